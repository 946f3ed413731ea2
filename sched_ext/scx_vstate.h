/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What scx_vstate shares: with llama-server the phase hints (ABI version 3), between its BPF part
 * and its loader the statistics.
 *
 * The hints.  While scx_vstate runs, a hash map is pinned at VSTATE_PHASE_MAP_PATH.  The process
 * that computes (the writer) sets an element before each batch and sets it to VSTATE_PHASE_IDLE
 * after it.  The key is the writer's TGID; a thread may have an element of its own under its TID,
 * which then counts instead.  A hint that is not valid in every point below is counted by what is
 * wrong with it, and has no effect.
 *
 * Promise: a layout never changes under the same version; the size is asserted on both sides.
 * Limit: a hint says what the writer claims.  Only threads that used vector registers follow it.
 */
#ifndef SCX_VSTATE_H
#define SCX_VSTATE_H

#define VSTATE_PHASE_ABI_VERSION 3
#define VSTATE_PIN_DIR "/sys/fs/bpf/scx_vstate"
#define VSTATE_PHASE_MAP_PATH VSTATE_PIN_DIR "/phase_hints"
#define VSTATE_WORKER_MAP_PATH VSTATE_PIN_DIR "/workers"
#define VSTATE_MAX_HINTS 64
#define VSTATE_MAX_WORKERS 256
#define VSTATE_TICKS_PER_S 100 /* of writer_start_ticks: USER_HZ, the unit of /proc/PID/stat */

enum vstate_phase {
	VSTATE_PHASE_NONE, /* no hint; the same as no element */
	VSTATE_PHASE_IDLE, /* between batches; no tokens */
	VSTATE_PHASE_PREFILL, /* prompt tokens only */
	VSTATE_PHASE_DECODE, /* generated tokens only */
	VSTATE_PHASE_MIXED, /* both */
	VSTATE_NR_PHASES,
};

struct vstate_phase_hint {
	unsigned int abi_version; /* VSTATE_PHASE_ABI_VERSION */
	unsigned int phase; /* enum vstate_phase */
	unsigned long long updated_ns; /* CLOCK_MONOTONIC; not in the future, within the TTL */
	unsigned long long writer_start_ticks; /* field 22 of /proc/self/stat */
	unsigned int prefill_tokens; /* of this batch */
	unsigned int decode_tokens; /* of this batch */
	unsigned int batch_tokens; /* the sum of both */
	unsigned int sequence; /* batches announced, this one included; IDLE repeats it */
	unsigned long long prefill_total; /* of all batches but failed ones, this one included */
	unsigned long long decode_total;
};
_Static_assert(sizeof(struct vstate_phase_hint) == 56, "phase hint ABI changed");

/* ---- BPF part and loader ------------------------------------------------------------------- */

enum vstate_rule { /* which threads are hot */
	VSTATE_RULE_DECLARED, /* all of the target */
	VSTATE_RULE_DECLARED_OR_DIRTY, /* those, and who was Dirty when it stopped */
	VSTATE_RULE_ANY_DIRTY, /* who was Dirty when it stopped, also by a system call */
	VSTATE_RULE_LIVE_DIRTY, /* who was Dirty with registers that the kernel had not discarded */
};

enum vstate_mixed {
	VSTATE_MIXED_PROPORTIONAL, /* slice and weight by the share of tokens */
	VSTATE_MIXED_LARGER, /* those of the phase with more tokens; decode when equal */
};

enum vstate_sticky { /* a hot thread that finds its home CPU busy ... */
	VSTATE_STICKY_OFF, /* ... queues for all CPUs */
	VSTATE_STICKY_ALWAYS, /* ... waits for it */
	VSTATE_STICKY_ADAPTIVE, /* ... waits unless another one waits there */
};

enum vstate_placement { /* a hot thread's home CPU is ... */
	VSTATE_PLACEMENT_OFF, /* ... none */
	VSTATE_PLACEMENT_LAST, /* ... where it ran last */
	VSTATE_PLACEMENT_WORKERS, /* ... what the map `workers` says, handed out in turn */
};

enum vstate_next { /* who runs when a turn ends */
	VSTATE_NEXT_HEAD, /* the head of the queue, whatever the vtime of the thread that ran */
	VSTATE_NEXT_EARLIEST, /* the lower vtime of the two */
};

enum vstate_credit { /* when the bound on sleep credit is applied */
	VSTATE_CREDIT_ENQUEUE, /* whenever a thread is queued */
	VSTATE_CREDIT_WAKEUP, /* when it wakes up */
};

/*
 * Every counter by the name it has in the JSON document.  "hint_": one per look-up of the target's
 * hint, each look-up in exactly one of them.  "_runs": one per start of a turn.
 */
// clang-format off
#define VSTATE_COUNTERS(x) \
	x(enqueued) x(dispatched) x(local_idle) x(home_idle) x(sticky_local) \
	x(adaptive_queue_fallback) x(patience_fallback) x(kept_running) x(kept_earliest) \
	x(migrations) x(runs) x(vector_runs) x(dirty_stops) x(dirty_preempts) x(dirty_blocks) \
	x(live_dirty_stops) x(live_dirty_ticks) x(credit_clamped) x(lead_clamped) \
	x(boost_exhausted) x(requeued) x(wakeups) x(yields) x(threads_enabled) x(threads_lost) \
	x(runtime_ns) x(vector_runtime_ns) \
	x(prefill_runs) x(decode_runs) x(mixed_runs) x(idle_runs) \
	x(mixed_prefill_major_runs) x(mixed_decode_major_runs) x(mixed_even_runs) \
	x(prefill_runtime_ns) x(decode_runtime_ns) x(mixed_runtime_ns) x(idle_runtime_ns) \
	x(hint_absent) x(hint_accepted) x(hint_bad_version) x(hint_bad_phase) x(hint_bad_time) \
	x(hint_future) x(hint_stale) x(hint_dead_writer) x(hint_bad_sum) x(hint_inconsistent)
// clang-format on

#define VSTATE_COUNTER_ID(name) VSTAT_##name,
enum vstate_counter {
	VSTATE_COUNTERS(VSTATE_COUNTER_ID) VSTAT_NR
};

struct vstate_stats {
	unsigned long long counter[VSTAT_NR];
};

/* A thread in the class, by TID. */
struct vstate_row {
	unsigned long long start_ns; /* of the thread: a TID alone may be another one's by now */
	unsigned long long vtime; /* order in the shared queue */
	unsigned long long charged_ns; /* CPU time of the thread that vtime covers */
	unsigned long long last_dirty_ns; /* by the rule; 0: never */
	unsigned long long stopped_ns; /* when it went to sleep */
	unsigned long long boosted_ns; /* what boosts spared it since it last slept */
	int last_cpu; /* -1: not run yet */
	unsigned char queued; /* in the shared queue, until it runs */
	unsigned char yielded; /* gives up this turn, whatever its vtime */
};

#endif
