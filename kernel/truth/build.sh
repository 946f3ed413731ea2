#!/bin/sh
# Build the QEMU plugin for the host, and for the guest, static, `mark` and the test's `known`.
# Runs inside the pinned tree.
# Promise: the bytes depend on this room's files, the pinned tree and QEMU's own plugin header.
# Limit: the header is of the version in toolchain/sources.toml; QEMU refuses another plugin API.
set -eu

tar --extract --xz --no-same-owner --file /src/qemu --strip-components=3 --wildcards '*/include/qemu/qemu-plugin.h'

# rbp: see this_hart_quickly() in truth.c.
x86_64-linux-gnu-gcc -std=gnu17 -O2 -fomit-frame-pointer -ffixed-rbp -Wall -Wextra -Wno-unused-parameter -Werror \
	-shared -fPIC -fvisibility=hidden -ffile-prefix-map=/recipe=. -ffile-prefix-map="$PWD"=. \
	-I. -I/recipe/truth/glib -o /out/truth.so /recipe/truth/truth.c
riscv64-linux-gnu-gcc -std=gnu17 -O2 -Wall -Wextra -Werror -static -march=rv64gc -mabi=lp64d \
	-ffile-prefix-map=/recipe=. -o /out/mark /recipe/truth/mark.c
# In two steps: the linker puts an assembler object's name, which gcc makes up, into the symbol table.
riscv64-linux-gnu-gcc -march=rv64gc -mabi=lp64d -I/recipe/truth -c -o known.o /recipe/truth/known.S
riscv64-linux-gnu-gcc -nostdlib -static -march=rv64gc -mabi=lp64d -o /out/known known.o
