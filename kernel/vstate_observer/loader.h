/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What the parts of vstate_observer's loader share.
 */
#ifndef LOADER_H
#define LOADER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include "tool/tool.h"
#include "vstate_observer.h"

#define NR_PROGRAMS 3

/* ---- instance.c: the BPF programs, loaded and attached ---------------------------------- */

struct program {
	const char *name; /* of the BPF program */
	const char *event; /* the tracepoint it sits on */
	bool attached;
	char reason[160]; /* why it is not attached */
	unsigned int instructions; /* after verification, before the JIT */
	uint64_t jit_start, jit_end; /* 0 where the kernel does not tell */
};

struct instance;

struct instance *instance_load(unsigned int max_threads, struct program programs[NR_PROGRAMS]);
/* Whom to count from now on, from zero; counting must be off. */
void instance_aim(struct instance *in, pid_t tgid, const struct spin_range *spin,
		  unsigned int nr_spin);
void instance_unload(struct instance *in);
/* Make a row for a thread that exists already; false: there is no room. */
bool instance_add_thread(struct instance *in, pid_t tid);
void instance_count(struct instance *in, bool on);
void instance_totals(struct instance *in, enum slot slot, struct counters *to);
uint64_t instance_threads_made(struct instance *in);
uint64_t instance_lost_threads(struct instance *in);
/* Calls back for each row, by thread id. */
void instance_rows(struct instance *in,
		   void (*each)(void *data, pid_t tid, const struct thread_row *row), void *data);

/* ---- selftest.c ---------------------------------------------------------------------------- */

struct semantics {
	const char *syscall_state; /* "dirty", "initial" or "mixed" */
	struct counters blocked; /* a thread that used V and blocks in a system call */
	struct counters preempted; /* a thread that computes with V and is preempted */
};

void selftest(struct instance *in, struct semantics *to);
void touch_vector_registers(void);

/* ---- target.c: the observed process and its machine, as /proc and /sys tell ------------------ */

struct target {
	pid_t tgid;
	char name[COMM_SIZE];
	bool position_independent;
	uint64_t load_bias; /* address in memory minus address in the file */
};

void target_read(struct target *to, pid_t tgid);
/* Refuse ranges that cannot be code of this target; turn them into addresses in memory. */
void target_place(const struct target *t, const struct spin_range *from, unsigned int nr,
		  struct spin_range *to);
void target_threads(pid_t tgid, void (*each)(void *data, pid_t tid), void *data);
/* False when the thread is gone. */
bool target_thread_name(pid_t tgid, pid_t tid, char name[COMM_SIZE]);
void require_fit_machine(void);
unsigned int vlen_bits(void);
void online_harts(char *to, size_t size);

/* ---- document.c ------------------------------------------------------------------------------ */

struct observation {
	const struct target *target;
	const struct semantics *semantics;
	const struct program *programs;
	const struct spin_range *spin; /* as in the file */
	unsigned int nr_spin;
	unsigned int max_threads;
	const char *stopped_by;
	uint64_t start_ns, stop_ns;
	uint64_t threads_made;
	char harts_start[256], harts_stop[256];
};

/* Returns whether the window is valid. */
bool document_write(const char *path, const struct observation *seen, struct instance *in);

#endif
