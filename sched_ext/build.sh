#!/bin/sh
# Build scx_vstate, the headers it needs of the kernel tree, or its tests' workload:
# build.sh scx-headers|scx-vstate|scx-workload.
# Promise: one static riscv64 program that runs on kernels it was not built for (CO-RE).
# Limit: runs inside the pinned tree, see toolchain/recipe.py.
set -eu
CC="riscv64-linux-gnu-gcc -std=gnu17 -O2 -Wall -Wextra -Werror -Wno-sign-compare
	-march=rv64gc -mabi=lp64d -ffile-prefix-map=/recipe=. -ffile-prefix-map=/build=."

case $1 in
scx-headers) # by themselves, since unpacking the kernel's source takes longer than all the rest
	tar -xJf /usr/src/linux-source-6.12.tar.xz --wildcards --strip-components=5 -C /out \
		'*/tools/sched_ext/include/scx/*.h'
	exit
	;;
scx-workload)
	# shellcheck disable=SC2086 # a command and its options
	$CC -pthread -static -o /out/workload /recipe/workload.c
	exit
	;;
esac

mkdir include
ln -s /in/sched_ext/scx-headers include/scx
bpftool btf dump file /in/kernel/image/vmlinux.btf format c >include/vmlinux.h
clang -O2 -g -Wall -Werror -target bpf -D__TARGET_ARCH_riscv -mcpu=v3 \
	-ffile-prefix-map=/recipe=. -ffile-prefix-map=/build=. \
	-isystem include -isystem /usr/riscv64-linux-gnu/include \
	-c /recipe/scx_vstate.bpf.c -o scx_vstate.unlinked.bpf.o
bpftool gen object scx_vstate.bpf.o scx_vstate.unlinked.bpf.o
bpftool gen skeleton scx_vstate.bpf.o name scx_vstate_bpf >include/scx_vstate.bpf.skel.h

# shellcheck disable=SC2086
$CC -isystem include -I/recipe -I/kernel -static -o /out/scx_vstate \
	/recipe/scx_vstate.c /recipe/knobs.c /recipe/engine.c /recipe/takeover.c \
	/recipe/document.c /kernel/tool/tool.c /kernel/tool/elf_stubs.c -lbpf -lelf -lz -lzstd
