#!/bin/sh
# Build vstate_profiler.ko (or, for the tests, probe_blocker.ko) for the kernel in /in/kernel/image, or
# the static program `pingpong`: build.sh vstate-profiler|probe-blocker|pingpong. Runs inside the
# pinned tree.
# Promise: the same bytes from the same kernel and tree; the module carries the build-id of the
# kernel it is for (modinfo field kernel_build_id), which load.py compares before insmod.
# Limit: a kernel without build-id is refused.
set -eu

if [ "$1" = pingpong ]; then
	riscv64-linux-gnu-gcc -std=gnu17 -O2 -Wall -Wextra -Werror -static -pthread -march=rv64gcv \
		-mabi=lp64d -ffile-prefix-map=/recipe=. -o /out/pingpong /recipe/vstate_profiler/pingpong.c
	exit
fi

mkdir bin module
ln -s /usr/bin/busybox bin/cmp # the tree has no diffutils
export PATH="$PWD/bin:$PATH"
export ARCH=riscv CROSS_COMPILE=riscv64-linux-gnu-
export KCFLAGS="-ffile-prefix-map=$PWD/module=/vstate_profiler -ffile-prefix-map=$PWD/linux-devel=/linux"
export KBUILD_BUILD_USER=bananaos KBUILD_BUILD_HOST=bananaos KBUILD_BUILD_VERSION=1

tar -xf /in/kernel/image/modules-devel.tar
name=$(echo "$1" | tr - _)
cp "/recipe/vstate_profiler/$name.c" /recipe/vstate_profiler/Makefile module/
build_id=$("${CROSS_COMPILE}readelf" -n /in/kernel/image/vmlinux | sed -n 's/^ *Build ID: //p')
[ -n "$build_id" ] || { echo "the kernel has no build-id" >&2 && exit 1; }

make -s -C linux-devel M="$PWD/module" MODULE="$name" KERNEL_BUILD_ID="$build_id" modules
"${CROSS_COMPILE}strip" --strip-debug -o "/out/$name.ko" "module/$name.ko"
