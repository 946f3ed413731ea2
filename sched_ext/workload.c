// SPDX-License-Identifier: GPL-2.0
/*
 * What the tests of scx_vstate have scheduled, and what they do to it.
 *
 *   run KIND:CPU:NICE...     threads until killed; KIND below, CPU -1 for any
 *   cpu PID                  a line "TID NAME NANOSECONDS" per thread: CPU time used so far
 *   policies PID             a line "TID POLICY NICE" per thread
 *   hint TGID FAULT [P D [TID]]  set the phase hint of the process, or of one thread of it:
 *                            P prefill and D decode tokens, a fault or ok
 *   pin TYPE SIZE            put a map of another type or value size where the hints belong;
 *                            0 0: a program
 *   churn MS                 make threads, and children that end at once, one after the other
 *   flip PID MS              change the affinity of all its threads, a different one each time
 *
 * Kinds: vector and scalar compute for ever; yield and nap do, too, and yield or sleep in between;
 * fifo is scalar at real-time priority; grow naps, and makes one more vector thread after 200 ms.
 *
 * Promise: threads make no system call but the one their kind names.
 * Limit: `run` shows its threads by name only; thread 0, which waits, is called `workload`.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <linux/bpf.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "scx_vstate.h"

#define NS_PER_MS 1000000L
#define ROUNDS 20000 /* of a loop body, between two system calls: some 200 us */

static __attribute__((noreturn)) void die(const char *what)
{
	fprintf(stderr, "workload: %s: %s\n", what, strerror(errno));
	exit(1);
}

static uint64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return ts.tv_sec * 1000000000ULL + ts.tv_nsec;
}

static void nap(long ns)
{
	struct timespec ts = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};

	nanosleep(&ts, NULL);
}

/* ---- run ----------------------------------------------------------------------------------- */

static void compute(bool vector)
{
	for (int i = 0; i < ROUNDS; i++) {
		if (vector)
			__asm__ volatile(".option push\n\t.option arch, +v\n\t"
					 "vsetvli t0, zero, e8, m1, ta, ma\n\t"
					 "vadd.vi v1, v1, 1\n\t.option pop" ::
						 : "t0");
		else
			__asm__ volatile("" ::: "memory");
	}
}

struct member {
	char kind[16];
	int cpu, nice;
};

static void *member_main(void *data)
{
	struct member *m = data;
	bool vector =
		!strcmp(m->kind, "vector") || !strcmp(m->kind, "yield") || !strcmp(m->kind, "nap");

	pthread_setname_np(pthread_self(), m->kind);
	if (m->cpu >= 0) {
		cpu_set_t set;

		CPU_ZERO(&set);
		CPU_SET(m->cpu, &set);
		if (sched_setaffinity(0, sizeof(set), &set))
			die("sched_setaffinity");
	}
	if (!strcmp(m->kind, "fifo")) {
		struct sched_param p = {.sched_priority = 1};

		if (sched_setscheduler(0, SCHED_FIFO, &p))
			die("sched_setscheduler");
	} else if (setpriority(PRIO_PROCESS, 0, m->nice)) {
		die("setpriority");
	}
	if (!strcmp(m->kind, "grow")) {
		static struct member late = {.kind = "vector", .cpu = -1};
		pthread_t thread;

		nap(200 * NS_PER_MS);
		if (pthread_create(&thread, NULL, member_main, &late))
			die("pthread_create");
		strcpy(m->kind, "nap");
	}
	for (;;) {
		compute(vector);
		if (!strcmp(m->kind, "yield"))
			sched_yield();
		else if (!strcmp(m->kind, "nap"))
			nap(NS_PER_MS / 10);
	}
	return NULL;
}

static void run(int argc, char **argv)
{
	for (int i = 0; i < argc; i++) {
		struct member *m = calloc(1, sizeof(*m));
		pthread_t thread;

		if (sscanf(argv[i], "%15[^:]:%d:%d", m->kind, &m->cpu, &m->nice) != 3)
			die(argv[i]);
		if (pthread_create(&thread, NULL, member_main, m))
			die("pthread_create");
	}
	for (;;)
		pause();
}

/* ---- looks at another process -------------------------------------------------------------- */

static void each_thread(pid_t pid, void (*call)(pid_t pid, pid_t tid))
{
	char path[64];
	struct dirent *entry;
	DIR *dir;

	snprintf(path, sizeof(path), "/proc/%d/task", pid);
	dir = opendir(path);
	if (!dir)
		die(path);
	while ((entry = readdir(dir)))
		if (atoi(entry->d_name) > 0)
			call(pid, atoi(entry->d_name));
	closedir(dir);
}

static void read_text(pid_t pid, pid_t tid, const char *name, char *to, size_t size)
{
	char path[96];
	FILE *file;

	snprintf(path, sizeof(path), "/proc/%d/task/%d/%s", pid, tid, name);
	file = fopen(path, "r");
	to[0] = '\0';
	if (file && fgets(to, size, file))
		to[strcspn(to, "\n")] = '\0';
	if (file)
		fclose(file);
}

static void print_cpu(pid_t pid, pid_t tid)
{
	char name[64], line[256];

	read_text(pid, tid, "comm", name, sizeof(name));
	read_text(pid, tid, "schedstat", line, sizeof(line));
	printf("%d %s %lld\n", tid, name, atoll(line));
}

static void print_policy(pid_t pid, pid_t tid)
{
	(void)pid;
	errno = 0;
	printf("%d %d %d\n", tid, sched_getscheduler(tid), getpriority(PRIO_PROCESS, tid));
}

/* ---- the hints' map ------------------------------------------------------------------------ */

static long bpf(int command, union bpf_attr *attr)
{
	return syscall(SYS_bpf, command, attr, sizeof(*attr));
}

static unsigned long long start_ticks(pid_t pid)
{
	unsigned long long ticks = 0;
	char line[1024];
	char *at;

	read_text(pid, pid, "stat", line, sizeof(line));
	at = strrchr(line, ')');
	if (!at || sscanf(at + 2,
			  "%*c %*d %*d %*d %*d %*d %*d %*d %*d %*d %*d %*d %*d %*d %*d "
			  "%*d %*d %*d %*d %llu",
			  &ticks) != 1)
		die("/proc/PID/stat");
	return ticks;
}

static void hint(pid_t tgid, const char *fault, unsigned int prefill, unsigned int decode,
		 __u32 key)
{
	static const enum vstate_phase phase_of[2][2] = {
		{VSTATE_PHASE_IDLE, VSTATE_PHASE_DECODE},
		{VSTATE_PHASE_PREFILL, VSTATE_PHASE_MIXED},
	};
	struct vstate_phase_hint h = {
		.abi_version = VSTATE_PHASE_ABI_VERSION,
		.phase = phase_of[!!prefill][!!decode],
		.updated_ns = now_ns(),
		.writer_start_ticks = start_ticks(tgid),
		.prefill_tokens = prefill,
		.decode_tokens = decode,
		.batch_tokens = prefill + decode,
		.sequence = 1,
		.prefill_total = prefill,
		.decode_total = decode,
	};
	union bpf_attr attr = {.pathname = (uintptr_t)VSTATE_PHASE_MAP_PATH};
	int fd;

	if (!strcmp(fault, "version"))
		h.abi_version = 2;
	else if (!strcmp(fault, "phase"))
		h.phase = VSTATE_NR_PHASES;
	else if (!strcmp(fault, "none"))
		h.phase = VSTATE_PHASE_NONE;
	else if (!strcmp(fault, "time"))
		h.updated_ns = 0;
	else if (!strcmp(fault, "future"))
		h.updated_ns += 3600 * 1000000000ULL;
	else if (!strcmp(fault, "stale"))
		h.updated_ns = 1;
	else if (!strcmp(fault, "dead"))
		h.writer_start_ticks--;
	else if (!strcmp(fault, "sum"))
		h.batch_tokens++;
	else if (!strcmp(fault, "overflow")) /* the sum is right in 32 bits only */
		h.prefill_tokens = h.decode_tokens = 0x80000001U, h.batch_tokens = 2;
	else if (!strcmp(fault, "inconsistent"))
		h.phase = VSTATE_PHASE_IDLE;
	else if (strcmp(fault, "ok"))
		die(fault);
	fd = bpf(BPF_OBJ_GET, &attr);
	if (fd < 0)
		die(VSTATE_PHASE_MAP_PATH);
	memset(&attr, 0, sizeof(attr));
	attr.map_fd = fd;
	attr.key = (uintptr_t)&key;
	attr.value = (uintptr_t)&h;
	if (bpf(BPF_MAP_UPDATE_ELEM, &attr))
		die("BPF_MAP_UPDATE_ELEM");
}

static int make_program(void)
{
	static const struct bpf_insn nothing[] = {
		{.code = BPF_ALU64 | BPF_MOV | BPF_K, .dst_reg = BPF_REG_0},
		{.code = BPF_JMP | BPF_EXIT},
	};
	union bpf_attr attr = {
		.prog_type = BPF_PROG_TYPE_SOCKET_FILTER,
		.insns = (uintptr_t)nothing,
		.insn_cnt = 2,
		.license = (uintptr_t)"GPL",
	};

	return bpf(BPF_PROG_LOAD, &attr);
}

static void pin(unsigned int type, unsigned int size)
{
	union bpf_attr attr = {
		.map_type = type,
		.key_size = 4,
		.value_size = size,
		.max_entries = VSTATE_MAX_HINTS,
	};
	int fd = type ? bpf(BPF_MAP_CREATE, &attr) : make_program();

	if (fd < 0)
		die(type ? "BPF_MAP_CREATE" : "BPF_PROG_LOAD");
	mkdir(VSTATE_PIN_DIR, 0755);
	memset(&attr, 0, sizeof(attr));
	attr.pathname = (uintptr_t)VSTATE_PHASE_MAP_PATH;
	attr.bpf_fd = fd;
	if (bpf(BPF_OBJ_PIN, &attr))
		die(VSTATE_PHASE_MAP_PATH);
}

/* ---- disturbances -------------------------------------------------------------------------- */

static void *no_work(void *data)
{
	return data;
}

static void churn(long ms)
{
	uint64_t end = now_ns() + ms * NS_PER_MS;

	while (now_ns() < end) {
		pthread_t thread;
		pid_t child = fork();

		if (child == 0)
			_exit(0);
		if (child < 0 || pthread_create(&thread, NULL, no_work, NULL))
			die("fork storm");
		pthread_join(thread, NULL);
		waitpid(child, NULL, 0);
	}
}

static unsigned int flips;

static void flip_thread(pid_t pid, pid_t tid)
{
	cpu_set_t set;

	(void)pid;
	CPU_ZERO(&set);
	for (int cpu = 0; cpu < 8; cpu++)
		if ((flips * 2654435761U >> (cpu + 8)) & 1)
			CPU_SET(cpu, &set);
	flips++;
	/* Refused when none of them is there, or the thread is gone. */
	sched_setaffinity(tid, sizeof(set), &set);
}

static void flip(pid_t pid, long ms)
{
	uint64_t end = now_ns() + ms * NS_PER_MS;

	while (now_ns() < end) {
		each_thread(pid, flip_thread);
		nap(NS_PER_MS);
	}
	printf("%u\n", flips);
}

int main(int argc, char **argv)
{
	const char *verb = argc > 2 ? argv[1] : "";

	if (!strcmp(verb, "run"))
		run(argc - 2, argv + 2);
	else if (!strcmp(verb, "cpu"))
		each_thread(atoi(argv[2]), print_cpu);
	else if (!strcmp(verb, "policies"))
		each_thread(atoi(argv[2]), print_policy);
	else if (!strcmp(verb, "hint") && argc > 3)
		hint(atoi(argv[2]), argv[3], argc > 4 ? atoi(argv[4]) : 0,
		     argc > 5 ? atoi(argv[5]) : 0, atoi(argv[argc > 6 ? 6 : 2]));
	else if (!strcmp(verb, "pin") && argc > 3)
		pin(atoi(argv[2]), atoi(argv[3]));
	else if (!strcmp(verb, "churn"))
		churn(atol(argv[2]));
	else if (!strcmp(verb, "flip") && argc > 3)
		flip(atoi(argv[2]), atol(argv[3]));
	else
		die("use: see the head of workload.c");
	return 0;
}
