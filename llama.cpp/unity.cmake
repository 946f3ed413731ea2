# Compile libllama's 150 small model files in batches: each of them includes the same large headers.
# Limit: only this target; elsewhere file-local names collide, or a file checks what it includes.
function(bananaos_unity)
    set_target_properties(llama PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 16)
endfunction()
if(CMAKE_SOURCE_DIR STREQUAL PROJECT_SOURCE_DIR)
    cmake_language(DEFER DIRECTORY ${CMAKE_SOURCE_DIR} CALL bananaos_unity)
endif()
