#!/bin/sh
# Build vstate_profiler.ko against a kernel tree of somebody else's, in /kernel, and the C header of
# a board's types from its BTF, if that is in /btf: external.sh BUILD-ID.
# Promise: the tree is only read; the module names the build-id of the kernel it is for.
# Limit: a tree whose host programs run on this machine (make modules_prepare, cross-compiled), with
# the board's Module.symvers.
set -eu
mkdir bin module
ln -s /usr/bin/busybox bin/cmp # the tree has no diffutils
export PATH="$PWD/bin:$PATH"
export ARCH=riscv CROSS_COMPILE=riscv64-linux-gnu-
export KCFLAGS="-ffile-prefix-map=$PWD/module=/vstate_profiler -ffile-prefix-map=/kernel=/linux"
export KBUILD_BUILD_USER=bananaos KBUILD_BUILD_HOST=bananaos KBUILD_BUILD_VERSION=1
cp /recipe/vstate_profiler.c /recipe/Makefile module/
make -s -C /kernel M="$PWD/module" MODULE=vstate_profiler KERNEL_BUILD_ID="$1" modules
"${CROSS_COMPILE}strip" --strip-debug -o /out/vstate_profiler.ko module/vstate_profiler.ko
if [ -e /btf ]; then
	bpftool btf dump file /btf format c >/out/vmlinux.h
fi
