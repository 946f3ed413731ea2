#!/bin/sh
# Append the payload to the guest's root file system and run QEMU: boot.sh QEMU [ARG...].
# Runs inside the pinned tree; /payload holds the files, /in/board/initramfs the base archive.
set -eu
cp /in/board/initramfs/initramfs.cpio /build/initrd
# The kernel reads archives one after the other; a later one adds to the earlier.
cd /
find payload -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} + 2>/dev/null || :
find payload | LC_ALL=C sort |
	cpio --create --format=newc --owner=0:0 --reproducible --quiet >>/build/initrd
cd /build
code=0
"$@" || code=$?
times >/build/times
exit "$code"
