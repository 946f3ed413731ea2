// SPDX-License-Identifier: GPL-2.0
/*
 * Processes whose vector-state saves are known beforehand, for the tests of vstate_observer.
 *
 * A target starts its threads; each uses V once and then waits for a byte from the FIFO.  So a
 * window can be opened while everything sleeps; each byte lets one thread do its work, after which
 * it sleeps for ever, so that the window can be closed in the same way.
 *
 * Promise: in its work a thread makes only those system calls that its mode names.
 * Limit: preemption is up to the scheduler: a mode that needs some has another process run `hog`.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/bpf.h>
#include <linux/capability.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define COPY_BYTES (64 * 1024) /* what a pipe holds */
#define NAP_NS 1000000
#define QUIET_NAPS 20 /* some slices of whoever shares the hart */

static int fifo;
static long rounds;
static long work_ms;
static uint64_t ticks_per_ms;

static __attribute__((noreturn)) void die(const char *what)
{
	fprintf(stderr, "workload: %s: %s\n", what, strerror(errno));
	exit(1);
}

static uint64_t ticks(void)
{
	uint64_t now;

	__asm__ volatile("rdtime %0" : "=r"(now));
	return now;
}

static uint64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return ts.tv_sec * 1000000000ULL + ts.tv_nsec;
}

static void nap(void)
{
	struct timespec ts = {.tv_nsec = NAP_NS};

	nanosleep(&ts, NULL);
}

static void calibrate(void)
{
	uint64_t start = ticks(), start_ns = now_ns();

	while (now_ns() - start_ns < 5000000)
		;
	ticks_per_ms = (ticks() - start) / 5;
}

static void use_vector(void)
{
	__asm__ volatile(".option push\n\t"
			 ".option arch, +v\n\t"
			 "vsetvli t0, zero, e32, m8, ta, ma\n\t"
			 "vmv.v.i v8, 1\n\t"
			 "vadd.vv v16, v8, v8\n\t"
			 ".option pop" ::
				 : "t0", "memory");
}

static void compute_until(uint64_t end)
{
	while (ticks() < end)
		use_vector();
}

/* The loop that a --spin range is for; nothing in it touches V. */
static __attribute__((noinline)) void spin_until(uint64_t end)
{
	while (ticks() < end)
		__asm__ volatile(".insn i 0x0F, 0, x0, x0, 0x010"); /* pause */
}

static uint64_t deadline(void)
{
	return ticks() + work_ms * ticks_per_ms;
}

static void work_scalar(void)
{
	spin_until(deadline());
}

static void work_compute(void)
{
	compute_until(deadline());
}

static void work_block(void)
{
	for (long i = 0; i < rounds; i++) {
		use_vector();
		nap();
	}
}

static void work_spin(void)
{
	for (long i = 0; i < rounds; i++) {
		use_vector();
		spin_until(deadline());
	}
}

static void work_mixed(void)
{
	for (long i = 0; i < rounds; i++) {
		compute_until(deadline());
		/* The deadline may have passed while another thread had the hart. */
		use_vector();
		spin_until(deadline());
		use_vector();
		nap();
	}
}

static void stay_on(int hart)
{
	cpu_set_t there;

	CPU_ZERO(&there);
	CPU_SET(hart, &there);
	if (sched_setaffinity(0, sizeof(there), &there))
		die("sched_setaffinity");
}

/* Each call moves the thread to another hart; it starts on hart 0. */
static void work_hop(void)
{
	for (long i = 0; i < rounds; i++)
		stay_on(1 + i % 2);
}

/* Through a pipe and back: pages are large enough for the kernel to copy them with V. */
static void work_copy(void)
{
	char bytes[COPY_BYTES];
	uint64_t end = deadline();
	int ends[2];

	memset(bytes, 1, sizeof(bytes));
	if (pipe(ends))
		die("pipe");
	while (ticks() < end)
		if (write(ends[1], bytes, sizeof(bytes)) != sizeof(bytes) ||
		    read(ends[0], bytes, sizeof(bytes)) != sizeof(bytes))
			die("pipe");
}

static int short_life(void *arg)
{
	(void)arg;
	use_vector();
	return 0;
}

/* Bare threads, one after the other on one stack: pthreads would cost several times as much. */
static void work_churn(void)
{
	static char stack[16 * 1024] __attribute__((aligned(16)));
	static volatile pid_t alive; /* the kernel clears it when the thread has ended */

	for (long i = 0; i < rounds; i++) {
		alive = 1;
		if (clone(short_life, stack + sizeof(stack),
			  CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD |
				  CLONE_SYSVSEM | CLONE_CHILD_CLEARTID,
			  NULL, NULL, NULL, &alive) < 0)
			die("clone");
		while (alive)
			syscall(SYS_futex, &alive, FUTEX_WAIT, 1, NULL, NULL, 0);
	}
}

static void work_exit(void)
{
	compute_until(deadline());
	exit(0);
}

static const struct mode {
	const char *name;
	void (*work)(void);
} modes[] = {
	{"scalar", work_scalar}, {"compute", work_compute}, {"block", work_block},
	{"spin", work_spin},	 {"mixed", work_mixed},	    {"hop", work_hop},
	{"copy", work_copy},	 {"churn", work_churn},	    {"exit", work_exit},
};

static __attribute__((noreturn)) void sleep_for_ever(void)
{
	for (;;)
		pause();
}

static void *worker(void *arg)
{
	const struct mode *mode = arg;
	char byte;

	if (mode->work != work_scalar)
		use_vector();
	if (mode->work == work_hop)
		stay_on(0);
	if (read(fifo, &byte, 1) != 1)
		die("read");
	mode->work();
	sleep_for_ever();
}

static __attribute__((noreturn)) void run_target(const struct mode *mode, char **args)
{
	long nr_threads = atol(args[1]);

	fifo = open(args[0], O_RDWR);
	if (fifo < 0)
		die(args[0]);
	rounds = atol(args[2]);
	work_ms = atol(args[3]);
	calibrate();
	for (long i = 0; i < nr_threads; i++) {
		pthread_t thread;

		errno = pthread_create(&thread, NULL, worker, (void *)mode);
		if (errno)
			die("pthread_create");
	}
	sleep_for_ever();
}

static __attribute__((noreturn)) void run_hog(void)
{
	for (;;)
		__asm__ volatile("");
}

/* Call `each` for every thread of a process; returns how many there are. */
static int for_threads(const char *pid, void (*each)(const char *status))
{
	char path[512], status[2048];
	struct dirent *entry;
	int nr = 0;
	DIR *dir;

	snprintf(path, sizeof(path), "/proc/%s/task", pid);
	dir = opendir(path);
	while (dir && (entry = readdir(dir))) {
		ssize_t size;
		int file;

		if (entry->d_name[0] == '.')
			continue;
		snprintf(path, sizeof(path), "/proc/%s/task/%s/status", pid, entry->d_name);
		file = open(path, O_RDONLY);
		size = file < 0 ? -1 : read(file, status, sizeof(status) - 1);
		if (file >= 0)
			close(file);
		if (size <= 0)
			continue;
		status[size] = '\0';
		nr++;
		each(status);
	}
	if (dir)
		closedir(dir);
	return nr;
}

static long number_after(const char *status, const char *name)
{
	const char *field = strstr(status, name);

	return field ? atol(field + strlen(name)) : -1;
}

static long voluntary(const char *status)
{
	return number_after(status, "\nvoluntary_ctxt_switches:");
}

static long forced(const char *status)
{
	return number_after(status, "\nnonvoluntary_ctxt_switches:");
}

static int nr_asleep;
static long nr_switches;

static void count_asleep(const char *status)
{
	nr_asleep += strstr(status, "State:\tS") != NULL;
	nr_switches += voluntary(status) + forced(status);
}

/*
 * Wait until a process has that many threads, all of them asleep, and no switches any more: a
 * thread that was preempted on its way to sleep looks asleep and is not.  For a minute.
 */
static int wait_asleep(const char *pid, int nr)
{
	long before = -1;
	int quiet = 0;

	for (int i = 0; i < 60000; i++) {
		nr_asleep = 0;
		nr_switches = 0;
		quiet = for_threads(pid, count_asleep) == nr && nr_asleep == nr &&
					nr_switches == before
				? quiet + 1
				: 0;
		if (quiet == QUIET_NAPS)
			return 0;
		before = nr_switches;
		nap();
	}
	fprintf(stderr, "workload: process %s: %d threads are asleep, expected %d\n", pid,
		nr_asleep, nr);
	return 1;
}

static const char *separator = "";

static void print_switches(const char *status)
{
	printf("%s\"%ld\": [%ld, %ld]", separator, number_after(status, "\nPid:"),
	       voluntary(status), forced(status));
	separator = ", ";
}

/* What the kernel itself counted, per thread: voluntary and other switches. */
static int show_switches(const char *pid)
{
	printf("{");
	for_threads(pid, print_switches);
	printf("}\n");
	return 0;
}

/* Have a child that has ended and is not asked for; print its id. */
static __attribute__((noreturn)) void keep_zombie(void)
{
	siginfo_t info;
	pid_t pid = fork();

	if (pid == 0)
		_exit(0);
	if (pid < 0 || waitid(P_PID, pid, &info, WEXITED | WNOWAIT))
		die("fork");
	printf("%d\n", pid);
	fflush(stdout);
	sleep_for_ever();
}

/* How many BPF programs are loaded on this machine. */
static int show_programs(void)
{
	union bpf_attr attr = {};
	int nr = 0;

	while (!syscall(SYS_bpf, BPF_PROG_GET_NEXT_ID, &attr, sizeof(attr))) {
		attr.start_id = attr.next_id;
		nr++;
	}
	if (errno != ENOENT)
		die("bpf");
	printf("%d\n", nr);
	return 0;
}

/* Run a program to which a signal comes before it begins. */
static __attribute__((noreturn)) void run_interrupted(char **argv)
{
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigprocmask(SIG_BLOCK, &set, NULL);
	raise(SIGTERM);
	execv(argv[0], argv);
	die(argv[0]);
}

/* Run a program without some capabilities: a list of numbers, separated by commas. */
static __attribute__((noreturn)) void run_without(char *list, char **argv)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct data[2];

	if (syscall(SYS_capget, &header, data))
		die("capget");
	for (char *number = strtok(list, ","); number; number = strtok(NULL, ",")) {
		int cap = atoi(number);

		/* Out of the bounding set, or exec() as root gives them back. */
		if (syscall(SYS_prctl, 24 /* PR_CAPBSET_DROP */, cap, 0, 0, 0))
			die("prctl");
		data[cap / 32].effective &= ~(1U << cap % 32);
		data[cap / 32].permitted &= ~(1U << cap % 32);
		data[cap / 32].inheritable &= ~(1U << cap % 32);
	}
	if (syscall(SYS_capset, &header, data))
		die("capset");
	execv(argv[0], argv);
	die(argv[0]);
}

int main(int argc, char **argv)
{
	const char *mode = argc > 1 ? argv[1] : "";

	if (argc == 2 && !strcmp(mode, "hog"))
		run_hog();
	if (argc == 2 && !strcmp(mode, "zombie"))
		keep_zombie();
	if (argc == 2 && !strcmp(mode, "programs"))
		return show_programs();
	if (argc == 3 && !strcmp(mode, "switches"))
		return show_switches(argv[2]);
	if (argc == 4 && !strcmp(mode, "asleep"))
		return wait_asleep(argv[2], atoi(argv[3]));
	if (argc >= 4 && !strcmp(mode, "without"))
		run_without(argv[2], &argv[3]);
	if (argc >= 3 && !strcmp(mode, "interrupted"))
		run_interrupted(&argv[2]);
	for (size_t i = 0; argc == 6 && i < sizeof(modes) / sizeof(modes[0]); i++)
		if (!strcmp(mode, modes[i].name))
			run_target(&modes[i], &argv[2]);
	fprintf(stderr,
		"use: workload MODE FIFO THREADS ROUNDS MILLISECONDS\n"
		"     workload hog | zombie | programs | switches PID | asleep PID THREADS\n"
		"     workload without CAPABILITIES PROGRAM [ARG...]\n"
		"     workload interrupted PROGRAM [ARG...]\n");
	return 2;
}
