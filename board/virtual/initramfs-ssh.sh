#!/bin/sh
# Assemble the root file system of the board that is reached over SSH as one uncompressed archive.
# Promise: a pure function of the ssh tree and this room's files; what is the machine's own (host
# key, the user's key) is not in it, interactive.py appends that.
# Limit: /srv and everything else lies in memory: a reboot gives the board as it was made.
set -eu

mkdir root
cp -R --no-preserve=ownership,timestamps /trees/ssh/. root/
cp -R /recipe/virtual/userland/. root/
# The modes of a checkout follow its owner's umask, those of a Nix store are its own.
(cd /recipe/virtual/userland && find . -mindepth 1 -type d -printf 'root/%P\0') | xargs -0 chmod 755
(cd /recipe/virtual/userland && find . -type f -printf 'root/%P\0') | xargs -0 chmod 644
# What maintainer scripts would have done: a shell by its usual name.
ln -s busybox root/usr/bin/sh
chmod 755 root/init root/etc/rc
chmod 440 root/etc/sudoers root/etc/sudoers.d/banana
chmod 600 root/etc/shadow
while read -r path; do
	rm -rf "root/$path"
done </recipe/virtual/userland-exclude.txt
mkdir -p root/srv/banana

python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash -s root -p / \
	root/usr/lib/python3.13 root/usr/lib/python3 >/dev/null

find root -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
(cd root && find . -mindepth 1 | LC_ALL=C sort |
	cpio --create --format=newc --owner=0:0 --reproducible --quiet) >/out/initramfs.cpio

# And sudo's set-user-ID bit, which no pinned tree has (toolchain/rootfs.py): in the archive, since
# Nix's sandbox lets no file have it.
python3 - /out/initramfs.cpio <<'EOF'
import sys
from pathlib import Path

archive = Path(sys.argv[1])
content = bytearray(archive.read_bytes())
member = b"00000000usr/bin/sudo\0"  # the end of its header, 110 bytes long, and its name
assert content.count(member) == 1
mode = content.index(member) + 8 - 110 + 14
assert content[mode : mode + 8] == b"000081ED"  # a file, 0755
content[mode : mode + 8] = b"000089ED"
archive.write_bytes(content)
EOF
