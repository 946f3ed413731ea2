#!/bin/sh
# A machine that has only what the README asks for, an ordinary user, and the README's commands, timed:
# tests/fresh_machine.sh DIRECTORY [BUNDLE [COMMAND...]]
#
# DIRECTORY is made: a plain Debian stable of debootstrap's, with Python's venv beside it.  The user
# gets a clone of this repository's last commit; with BUNDLE (a file of ./inv bundle) what is in that
# archive instead, and no network at all.  COMMAND replaces `./inv reproduce` and `./inv test` (with
# BUNDLE: `./inv reproduce`); the user's cache starts empty.  A machine that is there is used again.
#   tests/fresh_machine.sh DIRECTORY '' './inv --list'       a command in a clone
#   FRESH_KEEP=1                             the user's cache of the time before stays
#   FRESH_SUITE=noble FRESH_MIRROR=URL   another release, another archive (default: this host's)
#
# Promise: the root is pivoted, nothing of the host is seen but its kernel, /dev and how it reaches
# packages (apt's sources, pip's settings, certificates); ends with the command's exit code.
# Limit: needs root and debootstrap here, and 40 GB; a mount, process and host name namespace, no
# virtual machine: the kernel is this host's.
set -eu

fail() {
	printf 'error: %s\n' "$1" >&2
	exit "$2"
}

[ $# -ge 1 ] || fail 'no DIRECTORY; use: tests/fresh_machine.sh DIRECTORY [BUNDLE [COMMAND...]]' 2
here=$(dirname -- "$(dirname -- "$(readlink -f -- "$0")")")
mkdir -p -- "$1" 2>/dev/null || fail "$1: cannot be made; name another directory" 3
root=$(readlink -f -- "$1")
shift
bundle=${1:-}
[ $# = 0 ] || shift
[ -z "$bundle" ] || [ -f "$bundle" ] || fail "$bundle: no such file; ./inv bundle makes one" 2
[ "$(id -u)" = 0 ] || fail 'needs to be root: it makes another machine' 3
suite=${FRESH_SUITE:-trixie}

# The first archive of this host's apt that is not a security or update suite.
mirror() {
	# shellcheck disable=SC2016 # apt-get expands them
	apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 2>/dev/null |
		grep --invert-match -e security -e updates | head --lines=1 | cut --delimiter=' ' --fields=1
}

if ! [ -e "$root/complete" ]; then
	command -v debootstrap >/dev/null || fail 'debootstrap not found in PATH: install it' 3
	archive=${FRESH_MIRROR:-$(mirror)}
	[ -n "$archive" ] || fail 'no Debian archive among the apt sources; set FRESH_MIRROR' 3
	echo "debootstrap: $suite into $root"
	debootstrap --variant=minbase --include=python3-venv,util-linux,ca-certificates,zstd \
		"$suite" "$root/machine" "$archive" >"$root/debootstrap.log" 2>&1 ||
		fail "debootstrap failed; its log: $root/debootstrap.log" 3
	chroot "$root/machine" useradd --create-home --shell /bin/sh reviewer
	echo "deb $archive $suite main" >"$root/machine/etc/apt/sources.list"
	case $archive in
	*/debian | */debian/) ;;
	*) # of another distribution: its user does what the README says
		echo "export BANANAOS_DEBIAN_MIRROR=$(mirror)" >"$root/machine/etc/profile.d/debian-mirror.sh"
		;;
	esac
	touch "$root/complete"
fi

machine=$root/machine
home=$machine$(chroot "$machine" getent passwd reviewer | cut --delimiter=: --fields=6)
rm -rf "$home/bananaos"
[ -n "${FRESH_KEEP:-}" ] || rm -rf "$home/.cache"
if [ -n "$bundle" ]; then
	network=--net
	mkdir "$home/bananaos"
	zstd --decompress --stdout -- "$bundle" |
		tar --extract --strip-components=1 --directory "$home/bananaos"
	[ $# -gt 0 ] || set -- './inv reproduce'
else
	network=
	git -c safe.directory='*' clone --quiet --no-local "$here" "$home/bananaos"
	cp /etc/resolv.conf /etc/hosts "$machine/etc/"
	for settings in /etc/pip.conf /etc/ssl/certs/ca-certificates.crt; do
		[ ! -e "$settings" ] || cp "$settings" "$machine$settings"
	done
	[ $# -gt 0 ] || set -- './inv reproduce' './inv test'
fi
chroot "$machine" chown --recursive reviewer: "${home#"$machine"}"

# shellcheck disable=SC2016,SC2086 # the shell in there expands them; an option or none
exec unshare --mount --pid --fork --uts --ipc $network sh -c '
	set -eu
	machine=$1
	shift
	hostname fresh
	mount --make-rprivate /
	mount --bind "$machine" "$machine"
	mount --rbind /dev "$machine/dev"
	mount --rbind /sys "$machine/sys"
	mount -t proc proc "$machine/proc"
	mkdir -p "$machine/old"
	cd "$machine"
	pivot_root . old
	exec sh -c '\''
		umount -l /old
		ip link set lo up 2>/dev/null || true
		for command; do
			echo "reviewer@fresh: $command"
			start=$(date +%s)
			code=0
			su --login reviewer --command "cd bananaos && $command" || code=$?
			echo "reviewer@fresh: $command: exit code $code after $(($(date +%s) - start)) s"
			[ $code = 0 ] || exit $code
		done'\'' sh "$@"' sh "$machine" "$@"
