/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What the parts of scx_vstate's loader share.
 */
#ifndef LOADER_H
#define LOADER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include "tool/tool.h"
#include "policy.h"
#include "scx_vstate.h"

#define OPS_NAME "vstate"
#define COMM_SIZE 16
#define MAX_LISTED_THREADS 4096

/* ---- knobs.c: what can be set, and what it is set to --------------------------------------- */

enum knob {
	KNOB_RULE,
	KNOB_SAMPLE,
	KNOB_HINTS,
	KNOB_VECTOR_MS,
	KNOB_NORMAL_MS,
	KNOB_PREFILL_MS,
	KNOB_DECODE_MS,
	KNOB_VECTOR_WEIGHT,
	KNOB_PREFILL_WEIGHT,
	KNOB_DECODE_WEIGHT,
	KNOB_MIXED,
	KNOB_STICKY,
	KNOB_PLACEMENT,
	KNOB_NEXT,
	KNOB_CREDIT,
	KNOB_DECAY_MS,
	KNOB_HINT_TTL_MS,
	KNOB_BOOST_LIMIT_MS,
	KNOB_PATIENCE_MS,
	KNOB_DEFER_MS,
	KNOB_LEAD_MS,
	KNOB_MAX_THREADS,
	KNOB_WATCHDOG_MS,
	KNOB_INTERVAL_MS,
	NR_KNOBS,
};

struct settings {
	int policy, mode, scope; /* indices of the names below */
	long knob[NR_KNOBS]; /* a number, or an index of its choices */
};

#define SCOPE_PARTIAL 0
#define SCOPE_ALL 1

extern const char *const policy_names[], *const mode_names[], *const scope_names[];

struct options {
	struct settings set;
	pid_t pid;
	const char *out;
	bool verbose, hold;
};

void options_parse(int argc, char **argv, struct options *o);
const char *knob_name(enum knob k);
/* The name of its choice, or NULL for a number. */
const char *knob_choice(enum knob k, long value);

/* ---- engine.c: the BPF programs and the kernel's word about them --------------------------- */

struct kernel_state { /* /sys/kernel/sched_ext */
	char state[32], ops[128];
	long enable_seq, hotplug_seq, nr_rejected, switch_all;
};

struct exit_info { /* why the kernel ended the scheduler; kind 0: it did not */
	int kind;
	long code;
	char reason[128], message[1024];
	bool restart; /* as a hart came or went */
};

struct engine;

void engine_require_fit_machine(void);
struct engine *engine_create(const struct options *o);
/* Load, which takes long; nothing is in charge yet. */
void engine_load(struct engine *e);
/* Load unless that was done, and attach.  False: the kernel ended it; see engine_ended(). */
bool engine_start(struct engine *e);
bool engine_ended(struct engine *e, struct exit_info *to);
int engine_ended_fd(struct engine *e); /* readable when it is worth asking engine_ended() */
void engine_stop(struct engine *e); /* detach, wait until the kernel says so */
void engine_destroy(struct engine *e); /* and leave nothing pinned */
void engine_counters(struct engine *e, struct vstate_stats *to);
bool engine_hint(struct engine *e, pid_t tgid, struct vstate_phase_hint *to);
void kernel_state_read(struct kernel_state *to);
bool kernel_state_is_ours(const struct kernel_state *s);

/* ---- takeover.c: the target's threads ------------------------------------------------------ */

struct thread {
	pid_t tid;
	char name[COMM_SIZE];
	int policy; /* now */
	bool managed; /* by this scheduler, as far as its policy tells */
};

struct roll {
	struct thread thread[MAX_LISTED_THREADS];
	unsigned int nr, nr_managed;
};

void target_require(pid_t tgid, char name[COMM_SIZE]);
/* Partial scope: move every thread over, until none is left that was not; all: just look. */
void takeover(pid_t tgid, int scope, struct roll *to);
void roll_call(pid_t tgid, int scope, struct roll *to);
void give_back(pid_t tgid);
const char *sched_policy_name(int policy);

/* ---- document.c ---------------------------------------------------------------------------- */

struct report {
	const struct options *options;
	char target_name[COMM_SIZE];
	uint64_t start_ns, stop_ns;
	const char *stopped_by;
	struct kernel_state at_start, at_stop;
	struct exit_info exit;
	unsigned int restarts;
	struct vstate_stats counters;
	bool hinted;
	struct vstate_phase_hint last_hint;
	struct roll roll;
};

extern const char *const counter_names[VSTAT_NR];

/* Returns whether the run is valid. */
bool document_write(const char *path, const struct report *r);

#endif
