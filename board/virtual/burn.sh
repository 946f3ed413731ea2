#!/bin/sh
# Build the calibration program for the board, static. Runs inside the pinned tree.
set -eu
riscv64-linux-gnu-gcc -std=c17 -O2 -Wall -Wextra -Werror -static -pthread \
	-march=rv64gcv -mabi=lp64d -ffile-prefix-map=/recipe=. \
	-o /out/burn /recipe/virtual/burn.c
