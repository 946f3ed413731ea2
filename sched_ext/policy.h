/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What the BPF part of scx_vstate and its loader share: the choices of knobs, the counters, and
 * what is known of a thread.
 *
 * Promise: nothing in here is anybody else's business; both are built from it together.
 * Limit: plain C types, as the BPF part takes its own from the kernel's BTF.
 */
#ifndef VSTATE_POLICY_H
#define VSTATE_POLICY_H

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
	x(kept_deferring) x(migrations) x(runs) x(vector_runs) x(dirty_stops) x(dirty_preempts) x(dirty_blocks) \
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
	unsigned long long boosted_ns; /* what boosts spared it, less what it has slept */
	unsigned long long queued_ns; /* when it joined the shared queue; 0: is not in it */
	int last_cpu; /* -1: not run yet */
	unsigned char interrupted; /* made way for another one, until it runs again */
	unsigned char yielded; /* gives up this turn, whatever its vtime */
};

#endif
