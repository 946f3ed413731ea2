#!/bin/sh
# Build the QEMU plugin that switches the quantum's timer. Runs inside the pinned tree.
# Limit: as kernel/truth/build.sh, whose stand-in for GLib's header it shares.
set -eu
tar --extract --xz --no-same-owner --file /src/qemu --strip-components=3 --wildcards '*/include/qemu/qemu-plugin.h'
x86_64-linux-gnu-gcc -std=gnu17 -O2 -Wall -Wextra -Wno-unused-parameter -Werror \
	-shared -fPIC -fvisibility=hidden -ffile-prefix-map=/recipe=. -ffile-prefix-map="$PWD"=. \
	-I. -I/kernel/truth/glib -o /out/quantum.so /recipe/virtual/quantum.c
