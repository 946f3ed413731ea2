// SPDX-License-Identifier: GPL-2.0
/*
 * Move the threads of a running process under the scheduler, and back.
 *
 * A scheduling policy belongs to a thread and is inherited when it makes another.  So once a look
 * at /proc/TGID/task finds nobody left to move, all future threads are under the scheduler, too,
 * but for those of a parent with "reset on fork"; the loader looks again at each interval.
 *
 * Promise: nice values and flags stay as they are; real-time and deadline threads stay what they
 * are and are listed as not managed.
 * Limit: a policy is what a thread asks for; whether sched_ext is in charge, kernel_state_read()
 * tells.
 */
#include <dirent.h>
#include <errno.h>
#include <linux/sched.h>
#include <linux/sched/types.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "loader.h"

#define MOST_PASSES 1000

static const char *const policies[] = {
	[SCHED_NORMAL] = "other", [SCHED_FIFO] = "fifo", [SCHED_RR] = "rr",
	[SCHED_BATCH] = "batch",  [SCHED_IDLE] = "idle", [SCHED_DEADLINE] = "deadline",
	[SCHED_EXT] = "ext",
};

const char *sched_policy_name(int policy)
{
	return policy >= 0 && policy <= SCHED_EXT && policies[policy] ? policies[policy]
								      : "unknown";
}

static bool read_name(pid_t tgid, pid_t tid, char name[COMM_SIZE])
{
	char path[64];
	FILE *file;
	bool got;

	snprintf(path, sizeof(path), "/proc/%d/task/%d/comm", tgid, tid);
	file = fopen(path, "r");
	got = file && fgets(name, COMM_SIZE, file);
	if (file)
		fclose(file);
	if (got)
		name[strcspn(name, "\n")] = '\0';
	return got;
}

void target_require(pid_t tgid, char name[COMM_SIZE])
{
	char path[64], line[256], state = 0;
	int of = 0, kernel_thread = 0;
	FILE *file;

	snprintf(path, sizeof(path), "/proc/%d/status", tgid);
	file = fopen(path, "r");
	if (!file)
		fail(EXIT_UNFIT, "--pid %d: there is no such process", tgid);
	while (fgets(line, sizeof(line), file)) {
		sscanf(line, "State: %c", &state);
		sscanf(line, "Tgid: %d", &of);
		sscanf(line, "Kthread: %d", &kernel_thread);
	}
	fclose(file);
	if (of != tgid)
		fail(EXIT_USAGE, "--pid %d: a thread of process %d; give --pid %d", tgid, of, of);
	if (state == 'Z' || state == 'X')
		fail(EXIT_UNFIT, "--pid %d: this process has ended", tgid);
	if (kernel_thread)
		fail(EXIT_UNFIT, "--pid %d: a kernel thread", tgid);
	if (tgid == getpid())
		fail(EXIT_USAGE, "--pid %d: that is scx_vstate itself", tgid);
	if (!read_name(tgid, tgid, name))
		fail(EXIT_UNFIT, "--pid %d: this process has ended", tgid);
}

static bool is_fair(int policy)
{
	return policy == SCHED_NORMAL || policy == SCHED_BATCH || policy == SCHED_IDLE;
}

/* False: the thread is gone. */
static bool set_policy(pid_t tid, int to, bool (*from)(int policy))
{
	struct sched_attr attr = {.size = sizeof(attr)};

	if (!syscall(SYS_sched_getattr, tid, &attr, sizeof(attr), 0)) {
		if (!from(attr.sched_policy))
			return true;
		attr.sched_policy = to;
		attr.sched_flags &= SCHED_FLAG_RESET_ON_FORK;
		if (!syscall(SYS_sched_setattr, tid, &attr, 0))
			return true;
	}
	if (errno == ESRCH)
		return false;
	fail(EXIT_UNFIT, "thread %d: cannot set its scheduling policy: %s", tid, strerror(errno));
}

static DIR *open_tasks(pid_t tgid)
{
	char path[64];

	snprintf(path, sizeof(path), "/proc/%d/task", tgid);
	return opendir(path);
}

static int by_tid(const void *a, const void *b)
{
	const struct thread *x = a, *y = b;

	return (x->tid > y->tid) - (x->tid < y->tid);
}

void roll_call(pid_t tgid, int scope, struct roll *to)
{
	DIR *dir = open_tasks(tgid);
	struct dirent *entry;

	to->nr = to->nr_managed = 0;
	while (dir && (entry = readdir(dir))) {
		struct sched_attr attr = {.size = sizeof(attr)};
		struct thread *t = &to->thread[to->nr];

		memset(t, 0, sizeof(*t));
		t->tid = atoi(entry->d_name);
		if (t->tid <= 0 || syscall(SYS_sched_getattr, t->tid, &attr, sizeof(attr), 0) ||
		    !read_name(tgid, t->tid, t->name))
			continue;
		t->policy = attr.sched_policy;
		t->managed = t->policy == SCHED_EXT || (scope == SCOPE_ALL && is_fair(t->policy));
		to->nr_managed += t->managed;
		if (++to->nr == MAX_LISTED_THREADS)
			fail(EXIT_UNFIT, "--pid %d: more than %d threads", tgid,
			     MAX_LISTED_THREADS - 1);
	}
	if (dir)
		closedir(dir);
	qsort(to->thread, to->nr, sizeof(to->thread[0]), by_tid);
}

static bool anyone_fair(const struct roll *roll)
{
	for (unsigned int i = 0; i < roll->nr; i++)
		if (is_fair(roll->thread[i].policy))
			return true;
	return false;
}

void takeover(pid_t tgid, int scope, struct roll *to)
{
	roll_call(tgid, scope, to);
	if (scope == SCOPE_ALL)
		return;
	for (int pass = 0; anyone_fair(to); pass++) {
		if (pass == MOST_PASSES)
			fail(EXIT_UNFIT,
			     "--pid %d: still makes threads of another policy after %d "
			     "looks at it",
			     tgid, pass);
		for (unsigned int i = 0; i < to->nr; i++)
			set_policy(to->thread[i].tid, SCHED_EXT, is_fair);
		roll_call(tgid, scope, to);
	}
}

static bool is_ext(int policy)
{
	return policy == SCHED_EXT;
}

void give_back(pid_t tgid)
{
	DIR *dir = open_tasks(tgid);
	struct dirent *entry;

	while (dir && (entry = readdir(dir))) {
		pid_t tid = atoi(entry->d_name);

		if (tid > 0)
			set_policy(tid, SCHED_NORMAL, is_ext);
	}
	if (dir)
		closedir(dir);
}
