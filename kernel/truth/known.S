// SPDX-License-Identifier: GPL-2.0
/*
 * known - a program that executes a number of instructions known beforehand.
 *
 * Between the marker that opens the window and the one that closes it, that one included: 2003
 * instructions outside and 1000 inside the range known_spin_start .. known_spin_end, all in one page
 * that is there when the window opens.
 */
#include "marker.h"

#define SYS_getpid 172
#define SYS_exit_group 94

	.text
	.balign 4096
	.globl _start, known_spin_start, known_spin_end
	.type _start, @function
_start:
	li a7, SYS_getpid
	ecall
	slti x0, a0, MARKER_OPEN
	li t0, 1000
1:	addi t0, t0, -1
	bnez t0, 1b
	li t1, 500
known_spin_start:
2:	addi t1, t1, -1
	bnez t1, 2b
known_spin_end:
	slti x0, a0, MARKER_CLOSE
	li a0, 0
	li a7, SYS_exit_group
	ecall
	.size _start, . - _start
