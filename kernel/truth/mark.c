// SPDX-License-Identifier: GPL-2.0
/*
 * mark - open and close the window of the `truth` plugin, from within the guest.
 *
 * Promise: `mark open TGID` and `mark close` execute the one instruction the plugin waits for;
 * `mark range NUMBER START END` names kernel code outside the kernel's image (a BPF program, a
 * module) whose instructions are to be counted, addresses in hexadecimal.
 * Limit: without the plugin, and on a real board, nothing happens and nothing is said.
 */
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "marker.h"

/* A macro: the number is part of the instruction. No call may come between the registers. */
#define MARK(number, first, second, third)                                                    \
	do {                                                                                  \
		uint64_t values[] = {first, second, third};                                   \
		register uint64_t a0 __asm__("a0") = values[0];                               \
		register uint64_t a1 __asm__("a1") = values[1];                               \
		register uint64_t a2 __asm__("a2") = values[2];                               \
		__asm__ volatile("slti x0, a0, %0" ::"i"(number), "r"(a0), "r"(a1), "r"(a2)); \
	} while (0)

static uint64_t number(const char *text, int base)
{
	char *end;
	uint64_t value;

	errno = 0;
	value = strtoull(text, &end, base);
	if (errno || end == text || *end || *text == '-') {
		fprintf(stderr, "mark: got '%s', expected a %s number\n", text,
			base == 10 ? "decimal" : "hexadecimal");
		exit(2);
	}
	return value;
}

int main(int argc, char **argv)
{
	if (argc == 3 && !strcmp(argv[1], "open")) {
		MARK(MARKER_OPEN, number(argv[2], 10), 0, 0);
	} else if (argc == 2 && !strcmp(argv[1], "close")) {
		MARK(MARKER_CLOSE, 0, 0, 0);
	} else if (argc == 5 && !strcmp(argv[1], "range")) {
		MARK(MARKER_RANGE, number(argv[2], 10), number(argv[3], 16), number(argv[4], 16));
	} else {
		fprintf(stderr, "use: mark open TGID | close | range NUMBER START END\n");
		return 2;
	}
	return 0;
}
