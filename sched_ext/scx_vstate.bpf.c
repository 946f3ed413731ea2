// SPDX-License-Identifier: GPL-2.0
/*
 * scx_vstate - a scheduler that tries not to interrupt threads in the middle of vector work.
 *
 * A context switch in the middle of vector work saves and restores all vector registers, and it
 * takes a thread from a group that waits for it at the next barrier.  So threads that compute with
 * vectors ("hot" ones) get longer turns, come back to the CPU where they ran, and pay less than
 * full price for their time, within bounds.
 *
 * Policy.  All threads share one queue ordered by vtime: CPU time used, divided by weight.  A CPU
 * whose thread's turn ends goes on with it or takes the head, whichever has the lower vtime.
 * vtime_now, the highest vtime of those that left the queue or went on past it, is its clock: new
 * threads start at it, sleepers are moved up to it less a credit.
 *  - hot?      By `rule`: all threads of the target, or who was seen with VS = Dirty in the last
 *              hot_decay_ns.  `live-dirty` believes in Dirty only when the kernel was not entered
 *              by a system call: that overwrites the registers and then marks them Dirty.
 *  - slice     normal_slice_ns; vector_slice_ns when hot; while the target announces a phase (see
 *              scx_vstate.h) prefill_slice_ns or decode_slice_ns, for mixed batches by the tokens.
 *              For weights below 100 less, in proportion.
 *  - charge    measured run time * 100 / weight; when hot, divided by the vector's or the phase's
 *              boost, until a thread has been spared boost_limit_ns more than it has slept.
 *  - defer     a hot thread whose turn ends makes way for the head of the queue if none did in the
 *              last defer_ns or the head has waited as long; a head that was interrupted itself, by
 *              this rule, waits a vector slice more, as it mostly has its CPU back before that.
 *              Short work that gathers runs one after the other, for one interruption.
 *  - place     a hot thread's home is where it ran last, or what `workers` says.  Home is idle: it
 *              goes there.  Else any idle CPU.  Else, if `sticky`, it waits at home, unless another
 *              one waits there (adaptive) or home has passed over the shared queue for patience_ns.
 *
 * Example.  8 CPUs, 8 threads computing a decode step (boost 2, slice 30 ms), a scalar thread S
 * that needs 15 ms wakes up.  No CPU is idle, S is queued at vtime_now - 50 ms at the earliest. The
 * first worker whose turn ends, if the last interruption is 20 ms ago, is charged 15 ms; S is
 * earlier, gets that CPU and sleeps again, and the worker has it back.  Had S needed seconds, the
 * worker would have waited until S is the later of the two, or for 70 ms, and then interrupted
 * another one.  A worker that never sleeps is spared 15 ms in its first turn, 5 ms in the second
 * and nothing from then on (boost_limit_ns is 20 ms), so S keeps its share.  Under `declared` a
 * thread of the server that only parses HTTP gets the same treatment as a worker; under
 * `live-dirty` it does not.
 *
 * Known weakness.
 *  - Which thread the others wait for at a barrier is not known here; a hot one that only spins
 *    looks like one that computes.  With fewer free CPUs than workers a longer slice for the
 *    spinner is a longer wait for the straggler.
 *  - On 6.12 to 6.18 the fair class comes before this one: in partial scope every fair thread that
 *    wakes up interrupts ours, however long its slice, and sends it to the shared queue.
 *  - In partial scope a thread that was given an idle CPU which a fair thread takes at the same
 *    moment waits there for as long as that one computes.
 *  - A thread pinned to one CPU waits for the end of that CPU's turn and for defer_ns; in scope all
 *    per-CPU kernel threads, too.  Workers on fewer CPUs than there are of them take turns of a
 *    vector slice and defer_ns.
 *  - Who waits at home (`sticky`) is let in when the turn ends: defer is about the shared queue.
 *
 * Faithful or revised.  Every rule of the original design is there as a knob's value; the two
 * modes of knobs.c are sets of them.
 *
 * Promise: no clock but the kernel's, no random number: the same events give the same decisions.
 * Limit: no task storage and no BPF timers (on harts without Zacas recent kernels cannot allocate
 * them); threads that find no row are scheduled as cold ones, at vtime_now, and counted.
 */
#include "compat.bpf.h"
#include "policy.h"
#include "scx_vstate.h"

#define SHARED_DSQ 0
#define MAX_CPUS 512
#define NS_PER_MS 1000000ULL
#define NS_PER_TICK (1000000000ULL / VSTATE_TICKS_PER_S)
#define VTIME_START (1ULL << 40) /* far enough from 0 that no credit reaches below it */
#define LEAST_SLICE_NS NS_PER_MS
#define MAX_LEAD 5 /* times lead_ns */

/* asm/csr.h; macros are not in BTF */
#define SR_VS 0x600UL
#define SR_VS_DIRTY 0x600UL
#define EXC_SYSCALL 8UL

char _license[] SEC("license") = "GPL";

/* The loader sets every one of them. */
const volatile pid_t target_tgid;
const volatile u32 nr_cpu_ids = 1;
const volatile u32 rule, mixed, sticky, placement, credit, next;
const volatile bool use_hints, sample_at_tick, target_only;
const volatile u64 vector_slice_ns = 1, normal_slice_ns = 1;
const volatile u64 prefill_slice_ns = 1, decode_slice_ns = 1;
const volatile u32 vector_boost = 1, prefill_boost = 1, decode_boost = 1;
const volatile u64 hot_decay_ns, hint_ttl_ns;
const volatile u64 boost_limit_ns; /* 0: none */
const volatile u64 patience_ns; /* 0: for ever */
const volatile u64 defer_ns; /* 0: who waits is let in when a turn ends */
const volatile u64 lead_ns; /* 0: unbounded, and no shorter slices for low weights */

UEI_DEFINE(uei);

static u64 vtime_now = VTIME_START;
static u32 next_worker;
static u64 interrupted_ns; /* when a hot thread last made way */
/* When a CPU last looked at the shared queue. */
static u64 shared_seen_ns[MAX_CPUS];

/* Preallocated, as hashes are: nothing is allocated while a run queue is locked. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1); /* the loader sets it */
	__type(key, pid_t);
	__type(value, struct vstate_row);
} rows SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, VSTATE_MAX_HINTS);
	__type(key, u32);
	__type(value, struct vstate_phase_hint);
} phase_hints SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, VSTATE_MAX_WORKERS);
	__type(key, pid_t);
	__type(value, u32); /* CPU */
} workers SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct vstate_stats);
} stats SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096);
} ended SEC(".maps");

static __always_inline void count(enum vstate_counter which, u64 by)
{
	u32 zero = 0, at = which;
	struct vstate_stats *s = bpf_map_lookup_elem(&stats, &zero);

	barrier_var(at); /* the compiler knows that it is within bounds, the verifier does not */
	if (s && at < VSTAT_NR)
		s->counter[at] += by;
}

static __always_inline bool before(u64 a, u64 b)
{
	return (s64)(a - b) < 0;
}

static __always_inline u64 max_slice_ns(void)
{
	return vector_slice_ns > normal_slice_ns ? vector_slice_ns : normal_slice_ns;
}

static __always_inline bool of_target(const struct task_struct *p)
{
	return p->tgid == target_tgid;
}

/* The row of this thread, not of one that had its TID before. */
static __always_inline struct vstate_row *row_of(const struct task_struct *p)
{
	pid_t tid = p->pid;
	struct vstate_row *row = bpf_map_lookup_elem(&rows, &tid);

	return row && row->start_ns == p->start_time ? row : NULL;
}

/* ---- Is a thread hot, and in which phase? -------------------------------------------------- */

static __always_inline bool is_hot(const struct task_struct *p, const struct vstate_row *row,
				   u64 now)
{
	if (rule <= VSTATE_RULE_DECLARED_OR_DIRTY && of_target(p))
		return true;
	return rule != VSTATE_RULE_DECLARED && row && row->last_dirty_ns &&
	       now - row->last_dirty_ns < hot_decay_ns;
}

/* What is wrong with a hint; VSTAT_hint_accepted: nothing. */
static __always_inline enum vstate_counter judge(const struct vstate_phase_hint *h,
						 const struct task_struct *p, u64 now)
{
	bool prefill = h->prefill_tokens, decode = h->decode_tokens;

	if (h->abi_version != VSTATE_PHASE_ABI_VERSION)
		return VSTAT_hint_bad_version;
	if (h->phase >= VSTATE_NR_PHASES)
		return VSTAT_hint_bad_phase;
	if (h->phase == VSTATE_PHASE_NONE)
		return VSTAT_hint_absent;
	if (!h->updated_ns)
		return VSTAT_hint_bad_time;
	if (before(now, h->updated_ns))
		return VSTAT_hint_future;
	if (h->writer_start_ticks != p->group_leader->start_boottime / NS_PER_TICK)
		return VSTAT_hint_dead_writer;
	if (now - h->updated_ns > hint_ttl_ns)
		return VSTAT_hint_stale;
	if ((u64)h->prefill_tokens + h->decode_tokens != h->batch_tokens)
		return VSTAT_hint_bad_sum;
	if (prefill != (h->phase == VSTATE_PHASE_PREFILL || h->phase == VSTATE_PHASE_MIXED) ||
	    decode != (h->phase == VSTATE_PHASE_DECODE || h->phase == VSTATE_PHASE_MIXED))
		return VSTAT_hint_inconsistent;
	return VSTAT_hint_accepted;
}

struct view { /* a thread as the policy sees it now */
	bool hot;
	enum vstate_phase phase;
	u32 prefill_tokens, decode_tokens;
};

static __always_inline void look(struct view *v, const struct task_struct *p,
				 const struct vstate_row *row, u64 now)
{
	const struct vstate_phase_hint *h;
	struct vstate_phase_hint hint;
	enum vstate_counter verdict;
	u32 key = p->pid;

	__builtin_memset(v, 0, sizeof(*v));
	v->hot = is_hot(p, row, now);
	if (!use_hints || !v->hot || !of_target(p))
		return;
	h = bpf_map_lookup_elem(&phase_hints, &key);
	if (!h) {
		key = p->tgid;
		h = bpf_map_lookup_elem(&phase_hints, &key);
	}
	if (!h) {
		count(VSTAT_hint_absent, 1);
		return;
	}
	hint = *h; /* the writer may change it while it is judged */
	verdict = judge(&hint, p, now);
	count(verdict, 1);
	if (verdict == VSTAT_hint_accepted) {
		v->phase = hint.phase;
		v->prefill_tokens = hint.prefill_tokens;
		v->decode_tokens = hint.decode_tokens;
	}
}

/* ---- Slice and boost ----------------------------------------------------------------------- */

static __always_inline u64 of_mixed(const struct view *v, u64 prefill, u64 decode)
{
	u64 total = (u64)v->prefill_tokens + v->decode_tokens;

	if (!total) /* cannot be: judge() saw tokens of both kinds */
		return decode;
	if (mixed == VSTATE_MIXED_LARGER)
		return v->prefill_tokens > v->decode_tokens ? prefill : decode;
	return (prefill * v->prefill_tokens + decode * v->decode_tokens + total / 2) / total;
}

static __always_inline u64 by_phase(const struct view *v, u64 cold, u64 vector, u64 prefill,
				    u64 decode)
{
	if (!v->hot)
		return cold;
	switch (v->phase) {
	case VSTATE_PHASE_PREFILL:
		return prefill;
	case VSTATE_PHASE_DECODE:
		return decode;
	case VSTATE_PHASE_MIXED:
		return of_mixed(v, prefill, decode);
	default:
		return vector;
	}
}

static __always_inline u64 slice_of(const struct view *v, const struct task_struct *p)
{
	u64 slice =
		by_phase(v, normal_slice_ns, vector_slice_ns, prefill_slice_ns, decode_slice_ns);

	/* Nice 19 pays 67 times as much: a whole slice would be seconds of everyone's time. */
	if (lead_ns && p->scx.weight < 100)
		slice = slice * p->scx.weight / 100;
	return slice < LEAST_SLICE_NS ? LEAST_SLICE_NS : slice;
}

/* ---- Charge and sample --------------------------------------------------------------------- */

static __always_inline void count_runtime(const struct view *v, u64 used)
{
	count(VSTAT_runtime_ns, used);
	if (v->hot)
		count(VSTAT_vector_runtime_ns, used);
	if (v->phase == VSTATE_PHASE_PREFILL)
		count(VSTAT_prefill_runtime_ns, used);
	else if (v->phase == VSTATE_PHASE_DECODE)
		count(VSTAT_decode_runtime_ns, used);
	else if (v->phase == VSTATE_PHASE_MIXED)
		count(VSTAT_mixed_runtime_ns, used);
	else if (v->phase == VSTATE_PHASE_IDLE)
		count(VSTAT_idle_runtime_ns, used);
}

/* By the kernel's own account of CPU time: whatever callbacks did not come, nothing is lost. */
static __always_inline void charge(struct task_struct *p, struct vstate_row *row,
				   const struct view *v)
{
	u64 used = p->se.sum_exec_runtime - row->charged_ns;
	u64 full = used * 100 / (p->scx.weight ?: 100);
	u64 boosted = full / (by_phase(v, 1, vector_boost, prefill_boost, decode_boost) ?: 1);

	row->charged_ns += used;
	count_runtime(v, used);
	if (boost_limit_ns && row->boosted_ns + (full - boosted) > boost_limit_ns) {
		count(VSTAT_boost_exhausted, 1);
		boosted = full;
	}
	row->boosted_ns += full - boosted;
	row->vtime += boosted;
}

static __always_inline void hand_out_home(const struct task_struct *p)
{
	pid_t tid = p->pid;
	u32 cpu;

	if (placement != VSTATE_PLACEMENT_WORKERS || !of_target(p) ||
	    bpf_map_lookup_elem(&workers, &tid))
		return;
	cpu = __sync_fetch_and_add(&next_worker, 1) % (nr_cpu_ids ?: 1);
	bpf_map_update_elem(&workers, &tid, &cpu, BPF_NOEXIST);
}

/* The saved registers are those of the last entry into the kernel: this one, as p is running. */
static __always_inline void sample(struct task_struct *p, struct vstate_row *row, u64 now,
				   bool at_tick, bool runnable)
{
	struct pt_regs *regs = (struct pt_regs *)bpf_task_pt_regs(p);
	bool dirty = (regs->status & SR_VS) == SR_VS_DIRTY;
	bool live = dirty && regs->cause != EXC_SYSCALL;

	if (at_tick) {
		if (!sample_at_tick)
			return;
		if (live)
			count(VSTAT_live_dirty_ticks, 1);
	} else if (dirty) {
		count(VSTAT_dirty_stops, 1);
		count(runnable ? VSTAT_dirty_preempts : VSTAT_dirty_blocks, 1);
		if (live)
			count(VSTAT_live_dirty_stops, 1);
	}
	if (rule == VSTATE_RULE_LIVE_DIRTY ? live : dirty) {
		row->last_dirty_ns = now;
		hand_out_home(p);
	}
}

/* ---- Place --------------------------------------------------------------------------------- */

/* -1: none that this thread may use. */
static __always_inline s32 home_of(const struct task_struct *p, const struct vstate_row *row,
				   const struct view *v)
{
	pid_t tid = p->pid;
	s32 home = -1;
	u32 *cpu = NULL;

	if (!v->hot || !row || placement == VSTATE_PLACEMENT_OFF)
		return -1;
	if (placement == VSTATE_PLACEMENT_WORKERS)
		cpu = bpf_map_lookup_elem(&workers, &tid);
	home = cpu ? (s32)*cpu : row->last_cpu;
	if (home < 0 || home >= nr_cpu_ids || home >= MAX_CPUS ||
	    !bpf_cpumask_test_cpu(home, p->cpus_ptr))
		return -1;
	return home;
}

s32 BPF_STRUCT_OPS(vstate_select_cpu, struct task_struct *p, s32 prev_cpu, u64 wake_flags)
{
	u64 now = bpf_ktime_get_ns();
	struct vstate_row *row = row_of(p);
	bool is_idle = false;
	struct view v;
	s32 home, cpu;

	look(&v, p, row, now);
	home = home_of(p, row, &v);
	if (home >= 0 && scx_bpf_test_and_clear_cpu_idle(home)) {
		count(VSTAT_home_idle, 1);
		cpu = home;
		is_idle = true;
	} else {
		cpu = scx_bpf_select_cpu_dfl(p, prev_cpu, wake_flags, &is_idle);
	}
	if (is_idle) {
		count(VSTAT_local_idle, 1);
		insert(p, scx_enum(scx_dsq_id_flags, SCX_DSQ_LOCAL), slice_of(&v, p), 0);
		return cpu;
	}
	/* enqueue() may let it wait at home, and will not be asked where that is. */
	return home >= 0 && sticky != VSTATE_STICKY_OFF ? home : cpu;
}

/* Whether a thread of a class above ours has the CPU, for how long nobody knows. */
static __always_inline bool is_taken(s32 cpu)
{
	const struct task_struct *curr = current_on(cpu);

	if (!curr || curr->prio >= MAX_PRIO)
		return false;
	return curr->prio < MAX_RT_PRIO || (target_only && curr->policy != SCHED_EXT);
}

/* p is on its home's run queue: that of another CPU is never touched, so no change of affinity and
 * no CPU going offline can make the choice invalid. */
static __always_inline bool wait_at_home(const struct task_struct *p, s32 home, u64 enq_flags,
					 u64 now)
{
	if (sticky == VSTATE_STICKY_OFF || home < 0 || home >= MAX_CPUS ||
	    home != scx_bpf_task_cpu(p))
		return false;
	if (enq_flags & scx_enum(scx_enq_flags, SCX_ENQ_REENQ) || is_taken(home))
		return false;
	if (sticky == VSTATE_STICKY_ADAPTIVE &&
	    scx_bpf_dsq_nr_queued(scx_enum(scx_dsq_id_flags, SCX_DSQ_LOCAL_ON) | home)) {
		count(VSTAT_adaptive_queue_fallback, 1);
		return false;
	}
	/* A CPU asks for the shared queue only when its own is empty; let it become so. */
	if (patience_ns && now - shared_seen_ns[home] > patience_ns) {
		count(VSTAT_patience_fallback, 1);
		return false;
	}
	return true;
}

static __always_inline void bound_credit(struct vstate_row *row)
{
	u64 least = vtime_now - max_slice_ns();

	if (before(row->vtime, least)) {
		row->vtime = least;
		count(VSTAT_credit_clamped, 1);
	}
}

/* In its own run time, for low weights not all of it: the watchdog counts in everyone's. */
static __always_inline void bound_lead(const struct task_struct *p, struct vstate_row *row)
{
	u64 own = lead_ns * 100 / (p->scx.weight ?: 1);
	u64 most = vtime_now + (own < MAX_LEAD * lead_ns ? own : MAX_LEAD * lead_ns);

	if (lead_ns && before(most, row->vtime)) {
		row->vtime = most;
		count(VSTAT_lead_clamped, 1);
	}
}

static __always_inline void wake_idle(const struct task_struct *p)
{
	s32 cpu = scx_bpf_pick_idle_cpu(p->cpus_ptr, 0);

	if (cpu >= 0)
		scx_bpf_kick_cpu(cpu, scx_enum(scx_kick_flags, SCX_KICK_IDLE));
}

void BPF_STRUCT_OPS(vstate_enqueue, struct task_struct *p, u64 enq_flags)
{
	u64 now = bpf_ktime_get_ns();
	struct vstate_row *row = row_of(p);
	u64 vtime = vtime_now;
	struct view v;

	count(VSTAT_enqueued, 1);
	look(&v, p, row, now);
	if (row) {
		if (credit == VSTATE_CREDIT_ENQUEUE)
			bound_credit(row);
		bound_lead(p, row);
		vtime = row->vtime;
	}
	if (row && enq_flags & scx_enum(scx_enq_flags, SCX_ENQ_REENQ))
		row->interrupted =
			false; /* a class above ours has its CPU, for how long nobody knows */
	if (wait_at_home(p, home_of(p, row, &v), enq_flags, now)) {
		if (row)
			row->queued_ns = 0;
		count(VSTAT_sticky_local, 1);
		insert(p, scx_enum(scx_dsq_id_flags, SCX_DSQ_LOCAL), slice_of(&v, p), enq_flags);
	} else {
		if (row && !row->queued_ns) /* a change of nice or affinity queues it again */
			row->queued_ns = now;
		insert_vtime(p, SHARED_DSQ, slice_of(&v, p), vtime, enq_flags);
		/* select_cpu() has not looked for an idle CPU, and none looks unless it is told. */
		if (!(enq_flags & scx_enum(scx_enq_flags, SCX_ENQ_WAKEUP)))
			wake_idle(p);
	}
}

struct waiting { /* the first thread of the shared queue that a CPU may take */
	bool there, interrupted;
	u64 vtime, queued_ns;
};

static __always_inline void first_waiting(struct waiting *w, s32 cpu)
{
	const struct vstate_row *row;
	struct task_struct *p;

	__builtin_memset(w, 0, sizeof(*w));
	bpf_for_each (scx_dsq, p, SHARED_DSQ, 0) {
		row = row_of(p);
		if (!bpf_cpumask_test_cpu(cpu, p->cpus_ptr) || (row && !row->queued_ns))
			continue; /* the latter: another CPU has just taken it */
		w->there = true;
		w->vtime = p->scx.dsq_vtime;
		if (row) {
			w->queued_ns = row->queued_ns;
			w->interrupted = row->interrupted;
		}
		break;
	}
}

/*
 * The kernel asks for the next thread before it queues the one that ran: with one waiting thread
 * the two would take turns, and only slices, not weights, would count.
 */
static __always_inline bool goes_on(struct task_struct *prev, struct vstate_row *row,
				    const struct view *v, const struct waiting *w)
{
	if (next != VSTATE_NEXT_EARLIEST || row->yielded)
		return false;
	charge(prev, row, v);
	bound_lead(prev, row);
	if (!w->there || !before(row->vtime, w->vtime))
		return false;
	if (before(vtime_now, row->vtime))
		vtime_now = row->vtime;
	return true;
}

/*
 * For how much longer a hot thread goes on although an earlier one waits; 0: it makes way.  Without
 * the longer wait of the interrupted, one interruption would be passed on from worker to worker.
 */
static __always_inline u64 defers_for(const struct vstate_row *row, const struct view *v,
				      const struct waiting *w, u64 now)
{
	u64 since_ns = w->queued_ns, wait_ns = defer_ns;

	if (!defer_ns || !v->hot || row->yielded || !w->there)
		return 0;
	if (w->interrupted)
		wait_ns += vector_slice_ns;
	else if (before(interrupted_ns, since_ns))
		since_ns = interrupted_ns;
	return before(now, since_ns + wait_ns) ? since_ns + wait_ns - now : 0;
}

static __always_inline bool take_head(void)
{
	bool taken = move_to_local(SHARED_DSQ);

	if (taken)
		count(VSTAT_dispatched, 1);
	return taken;
}

void BPF_STRUCT_OPS(vstate_dispatch, s32 cpu, struct task_struct *prev)
{
	u64 now = bpf_ktime_get_ns();
	struct vstate_row *row;
	struct waiting first;
	struct view v;
	u64 slice, left;

	if (cpu >= 0 && cpu < MAX_CPUS)
		shared_seen_ns[cpu] = now;
	if (!prev || !(prev->scx.flags & scx_enum(scx_ent_flags, SCX_TASK_QUEUED))) {
		take_head();
		return;
	}
	row = row_of(prev);
	look(&v, prev, row, now);
	slice = slice_of(&v, prev);
	first_waiting(&first, cpu);
	if (row && goes_on(prev, row, &v, &first)) {
		count(VSTAT_kept_earliest, 1);
	} else if (row && (left = defers_for(row, &v, &first, now)) > 0) {
		count(VSTAT_kept_deferring, 1);
		slice = left < slice ? left : slice;
	} else if (take_head()) {
		if (row && v.hot && !row->yielded) {
			row->interrupted = true;
			interrupted_ns = now;
		}
		return;
	} else {
		count(VSTAT_kept_running, 1);
	}
	/* prev goes on: with our slice, else the kernel gives it one of 20 ms. */
	if (row)
		row->yielded = false;
	set_slice(prev, slice);
}

/* What the kernel does by itself, and dispatch() learns of it. */
bool BPF_STRUCT_OPS(vstate_yield, struct task_struct *from, struct task_struct *to)
{
	struct vstate_row *row = row_of(from);

	count(VSTAT_yields, 1);
	if (row)
		row->yielded = true;
	set_slice(from, 0);
	return false;
}

/*
 * A class above ours took this CPU: real time, or in partial scope the fair one.  For how long
 * nobody knows, and nobody else can take what waits here: let others run it.
 */
void BPF_STRUCT_OPS(vstate_cpu_release, s32 cpu, struct scx_cpu_release_args *args)
{
	if (args->reason != scx_enum(scx_cpu_preempt_reason, SCX_CPU_PREEMPT_STOP))
		count(VSTAT_requeued, requeue_local());
}

/* ---- The life of a turn -------------------------------------------------------------------- */

void BPF_STRUCT_OPS(vstate_runnable, struct task_struct *p, u64 enq_flags)
{
	struct vstate_row *row = row_of(p);
	u64 slept;

	if (!row || !(enq_flags & scx_enum(scx_enq_flags, SCX_ENQ_WAKEUP)))
		return;
	count(VSTAT_wakeups, 1);
	if (credit == VSTATE_CREDIT_WAKEUP)
		bound_credit(row);
	slept = bpf_ktime_get_ns() - row->stopped_ns;
	row->boosted_ns -= slept < row->boosted_ns ? slept : row->boosted_ns;
}

static __always_inline void count_run(const struct view *v)
{
	count(VSTAT_runs, 1);
	if (v->hot)
		count(VSTAT_vector_runs, 1);
	if (v->phase == VSTATE_PHASE_PREFILL)
		count(VSTAT_prefill_runs, 1);
	else if (v->phase == VSTATE_PHASE_DECODE)
		count(VSTAT_decode_runs, 1);
	else if (v->phase == VSTATE_PHASE_IDLE)
		count(VSTAT_idle_runs, 1);
	if (v->phase != VSTATE_PHASE_MIXED)
		return;
	count(VSTAT_mixed_runs, 1);
	if (v->prefill_tokens > v->decode_tokens)
		count(VSTAT_mixed_prefill_major_runs, 1);
	else if (v->prefill_tokens < v->decode_tokens)
		count(VSTAT_mixed_decode_major_runs, 1);
	else
		count(VSTAT_mixed_even_runs, 1);
}

void BPF_STRUCT_OPS(vstate_running, struct task_struct *p)
{
	struct vstate_row *row = row_of(p);
	s32 cpu = scx_bpf_task_cpu(p);
	struct view v;

	look(&v, p, row, bpf_ktime_get_ns());
	count_run(&v);
	if (!row)
		return;
	/* Who did not wait tells nothing of those who do.  Two CPUs at once: the lower may stay. */
	if (row->queued_ns && before(vtime_now, row->vtime))
		vtime_now = row->vtime;
	row->queued_ns = 0;
	row->interrupted = row->yielded = false;
	if (row->last_cpu >= 0 && row->last_cpu != cpu)
		count(VSTAT_migrations, 1);
	row->last_cpu = cpu;
}

/* Threads that run alone are not stopped; they are charged and sampled here. */
void BPF_STRUCT_OPS(vstate_tick, struct task_struct *p)
{
	u64 now = bpf_ktime_get_ns();
	struct vstate_row *row = row_of(p);
	struct view v;

	if (!row)
		return;
	sample(p, row, now, true, true);
	look(&v, p, row, now);
	charge(p, row, &v);
}

void BPF_STRUCT_OPS(vstate_stopping, struct task_struct *p, bool runnable)
{
	u64 now = bpf_ktime_get_ns();
	struct vstate_row *row = row_of(p);
	struct view v;

	if (!row)
		return;
	sample(p, row, now, false, runnable);
	look(&v, p, row, now);
	charge(p, row, &v);
	if (!runnable)
		row->stopped_ns = now;
}

/* ---- The life of a thread in the class, and of the scheduler ------------------------------- */

void BPF_STRUCT_OPS(vstate_enable, struct task_struct *p)
{
	pid_t tid = p->pid;
	struct vstate_row row = {
		.start_ns = p->start_time,
		.vtime = vtime_now, /* what it had under an earlier scheduler means nothing */
		.charged_ns = p->se.sum_exec_runtime,
		.stopped_ns = bpf_ktime_get_ns(),
		.last_cpu = -1,
	};

	count(bpf_map_update_elem(&rows, &tid, &row, BPF_ANY) ? VSTAT_threads_lost
							      : VSTAT_threads_enabled,
	      1);
}

void BPF_STRUCT_OPS(vstate_disable, struct task_struct *p)
{
	pid_t tid = p->pid;

	if (!row_of(p))
		return;
	bpf_map_delete_elem(&rows, &tid);
	bpf_map_delete_elem(&workers, &tid);
}

s32 BPF_STRUCT_OPS_SLEEPABLE(vstate_init)
{
	return scx_bpf_create_dsq(SHARED_DSQ, -1);
}

void BPF_STRUCT_OPS(vstate_exit, struct scx_exit_info *ei)
{
	char wake = 1;

	UEI_RECORD(uei, ei);
	bpf_ringbuf_output(&ended, &wake, sizeof(wake), 0); /* the loader need not poll */
}

// clang-format off
SCX_OPS_DEFINE(vstate_ops,
	       .select_cpu	= (void *)vstate_select_cpu,
	       .enqueue		= (void *)vstate_enqueue,
	       .dispatch	= (void *)vstate_dispatch,
	       .yield		= (void *)vstate_yield,
	       .cpu_release	= (void *)vstate_cpu_release,
	       .runnable	= (void *)vstate_runnable,
	       .running		= (void *)vstate_running,
	       .tick		= (void *)vstate_tick,
	       .stopping	= (void *)vstate_stopping,
	       .enable		= (void *)vstate_enable,
	       .disable		= (void *)vstate_disable,
	       .init		= (void *)vstate_init,
	       .exit		= (void *)vstate_exit,
	       .name		= "vstate");
// clang-format on
