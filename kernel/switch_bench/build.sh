#!/bin/sh
# Build switch_bench, static: build.sh switch-bench-riscv64|switch-bench-x86-64. Runs inside the
# pinned tree, see toolchain/recipe.py.
set -eu
case $1 in
switch-bench-riscv64) set -- riscv64-linux-gnu-gcc -march=rv64gc -mabi=lp64d ;;
switch-bench-x86-64) set -- x86_64-linux-gnu-gcc -march=x86-64 ;;
esac
"$@" -std=gnu17 -O2 -Wall -Wextra -Werror -static -pthread -I/recipe \
	-ffile-prefix-map=/recipe=. -o /out/switch_bench /recipe/switch_bench/switch_bench.c /recipe/tool/tool.c
