#!/bin/sh
# Build vstate_observer, or the workloads its tests observe: build.sh vstate-observer|observer-workload.
# Promise: one static riscv64 program that runs on kernels it was not built for (CO-RE): BTF of the
# built kernel only names the fields, their places are found when it is loaded.
# Limit: runs inside the pinned tree, see toolchain/recipe.py.
set -eu
src=/recipe/vstate_observer
CC="riscv64-linux-gnu-gcc -std=gnu17 -O2 -Wall -Wextra -Werror -Wno-sign-compare
	-march=rv64gc -mabi=lp64d -ffile-prefix-map=/recipe=. -ffile-prefix-map=/build=."

case $1 in
observer-workload)
	# shellcheck disable=SC2086 # a command and its options
	$CC -pthread -static -o /out/workload "$src/workload.c"
	# shellcheck disable=SC2086
	$CC -pthread -static-pie -fPIE -o /out/workload-pie "$src/workload.c"
	exit
	;;
esac

bpftool btf dump file /in/kernel/image/vmlinux.btf format c >vmlinux.h
clang -O2 -g -Wall -Werror -target bpf -D__TARGET_ARCH_riscv -mcpu=v3 \
	-ffile-prefix-map=/recipe=. -ffile-prefix-map=/build=. \
	-I. -I"$src" -c "$src/vstate_observer.bpf.c" -o vstate_observer.unlinked.bpf.o
bpftool gen object vstate_observer.bpf.o vstate_observer.unlinked.bpf.o
bpftool gen skeleton vstate_observer.bpf.o name vstate_observer_bpf >vstate_observer.skel.h

# shellcheck disable=SC2086
$CC -isystem . -I"$src" -I/recipe -static -o /out/vstate_observer \
	"$src"/vstate_observer.c "$src"/instance.c "$src"/selftest.c "$src"/target.c \
	"$src"/document.c /recipe/tool/tool.c /recipe/tool/elf_stubs.c -lbpf -lelf -lz -lzstd
