# CMake tool chain file: llama-server for RVV 1.0 boards, static, for the K1's extensions.
# Limit: one -march for the whole program; a board without Zfh, Zvfh or Zbs cannot run it.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR riscv64)
set(CMAKE_C_COMPILER riscv64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER riscv64-linux-gnu-g++)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
set(CMAKE_FIND_ROOT_PATH /usr/riscv64-linux-gnu)

# ggml composes an -march of its own (ggml-cpu/CMakeLists.txt), which knows neither Zbb nor Zbs and
# comes after CMAKE_C_FLAGS. The compile rule's last word wins, for every object alike.
set(BOARD_MARCH "-march=rv64gcv_zfh_zvfh_zba_zbb_zbs_zihintpause -mabi=lp64d")
set(CMAKE_C_COMPILE_OBJECT
    "<CMAKE_C_COMPILER> <DEFINES> <INCLUDES> <FLAGS> ${BOARD_MARCH} -o <OBJECT> -c <SOURCE>")
set(CMAKE_CXX_COMPILE_OBJECT
    "<CMAKE_CXX_COMPILER> <DEFINES> <INCLUDES> <FLAGS> ${BOARD_MARCH} -o <OBJECT> -c <SOURCE>")
