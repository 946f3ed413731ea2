#!/bin/sh
# Run a program of the pinned tree `nix` as on a machine that has Debian's Nix and all of this host's
# directories but /usr, /etc and the like: nix_machine.sh TREE STATE PROGRAM [ARG...]
# Promise: /nix is the directory STATE; the root is pivoted, since in a mere chroot the kernel
# forbids the user namespaces that builders make.  Nothing of it is seen outside.
# Limit: needs to be root, or user namespaces.  The host's programs are not there.
set -eu
tree=$1 state=$2
if [ "${IN_NIX_MACHINE:-}" != "$tree" ]; then
	user=
	[ "$(id -u)" = 0 ] || user='--user --map-root-user'
	# shellcheck disable=SC2086 # no option or two
	IN_NIX_MACHINE=$tree exec unshare $user --mount "$0" "$@"
fi
shift 2
mkdir -p "$state"
here=$PWD
mount --make-rprivate /
root=/mnt
mount -t tmpfs tmpfs "$root"
for entry in "$tree"/* /*; do
	name=${entry##*/}
	[ "$entry" != /mnt ] && [ ! -e "$root/$name" ] && [ ! -L "$root/$name" ] || continue
	if [ -L "$entry" ]; then
		ln -s "$(readlink "$entry")" "$root/$name"
	elif [ "${entry%/*}" = "$tree" ] && [ -z "$(ls -A "$entry")" ]; then
		continue # a mount point of the tree: the host's directory, if there is one
	elif [ -d "$entry" ]; then
		mkdir "$root/$name"
		mount --rbind "$entry" "$root/$name"
	fi
done
[ -d "$root/nix" ] || mkdir "$root/nix"
mount --bind "$state" "$root/nix"
mkdir "$root/old"
cd "$root"
pivot_root . old
# shellcheck disable=SC2016 # the shell in there expands them
exec /usr/bin/busybox sh -c '
	umount -l /old
	cd "$1" && shift || exit
	PATH=/usr/bin NIX_CONF_DIR=/nix/etc exec "$@"' sh "$here" "$@"
