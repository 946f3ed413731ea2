#!/bin/sh
# Builder of artifacts.nix: unpack the trees a recipe wants to look into, then enter the pinned tree.
# Promise: the recipe sees what it sees with the other drivers: enter.sh is theirs, and so is the
# environment, given as VARIABLE=VALUE words.
# Limit: runs in Nix's sandbox, by the tree's busybox, whose shell finds its applets without a PATH.
# Use: nix_builder.sh BUSYBOX ENTER TREE DIRECTORY SCRIPT NAME VARIABLE=VALUE...
# $mounts: lines "ro STORE_PATH INSIDE"; $archives: lines "STORE_PATH NAME", unpacked at /trees/NAME.
set -eu
: "${out?}" "${archives?}" "${mounts?}" # attributes of the derivation
busybox=$1 enter=$2 tree=$3 directory=$4 script=$5 name=$6
shift 6
top=$NIX_BUILD_TOP
mkdir "$top/scratch" "$top/trees" "$out"
printf '%s' "$archives" >"$top/archives"
while read -r archive inside; do
	mkdir "$top/trees/$inside"
	tar -x -f "$archive" -C "$top/trees/$inside"
	printf 'ro\t%s\t%s\n' "$top/trees/$inside" "/trees/$inside"
done <"$top/archives" >"$top/mounts"
printf '%s' "$mounts" >>"$top/mounts"
printf 'rw\t%s\t%s\n' "$top/scratch" "$directory" "$out" /out >>"$top/mounts"
exec env -i "$@" JOBS="${jobs:-$NIX_BUILD_CORES}" \
	"$busybox" unshare --user --map-root-user --mount --pid --net --ipc --uts --fork \
	"$busybox" sh "$enter" "$tree" "$top/mounts" "$directory" \
	sh -eu "/recipe/$script" "$name"
