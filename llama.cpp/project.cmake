# What is different in llama.cpp's own build; read by its project().
# unity: libllama's 150 small model files are compiled in batches, since each of them includes the
#   same large headers; only this target: elsewhere file-local names collide, or a file checks what
#   it includes.
# paths: assertions print __FILE__; without the map the bytes would follow the build's directory (found by
#   ./inv verify --full in another one). The map is to what the ordinary build has.
# hints: the phase hints, which apply.sh has put into tools/server.
function(bananaos)
    set_target_properties(llama PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 16)
    target_sources(server-context PRIVATE ${CMAKE_SOURCE_DIR}/tools/server/server-vstate.cpp)
endfunction()
if(CMAKE_SOURCE_DIR STREQUAL PROJECT_SOURCE_DIR)
    add_compile_options("-ffile-prefix-map=${CMAKE_SOURCE_DIR}=/build")
    cmake_language(DEFER DIRECTORY ${CMAKE_SOURCE_DIR} CALL bananaos)
endif()
