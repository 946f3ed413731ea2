#!/bin/sh
# Build llama-server (static) from the pinned source with the phase hints, or a program that only
# writes hints: build.sh server-riscv64|server-x86-64|hints.
# Promise: the bytes depend on the source, this room's files and the pinned tree only.
# Limit: runs inside the pinned tree (see toolchain/recipe.py), without network.
set -eu

if [ "$1" = hints ]; then
	for triplet in riscv64 x86_64; do
		$triplet-linux-gnu-g++ -std=c++17 -O2 -Wall -Wextra -Werror -static -I/recipe -I/sched_ext \
			-ffile-prefix-map=/recipe=. -o "/out/hints-$triplet" \
			/recipe/hints.cpp /recipe/server-vstate.cpp
	done
	exit
fi

tar --extract --gzip --file /src/llama-cpp --strip-components=3 --wildcards '*/vendor/llama.cpp'

sh /recipe/apply.sh

case $1 in
server-riscv64) set -- -DCMAKE_TOOLCHAIN_FILE=/recipe/riscv64.cmake ;;
server-x86-64) set -- -DCMAKE_TOOLCHAIN_FILE=/recipe/x86-64.cmake \
	-DGGML_SSE42=ON -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_BMI2=ON -DGGML_FMA=ON -DGGML_F16C=ON ;;
esac

# GGML_OPENMP off: ggml's own thread pool, whose barrier and polling are what is measured.
# GGML_CPU_REPACK off: on the K1 it changes the two phases differently and crashed a board
# (llama.cpp issue 22655). GGML_RV_ZICBOP off: the K1 has none.
cmake -S . -B out -G Ninja "$@" \
	-DCMAKE_PROJECT_INCLUDE=/recipe/project.cmake \
	-DCMAKE_BUILD_TYPE=Release \
	-DCMAKE_EXE_LINKER_FLAGS=-static \
	-DBUILD_SHARED_LIBS=OFF \
	-DGGML_NATIVE=OFF -DGGML_OPENMP=OFF -DGGML_CPU_REPACK=OFF -DGGML_RV_ZICBOP=OFF \
	-DGGML_CCACHE=OFF -DGGML_LLAMAFILE=OFF \
	-DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
	-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF \
	-DLLAMA_BUILD_NUMBER=0 -DLLAMA_BUILD_COMMIT=llama-cpp-python-0.3.36
cmake --build out --target llama-server --parallel "$JOBS"

# The ten slowest objects, for whoever wants to shorten this.
awk 'NR > 1 { printf "%6.1f s %s\n", ($2 - $1) / 1000, $4 }' out/.ninja_log | sort -rn | head -n 10

cp out/bin/llama-server /out/llama-server
