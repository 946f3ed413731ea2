#!/bin/sh
# Stands for a compiler of the pinned tree during `./inv verify`: runs it as on another x86-64 CPU,
# so that -march=native means another machine.  What the compiler starts runs on the real one.
exec /other-cpu/qemu-x86_64 -cpu Nehalem "/usr/bin/${0##*/}" "$@"
