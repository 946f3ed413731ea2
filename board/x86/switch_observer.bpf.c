// SPDX-License-Identifier: GPL-2.0
/*
 * switch_observer.bpf.c - context switches of one process; compiled by bcc, see switch_observer.py,
 * which defines the names in capitals.
 *
 * Raw tracepoints: sched_switch(preempt, prev, next, prev_state), sched_migrate_task(p, dest_cpu).
 * While the first one runs, `current` is still prev, so prev needs no look into its structure. What
 * is taken from other tasks is read at offsets that the running kernel's BTF gave.
 */
#include <uapi/linux/ptrace.h>

struct counts {
	u64 voluntary, involuntary;
};
struct totals {
	u64 recording, tgid, resumed, resumed_with_avx, migrations, lost;
};

BPF_HASH(threads, u32, struct counts, LARGEST);
BPF_ARRAY(totals, struct totals, 1);

#if HAS_LAYOUT
static inline u32 tgid_of(u64 task)
{
	u32 tgid = 0;

	bpf_probe_read_kernel(&tgid, sizeof(tgid), (void *)(task + TASK_TGID));
	return tgid;
}
#endif

RAW_TRACEPOINT_PROBE(sched_switch)
{
	struct bpf_pidns_info ids = {};
	struct counts none = {}, *counts;
	struct totals *all;
	int zero = 0;
	u32 tid;

	all = totals.lookup(&zero);
	if (!all)
		return 0;
#if HAS_LAYOUT
	if (all->recording && all->tgid && tgid_of(ctx->args[2]) == all->tgid) {
		__sync_fetch_and_add(&all->resumed, 1);
#if HAS_FPU
		u64 state = 0, components = 0;

		bpf_probe_read_kernel(&state, sizeof(state), (void *)(ctx->args[2] + TASK_FPSTATE));
		bpf_probe_read_kernel(&components, sizeof(components),
				      (void *)(state + FPSTATE_COMPONENTS));
		if (components & AVX_COMPONENTS)
			__sync_fetch_and_add(&all->resumed_with_avx, 1);
#endif
	}
#endif
	if (bpf_get_ns_current_pid_tgid(NAMESPACE_DEV, NAMESPACE_INO, &ids, sizeof(ids)) ||
	    ids.tgid != TARGET)
		return 0;
	all->tgid = bpf_get_current_pid_tgid() >> 32;
	if (!all->recording)
		return 0;
	tid = ids.pid;
	counts = threads.lookup_or_try_init(&tid, &none);
	if (!counts)
		__sync_fetch_and_add(&all->lost, 1);
	else if (!ctx->args[0] && (u32)ctx->args[3])
		counts->voluntary++;
	else
		counts->involuntary++;
	return 0;
}

#if HAS_LAYOUT
RAW_TRACEPOINT_PROBE(sched_migrate_task)
{
	struct totals *all;
	int zero = 0;

	all = totals.lookup(&zero);
	if (all && all->recording && all->tgid && tgid_of(ctx->args[0]) == all->tgid)
		__sync_fetch_and_add(&all->migrations, 1);
	return 0;
}
#endif
