# CMake initial settings: llama-server for x86-64-v3 (AVX2, FMA, F16C, BMI2), static, no native flags.
# Limit: runs on processors from Haswell and Zen on; uses no AVX-512 where there is some.
set(CMAKE_C_FLAGS_INIT "-march=x86-64-v3")
set(CMAKE_CXX_FLAGS_INIT "-march=x86-64-v3")
