/* SPDX-License-Identifier: GPL-2.0 */
/*
 * probe.h - what the programs that measure the machine they run on have in common.
 *
 * Promise: a counter that programs may not read is absent, not zero; the rest is tool.h's.
 * Limit: static functions for programs of one file.
 */
#ifndef PROBE_H
#define PROBE_H

#include <errno.h>
#include <getopt.h>
#include <linux/perf_event.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include "tool/tool.h"

#define PROBE_UNUSED __attribute__((unused))

PROBE_UNUSED static void *allocate(size_t size)
{
	void *memory = aligned_alloc(4096, (size + 4095) / 4096 * 4096);

	if (!memory)
		fail(EXIT_UNFIT, "out of memory for %zu bytes", size);
	memset(memory, 1, size);
	return memory;
}

/* ---- the command line ------------------------------------------------------------------------ */

#define MAX_NUMBERS 4
#define FIRST_NUMBER 256 /* option values below are characters */

struct number_option {
	const char *name;
	long *value; /* as it is: the default */
	long least, most;
};

/* --out FILE, --help and these numbers, the last of them without a name; returns FILE.  What cannot
 * be understood is fail(EXIT_USAGE), help is printed and ends the program. */
PROBE_UNUSED static const char *read_options(int argc, char **argv,
					     const struct number_option *numbers, const char *help)
{
	struct option known[MAX_NUMBERS + 3] = {
		{"out", required_argument, NULL, 'o'},
		{"help", no_argument, NULL, 'h'},
	};
	const char *out = NULL;
	int c;

	for (int i = 0; numbers[i].name; i++)
		known[2 + i] =
			(struct option){numbers[i].name, required_argument, NULL, FIRST_NUMBER + i};
	while ((c = getopt_long(argc, argv, "", known, NULL)) != -1) {
		const struct number_option *n = numbers + c - FIRST_NUMBER;

		switch (c) {
		case 'o':
			out = optarg;
			break;
		case 'h':
			fputs(help, stdout);
			exit(EXIT_DONE);
		case '?': /* getopt has said what is wrong */
			exit(EXIT_USAGE);
		default:
			*n->value = number(n->name, optarg, n->least, n->most);
		}
	}
	if (optind < argc)
		fail(EXIT_USAGE, "'%s': expected options only; see --help", argv[optind]);
	if (!out)
		fail(EXIT_USAGE, "--out is missing; see --help");
	return out;
}

/* ---- the machine ----------------------------------------------------------------------------- */

PROBE_UNUSED static bool file_has(const char *path, const char *text)
{
	char content[8192];
	FILE *file = fopen(path, "r");
	size_t size = file ? fread(content, 1, sizeof(content), file) : 0;

	if (file)
		fclose(file);
	return memmem(content, size, text, strlen(text));
}

#define QEMU_USER "qemu-user"

/* QEMU's riscv machines say so in their device tree, its user-mode emulation in /proc/cpuinfo. */
PROBE_UNUSED static const char *emulator_name(void)
{
	if (file_has("/proc/cpuinfo", "uarch\t\t: qemu"))
		return QEMU_USER;
	return file_has("/proc/device-tree/compatible", "riscv-virtio") ? "qemu-system" : NULL;
}

/* Stay on one CPU, the one this runs on; returns its number. */
PROBE_UNUSED static int stay_on_this_cpu(void)
{
	cpu_set_t here;
	int cpu = sched_getcpu();

	CPU_ZERO(&here);
	CPU_SET(cpu, &here);
	if (sched_setaffinity(0, sizeof(here), &here))
		fail(EXIT_UNFIT, "cannot stay on one CPU: %s", strerror(errno));
	return cpu;
}

/* ---- clocks and counters --------------------------------------------------------------------- */

PROBE_UNUSED static uint64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC_RAW, &ts);
	return ts.tv_sec * 1000000000ULL + ts.tv_nsec;
}

struct counter {
	const char *source; /* "perf", "csr" or NULL */
	int fd;
	uint64_t (*read_csr)(void);
};

#ifdef __riscv
PROBE_UNUSED static uint64_t read_cycle(void)
{
	uint64_t value;

	__asm__ volatile("rdcycle %0" : "=r"(value));
	return value;
}

PROBE_UNUSED static uint64_t read_instret(void)
{
	uint64_t value;

	__asm__ volatile("rdinstret %0" : "=r"(value));
	return value;
}
#else /* no counter but perf's */
#define read_cycle NULL
#define read_instret NULL
#endif

static sigjmp_buf refused;

static void on_illegal(int signal_number)
{
	(void)signal_number;
	siglongjmp(refused, 1);
}

/* Kernels differ in whether programs may read these. */
static bool allowed(uint64_t (*read_csr)(void))
{
	struct sigaction action = {.sa_handler = on_illegal}, before;
	volatile bool works = false;

	if (!read_csr)
		return false;
	sigaction(SIGILL, &action, &before);
	if (!sigsetjmp(refused, 1)) {
		read_csr();
		works = true;
	}
	sigaction(SIGILL, &before, NULL);
	return works;
}

/* Of this thread and of those it makes from now on; the kernel's part included or not. */
PROBE_UNUSED static struct counter open_counter(uint64_t event, bool with_kernel,
						uint64_t (*read_csr)(void))
{
	struct perf_event_attr attr = {
		.type = PERF_TYPE_HARDWARE,
		.size = sizeof(attr),
		.config = event,
		.inherit = 1,
		.exclude_kernel = !with_kernel,
		.exclude_hv = 1,
	};
	struct counter c = {.fd = syscall(SYS_perf_event_open, &attr, 0, -1, -1, 0)};

	if (c.fd >= 0)
		c.source = "perf";
	else if (allowed(read_csr)) {
		c.source = "csr";
		c.read_csr = read_csr;
	}
	return c;
}

PROBE_UNUSED static uint64_t read_counter(const struct counter *c)
{
	uint64_t value = 0;

	if (!c->source)
		return 0;
	if (c->read_csr)
		return c->read_csr();
	if (read(c->fd, &value, sizeof(value)) != sizeof(value))
		fail(EXIT_UNFIT, "perf counter: %s", strerror(errno));
	return value;
}

/* ---- the document ---------------------------------------------------------------------------- */

PROBE_UNUSED static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

PROBE_UNUSED static void put_text(FILE *f, const char *name, const char *text)
{
	fprintf(f, "\"%s\": ", name);
	put_string(f, text);
}

#endif /* PROBE_H */
