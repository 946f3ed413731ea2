/* SPDX-License-Identifier: GPL-2.0 */
/*
 * probe.h - what the programs that measure the machine they run on have in common.
 *
 * Promise: one line and an exit code for whatever cannot be done; a JSON document is replaced whole
 * or not at all; a counter that programs may not read is absent, not zero.
 * Limit: static functions for programs of one file; each must define `probe_name`.
 */
#ifndef PROBE_H
#define PROBE_H

#include <errno.h>
#include <linux/perf_event.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define EXIT_USAGE 2
#define EXIT_UNFIT 3
#define PROBE_UNUSED __attribute__((unused))

static const char probe_name[];

__attribute__((noreturn, format(printf, 2, 3))) static void fail(int code, const char *format, ...)
{
	va_list args;

	fprintf(stderr, "%s: ", probe_name);
	va_start(args, format);
	vfprintf(stderr, format, args);
	va_end(args);
	fputc('\n', stderr);
	exit(code);
}

PROBE_UNUSED static long number(const char *option, const char *text, long most)
{
	char *end;
	long value;

	errno = 0;
	value = strtol(text, &end, 10);
	if (errno || end == text || *end || value < 1 || value > most)
		fail(EXIT_USAGE, "%s: got '%s', expected an integer of 1..%ld", option, text, most);
	return value;
}

PROBE_UNUSED static void *allocate(size_t size)
{
	void *memory = aligned_alloc(4096, (size + 4095) / 4096 * 4096);

	if (!memory)
		fail(EXIT_UNFIT, "out of memory for %zu bytes", size);
	memset(memory, 1, size);
	return memory;
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

/* `"name": "text"`, or null; what JSON would have to escape is left out. */
PROBE_UNUSED static void put_text(FILE *f, const char *name, const char *text)
{
	fprintf(f, "\"%s\": ", name);
	if (!text) {
		fputs("null", f);
		return;
	}
	fputc('"', f);
	for (; *text; text++)
		if (*text >= ' ' && *text < 0x7f && *text != '"' && *text != '\\')
			fputc(*text, f);
	fputc('"', f);
}

/* Replace `path` by what `put` writes, at once; on a full disk it stays as it was. */
PROBE_UNUSED static void write_document(const char *path, void (*put)(FILE *f, void *data),
					void *data)
{
	char *temporary;
	FILE *f;

	if (asprintf(&temporary, "%s.%d.tmp", path, getpid()) < 0)
		fail(EXIT_UNFIT, "out of memory");
	f = fopen(temporary, "wxe");
	if (f)
		put(f, data);
	if (!f || ferror(f) || fflush(f) || fsync(fileno(f)) || fclose(f) ||
	    rename(temporary, path)) {
		int err = errno;

		unlink(temporary);
		fail(EXIT_UNFIT, "%s: cannot write: %s; free some space or name another --out",
		     path, strerror(err));
	}
	free(temporary);
}

#endif /* PROBE_H */
