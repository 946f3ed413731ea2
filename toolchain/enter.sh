#!/bin/sh
# Enter the pinned tree: a root of its own with the tree's directories read-only, /proc, /dev, /tmp
# and the caller's mounts; then chroot.
# Promise: run as root of a fresh mount, PID, network, IPC and UTS namespace (see inside.py), it
# changes nothing that the host can see; the tree, which all share, is not written, whatever is
# mounted where.
# Limit: needs mount and chroot of the host (util-linux, coreutils) and nothing else of it.
# Use: enter.sh TREE MOUNTS DIRECTORY PROGRAM [ARG...]; each line of the file MOUNTS is
# "ro|rw HOST INSIDE", and DIRECTORY is where inside the program starts.
set -eu
umask 022 # the modes of what is made inside must not be the caller's affair

tree=$1 mounts=$2
shift 2

mount --make-rprivate /

# Mount points are made in this file system, never in the tree.
root=$tree/run
mount -t tmpfs -o mode=755 tmpfs "$root"

bind() { # ro|rw HOST TARGET
	if [ -d "$2" ]; then
		[ -d "$3" ] || mkdir -p "$3"
	elif [ ! -e "$3" ]; then
		mkdir -p "${3%/*}"
		: >"$3"
	fi
	mount --bind "$2" "$3"
	[ "$1" = rw ] || mount -o remount,bind,ro "$3"
}

for entry in "$tree"/*; do
	target=$root/${entry##*/}
	if [ -L "$entry" ]; then
		ln -s "$(readlink "$entry")" "$target"
	elif [ "$entry" = "$root" ] || [ -z "$(ls -A "$entry")" ]; then
		mkdir "$target" # empty in the tree: a place for mounts
	else
		bind ro "$entry" "$target"
	fi
done

# A container without the right to mount a fresh /proc still lets the visible one be bound.
mount -t proc proc "$root/proc" 2>/dev/null || mount --rbind /proc "$root/proc"
for name in tmp run var/tmp dev; do
	mount -t tmpfs -o mode=755 tmpfs "$root/$name"
done
for name in null zero full random urandom tty; do
	bind rw "/dev/$name" "$root/dev/$name"
done
mkdir "$root/dev/shm"
ln -s /proc/self/fd "$root/dev/fd"
ln -s fd/0 "$root/dev/stdin"
ln -s fd/1 "$root/dev/stdout"
ln -s fd/2 "$root/dev/stderr"

while IFS="$(printf '\t')" read -r mode host inside; do
	bind "$mode" "$host" "$root$inside"
done <"$mounts"

# Last, since it holds the mount points.
mount -o remount,bind,ro "$root"

# shellcheck disable=SC2016 # "$@" belongs to the shell inside
exec chroot "$root" /bin/sh -c '
	busybox hostname bananaos 2>/dev/null
	busybox ip link set lo up 2>/dev/null
	cd "$1" || exit
	shift
	unset _ SHLVL OLDPWD # what some shells leave in the environment and others do not
	exec "$@"' sh "$@"
