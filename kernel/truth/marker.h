/* SPDX-License-Identifier: GPL-2.0 */
/*
 * How the guest speaks to the plugin: `slti x0, a0, NUMBER`. With x0 as destination these encodings
 * are hints that the ISA leaves to custom use: on any hart they do nothing.
 */
#ifndef TRUTH_MARKER_H
#define TRUTH_MARKER_H

/* Open the window; a0: thread group id of the target, 0 for none. */
#define MARKER_OPEN 0x5b0
/* Close the window; a0 is ignored. */
#define MARKER_CLOSE 0x5b1
/* Name a range of code; a0: its number, a1: its first address, a2: the one after it. */
#define MARKER_RANGE 0x5b2

#define MARKER_WORD(number) ((number) << 20 | 10 << 15 | 2 << 12 | 0x13)

#endif
