#!/bin/sh
# Build xstate_probe: one static program for any x86-64. Runs inside the pinned tree, see
# toolchain/recipe.py.
set -eu
x86_64-linux-gnu-gcc -std=gnu17 -O2 -Wall -Wextra -Werror -static -march=x86-64 -I/recipe \
	-ffile-prefix-map=/recipe=. -o /out/xstate_probe /recipe/xstate_probe/xstate_probe.c /recipe/tool/tool.c
