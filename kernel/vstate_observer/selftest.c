// SPDX-License-Identifier: GPL-2.0
/*
 * Find out, before anything is observed, what this kernel does with vector registers.
 *
 * Released kernels (6.12 to 7.3) overwrite them at system call entry and mark them Dirty, so that a
 * thread that blocks is saved for nothing; a coming kernel leaves Initial and saves nothing.  The
 * same number of saves then means something else, so the data are labelled with what was seen.
 *
 * Promise: decided by the observer's own programs on a real thread of a child process: it blocks
 * at least NR_ROUNDS times in a system call after having used V, and is preempted as often in the
 * middle of vector code.  A child that does not get that far ends the observer.
 * Limit: takes some tens of milliseconds of one hart; both run on the hart they start on.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "loader.h"

#define NR_ROUNDS 4
#define PATIENCE_MS 5000

struct shared {
	_Atomic bool spin; /* the next wake-up starts vector code that does not end by itself */
	_Atomic bool computing;
};

void touch_vector_registers(void)
{
	__asm__ volatile(".option push\n\t"
			 ".option arch, +v\n\t"
			 "vsetvli t0, zero, e8, m8, ta, ma\n\t"
			 "vmv.v.i v0, 1\n\t"
			 "vadd.vv v8, v0, v0\n\t"
			 ".option pop" ::
				 : "t0", "memory");
}

static void sleep_ns(long ns)
{
	struct timespec ts = {.tv_nsec = ns};

	nanosleep(&ts, NULL);
}

static void child(int wake, struct shared *shared)
{
	char byte;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (;;) {
		touch_vector_registers();
		if (read(wake, &byte, 1) != 1)
			_exit(0);
		while (atomic_load(&shared->spin)) {
			touch_vector_registers();
			atomic_store(&shared->computing, true);
		}
	}
}

static void wake(int fd)
{
	if (write(fd, "", 1) != 1)
		fail(EXIT_UNFIT, "self-test: the child process ended: %s", strerror(errno));
}

static uint64_t sum(const struct counters *c, enum why why)
{
	uint64_t all = 0;

	for (int out = 0; out < NR_OUTCOMES; out++)
		all += c->outs[why][out];
	return all;
}

/*
 * Until that many switches of the child were counted.  Not the state in /proc: a thread that was
 * preempted on its way to sleep looks asleep there and is not.
 */
static void wait_for(struct instance *in, enum why why, uint64_t least, struct counters *seen)
{
	for (int i = 0; i < PATIENCE_MS; i++) {
		instance_totals(in, SLOT_ALL, seen);
		if (sum(seen, why) >= least)
			return;
		sleep_ns(1000000);
	}
	fail(EXIT_UNFIT, "self-test: the programs saw %llu switches of a thread, expected %llu",
	     (unsigned long long)sum(seen, why), (unsigned long long)least);
}

static const char *label(const struct counters *blocked)
{
	uint64_t all = sum(blocked, WHY_BLOCKING);

	if (blocked->outs[WHY_BLOCKING][OUT_DISCARDED] == all)
		return "dirty";
	return blocked->outs[WHY_BLOCKING][OUT_INITIAL] == all ? "initial" : "mixed";
}

void selftest(struct instance *in, struct semantics *to)
{
	struct shared *shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE,
				     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	cpu_set_t allowed, here;
	int pipes[2];
	pid_t pid;

	if (shared == MAP_FAILED || pipe(pipes) || sched_getaffinity(0, sizeof(allowed), &allowed))
		fail(EXIT_UNFIT, "self-test: %s", strerror(errno));
	CPU_ZERO(&here);
	CPU_SET(sched_getcpu(), &here);
	if (sched_setaffinity(0, sizeof(here), &here))
		fail(EXIT_UNFIT, "self-test: cannot stay on one hart: %s", strerror(errno));
	pid = fork();
	if (pid < 0)
		fail(EXIT_UNFIT, "self-test: cannot start a process: %s", strerror(errno));
	if (pid == 0) {
		close(pipes[1]);
		child(pipes[0], shared);
	}
	close(pipes[0]);

	instance_aim(in, pid, NULL, 0);
	instance_count(in, true);
	for (int i = 1; i <= NR_ROUNDS; i++) {
		wake(pipes[1]);
		wait_for(in, WHY_BLOCKING, i, &to->blocked);
	}
	instance_count(in, false);
	instance_totals(in, SLOT_ALL, &to->blocked);
	to->syscall_state = label(&to->blocked);

	atomic_store(&shared->spin, true);
	wake(pipes[1]);
	for (int i = 0; i < PATIENCE_MS && !atomic_load(&shared->computing); i++)
		sleep_ns(1000000);
	instance_aim(in, pid, NULL, 0);
	instance_count(in, true);
	/* Both share a hart: that this process runs at all is a preemption of the other. */
	wait_for(in, WHY_RUNNABLE, NR_ROUNDS, &to->preempted);
	instance_count(in, false);
	instance_totals(in, SLOT_ALL, &to->preempted);
	if (!to->preempted.outs[WHY_RUNNABLE][OUT_COMPUTE])
		fail(EXIT_UNFIT,
		     "self-test: a thread was preempted in vector code, the programs saw no save");

	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
	close(pipes[1]);
	munmap(shared, sizeof(*shared));
	sched_setaffinity(0, sizeof(allowed), &allowed);
}
