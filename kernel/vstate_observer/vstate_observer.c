// SPDX-License-Identifier: GPL-2.0
/*
 * vstate_observer - count every save of vector registers of one process, and say what it was worth.
 *
 * Promise: between the line "ready" and its end this program costs the target the BPF programs at
 * its context switches and nothing else; it ends by a signal, a deadline or the target's end, and
 * then writes one document or none.  What it loaded goes with it, however it ends.
 * Limit: one observer at a time on a machine; see vstate_observer.bpf.c for what is counted.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <getopt.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>
#include "loader.h"

#define MAX_DURATION_MS (7L * 24 * 3600 * 1000)
#define MOST_THREADS (1 << 20)

const char tool_name[] = "vstate_observer";

static const char help_fmt[] =
	"use: vstate_observer --pid TGID --out FILE [--spin START-END]... [--duration-ms N]\n"
	"                     [--max-threads N] [--hold]\n"
	"\n"
	"Counts, for every context switch of one process, whether the kernel saves vector "
	"registers\n"
	"and what they were worth; writes one JSON document (schemas/observer.schema.json).\n"
	"\n"
	"  --pid TGID         the process\n"
	"  --out FILE         replaced whole when the window closes\n"
	"  --spin START-END   code that only waits (hexadecimal, END excluded, addresses of the\n"
	"                     executable's file; kernel/spin_ranges.py finds them); at most 16\n"
	"  --duration-ms N    close the window after N milliseconds, 1..604800000\n"
	"  --max-threads N    rows for threads, 1..1048576 (default 4096)\n"
	"  --hold             do all that takes long, print the line \"loaded\", and open the "
	"window\n"
	"                     when SIGUSR1 comes\n"
	"  --help             this text\n"
	"\n"
	"The programs' places are printed first, then the line \"ready\": the window is open. "
	"SIGINT\n"
	"or SIGTERM closes it.\n"
	"\n"
	"Exit codes: 0 valid document written; 2 usage; 3 machine, kernel or folder unfit, "
	"nothing\n"
	"written; 4 document written, but invalid_reasons is not empty; 130 a signal came before\n"
	"the window was open, nothing written.\n";

struct options {
	pid_t pid;
	const char *out;
	long duration_ms; /* 0: until a signal */
	unsigned int max_threads;
	bool hold;
	unsigned int nr_spin;
	struct spin_range spin[MAX_SPIN];
};

static void add_spin(struct options *o, const char *text)
{
	struct spin_range range;
	char *end, *last;

	if (o->nr_spin == MAX_SPIN)
		fail(EXIT_USAGE, "--spin %s: more than %d ranges", text, MAX_SPIN);
	errno = 0;
	range.start = strtoull(text, &end, 16);
	last = end;
	if (*end == '-')
		range.end = strtoull(end + 1, &last, 16);
	if (errno || end == text || last == end || last == end + 1 || *last ||
	    range.start >= range.end)
		fail(EXIT_USAGE,
		     "--spin: got '%s', expected START-END, hexadecimal, START below END", text);
	o->spin[o->nr_spin++] = range;
}

static void parse(int argc, char **argv, struct options *o)
{
	static const struct option known[] = {
		{"pid", required_argument, NULL, 'p'},
		{"out", required_argument, NULL, 'o'},
		{"spin", required_argument, NULL, 's'},
		{"duration-ms", required_argument, NULL, 'd'},
		{"max-threads", required_argument, NULL, 'm'},
		{"hold", no_argument, NULL, 'w'},
		{"help", no_argument, NULL, 'h'},
		{},
	};
	int c;

	while ((c = getopt_long(argc, argv, "", known, NULL)) != -1) {
		switch (c) {
		case 'p':
			o->pid = number("pid", optarg, 1, 1 << 22);
			break;
		case 'o':
			o->out = optarg;
			break;
		case 's':
			add_spin(o, optarg);
			break;
		case 'd':
			o->duration_ms = number("duration-ms", optarg, 1, MAX_DURATION_MS);
			break;
		case 'm':
			o->max_threads = number("max-threads", optarg, 1, MOST_THREADS);
			break;
		case 'w':
			o->hold = true;
			break;
		case 'h':
			fputs(help_fmt, stdout);
			exit(EXIT_DONE);
		default: /* getopt has said what is wrong */
			exit(EXIT_USAGE);
		}
	}
	if (optind < argc)
		fail(EXIT_USAGE, "'%s': expected options only; see --help", argv[optind]);
	if (!o->pid || !o->out)
		fail(EXIT_USAGE, "%s is missing; see --help", o->pid ? "--out" : "--pid");
}

/* An abstract address goes with the process that holds it: no stale lock file. */
static void require_only_one(void)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	socklen_t size;

	size = offsetof(struct sockaddr_un, sun_path) + 1 +
	       sprintf(address.sun_path + 1, "vstate_observer");
	if (fd >= 0 && !bind(fd, (struct sockaddr *)&address, size) && !listen(fd, 1))
		return;
	if (errno == EADDRINUSE) {
		struct ucred other = {};
		socklen_t length = sizeof(other);

		if (!connect(fd, (struct sockaddr *)&address, size))
			getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &other, &length);
		fail(EXIT_UNFIT, "another vstate_observer is running, process %d; stop it first",
		     other.pid);
	}
	fail(EXIT_UNFIT, "cannot tell whether another vstate_observer is running: %s",
	     strerror(errno));
}

static uint64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return ts.tv_sec * 1000000000ULL + ts.tv_nsec;
}

static void say(const char *line)
{
	puts(line);
	if (fflush(stdout))
		fail(EXIT_UNFIT, "cannot write to standard output: %s", strerror(errno));
}

static void say_programs(const struct program *programs)
{
	for (int i = 0; i < NR_PROGRAMS; i++) {
		const struct program *p = &programs[i];

		if (p->attached && !p->jit_start)
			printf("%s on %s: %u instructions, interpreted\n", p->name, p->event,
			       p->instructions);
		else if (p->attached)
			printf("%s on %s: %u instructions, JIT 0x%llx-0x%llx\n", p->name, p->event,
			       p->instructions, (unsigned long long)p->jit_start,
			       (unsigned long long)p->jit_end);
		else
			printf("%s on %s: left out, %s\n", p->name, p->event, p->reason);
	}
}

/* From here on these come through the descriptor only. */
static int signals_fd(int first, int second)
{
	sigset_t set;
	int fd;

	sigemptyset(&set);
	sigaddset(&set, first);
	sigaddset(&set, second);
	sigprocmask(SIG_BLOCK, &set, NULL);
	fd = signalfd(-1, &set, SFD_CLOEXEC);
	if (fd < 0)
		fail(EXIT_UNFIT, "signalfd: %s", strerror(errno));
	return fd;
}

/* Until the window may be opened: at once, or when it is told to. */
static void hold(int end, int begin, bool until_told)
{
	struct pollfd fds[] = {
		{.fd = end, .events = POLLIN},
		{.fd = begin, .events = POLLIN},
	};

	if (until_told)
		say("loaded");
	while (poll(fds, 2, until_told ? -1 : 0) < 0 && errno == EINTR)
		;
	if (fds[0].revents)
		fail(EXIT_INTERRUPTED, "interrupted before the window was open; nothing written");
}

static int deadline_fd(long duration_ms)
{
	struct itimerspec when = {
		.it_value.tv_sec = duration_ms / 1000,
		.it_value.tv_nsec = duration_ms % 1000 * 1000000,
	};
	int fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC);

	if (fd < 0 || timerfd_settime(fd, 0, &when, NULL))
		fail(EXIT_UNFIT, "timerfd: %s", strerror(errno));
	return fd;
}

/* Returns what closed the window. */
static const char *wait_for_end(int signals, int deadline, int target)
{
	static const char *const ends[] = {"signal", "deadline", "target-exit"};
	struct pollfd fds[] = {
		{.fd = signals, .events = POLLIN},
		{.fd = deadline, .events = POLLIN},
		{.fd = target, .events = POLLIN},
	};

	while (poll(fds, 3, -1) < 0 && errno == EINTR)
		;
	/* The target's end makes the data invalid, so it is told first. */
	for (int i = 2; i >= 0; i--)
		if (fds[i].revents)
			return ends[i];
	fail(EXIT_UNFIT, "poll: %s", strerror(errno));
}

struct roll_call {
	struct instance *in;
	unsigned int nr;
	bool full;
};

static void add_thread(void *data, pid_t tid)
{
	struct roll_call *call = data;

	call->nr++;
	if (!instance_add_thread(call->in, tid))
		call->full = true;
}

int main(int argc, char **argv)
{
	struct options o = {.max_threads = 4096};
	struct observation seen = {};
	struct program programs[NR_PROGRAMS];
	struct spin_range spin[MAX_SPIN];
	struct semantics semantics = {};
	struct target target = {};
	struct roll_call call = {};
	struct instance *in;
	int end, begin, exited;
	bool valid;

	parse(argc, argv, &o);
	signal(SIGPIPE, SIG_IGN);
	end = signals_fd(SIGINT, SIGTERM);
	begin = signals_fd(SIGUSR1, SIGUSR1);
	require_fit_machine();
	require_only_one();
	target_read(&target, o.pid);
	target_place(&target, o.spin, o.nr_spin, spin);
	exited = syscall(SYS_pidfd_open, o.pid, 0);
	if (exited < 0)
		fail(EXIT_UNFIT, "--pid %d: %s", o.pid, strerror(errno));
	document_check_writable(o.out);
	in = instance_load(o.max_threads, programs);
	selftest(in, &semantics);

	instance_aim(in, o.pid, spin, o.nr_spin);
	say_programs(programs);
	hold(end, begin, o.hold);
	call.in = in;
	target_threads(o.pid, add_thread, &call);
	if (call.full)
		fail(EXIT_USAGE, "--max-threads %u: process %d has %u threads already",
		     o.max_threads, o.pid, call.nr);

	online_harts(seen.harts_start, sizeof(seen.harts_start));
	seen.start_ns = now_ns();
	instance_count(in, true);
	say("ready");
	seen.stopped_by =
		wait_for_end(end, o.duration_ms ? deadline_fd(o.duration_ms) : -1, exited);
	instance_count(in, false);
	seen.stop_ns = now_ns();
	online_harts(seen.harts_stop, sizeof(seen.harts_stop));

	seen.target = &target;
	seen.semantics = &semantics;
	seen.programs = programs;
	seen.spin = o.spin;
	seen.nr_spin = o.nr_spin;
	seen.max_threads = o.max_threads;
	seen.threads_made = instance_threads_made(in);
	valid = document_write(o.out, &seen, in);
	instance_unload(in);
	return valid ? EXIT_DONE : EXIT_INVALID;
}
