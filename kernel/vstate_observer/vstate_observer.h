/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What the BPF programs of vstate_observer and its loader share: the shape of the counters.
 *
 * Promise: every switch-out of a target thread adds one to exactly one cell of `outs`, so sums over
 * it lose and double nothing.
 * Limit: not an interface for other programs; those read the JSON document.
 */
#ifndef VSTATE_OBSERVER_H
#define VSTATE_OBSERVER_H

#define MAX_SPIN 16 /* address ranges of spin loops */
#define COMM_SIZE 16

enum why {
	WHY_RUNNABLE, /* preempted or yielding: it would go on at once */
	WHY_BLOCKING, /* sleeping, stopped or exiting */
	NR_WHYS,
};

enum outcome {
	OUT_OFF, /* user registers, by VS: never used since exec */
	OUT_INITIAL, /* marked for restoring, or as the kernel gave them */
	OUT_CLEAN, /* unchanged since they were loaded */
	OUT_DISCARDED, /* Dirty, saved; overwritten by the kernel at syscall entry */
	OUT_COMPUTE, /* Dirty, saved; what the thread left, outside the spin loops */
	OUT_SPIN, /* Dirty, saved; what the thread left, inside a spin loop */
	OUT_KERNEL_SAVE, /* kernel-mode vector code was interrupted, its registers saved */
	OUT_KERNEL_CLEAN, /* the same with nothing to save */
	NR_OUTCOMES,
};

struct counters {
	unsigned long long outs[NR_WHYS][NR_OUTCOMES]; /* switch-outs */
	unsigned long long pending_restores; /* switch-ins that mark the registers for loading */
	unsigned long long migrations;
};

struct thread_row {
	struct counters counters;
	unsigned int threads; /* that had this id; more than one after the id was used again */
	unsigned int exited; /* of those */
	char comm[COMM_SIZE]; /* at exit; before that, user space can read it */
};

enum slot {
	SLOT_ALL, /* every thread of the target */
	SLOT_WITHOUT_ROW, /* those among them for which the map had no room */
	NR_SLOTS,
};

struct spin_range {
	unsigned long long start; /* first byte */
	unsigned long long end; /* first byte behind it */
};

#endif
