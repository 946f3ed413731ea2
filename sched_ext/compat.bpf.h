/* SPDX-License-Identifier: GPL-2.0 */
/*
 * One BPF object for Linux 6.12 and later: each call that changed, with what changed it.
 *
 * The kernel tree's scx/common.bpf.h is that of 6.12.  libbpf looks a name up without its last
 * ___suffix and takes a declaration only if the running kernel's function has the same arguments
 * and result; what is weak and absent compares as null, and the verifier drops that branch.
 *
 * Promise: nothing but this file and the look-ups of engine.c knows a kernel version.
 * Limit: the newest kernel these were checked against is named in docs/scheduler.md.
 */
#ifndef VSTATE_COMPAT_BPF_H
#define VSTATE_COMPAT_BPF_H

#include <scx/common.bpf.h>

#define MAX_RT_PRIO 100 /* include/linux/sched/prio.h; macros are not in BTF */
#define MAX_PRIO 140 /* of the idle thread; all others are below */
#define SCHED_EXT 7 /* include/uapi/linux/sched.h */

/* No promise holds an enumerator's value across kernels: the running kernel's is taken. */
#define scx_enum(type, name) bpf_core_enum_value(enum type, name)

/* 6.13, 5209c03c8ed2 ("sched_ext: Rename scx_bpf_consume() to scx_bpf_dsq_move_to_local()");
 * the old name is gone since 6.15.  7.1 has a second one with enqueue flags. */
bool scx_bpf_dsq_move_to_local___v2___vstate(u64 dsq, u64 enq_flags) __ksym __weak;
bool scx_bpf_dsq_move_to_local___vstate(u64 dsq) __ksym __weak;
bool scx_bpf_consume___vstate(u64 dsq) __ksym __weak;

static __always_inline bool move_to_local(u64 dsq)
{
	if (bpf_ksym_exists(scx_bpf_dsq_move_to_local___v2___vstate))
		return scx_bpf_dsq_move_to_local___v2___vstate(dsq, 0);
	if (bpf_ksym_exists(scx_bpf_dsq_move_to_local___vstate))
		return scx_bpf_dsq_move_to_local___vstate(dsq);
	return scx_bpf_consume___vstate(dsq);
}

/* 6.13, cc26abb1a19a ("sched_ext: Rename scx_bpf_dispatch[_vtime]() to
 * scx_bpf_dsq_insert[_vtime]()"); the old names are gone since 6.15.  6.19 has a second one that
 * returns whether it inserted. */
bool scx_bpf_dsq_insert___v2___vstate(struct task_struct *p, u64 dsq, u64 slice,
				      u64 enq_flags) __ksym __weak;
void scx_bpf_dsq_insert___vstate(struct task_struct *p, u64 dsq, u64 slice,
				 u64 enq_flags) __ksym __weak;
void scx_bpf_dispatch___vstate(struct task_struct *p, u64 dsq, u64 slice,
			       u64 enq_flags) __ksym __weak;

static __always_inline void insert(struct task_struct *p, u64 dsq, u64 slice, u64 enq_flags)
{
	if (bpf_ksym_exists(scx_bpf_dsq_insert___v2___vstate))
		scx_bpf_dsq_insert___v2___vstate(p, dsq, slice, enq_flags);
	else if (bpf_ksym_exists(scx_bpf_dsq_insert___vstate))
		scx_bpf_dsq_insert___vstate(p, dsq, slice, enq_flags);
	else
		scx_bpf_dispatch___vstate(p, dsq, slice, enq_flags);
}

/* 6.19, c0d630ba347c ("sched_ext: Wrap kfunc args in struct to prepare for aux__prog"): five
 * arguments are one too many for a function that also needs its program. */
struct scx_bpf_dsq_insert_vtime_args___vstate {
	u64 dsq_id;
	u64 slice;
	u64 vtime;
	u64 enq_flags;
};
bool __scx_bpf_dsq_insert_vtime___vstate(
	struct task_struct *p, struct scx_bpf_dsq_insert_vtime_args___vstate *args) __ksym __weak;
void scx_bpf_dsq_insert_vtime___vstate(struct task_struct *p, u64 dsq, u64 slice, u64 vtime,
				       u64 enq_flags) __ksym __weak;
void scx_bpf_dispatch_vtime___vstate(struct task_struct *p, u64 dsq, u64 slice, u64 vtime,
				     u64 enq_flags) __ksym __weak;

static __always_inline void insert_vtime(struct task_struct *p, u64 dsq, u64 slice, u64 vtime,
					 u64 enq_flags)
{
	if (bpf_ksym_exists(__scx_bpf_dsq_insert_vtime___vstate)) {
		struct scx_bpf_dsq_insert_vtime_args___vstate args = {
			.dsq_id = dsq,
			.slice = slice,
			.vtime = vtime,
			.enq_flags = enq_flags,
		};

		__scx_bpf_dsq_insert_vtime___vstate(p, &args);
	} else if (bpf_ksym_exists(scx_bpf_dsq_insert_vtime___vstate)) {
		scx_bpf_dsq_insert_vtime___vstate(p, dsq, slice, vtime, enq_flags);
	} else {
		scx_bpf_dispatch_vtime___vstate(p, dsq, slice, vtime, enq_flags);
	}
}

/* 6.19 has a call for it; 7.2 warns of the direct write. */
bool scx_bpf_task_set_slice___vstate(struct task_struct *p, u64 slice) __ksym __weak;

static __always_inline void set_slice(struct task_struct *p, u64 slice)
{
	if (bpf_ksym_exists(scx_bpf_task_set_slice___vstate))
		scx_bpf_task_set_slice___vstate(p, slice);
	else
		p->scx.slice = slice;
}

/* 6.18 has a call for it; 7.3 drops the way by the run queue. */
struct task_struct *scx_bpf_cpu_curr___vstate(s32 cpu) __ksym __weak;
struct rq *scx_bpf_cpu_rq___vstate(s32 cpu) __ksym __weak;

/* NULL: not known. */
static __always_inline const struct task_struct *current_on(s32 cpu)
{
	struct task_struct *curr = NULL;
	struct rq *rq;

	if (bpf_ksym_exists(scx_bpf_cpu_curr___vstate)) {
		curr = scx_bpf_cpu_curr___vstate(cpu);
	} else if (bpf_ksym_exists(scx_bpf_cpu_rq___vstate)) {
		rq = scx_bpf_cpu_rq___vstate(cpu);
		if (rq)
			curr = rq->curr;
	}
	return curr;
}

/* 6.19 renamed it for callers outside of ops.cpu_release(), which 7.2 deprecates. */
u32 scx_bpf_reenqueue_local___vstate(void) __ksym __weak;

static __always_inline u32 requeue_local(void)
{
	if (bpf_ksym_exists(scx_bpf_reenqueue_local___vstate))
		return scx_bpf_reenqueue_local___vstate();
	return 0;
}

#endif
