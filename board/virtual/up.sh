#!/bin/sh
# Append this board's own keys to its root file system and become QEMU: up.sh QEMU [ARG...].
# Runs inside the pinned tree; /identity holds etc/..., /in/board/initramfs-ssh the base archive.
set -eu
cp /in/board/initramfs-ssh/initramfs.cpio /build/initrd
# The kernel reads archives one after the other; a later one adds to the earlier.
cd /identity
find . -mindepth 1 | LC_ALL=C sort |
	cpio --create --format=newc --owner=0:0 --quiet >>/build/initrd
cd /build
exec "$@"
