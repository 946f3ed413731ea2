#!/bin/sh
# Append the payload to the guest's root file system and run QEMU: boot.sh QEMU [ARG...].
# Runs inside the pinned tree; /payload holds the files, /in/board/initramfs the base archive, and
# /in/modules.cpio, where it is there, the modules of a kernel that needs some.
set -eu
cp /in/board/initramfs/initramfs.cpio /build/initrd
[ ! -e /in/modules.cpio ] || cat /in/modules.cpio >>/build/initrd
# A copy, because the files below /payload are the caller's: with his modes, and with times that tell
# when they were written, which the guest must not learn.
cp -R /payload /build/payload
chmod -R u=rwX,go=rX /build/payload
find /build/payload -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
# The kernel reads archives one after the other; a later one adds to the earlier.
cd /build
find payload | LC_ALL=C sort |
	cpio --create --format=newc --owner=0:0 --reproducible --quiet >>/build/initrd
rm -r /build/payload
sha256sum initrd # into the log: all that the guest is given, in one line
code=0
"$@" || code=$?
times >/build/times
exit "$code"
