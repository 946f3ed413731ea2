#!/bin/sh
# Build rvv_probe: one static riscv64 program. Runs inside the pinned tree, see toolchain/recipe.py.
set -eu
riscv64-linux-gnu-gcc -std=gnu17 -O2 -Wall -Wextra -Werror -static -march=rv64gc -mabi=lp64d \
	-I/recipe -ffile-prefix-map=/recipe=. -o /out/rvv_probe /recipe/rvv_probe/rvv_probe.c /recipe/tool/tool.c
