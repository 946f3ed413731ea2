#!/bin/sh
# Make a kernel that somebody else built bootable here, and the profiler for it:
# build.sh stock-image|stock-profiler. Runs inside the pinned tree; /trees/next holds Debian's packages.
# Promise: nothing of the kernel is compiled; its Image and modules are Debian's own bytes, taken out
# of their compression. modules.cpio holds the modules the virtual board's devices need and those
# that these depend on, numbered in the order of loading.
# Limit: one kernel in the tree, its vmlinuz a plain Image. The module is compiled by the pinned GCC 14
# against headers whose kernel was compiled by a later one; what that GCC does not know is left out
# below by name. No structure's layout depends on it.
set -eu

DEVICES="virtio_mmio virtio_console" # the results port; built into some kernels, modules in others
modules=$(echo /trees/next/usr/lib/modules/*)
release=${modules##*/}
[ -d "$modules" ] || { echo "the tree holds another number of kernels than one: $modules" >&2 && exit 1; }

image() {
	magic=$(dd if="$modules/vmlinuz" bs=1 skip=56 count=4 2>/dev/null | od -An -c | tr -d ' ')
	[ "$magic" = 'RSC005' ] || { echo "vmlinuz is no plain Image: '$magic'" >&2 && exit 1; }
	cp "$modules/vmlinuz" /out/Image
	cp "$modules/config" /out/config

	mkdir -p dep/lib/modules cpio/modules
	depmod -b /trees/next -o "$PWD/dep" "$release"
	ln -s "$modules/kernel" "dep/lib/modules/$release/kernel"
	# Lines `insmod PATH` in order, and `builtin NAME`; some modules are needed by several.
	for device in $DEVICES; do
		modprobe -d "$PWD/dep" -S "$release" --show-depends "$device"
	done | sed -n 's/^insmod \([^ ]*\).*/\1/p' | awk '!seen[$0]++' >order
	number=10
	while read -r path; do
		name=${path##*/}
		case $name in
		*.xz) xz -dc "$path" >"cpio/modules/$number-${name%.xz}" ;;
		*) cp "$path" "cpio/modules/$number-$name" ;;
		esac
		number=$((number + 1))
	done <order
	find cpio -exec touch --date="@$SOURCE_DATE_EPOCH" {} +
	(cd cpio && find modules | LC_ALL=C sort |
		cpio --create --format=newc --owner=0:0 --reproducible --quiet) >/out/modules.cpio
}

profiler() {
	mkdir -p bin module usr/lib
	ln -s /usr/bin/busybox bin/cmp # the tree has no diffutils
	export PATH="$PWD/bin:$PATH"
	cp -R /trees/next/usr/src usr/src
	cp -R /trees/next/usr/lib/linux-kbuild-* usr/lib/
	common=$(echo "$PWD"/usr/src/linux-headers-*-common)
	headers=$PWD/usr/src/linux-headers-$release
	# GCC 14 and this kernel's: zacas, zabha in -march, and counted_by on flexible arrays.
	sed -i -E '/CONFIG_(TOOLCHAIN_HAS_ZACAS|TOOLCHAIN_HAS_ZABHA|CC_HAS_COUNTED_BY)\b/d' \
		"$headers/include/config/auto.conf" "$headers/include/generated/autoconf.h"
	# The first of the Image's notes is the kernel's own; those of the vDSOs follow. load.py compares
	# with what the running kernel says.
	build_id=$(python3 -c 'import sys
note = b"\x04\0\0\0\x14\0\0\0\x03\0\0\0GNU\0"
image = open(sys.argv[1], "rb").read()
at = image.index(note) + len(note)
print(image[at:at + 20].hex())' "$modules/vmlinuz")

	export ARCH=riscv CROSS_COMPILE=riscv64-linux-gnu-
	export KCFLAGS="-ffile-prefix-map=$PWD/module=/vstate_profiler -ffile-prefix-map=$PWD/usr=/usr"
	export KBUILD_BUILD_USER=bananaos KBUILD_BUILD_HOST=bananaos KBUILD_BUILD_VERSION=1
	cp /recipe/vstate_profiler/vstate_profiler.c /recipe/vstate_profiler/Makefile module/
	make -C "$common" O="$headers" CC="${CROSS_COMPILE}gcc" M="$PWD/module" \
		MODULE=vstate_profiler KERNEL_BUILD_ID="$build_id" modules
	"${CROSS_COMPILE}strip" --strip-debug -o /out/vstate_profiler.ko module/vstate_profiler.ko
}

"${1#stock-}"
