#!/bin/sh
# Build the virtual board's kernel: Image, System.map, BTF, and what external modules need.
#
# Promise: the same bytes from the same tree, wherever and whenever it runs, with any $JOBS; a
# configuration that differs from config/virtual.fragment fails before anything is compiled.
# Limit: runs only inside the pinned tree (see toolchain/inside.py); it is not a general build.
# Use: sh /recipe/build.sh, in an empty writable directory, with $JOBS and $SOURCE_DATE_EPOCH.
set -eu
: "${JOBS:?}" "${SOURCE_DATE_EPOCH:?}"

recipe=/recipe
out=/out
work=$PWD
source=$work/linux

# The tree has no diffutils; kbuild and link-vmlinux.sh call cmp -s.
mkdir bin
ln -s /usr/bin/busybox bin/cmp
export PATH="$work/bin:$PATH"

export ARCH=riscv CROSS_COMPILE=riscv64-linux-gnu-
export KBUILD_BUILD_USER=bananaos KBUILD_BUILD_HOST=bananaos KBUILD_BUILD_VERSION=1
# A set KBUILD_BUILD_TIMESTAMP is also what makes scripts/Makefile.btf ask pahole for
# reproducible_build, without which its parallel encoding depends on thread timing.
KBUILD_BUILD_TIMESTAMP=$(LC_ALL=C date -u -d "@$SOURCE_DATE_EPOCH" '+%a %b %e %H:%M:%S UTC %Y')
export KBUILD_BUILD_TIMESTAMP
export KCFLAGS="-ffile-prefix-map=$source=/linux" KAFLAGS="-ffile-prefix-map=$source=/linux"

# Kconfig needs every directory's Kconfig, but no code of drivers that are never compiled.
mkdir "$source"
tar -xJf /usr/src/linux-source-6.12.tar.xz -C "$source" --strip-components=1 \
	--exclude='*/drivers/gpu/*.[ch]' --exclude='*/drivers/media/*.[ch]' \
	--exclude='*/drivers/net/ethernet/*.[ch]' --exclude='*/drivers/net/wireless/*.[ch]' \
	--exclude='*/sound/*.[ch]' --exclude='*/boot/dts/*.dts*' --exclude='*/Documentation/*.rst' \
	--exclude='*/tools/testing/*'
cd "$source"

make -s KCONFIG_ALLCONFIG="$recipe/config/virtual.fragment" allnoconfig
python3 "$recipe/lint.py" --fragment "$recipe/config/virtual.fragment" \
	--forbidden "$recipe/config/forbidden.toml" --config .config --source .

make -j "$JOBS" Image modules

"${CROSS_COMPILE}objcopy" -O binary --only-section=.BTF vmlinux "$out/vmlinux.btf"
# Symbols, code and BTF without the DWARF: for finding save sites and for the BTF of modules.
"${CROSS_COMPILE}strip" --strip-debug -o "$out/vmlinux" vmlinux
"${CROSS_COMPILE}strip" --strip-debug -o "$out/lkdtm.ko" drivers/misc/lkdtm/lkdtm.ko
cp arch/riscv/boot/Image System.map "$out/"
cp .config "$out/config"

# A tree in which `make ARCH=riscv CROSS_COMPILE=... -C linux-devel M=<module>` works.
devel=$work/linux-devel
mkdir "$devel"
find Makefile .config Module.symvers include scripts arch/riscv/Makefile arch/riscv/include \
	tools/bpf/resolve_btfids/resolve_btfids \
	\( -type f -o -type l \) ! -name '*.o' ! -name '.*.cmd' ! -name '.*.d' \
	! -path 'include/dt-bindings/*' ! -path 'scripts/dtc/include-prefixes/*' |
	cpio -pdm --quiet "$devel"
cp "$out/vmlinux" "$devel/vmlinux"
# Its debug information, and the build ID that covers it, name the build directory.
strip --remove-section=.note.gnu.build-id "$devel/tools/bpf/resolve_btfids/resolve_btfids"
tar -C "$work" --sort=name --format=gnu --owner=0 --group=0 --numeric-owner \
	--mode=u+rwX,go=rX --mtime="@$SOURCE_DATE_EPOCH" -cf "$out/modules-devel.tar" linux-devel
