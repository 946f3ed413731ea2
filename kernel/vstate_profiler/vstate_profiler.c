// SPDX-License-Identifier: GPL-2.0
/*
 * vstate_profiler - count and time the kernel's saves and restores of vector registers.
 *
 * Promise: between `start` and `stop` every execution of every live site is counted, or shows in
 * the site's missed probes; all save sites are live or the module does not load; what is not live
 * is listed with the reason.  Nothing is subtracted: the cost of an empty pair of probes is
 * measured at load and printed beside the raw times.
 * Limit: the sites (kernel/sites.py) are two kprobes each, so a duration holds two traps.  Probes
 * that are disarmed and armed again between start and stop are not noticed here: compare with the
 * other instruments.  Times have the resolution of the `time` counter, see resolution_ns.
 *
 * Use: site=KIND:ROLE:STATE:ANCHOR:ANCHOR_OFFSET:FIRST:VSETVLI:END,... target_tgid=N, then write
 * start, stop or reset to debugfs vstate_profiler/control and read stats or csv.
 */
#include <linux/debugfs.h>
#include <linux/init.h>
#include <linux/kprobes.h>
#include <linux/math64.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/percpu.h>
#include <linux/pid.h>
#include <linux/sched.h>
#include <linux/sched/signal.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/timekeeping.h>
#include <linux/uaccess.h>
#include <asm/timex.h>
#include <asm/vector.h>

/* load.py looks for this prefix: the kernel's own remarks on a module begin with its name, too. */
#define pr_refuse(fmt, ...) pr_err(KBUILD_MODNAME ": error: " fmt, ##__VA_ARGS__)

#define MAX_SITES 32
#define BUCKETS 32
#define NAME_BYTES 64
#define WHY_BYTES 128
#define EMPTY_PAIRS 1000
#define NR_ACCESSES 4

#define C_EBREAK 0x9002
#define EBREAK 0x00100073

extern unsigned long riscv_timebase;

static char *site[MAX_SITES];
static int nr_site;
module_param_array(site, charp, &nr_site, 0444);
MODULE_PARM_DESC(site, "the sites, as kernel/vstate_profiler/load.py writes them");

static int target_tgid;
module_param(target_tgid, int, 0644);
MODULE_PARM_DESC(target_tgid,
		 "process to count apart from the whole system; read at start, 0: none");

enum scope {
	SYSTEM,
	TARGET,
	NR_SCOPES
};
static const char *const scope_names[NR_SCOPES] = {"system", "target"};

/* Times are ticks of the `time` counter, so that sums are exact. */
struct tally {
	u64 count; /* the first instruction was reached */
	u64 timed; /* and then the end */
	u64 total_ticks;
	u64 min_ticks;
	u64 max_ticks;
	u64 histogram[BUCKETS]; /* [0]: 0 ticks, [k]: 2^(k-1) up to 2^k - 1, the last: and more */
};

struct cpu_state {
	struct tally tally[NR_SCOPES];
	u64 begun_ticks;
	u64 orphan_ends; /* an end without a begin: a jump into the middle, or the window's edge */
	bool inside;
	bool inside_target;
};

struct vstate_site {
	bool is_save;
	char role[NAME_BYTES];
	char state[NAME_BYTES];
	char anchor[NAME_BYTES];
	unsigned long anchor_offset, first, vsetvli,
		end; /* bytes; the last three from the function */
	struct kprobe begin_probe, end_probe;
	bool begin_registered, end_registered;
	bool live;
	char why[WHY_BYTES]; /* why it is not live */
	unsigned long begin_missed, end_missed; /* in the windows so far */
	unsigned long begin_missed_before, end_missed_before;
	struct cpu_state __percpu *cpu;
};

static struct vstate_site *sites;
static struct dentry *directory;
static DEFINE_MUTEX(control_lock);
static bool active; /* written under control_lock, read by the probes */
static pid_t active_tgid;

static struct window {
	u64 windows;
	u64 total_ns;
	u64 start_ns, stop_ns; /* CLOCK_MONOTONIC, of the last window */
	unsigned int cpus_at_start, cpus_at_stop;
	struct pid *target;
	bool target_exited;
} window;

static struct tally overhead; /* of a pair of probes around nothing */
static bool overhead_inside;
static u64 overhead_begun;

static u64 ticks_to_ns(u64 ticks)
{
	return mul_u64_u64_div_u64(ticks, NSEC_PER_SEC, riscv_timebase);
}

static void add_time(struct tally *tally, u64 ticks)
{
	unsigned int bucket = min_t(unsigned int, fls64(ticks), BUCKETS - 1);

	if (!tally->timed || ticks < tally->min_ticks)
		tally->min_ticks = ticks;
	if (ticks > tally->max_ticks)
		tally->max_ticks = ticks;
	tally->timed++;
	tally->total_ticks += ticks;
	tally->histogram[bucket]++;
}

/* Probe handlers run with interrupts off, and so does the code of most sites; where it does not,
 * preemption is off: what begins on a CPU ends on it.
 */
static int at_begin(struct kprobe *probe, struct pt_regs *regs)
{
	struct vstate_site *vsite = container_of(probe, struct vstate_site, begin_probe);
	struct cpu_state *cpu;

	if (!READ_ONCE(active))
		return 0;
	cpu = this_cpu_ptr(vsite->cpu);
	cpu->tally[SYSTEM].count++;
	/* In __schedule, current is still the task that is switched out. */
	cpu->inside_target = active_tgid && current->tgid == active_tgid;
	if (cpu->inside_target)
		cpu->tally[TARGET].count++;
	cpu->inside = true;
	cpu->begun_ticks = get_cycles64(); /* last: the rest is not the save's time */
	return 0;
}

static int at_end(struct kprobe *probe, struct pt_regs *regs)
{
	u64 now = get_cycles64();
	struct vstate_site *vsite = container_of(probe, struct vstate_site, end_probe);
	struct cpu_state *cpu;

	if (!READ_ONCE(active))
		return 0;
	cpu = this_cpu_ptr(vsite->cpu);
	if (!cpu->inside) {
		cpu->orphan_ends++;
		return 0;
	}
	cpu->inside = false;
	add_time(&cpu->tally[SYSTEM], now - cpu->begun_ticks);
	if (cpu->inside_target)
		add_time(&cpu->tally[TARGET], now - cpu->begun_ticks);
	return 0;
}

/* -- what a probe costs -------------------------------------------------------------------- */

void vstate_profiler_empty(void);
extern char vstate_profiler_empty_end[];

asm(".pushsection .text\n"
    ".option push\n"
    ".option norvc\n"
    ".balign 4\n"
    ".type vstate_profiler_empty, @function\n"
    "vstate_profiler_empty:\n"
    "	nop\n"
    "vstate_profiler_empty_end:\n"
    "	nop\n"
    "	ret\n"
    ".size vstate_profiler_empty, . - vstate_profiler_empty\n"
    ".option pop\n"
    ".popsection\n");

static int at_empty_begin(struct kprobe *probe, struct pt_regs *regs)
{
	overhead.count++;
	overhead_inside = true;
	overhead_begun = get_cycles64();
	return 0;
}

static int at_empty_end(struct kprobe *probe, struct pt_regs *regs)
{
	u64 now = get_cycles64();

	if (overhead_inside)
		add_time(&overhead, now - overhead_begun);
	overhead_inside = false;
	return 0;
}

static int measure_overhead(void)
{
	struct kprobe begin = {
		.addr = (kprobe_opcode_t *)vstate_profiler_empty,
		.pre_handler = at_empty_begin,
	};
	struct kprobe end = {
		.addr = (kprobe_opcode_t *)vstate_profiler_empty_end,
		.pre_handler = at_empty_end,
	};
	unsigned long flags;
	int err;

	err = register_kprobe(&begin);
	if (err)
		goto out;
	err = register_kprobe(&end);
	if (err)
		goto out_begin;
	for (int i = 0; i < EMPTY_PAIRS; i++) {
		local_irq_save(flags);
		vstate_profiler_empty();
		local_irq_restore(flags);
	}
	unregister_kprobe(&end);
	if (overhead.timed != EMPTY_PAIRS) {
		pr_refuse("only %llu of %d empty probe pairs were seen: kprobes do not work here, "
			  "are "
			  "they disabled (debugfs kprobes/enabled)?\n",
			  overhead.timed, EMPTY_PAIRS);
		unregister_kprobe(&begin);
		return -ENXIO;
	}
out_begin:
	unregister_kprobe(&begin);
out:
	if (err)
		pr_refuse("cannot probe this module's own empty function: error %d\n", err);
	return err;
}

/* -- is the code at a site what the site says? ---------------------------------------------- */

/* Returns the instruction's length in bytes, 0 where there is none to read. */
static unsigned int read_instruction(unsigned long address, u32 *word)
{
	u16 low, high;

	if (get_kernel_nofault(low, (u16 *)address))
		return 0;
	*word = low;
	if ((low & 3) != 3)
		return 2;
	if (get_kernel_nofault(high, (u16 *)(address + 2)))
		return 0;
	*word |= (u32)high << 16;
	return 4;
}

static bool is_vsetvli(u32 word)
{
	return (word & 0xfffff07f) == 0x0c307057; /* vsetvli rd, zero, e8, m8, ta, ma */
}

static bool is_access(u32 word, bool save, unsigned int reg)
{
	return (word & ~(31U << 15)) == ((save ? 0x02000027U : 0x02000007U) | reg << 7);
}

/* Returns the address after the four accesses that follow the vsetvli at `address`; 0: none. */
static unsigned long match_sequence(unsigned long address, bool save)
{
	u32 word = 0;
	unsigned int length = read_instruction(address, &word);

	if (length != 4 || !is_vsetvli(word))
		return 0;
	address += length;
	for (unsigned int access = 0; access < NR_ACCESSES; access++) {
		if (access) /* the add that moves the pointer on */
			address += read_instruction(address, &word);
		length = read_instruction(address, &word);
		if (length != 4 || !is_access(word, save, access * 8))
			return 0;
		address += length;
	}
	return address;
}

static int verify_code(struct vstate_site *vsite, unsigned long function)
{
	unsigned long after = match_sequence(function + vsite->vsetvli, vsite->is_save);
	unsigned long address = function + vsite->first;
	bool passed_vsetvli = false;
	u32 word = 0;

	if (!after) {
		read_instruction(function + vsite->vsetvli, &word);
		scnprintf(vsite->why, WHY_BYTES,
			  "at +0x%lx stands %08x, not vsetvli e8,m8 with the four %s after it",
			  vsite->vsetvli, word, vsite->is_save ? "stores" : "loads");
		return -EILSEQ;
	}
	/* Instruction by instruction, so that no offset lies in the middle of one. */
	while (address < function + vsite->end) {
		unsigned int length = read_instruction(address, &word);

		if (!length)
			break;
		passed_vsetvli |= address == function + vsite->vsetvli;
		address += length;
	}
	if (address != function + vsite->end || after > address || !passed_vsetvli) {
		scnprintf(vsite->why, WHY_BYTES,
			  "the end +0x%lx does not follow the first +0x%lx and the sequence at "
			  "+0x%lx",
			  vsite->end, vsite->first, vsite->vsetvli);
		return -EILSEQ;
	}
	return 0;
}

/* Every sequence of the functions that hold sites must be a site: half of them is a wrong count. */
static int verify_all_listed(struct vstate_site *vsite, unsigned long function)
{
	char name[KSYM_SYMBOL_LEN];
	unsigned long size, offset;
	char *plus;

	/* name+0xOFFSET/0xSIZE */
	sprint_symbol(name, function + vsite->vsetvli);
	plus = strrchr(name, '+');
	if (!plus || sscanf(plus, "+0x%lx/0x%lx", &offset, &size) != 2) {
		scnprintf(vsite->why, WHY_BYTES, "the kernel does not know its function's size");
		return -ENOENT;
	}
	for (unsigned long at = 0; at < size; at += 2) {
		bool listed = false;

		if (!match_sequence(function + at, vsite->is_save))
			continue;
		for (int i = 0; i < nr_site; i++)
			listed |= sites[i].is_save == vsite->is_save && sites[i].vsetvli == at &&
				  !strcmp(sites[i].anchor, vsite->anchor) &&
				  sites[i].anchor_offset == vsite->anchor_offset;
		if (!listed) {
			scnprintf(vsite->why, WHY_BYTES,
				  "its function has another one at +0x%lx, which is not listed",
				  at);
			return -ESRCH;
		}
	}
	return 0;
}

/* -- sites ---------------------------------------------------------------------------------- */

static const char *why_no_probe(int err)
{
	switch (err) {
	case -ENOENT:
		return "this kernel has no such symbol";
	case -EILSEQ:
		return "there is no start of an instruction";
	case -EINVAL:
		return "the kernel allows no probe there (noinstr, or not to be stepped)";
	default:
		return "the probe was refused";
	}
}

static int register_disarmed(struct vstate_site *vsite, struct kprobe *probe, unsigned long offset,
			     kprobe_pre_handler_t handler)
{
	int err;

	probe->symbol_name = vsite->anchor;
	probe->offset = vsite->anchor_offset + offset;
	probe->pre_handler = handler;
	probe->flags = KPROBE_FLAG_DISABLED;
	err = register_kprobe(probe);
	if (err)
		scnprintf(vsite->why, WHY_BYTES, "+0x%lx: %s (%d)", offset, why_no_probe(err), err);
	return err;
}

static bool is_armed(const struct kprobe *probe)
{
	u32 word = 0;
	unsigned int length = read_instruction((unsigned long)probe->addr, &word);

	return (length == 2 && word == C_EBREAK) || (length == 4 && word == EBREAK);
}

static int prepare(struct vstate_site *vsite)
{
	unsigned long function;
	int err;

	/* The way out of every trap, a probe's own included, leads through here. */
	if (!strcmp(vsite->anchor, "riscv_v_context_nesting_end")) {
		scnprintf(vsite->why, WHY_BYTES,
			  "part of every trap's return, a probe would recurse");
		return -EDEADLK;
	}
	err = register_disarmed(vsite, &vsite->begin_probe, vsite->first, at_begin);
	if (err)
		return err;
	vsite->begin_registered = true;
	err = register_disarmed(vsite, &vsite->end_probe, vsite->end, at_end);
	if (err)
		return err;
	vsite->end_registered = true;

	function = (unsigned long)vsite->begin_probe.addr - vsite->first;
	err = verify_code(vsite, function);
	return err ?: verify_all_listed(vsite, function);
}

static int arm(struct vstate_site *vsite)
{
	/* The end first: no begin without one. */
	int err = enable_kprobe(&vsite->end_probe) ?: enable_kprobe(&vsite->begin_probe);

	if (!err && !(is_armed(&vsite->begin_probe) && is_armed(&vsite->end_probe)))
		err = -ENXIO;
	if (err)
		scnprintf(vsite->why, WHY_BYTES,
			  "cannot be armed (%d); are kprobes disabled (debugfs kprobes/enabled)?",
			  err);
	vsite->live = !err;
	return err;
}

static void drop(struct vstate_site *vsite)
{
	if (vsite->begin_registered)
		unregister_kprobe(&vsite->begin_probe);
	if (vsite->end_registered)
		unregister_kprobe(&vsite->end_probe);
	vsite->begin_registered = vsite->end_registered = vsite->live = false;
}

static int parse(struct vstate_site *vsite, const char *text)
{
	char kind[NAME_BYTES];
	struct {
		char *name;
		unsigned long *number;
	} fields[] = {
		{.name = kind},
		{.name = vsite->role},
		{.name = vsite->state},
		{.name = vsite->anchor},
		{.number = &vsite->anchor_offset},
		{.number = &vsite->first},
		{.number = &vsite->vsetvli},
		{.number = &vsite->end},
	};
	char copy[512], *rest = copy;

	if (strscpy(copy, text, sizeof(copy)) < 0)
		return -EINVAL;
	for (int i = 0; i < ARRAY_SIZE(fields); i++) {
		char *field = strsep(&rest, ":");

		if (!field || !*field)
			return -EINVAL;
		if (fields[i].name ? strscpy(fields[i].name, field, NAME_BYTES) < 0
				   : kstrtoul(field, 0, fields[i].number))
			return -EINVAL;
	}
	vsite->is_save = !strcmp(kind, "save");
	return !rest && (vsite->is_save || !strcmp(kind, "restore")) ? 0 : -EINVAL;
}

static int set_up_sites(void)
{
	int refused = 0, saves = 0, first_err = 0;

	for (int i = 0; i < nr_site; i++) {
		int err = parse(&sites[i], site[i]);

		if (err) {
			pr_refuse("site %d: got '%s', expected KIND:ROLE:STATE:ANCHOR:OFFSET:FIRST:"
				  "VSETVLI:END\n",
				  i, site[i]);
			return err;
		}
		sites[i].cpu = alloc_percpu(struct cpu_state);
		if (!sites[i].cpu)
			return -ENOMEM;
		saves += sites[i].is_save;
	}
	if (!saves) {
		pr_refuse("no save site among the %d given; use kernel/sites.py and load.py\n",
			  nr_site);
		return -EINVAL;
	}
	for (int i = 0; i < nr_site; i++) {
		struct vstate_site *vsite = &sites[i];
		int err = prepare(vsite) ?: arm(vsite);

		if (!err)
			continue;
		drop(vsite);
		/* What cannot be probed by its nature is told in stats; everything else is fatal.
		 */
		if (!vsite->is_save && (err == -EINVAL || err == -EDEADLK))
			continue;
		pr_refuse("%s site %s: %s\n", vsite->is_save ? "save" : "restore", vsite->anchor,
			  vsite->why);
		refused++;
		first_err = first_err ?: err;
	}
	if (refused)
		pr_refuse("not loaded: %d of %d sites cannot be used; are they of this kernel?\n",
			  refused, nr_site);
	return first_err;
}

static void tear_down_sites(void)
{
	for (int i = 0; i < nr_site; i++) {
		drop(&sites[i]);
		free_percpu(sites[i].cpu);
	}
	kfree(sites);
}

/* -- window --------------------------------------------------------------------------------- */

/* Sees which sites' probes are in the code now; returns how many should be and are not. */
static int check_armed(void)
{
	int lost = 0;

	for (int i = 0; i < nr_site; i++) {
		struct vstate_site *vsite = &sites[i];

		if (!vsite->begin_registered)
			continue;
		vsite->live = is_armed(&vsite->begin_probe) && is_armed(&vsite->end_probe);
		if (vsite->live)
			continue;
		scnprintf(vsite->why, WHY_BYTES,
			  "its probes were disarmed (debugfs kprobes/enabled)");
		pr_refuse("%s: %s\n", vsite->anchor, vsite->why);
		lost++;
	}
	return lost;
}

static int start(void)
{
	int tgid = READ_ONCE(target_tgid);

	if (active)
		return -EBUSY;
	if (check_armed())
		return -ENXIO;
	put_pid(window.target);
	window.target = tgid ? find_get_pid(tgid) : NULL;
	if (tgid && !window.target) {
		pr_refuse("target_tgid=%d: no such process\n", tgid);
		return -ESRCH;
	}
	window.target_exited = false;
	for (int i = 0; i < nr_site; i++) {
		unsigned int cpu;

		for_each_possible_cpu(cpu) per_cpu_ptr(sites[i].cpu, cpu)->inside = false;
		sites[i].begin_missed_before = sites[i].begin_probe.nmissed;
		sites[i].end_missed_before = sites[i].end_probe.nmissed;
	}
	window.cpus_at_start = num_online_cpus();
	active_tgid = tgid;
	window.start_ns = ktime_get_ns();
	smp_wmb(); /* the target before the probes may look */
	WRITE_ONCE(active, true);
	return 0;
}

/* Under RCU.  A process that nobody has waited for yet is still there, but it has ended. */
static bool has_ended(struct pid *pid)
{
	struct task_struct *leader = pid_task(pid, PIDTYPE_TGID);

	return !leader || leader->exit_state ||
	       READ_ONCE(leader->signal->flags) & SIGNAL_GROUP_EXIT;
}

static int stop(void)
{
	if (!active)
		return -EALREADY;
	WRITE_ONCE(active, false);
	synchronize_rcu(); /* handlers run with preemption off: after this none is under way */
	window.stop_ns = ktime_get_ns();
	window.total_ns += window.stop_ns - window.start_ns;
	window.windows++;
	window.cpus_at_stop = num_online_cpus();
	rcu_read_lock();
	window.target_exited = window.target && has_ended(window.target);
	rcu_read_unlock();
	for (int i = 0; i < nr_site; i++) {
		sites[i].begin_missed +=
			sites[i].begin_probe.nmissed - sites[i].begin_missed_before;
		sites[i].end_missed += sites[i].end_probe.nmissed - sites[i].end_missed_before;
	}
	check_armed();
	return 0;
}

static int reset(void)
{
	unsigned int cpu;

	if (active)
		return -EBUSY;
	put_pid(window.target);
	memset(&window, 0, sizeof(window));
	for (int i = 0; i < nr_site; i++) {
		for_each_possible_cpu(cpu)
			memset(per_cpu_ptr(sites[i].cpu, cpu), 0, sizeof(struct cpu_state));
		sites[i].begin_missed = sites[i].end_missed = 0;
	}
	return 0;
}

static ssize_t control_write(struct file *file, const char __user *from, size_t size, loff_t *pos)
{
	char word[16] = "";
	int err;

	if (size >= sizeof(word) || copy_from_user(word, from, size))
		return -EINVAL;
	mutex_lock(&control_lock);
	if (sysfs_streq(word, "start"))
		err = start();
	else if (sysfs_streq(word, "stop"))
		err = stop();
	else if (sysfs_streq(word, "reset"))
		err = reset();
	else
		err = -EINVAL;
	mutex_unlock(&control_lock);
	return err ?: size;
}

static const struct file_operations control_operations = {
	.owner = THIS_MODULE,
	.open = simple_open,
	.write = control_write,
};

/* -- reports -------------------------------------------------------------------------------- */

static void add_tally(struct tally *sum, const struct tally *tally)
{
	if (tally->timed && (!sum->timed || tally->min_ticks < sum->min_ticks))
		sum->min_ticks = tally->min_ticks;
	sum->max_ticks = max(sum->max_ticks, tally->max_ticks);
	sum->count += tally->count;
	sum->timed += tally->timed;
	sum->total_ticks += tally->total_ticks;
	for (int i = 0; i < BUCKETS; i++)
		sum->histogram[i] += tally->histogram[i];
}

static void show_sum(struct seq_file *seq, bool save, enum scope scope)
{
	const char *kind = save ? "save" : "restore";
	const char *name = scope_names[scope];
	u64 capacity_ns = window.total_ns * window.cpus_at_start;
	struct tally sum = {};
	unsigned int cpu;

	for (int i = 0; i < nr_site; i++)
		if (sites[i].is_save == save)
			for_each_possible_cpu(cpu)
				add_tally(&sum, &per_cpu_ptr(sites[i].cpu, cpu)->tally[scope]);
	seq_printf(seq, "%s_%s_count %llu\n", kind, name, sum.count);
	seq_printf(seq, "%s_%s_timed %llu\n", kind, name, sum.timed);
	seq_printf(seq, "%s_%s_total_ns %llu\n", kind, name, ticks_to_ns(sum.total_ticks));
	if (save && capacity_ns)
		seq_printf(seq, "vstate_cpu_capacity_ppm_%s %llu\n", name,
			   mul_u64_u64_div_u64(ticks_to_ns(sum.total_ticks), 1000000, capacity_ns));
}

static int stats_show(struct seq_file *seq, void *unused)
{
	int dead = 0;

	mutex_lock(&control_lock);
	for (int i = 0; i < nr_site; i++)
		dead += !sites[i].live;
	seq_printf(seq, "active %d\n", active);
	seq_printf(seq, "sites_not_live %d\n", dead);
	seq_printf(seq, "target_tgid %d\n", active_tgid);
	seq_printf(seq, "target_exited %d\n", window.target_exited);
	seq_printf(seq, "windows %llu\n", window.windows);
	seq_printf(seq, "window_ns %llu\n", window.total_ns);
	seq_printf(seq, "window_start_ns %llu\n", window.start_ns);
	seq_printf(seq, "window_stop_ns %llu\n", window.stop_ns);
	seq_printf(seq, "online_cpus_at_start %u\n", window.cpus_at_start);
	seq_printf(seq, "online_cpus_at_stop %u\n", window.cpus_at_stop);
	seq_printf(seq, "vlen_bits %lu\n", riscv_v_vsize / 4);
	seq_printf(seq, "register_file_bytes %lu\n", riscv_v_vsize);
	seq_printf(seq, "timebase_hz %lu\n", riscv_timebase);
	seq_printf(seq, "resolution_ns %llu\n", ticks_to_ns(1));
	seq_printf(seq, "empty_pair_count %llu\n", overhead.timed);
	seq_printf(seq, "empty_pair_total_ns %llu\n", ticks_to_ns(overhead.total_ticks));
	seq_printf(seq, "empty_pair_min_ns %llu\n", ticks_to_ns(overhead.min_ticks));
	seq_printf(seq, "empty_pair_max_ns %llu\n", ticks_to_ns(overhead.max_ticks));
	for (int scope = 0; scope < NR_SCOPES; scope++) {
		show_sum(seq, true, scope);
		show_sum(seq, false, scope);
	}
	for (int i = 0; i < nr_site; i++) {
		u64 orphans = 0;
		unsigned int cpu;

		for_each_possible_cpu(cpu) orphans += per_cpu_ptr(sites[i].cpu, cpu)->orphan_ends;
		seq_printf(seq,
			   "site %d %s %s %s %s+0x%lx begin_missed %lu end_missed %lu orphan_ends "
			   "%llu %s\n",
			   i, sites[i].is_save ? "save" : "restore", sites[i].role, sites[i].state,
			   sites[i].anchor, sites[i].anchor_offset + sites[i].first,
			   sites[i].begin_missed, sites[i].end_missed, orphans,
			   sites[i].live ? "live" : sites[i].why);
	}
	mutex_unlock(&control_lock);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(stats);

static int csv_show(struct seq_file *seq, void *unused)
{
	unsigned int cpu;

	seq_puts(seq, "site,scope,cpu,count,timed,total_ns,min_ns,max_ns");
	for (int i = 0; i < BUCKETS; i++)
		seq_printf(seq, ",from_%llu_ns", i ? ticks_to_ns(1ULL << (i - 1)) : 0);
	seq_puts(seq, "\n");
	mutex_lock(&control_lock);
	for (int i = 0; i < nr_site; i++)
		for (int scope = 0; scope < NR_SCOPES; scope++)
			for_each_possible_cpu(cpu)
			{
				struct tally *tally = &per_cpu_ptr(sites[i].cpu, cpu)->tally[scope];

				seq_printf(seq, "%d,%s,%u,%llu,%llu,%llu,%llu,%llu", i,
					   scope_names[scope], cpu, tally->count, tally->timed,
					   ticks_to_ns(tally->total_ticks),
					   ticks_to_ns(tally->min_ticks),
					   ticks_to_ns(tally->max_ticks));
				for (int bucket = 0; bucket < BUCKETS; bucket++)
					seq_printf(seq, ",%llu", tally->histogram[bucket]);
				seq_puts(seq, "\n");
			}
	mutex_unlock(&control_lock);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(csv);

static int __init vstate_profiler_init(void)
{
	int err;

	if (!has_vector()) {
		pr_refuse("this machine has no vector unit (RVV 1.0)\n");
		return -ENODEV;
	}
	sites = kcalloc(MAX_SITES, sizeof(*sites), GFP_KERNEL);
	if (!sites)
		return -ENOMEM;
	err = measure_overhead() ?: set_up_sites();
	if (err) {
		tear_down_sites();
		return err;
	}
	directory = debugfs_create_dir("vstate_profiler", NULL);
	debugfs_create_file("control", 0200, directory, NULL, &control_operations);
	debugfs_create_file("stats", 0400, directory, NULL, &stats_fops);
	debugfs_create_file("csv", 0400, directory, NULL, &csv_fops);
	return 0;
}

static void __exit vstate_profiler_exit(void)
{
	debugfs_remove(directory);
	tear_down_sites();
	put_pid(window.target);
}

module_init(vstate_profiler_init);
module_exit(vstate_profiler_exit);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("counts and times saves and restores of vector registers");
MODULE_INFO(kernel_build_id, KERNEL_BUILD_ID);
