// SPDX-License-Identifier: GPL-2.0
/*
 * probe_blocker - make the kernel miss every kprobe of one CPU for a while; for the tests.
 *
 * A probe that is hit while the handler of another one runs on the same CPU is missed: the kernel
 * steps over it, calls no handler, and counts that in its nmissed (reenter_kprobe() in
 * arch/riscv/kernel/probes/kprobes.c).  No handler of the profiler's can be hit by a probe, so this
 * module sets the kernel's own mark for a handler that runs, and sleeps.
 *
 * Promise: what is missed is missed by the kernel's own code; afterwards the mark is as it was, and
 * loading fails with EAGAIN, so that nothing stays loaded.
 * Limit: the mark is not exported, so its address is a parameter, from /proc/kallsyms.  Some probe
 * must have been hit on this CPU before, or the kernel warns of a state that it does not know.
 */
#include <linux/delay.h>
#include <linux/kprobes.h>
#include <linux/module.h>
#include <linux/percpu.h>

static unsigned long current_kprobe_at;
module_param(current_kprobe_at, ulong, 0);
MODULE_PARM_DESC(current_kprobe_at, "address of the per-CPU variable current_kprobe");

static unsigned int ms;
module_param(ms, uint, 0);
MODULE_PARM_DESC(ms, "for how long, in milliseconds");

static struct kprobe nobody;

static int __init probe_blocker_init(void)
{
	struct kprobe *__percpu *marks = (struct kprobe * __percpu *)current_kprobe_at;
	struct kprobe **mark;

	if (!current_kprobe_at || !ms)
		return -EINVAL;
	migrate_disable();
	mark = per_cpu_ptr(marks, smp_processor_id());
	WRITE_ONCE(*mark, &nobody);
	msleep(ms);
	WRITE_ONCE(*mark, NULL);
	migrate_enable();
	return -EAGAIN;
}
module_init(probe_blocker_init);

MODULE_DESCRIPTION("makes the kernel miss probes, for the tests of vstate_profiler");
MODULE_LICENSE("GPL");
