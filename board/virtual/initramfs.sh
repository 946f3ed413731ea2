#!/bin/sh
# Assemble the guest's root file system as one uncompressed cpio archive.
# Promise: a pure function of the guest tree and this room's files: sorted names, fixed times and
# owners, Python compiled beforehand with hash-checked-never code (a time stamp would be a lie here).
# Limit: uncompressed on purpose, a gzip archive costs 13 more virtual seconds at boot (measured by
# a prototype); no device nodes, the kernel's own initramfs brings /dev/console.
set -eu

mkdir root
cp -R --no-preserve=ownership,timestamps /trees/guest/. root/
while read -r path; do
	rm -rf "root/$path"
done </recipe/virtual/initramfs-exclude.txt
cp /recipe/virtual/init root/init
cp /recipe/virtual/harts root/usr/bin/harts
chmod 755 root/init root/usr/bin/harts
mkdir -p root/results root/payload

# The tree's own Python has the guest's version (both trixie), so its byte code is the guest's.
python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash -s root -p / \
	root/usr/lib/python3.13 root/usr/lib/python3 >/dev/null

find root -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
(cd root && find . -mindepth 1 | LC_ALL=C sort |
	cpio --create --format=newc --owner=0:0 --reproducible --quiet) >/out/initramfs.cpio
