// SPDX-License-Identifier: GPL-2.0
/*
 * Count what each context switch of one process does with the vector registers.
 *
 * sched_switch fires with interrupts off, before switch_to(), when all that decides about a save is
 * final (Linux 6.12 to 7.3, __switch_to_vector() in arch/riscv/include/asm/vector.h):
 *  - kernel-mode vector code was interrupted (RISCV_PREEMPT_V): its registers are saved iff dirty;
 *  - else the user's registers are saved iff VS in the saved status is Dirty.
 * Where the thread came in by a system call (cause 8), the kernel itself had overwritten the
 * registers on entry and marked them Dirty: that save keeps nothing.  Otherwise they hold what
 * the thread left, and its program counter tells whether it was computing or only spinning.
 *
 * Promise: one count per switch; no event goes to user space; threads that find no row are counted
 * beside the rows, never dropped.
 * Limit: saves outside of switches (signals, ptrace, kernel_vector_begin) are not seen here.  The
 * read of VS is exact because a task that is being switched out wrote its pt_regs at its last entry
 * into the kernel; of a running task it would be stale.
 *
 * No task storage and no timers: on harts without Zacas recent kernels cannot allocate them.  Rows
 * are preallocated and made when a thread is made, so a switch never allocates.  A row is written
 * by the hart on which its thread runs, migrations only under the thread's pi_lock, and the
 * scheduler orders the two: no atomics needed.
 */
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <bpf/bpf_core_read.h>
#include "vstate_observer.h"

/* Macros of the kernel's headers are not in BTF. */
#define SR_VS 0x600UL
#define SR_VS_OFF 0x000UL
#define SR_VS_INITIAL 0x200UL
#define SR_VS_CLEAN 0x400UL
#define EXC_SYSCALL 8UL /* ecall from user mode */
#define RISCV_PREEMPT_V 0x00000100U
#define RISCV_PREEMPT_V_DIRTY 0x80000000U
#define TASK_DEAD 0x80U

char LICENSE[] SEC("license") = "GPL";

/* Not read-only data: the self-test runs the same programs on another process first. */
volatile pid_t target_tgid;
volatile __u32 nr_spin;
volatile struct spin_range spin[MAX_SPIN];
volatile bool counting;
__u64 threads_made;
__u64 lost_threads;

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, NR_SLOTS);
	__type(key, __u32);
	__type(value, struct counters);
} totals SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH); /* preallocated unless told otherwise */
	__uint(max_entries, 1); /* set before loading */
	__type(key, pid_t);
	__type(value, struct thread_row);
} rows SEC(".maps");

static const struct thread_row new_row = {.threads = 1};

static __always_inline struct counters *total(__u32 slot)
{
	return bpf_map_lookup_elem(&totals, &slot);
}

static __always_inline bool spinning(unsigned long epc)
{
	for (int i = 0; i < MAX_SPIN && i < nr_spin; i++) {
		if (epc >= spin[i].start && epc < spin[i].end)
			return true;
	}
	return false;
}

static __always_inline struct pt_regs *user_regs(struct task_struct *p)
{
	return (struct pt_regs *)bpf_task_pt_regs(p);
}

static __always_inline enum outcome outcome_of(struct task_struct *p)
{
	__u32 flags = p->thread.riscv_v_flags;
	struct pt_regs *regs;

	if (flags & RISCV_PREEMPT_V)
		return flags & RISCV_PREEMPT_V_DIRTY ? OUT_KERNEL_SAVE : OUT_KERNEL_CLEAN;
	regs = user_regs(p);
	switch (regs->status & SR_VS) {
	case SR_VS_OFF:
		return OUT_OFF;
	case SR_VS_INITIAL:
		return OUT_INITIAL;
	case SR_VS_CLEAN:
		return OUT_CLEAN;
	}
	if (regs->cause == EXC_SYSCALL)
		return OUT_DISCARDED;
	return spinning(regs->epc) ? OUT_SPIN : OUT_COMPUTE;
}

static __always_inline void count_out(struct counters *to, enum why why, enum outcome outcome)
{
	/* Both are within bounds; the verifier wants to see it. */
	if (to && why < NR_WHYS && outcome < NR_OUTCOMES)
		to->outs[why][outcome]++;
}

static __always_inline void switch_out(struct task_struct *p, enum why why, bool dead)
{
	enum outcome outcome = outcome_of(p);
	pid_t tid = p->pid;
	struct thread_row *row = bpf_map_lookup_elem(&rows, &tid);

	count_out(total(SLOT_ALL), why, outcome);
	if (!row) {
		count_out(total(SLOT_WITHOUT_ROW), why, outcome);
		return;
	}
	count_out(&row->counters, why, outcome);
	if (dead) {
		row->exited++;
		bpf_probe_read_kernel_str(row->comm, sizeof(row->comm), p->comm);
	}
}

static __always_inline void switch_in(struct task_struct *p)
{
	pid_t tid = p->pid;
	struct thread_row *row;
	struct counters *to;

	if (p->thread.riscv_v_flags & RISCV_PREEMPT_V ||
	    (user_regs(p)->status & SR_VS) == SR_VS_OFF)
		return;
	to = total(SLOT_ALL);
	if (to)
		to->pending_restores++;
	row = bpf_map_lookup_elem(&rows, &tid);
	to = row ? &row->counters : total(SLOT_WITHOUT_ROW);
	if (to)
		to->pending_restores++;
}

SEC("tp_btf/sched_switch")
int BPF_PROG(on_switch, bool preempt, struct task_struct *prev, struct task_struct *next,
	     unsigned int prev_state)
{
	if (!counting)
		return 0;
	if (prev->tgid == target_tgid) {
		/* With a signal pending a thread that wanted to sleep is put back to running. */
		bool runnable = preempt || !prev_state || !prev->__state;

		switch_out(prev, runnable ? WHY_RUNNABLE : WHY_BLOCKING, prev_state & TASK_DEAD);
	}
	if (next->tgid == target_tgid)
		switch_in(next);
	return 0;
}

/* The arguments behind p changed between kernels; they are not needed. */
SEC("tp_btf/sched_migrate_task")
int BPF_PROG(on_migrate, struct task_struct *p)
{
	struct thread_row *row;
	struct counters *to;
	pid_t tid;

	if (!counting || p->tgid != target_tgid)
		return 0;
	tid = p->pid;
	to = total(SLOT_ALL);
	if (to)
		to->migrations++;
	row = bpf_map_lookup_elem(&rows, &tid);
	to = row ? &row->counters : total(SLOT_WITHOUT_ROW);
	if (to)
		to->migrations++;
	return 0;
}

/* Not subject to `counting`: rows must be there for threads made while the loader lists them. */
SEC("tp_btf/sched_wakeup_new")
int BPF_PROG(on_new, struct task_struct *p)
{
	struct thread_row *row;
	pid_t tid;

	if (p->tgid != target_tgid)
		return 0;
	tid = p->pid;
	__sync_fetch_and_add(&threads_made, 1);
	row = bpf_map_lookup_elem(&rows, &tid);
	if (row)
		row->threads++;
	else if (bpf_map_update_elem(&rows, &tid, &new_row, BPF_NOEXIST))
		__sync_fetch_and_add(&lost_threads, 1);
	return 0;
}
