#!/bin/sh
# Build the bystander for the board, static and without vector instructions. Runs inside the pinned
# tree.
set -eu
riscv64-linux-gnu-gcc -std=gnu17 -O2 -Wall -Wextra -Werror -static -pthread \
	-march=rv64gc -mabi=lp64d -ffile-prefix-map=/recipe=. \
	-o /out/bystander /recipe/bystander.c
