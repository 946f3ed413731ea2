// SPDX-License-Identifier: GPL-2.0
/*
 * scx_vstate - put a running process under the scheduler of scx_vstate.bpf.c.
 *
 * Promise: "ready" is printed when the kernel says that this scheduler is enabled and every thread
 * of the target has moved.  From then on it wakes up for the interval's line, a signal, the
 * target's end and the kernel's word that it is over, nothing else.  A hart that comes or goes
 * makes the kernel end the scheduler; it is started again, and the document says so.  However it
 * ends, the machine is back on its default scheduler. Limit: one sched_ext scheduler at a time is
 * the kernel's rule.  Killed by SIGKILL it leaves the pinned maps, which the next one takes over,
 * and the policy "ext" on the target's threads, which without a scheduler means the default.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>
#include "loader.h"

const char tool_name[] = "scx_vstate";

enum event {
	EVENT_SIGNAL,
	EVENT_TARGET_EXIT,
	EVENT_ENDED,
	EVENT_INTERVAL,
	NR_EVENTS
};

static uint64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return ts.tv_sec * 1000000000ULL + ts.tv_nsec;
}

static int signals_fd(void)
{
	sigset_t set;
	int fd;

	signal(SIGPIPE, SIG_IGN);
	sigemptyset(&set);
	sigaddset(&set, SIGINT);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGUSR1); /* means something only to --hold */
	sigprocmask(SIG_BLOCK, &set, NULL);
	fd = signalfd(-1, &set, SFD_CLOEXEC);
	if (fd < 0)
		fail(EXIT_UNFIT, "signalfd: %s", strerror(errno));
	return fd;
}

/* Whether a signal came that ends the program. */
static bool told_to_end(int fd)
{
	struct pollfd p = {.fd = fd, .events = POLLIN};
	struct signalfd_siginfo info;

	while (poll(&p, 1, 0) > 0 && read(fd, &info, sizeof(info)) == sizeof(info))
		if (info.ssi_signo != SIGUSR1)
			return true;
	return false;
}

static int interval_fd(long ms)
{
	struct itimerspec when = {
		.it_value = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000},
		.it_interval = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000},
	};
	int fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC);

	if (fd < 0 || timerfd_settime(fd, 0, &when, NULL))
		fail(EXIT_UNFIT, "timerfd: %s", strerror(errno));
	return fd;
}

static void flush(void)
{
	if (fflush(stdout))
		fail(EXIT_UNFIT, "cannot write to standard output: %s", strerror(errno));
}

static void say_settings(const struct options *o)
{
	printf("policy=%s mode=%s scope=%s", policy_names[o->set.policy], mode_names[o->set.mode],
	       scope_names[o->set.scope]);
	for (int k = 0; k < NR_KNOBS; k++) {
		const char *choice = knob_choice(k, o->set.knob[k]);

		if (choice)
			printf(" %s=%s", knob_name(k), choice);
		else
			printf(" %s=%ld", knob_name(k), o->set.knob[k]);
	}
	putchar('\n');
	flush();
}

static void say_threads(const struct roll *roll)
{
	for (unsigned int i = 0; i < roll->nr; i++) {
		const struct thread *t = &roll->thread[i];

		printf("thread %d (%s): policy %s%s\n", t->tid, t->name,
		       sched_policy_name(t->policy), t->managed ? "" : ", not managed");
	}
}

/* What changed since the last line. */
static void say_interval(const struct vstate_stats *now, struct vstate_stats *before)
{
	printf("stats");
	for (int i = 0; i < VSTAT_NR; i++)
		if (now->counter[i] != before->counter[i])
			printf(" %s=%llu", counter_names[i], now->counter[i] - before->counter[i]);
	putchar('\n');
	fflush(stdout); /* a reader who has gone is no reason to stop scheduling */
	*before = *now;
}

static __attribute__((noreturn)) void ended_before_ready(struct engine *e,
							 const struct exit_info *ended)
{
	engine_destroy(e);
	fail(EXIT_UNFIT, "the kernel ended the scheduler before it was ready: %s%s%s",
	     ended->reason[0] ? ended->reason : "no reason given", ended->message[0] ? ": " : "",
	     ended->message);
}

static __attribute__((noreturn)) void interrupted(struct engine *e)
{
	engine_destroy(e);
	fail(EXIT_INTERRUPTED, "interrupted before it was ready; nothing written");
}

/* Loaded, until SIGUSR1 comes. */
static void hold(struct engine *e, const int fds[NR_EVENTS], pid_t pid)
{
	struct signalfd_siginfo info;
	struct pollfd p[] = {{.fd = fds[EVENT_SIGNAL], .events = POLLIN},
			     {.fd = fds[EVENT_TARGET_EXIT], .events = POLLIN}};

	engine_load(e);
	puts("loaded");
	flush();
	do {
		if (poll(p, 2, -1) < 0 && errno != EINTR)
			fail(EXIT_UNFIT, "poll: %s", strerror(errno));
		if (p[1].revents) {
			engine_destroy(e);
			fail(EXIT_UNFIT, "--pid %d: this process has ended", pid);
		}
	} while (!p[0].revents);
	if (read(fds[EVENT_SIGNAL], &info, sizeof(info)) != sizeof(info) ||
	    info.ssi_signo != SIGUSR1)
		interrupted(e);
}

/* In charge, restarting for as long as harts come and go; false: ended for good. */
static bool start(struct engine *e, struct exit_info *ended, unsigned int *restarts)
{
	while (!engine_start(e)) {
		if (!engine_ended(e, ended) || !ended->restart)
			return false;
		engine_stop(e);
		++*restarts;
	}
	memset(ended, 0, sizeof(*ended));
	return true;
}

static enum event next_event(const int fds[NR_EVENTS])
{
	struct pollfd p[NR_EVENTS];

	for (int i = 0; i < NR_EVENTS; i++)
		p[i] = (struct pollfd){.fd = fds[i], .events = POLLIN};
	while (poll(p, NR_EVENTS, -1) < 0)
		if (errno != EINTR)
			fail(EXIT_UNFIT, "poll: %s", strerror(errno));
	/* The kernel's word first: a run that was ejected is not an orderly one. */
	if (p[EVENT_ENDED].revents)
		return EVENT_ENDED;
	if (p[EVENT_TARGET_EXIT].revents)
		return EVENT_TARGET_EXIT;
	return p[EVENT_SIGNAL].revents ? EVENT_SIGNAL : EVENT_INTERVAL;
}

/* Returns what ended it. */
static const char *supervise(struct engine *e, struct report *r, int fds[NR_EVENTS])
{
	const struct options *o = r->options;
	struct vstate_stats before = {};
	uint64_t expired;

	for (;;) {
		switch (next_event(fds)) {
		case EVENT_SIGNAL:
			if (told_to_end(fds[EVENT_SIGNAL]))
				return "signal";
			break;
		case EVENT_TARGET_EXIT:
			return "target-exit";
		case EVENT_ENDED:
			if (engine_ended(e, &r->exit)) {
				if (!r->exit.restart)
					return "ejected";
				printf("restart: %s: %s\n", r->exit.reason, r->exit.message);
				fflush(stdout);
				engine_stop(e);
				r->restarts++;
				if (!start(e, &r->exit, &r->restarts))
					return "ejected";
			}
			fds[EVENT_ENDED] = engine_ended_fd(e);
			break;
		default:
			if (read(fds[EVENT_INTERVAL], &expired, sizeof(expired)) < 0)
				break;
			takeover(o->pid, o->set.scope, &r->roll);
			engine_counters(e, &r->counters);
			say_interval(&r->counters, &before);
		}
	}
}

int main(int argc, char **argv)
{
	static struct report r; /* large: the roll */
	static struct options o;
	int fds[NR_EVENTS];
	struct engine *e;
	bool valid;

	options_parse(argc, argv, &o);
	r.options = &o;
	fds[EVENT_SIGNAL] = signals_fd();
	engine_require_fit_machine();
	target_require(o.pid, r.target_name);
	fds[EVENT_TARGET_EXIT] = syscall(SYS_pidfd_open, o.pid, 0);
	if (fds[EVENT_TARGET_EXIT] < 0)
		fail(EXIT_UNFIT, "--pid %d: %s", o.pid, strerror(errno));
	document_check_writable(o.out);
	say_settings(&o);

	e = engine_create(&o);
	if (o.hold)
		hold(e, fds, o.pid);
	if (!start(e, &r.exit, &r.restarts))
		ended_before_ready(e, &r.exit);
	takeover(o.pid, o.set.scope, &r.roll);
	say_threads(&r.roll);
	if (told_to_end(fds[EVENT_SIGNAL])) {
		give_back(o.pid);
		interrupted(e);
	}
	kernel_state_read(&r.at_start);
	if (!kernel_state_is_ours(&r.at_start)) {
		engine_ended(e, &r.exit);
		ended_before_ready(e, &r.exit);
	}
	r.restarts = 0; /* those before the window do not matter */
	fds[EVENT_ENDED] = engine_ended_fd(e);
	fds[EVENT_INTERVAL] = interval_fd(o.set.knob[KNOB_INTERVAL_MS]);
	r.start_ns = now_ns();
	puts("ready");
	flush();

	r.stopped_by = supervise(e, &r, fds);
	/* While it is still in charge, so that what ending does is not in the counters. */
	engine_counters(e, &r.counters);
	r.stop_ns = now_ns();
	kernel_state_read(&r.at_stop);
	roll_call(o.pid, o.set.scope, &r.roll);
	r.hinted = engine_hint(e, o.pid, &r.last_hint);
	engine_destroy(e);
	if (o.set.scope == SCOPE_PARTIAL)
		give_back(o.pid);
	valid = document_write(o.out, &r);
	if (r.exit.kind)
		fail(EXIT_INVALID, "the kernel ended the scheduler: %s%s%s", r.exit.reason,
		     r.exit.message[0] ? ": " : "", r.exit.message);
	return valid ? EXIT_DONE : EXIT_INVALID;
}
