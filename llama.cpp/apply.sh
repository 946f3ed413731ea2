#!/bin/sh
# Put the phase hints into an unpacked llama.cpp, the working directory.
# Promise: every hunk of server-vstate.patch fits, or it ends with 1 and the file and the hunk that
# does not.
# Limit: a hunk fits by its context lines; nothing knows whether the code around still means the same.
set -eu

if ! busybox patch -p1 -i /recipe/server-vstate.patch; then
	echo 'server-vstate.patch: does not fit this llama.cpp: write it anew for the pin' >&2
	exit 1
fi
cp /recipe/server-vstate.cpp /recipe/server-vstate.h /sched_ext/scx_vstate.h tools/server/
