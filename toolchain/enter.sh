#!/bin/sh
# Enter the pinned tree: bind it read-only, give it /proc, /dev, /tmp and the caller's mounts, chroot.
# Promise: run as root of a fresh mount, PID, network, IPC and UTS namespace (see inside.py), it
# changes nothing that the host can see; the tree itself cannot be written.
# Limit: needs mount and chroot of the host (util-linux, coreutils) and nothing else of it.
# Use: enter.sh TREE MOUNTS PROGRAM [ARG...]; each line of the file MOUNTS is "ro|rw HOST INSIDE".
set -eu

tree=$1 mounts=$2
shift 2

mount --make-rprivate /
mount --bind "$tree" "$tree"

# A container without the right to mount a fresh /proc still lets the visible one be bound.
mount -t proc proc "$tree/proc" 2>/dev/null || mount --rbind /proc "$tree/proc"
for name in tmp run in src trees recipe var/tmp; do
	mount -t tmpfs -o mode=755 tmpfs "$tree/$name"
done
mount -t tmpfs -o mode=755 tmpfs "$tree/dev"
for name in null zero full random urandom tty; do
	: >"$tree/dev/$name"
	mount --bind "/dev/$name" "$tree/dev/$name"
done
mkdir "$tree/dev/shm"
ln -s /proc/self/fd "$tree/dev/fd"
ln -s fd/0 "$tree/dev/stdin"
ln -s fd/1 "$tree/dev/stdout"
ln -s fd/2 "$tree/dev/stderr"

while IFS="$(printf '\t')" read -r mode host inside; do
	target=$tree$inside
	if [ -d "$host" ]; then
		[ -d "$target" ] || mkdir -p "$target"
	elif [ ! -e "$target" ]; then
		mkdir -p "${target%/*}"
		: >"$target"
	fi
	mount --bind "$host" "$target"
	[ "$mode" = rw ] || mount -o remount,bind,ro "$target"
done <"$mounts"

# Last, since mount points may have had to be made on the tmpfs mounts inside.
mount -o remount,bind,ro "$tree"

# shellcheck disable=SC2016 # "$@" belongs to the shell inside
exec chroot "$tree" /bin/sh -c '
	busybox hostname bananaos 2>/dev/null
	busybox ip link set lo up 2>/dev/null
	cd /build && exec "$@"' sh "$@"
