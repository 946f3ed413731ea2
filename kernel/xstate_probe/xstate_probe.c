// SPDX-License-Identifier: GPL-2.0
/*
 * xstate_probe - how large is this processor's extended state, and what does saving it cost?
 *
 * Reads CPUID leaf 0xD and XCR0, asks the kernel what it thinks of the same, and measures XSAVE,
 * XSAVEC, XSAVEOPT and XRSTOR of each enabled component and of ever larger sets of them, against a
 * copy of as many bytes.
 *
 * Promise: a component the processor does not have is absent, not zero; sizes are CPUID's; times
 * are measured, in nanoseconds and in ticks of the time-stamp counter (which is a clock, not the
 * core's cycles; those are given where perf may count them).  What faults is named, not left out.
 * One JSON document or none.
 * Limit: user space.  The kernel saves with XSAVES (compacted, leaves out what is in its initial
 * state and what was not touched since it was restored): XSAVEC of the state in question is the
 * nearest a program gets.  The supervisor components' sizes are there, their state is not.
 */
#define _GNU_SOURCE
#include <cpuid.h>
#include <elf.h>
#include <sys/auxv.h>
#include <sys/ptrace.h>
#include <sys/uio.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <x86intrin.h>

#include "probe.h"

#define MAX_REPEATS 1001
#define NR_COMPONENTS 63 /* bit 63 of XCR0 is reserved for extending the vector */
#define LEGACY_BYTES 512
#define HEADER_BYTES 64
#define MXCSR_RESET 0x1f80
#define FCW_RESET 0x37f
#define COLD_PLACES 256 /* flushed before each cold pass */

#define BIT(n) (1ULL << (n))
enum component {
	X87 = 0,
	SSE = 1,
	AVX = 2,
	OPMASK = 5,
	ZMM_HI256 = 6,
	HI16_ZMM = 7,
	PKRU = 9,
	TILECFG = 17,
	TILEDATA = 18,
};

const char tool_name[] = "xstate_probe";

static const char help_fmt[] =
	"use: xstate_probe --out FILE [--passes N] [--repeats N]\n"
	"\n"
	"Reads the sizes of the processor's extended state (CPUID leaf 0xD, XCR0) and measures "
	"what\n"
	"saving and restoring it costs a program; writes JSON (schemas/xstate.schema.json).\n"
	"\n"
	"  --out FILE    replaced whole\n"
	"  --passes N    saves or restores per repeat, 1..1000000 (default 1000)\n"
	"  --repeats N   measurements of each kind, 1..1001 (default 21)\n"
	"\n"
	"Exit codes: 0 done; 2 usage; 3 no XSAVE on this machine, or FILE cannot be written.\n";

/* ---- what the processor says ----------------------------------------------------------------- */

static const char *const names[NR_COMPONENTS] = {
	"x87",	    "SSE", "AVX YMM_Hi128", "MPX BNDREGS", "MPX BNDCSR",   "opmask",   "ZMM_Hi256",
	"Hi16_ZMM", "PT",  "PKRU",	    "PASID",	   "CET_U",	   "CET_S",    "HDC",
	"UINTR",    "LBR", "HWP",	    "AMX TILECFG", "AMX TILEDATA", "APX EGPR",
};

struct size {
	bool present, supervisor, aligned, enabled;
	unsigned int bytes, offset; /* offset: in the standard format; user components only */
};

struct machine {
	char vendor[13], brand[49], hypervisor[13];
	unsigned int family, model, stepping;
	bool xsaveopt, xsavec, xgetbv1, xsaves, avx2, avx512f;
	uint64_t user_mask, supervisor_mask, xcr0;
	unsigned int enabled_bytes, supported_bytes, compacted_bytes;
	struct size sizes[NR_COMPONENTS];
};

static uint64_t xgetbv(unsigned int index)
{
	unsigned int low, high;

	__asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(index));
	return low | (uint64_t)high << 32;
}

static void text_of(char *to, const unsigned int *registers, int nr)
{
	memcpy(to, registers, nr * sizeof(*registers));
	to[nr * sizeof(*registers)] = '\0';
}

static void read_names(struct machine *m)
{
	unsigned int a, b, c, d, brand[12] = {0};

	__cpuid(0, a, b, c, d);
	text_of(m->vendor, (unsigned int[]){b, d, c}, 3);
	__cpuid(0x80000000, a, b, c, d);
	for (unsigned int i = 0; a >= 0x80000004 && i < 3; i++)
		__cpuid(0x80000002 + i, brand[4 * i], brand[4 * i + 1], brand[4 * i + 2],
			brand[4 * i + 3]);
	text_of(m->brand, brand, 12);
	__cpuid(1, a, b, c, d);
	m->stepping = a & 0xf;
	m->model = (a >> 4 & 0xf) | (a >> 12 & 0xf0);
	m->family = (a >> 8 & 0xf) == 0xf ? 0xf + (a >> 20 & 0xff) : a >> 8 & 0xf;
	if (c & BIT(31)) {
		__cpuid(0x40000000, a, b, c, d);
		text_of(m->hypervisor, (unsigned int[]){b, c, d}, 3);
	}
}

static void read_machine(struct machine *m)
{
	unsigned int a, b, c, d;

	read_names(m);
	__cpuid(1, a, b, c, d);
	if (!(c & bit_OSXSAVE) || __get_cpuid_max(0, NULL) < 0xd)
		fail(EXIT_UNFIT, "no XSAVE here: a processor without it, or a kernel that does "
				 "not use it (noxsave)");
	if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
		m->avx2 = b & bit_AVX2;
		m->avx512f = b & bit_AVX512F;
	}
	m->xcr0 = xgetbv(0);
	__cpuid_count(0xd, 0, a, b, c, d);
	m->user_mask = a | (uint64_t)d << 32;
	m->enabled_bytes = b;
	m->supported_bytes = c;
	__cpuid_count(0xd, 1, a, b, c, d);
	m->xsaveopt = a & bit_XSAVEOPT;
	m->xsavec = a & bit_XSAVEC;
	m->xgetbv1 = a & BIT(2);
	m->xsaves = a & bit_XSAVES;
	m->compacted_bytes = m->xsavec ? b : 0;
	m->supervisor_mask = m->xsaves ? c | (uint64_t)d << 32 : 0;
	/* Part of the legacy area, whose sizes CPUID does not tell: SDM 1, 13.4.1. */
	m->sizes[X87] = (struct size){.present = true, .enabled = true, .bytes = 160};
	m->sizes[SSE] = (struct size){.present = m->user_mask & BIT(SSE),
				      .enabled = m->xcr0 & BIT(SSE),
				      .bytes = 256,
				      .offset = 160};
	for (int i = 2; i < NR_COMPONENTS; i++) {
		struct size *size = &m->sizes[i];

		size->present = (m->user_mask | m->supervisor_mask) & BIT(i);
		if (!size->present)
			continue;
		__cpuid_count(0xd, i, a, b, c, d);
		size->bytes = a;
		size->offset = b;
		size->supervisor = c & BIT(0);
		size->aligned = c & BIT(1);
		size->enabled = m->xcr0 & BIT(i);
	}
}

/* Bytes from the start of the area to the end of the last component of `mask`. */
static unsigned int area_bytes(const struct machine *m, uint64_t mask, bool compacted)
{
	unsigned int end = LEGACY_BYTES + HEADER_BYTES;

	for (int i = 2; i < NR_COMPONENTS; i++) {
		const struct size *size = &m->sizes[i];

		if (!(mask & BIT(i)))
			continue;
		if (compacted) {
			if (size->aligned)
				end = (end + 63) / 64 * 64;
			end += size->bytes;
		} else if (size->offset + size->bytes > end) {
			end = size->offset + size->bytes;
		}
	}
	return end;
}

static unsigned int payload_bytes(const struct machine *m, uint64_t mask)
{
	unsigned int sum = 0;

	for (int i = 0; i < NR_COMPONENTS; i++)
		if (mask & BIT(i))
			sum += m->sizes[i].bytes;
	return sum;
}

/* ---- what the kernel says -------------------------------------------------------------------- */

#define ARCH_GET_XCOMP_SUPP 0x1021
#define ARCH_GET_XCOMP_PERM 0x1022
#define ARCH_REQ_XCOMP_PERM 0x1023
#define SW_RESERVED 464 /* offset of the mask of features that the kernel puts into the area */
#define LARGEST_AREA (64 << 10)

struct kernel {
	bool has_supported, has_permitted, has_area;
	uint64_t supported, permitted, area_mask;
	unsigned int area_bytes;
	unsigned long signal_stack_bytes; /* 0: it does not say */
};

/* A stopped child's state as ptrace gives it: the kernel's own standard-format area. */
static void read_area(struct kernel *k)
{
	static char area[LARGEST_AREA];
	struct iovec vector = {.iov_base = area, .iov_len = sizeof(area)};
	int status;
	pid_t child = fork();

	if (!child) {
		if (ptrace(PTRACE_TRACEME, 0, NULL, NULL))
			_exit(1);
		raise(SIGSTOP);
		_exit(0);
	}
	if (child < 0 || waitpid(child, &status, 0) != child || !WIFSTOPPED(status))
		return; /* not allowed here: no statement */
	if (!ptrace(PTRACE_GETREGSET, child, (void *)NT_X86_XSTATE, &vector)) {
		k->has_area = true;
		k->area_bytes = vector.iov_len;
		memcpy(&k->area_mask, area + SW_RESERVED, sizeof(k->area_mask));
	}
	ptrace(PTRACE_CONT, child, NULL, NULL);
	waitpid(child, &status, 0);
}

static void read_kernel(struct kernel *k)
{
	k->has_supported = !syscall(SYS_arch_prctl, ARCH_GET_XCOMP_SUPP, &k->supported);
	k->has_permitted = !syscall(SYS_arch_prctl, ARCH_GET_XCOMP_PERM, &k->permitted);
	k->signal_stack_bytes = getauxval(AT_MINSIGSTKSZ);
	read_area(k);
}

/* ---- states ---------------------------------------------------------------------------------- */

enum state {
	INIT,
	MODIFIED,
	CLEAN
};
static const char *const state_names[] = {"init", "modified", "clean"};

/* The registers that these touch are nobody else's while this holds: no compiler may use them. */
#define NO_VECTORS __attribute__((target("general-regs-only"), noinline))

#define WITH_MASK(instruction, area, mask)                                           \
	__asm__ volatile(instruction " (%0)" ::"r"(area), "a"((unsigned int)(mask)), \
			 "d"((unsigned int)((mask) >> 32))                           \
			 : "memory")

static uint64_t *header_of(char *area)
{
	return (uint64_t *)(area + LEGACY_BYTES);
}

/* A standard-format area that puts the components of `mask` into `state`, and is valid. */
static void make_area(const struct machine *m, uint64_t mask, enum state state, char *area)
{
	static const unsigned int mxcsr = MXCSR_RESET;
	static const uint16_t fcw = FCW_RESET;
	const uint64_t patterned = BIT(AVX) | BIT(OPMASK) | BIT(ZMM_HI256) | BIT(HI16_ZMM);

	memset(area, 0, area_bytes(m, m->xcr0, false));
	WITH_MASK("xsave64", area, m->xcr0); /* what has no pattern keeps what it is */
	memcpy(area, &fcw, sizeof(fcw));
	memset(area + 2, 0, 22); /* status, tags, instruction and data pointers */
	memcpy(area + 24, &mxcsr, sizeof(mxcsr));
	area[4] = (char)0xff; /* eight valid x87 registers */
	memset(area + 160, 0x5a, 256);
	for (int i = 2; i < NR_COMPONENTS; i++)
		if (m->xcr0 & patterned & BIT(i))
			memset(area + m->sizes[i].offset, 0x5a, m->sizes[i].bytes);
	if (m->xcr0 & BIT(TILECFG)) {
		char *config = area + m->sizes[TILECFG].offset;

		memset(config, 0, m->sizes[TILECFG].bytes);
		config[0] = 1; /* palette 1: eight tiles of 16 rows of 64 bytes */
		for (int tile = 0; tile < 8; tile++) {
			config[16 + 2 * tile] = 64;
			config[48 + tile] = 16;
		}
	}
	*header_of(area) = state == INIT ? 0 : mask;
}

static char *state_area; /* from which the state is restored */

NO_VECTORS static void restore(uint64_t mask, char *area)
{
	WITH_MASK("xrstor64", area, mask);
}

/* ---- moves ----------------------------------------------------------------------------------- */

enum operation {
	XSAVE,
	XSAVEC,
	XSAVEOPT,
	XRSTOR,
	XRSTOR_COMPACTED,
	COPY
};
static const char *const operation_names[] = {"xsave",	"xsavec",	    "xsaveopt",
					      "xrstor", "xrstor-compacted", "memcpy"};

static bool is_compacted(enum operation operation)
{
	return operation == XSAVEC || operation == XRSTOR_COMPACTED;
}

NO_VECTORS static void once(enum operation operation, char *area, uint64_t mask)
{
	switch (operation) {
	case XSAVE:
		WITH_MASK("xsave64", area, mask);
		break;
	case XSAVEC:
		WITH_MASK("xsavec64", area, mask);
		break;
	case XSAVEOPT:
		WITH_MASK("xsaveopt64", area, mask);
		break;
	default:
		WITH_MASK("xrstor64", area, mask);
	}
}

/* `passes` times in one place, or once in each of the places `step` bytes apart. */
#define LOOP(instruction)                                                  \
	for (long i = 0; i < passes; i++, place = (place + step) & places) \
	WITH_MASK(instruction, area + place, mask)

NO_VECTORS static void move(enum operation operation, char *area, uint64_t mask, long passes,
			    unsigned long step, unsigned long places)
{
	unsigned long place = 0;

	switch (operation) {
	case XSAVE:
		LOOP("xsave64");
		break;
	case XSAVEC:
		LOOP("xsavec64");
		break;
	case XSAVEOPT:
		LOOP("xsaveopt64");
		break;
	default:
		LOOP("xrstor64");
	}
}

static void copy(char *to, const char *from, size_t bytes, long passes, unsigned long step,
		 unsigned long places)
{
	void *(*volatile function)(void *, const void *, size_t) = memcpy;
	unsigned long place = 0;

	for (long i = 0; i < passes; i++, place = (place + step) & places)
		function(to + place, from, bytes);
}

/* ---- measuring ------------------------------------------------------------------------------- */

struct setup {
	struct machine machine;
	struct kernel kernel;
	uint64_t usable; /* enabled, and this process may have them */
	long passes;
	long repeats;
	struct counter cycles;
	unsigned long slot_bytes; /* between two places; a power of two */
	char *memory, *source;
};

struct kind {
	enum operation operation;
	uint64_t mask;
	enum state state;
	bool cold;
};

struct series {
	double ns[MAX_REPEATS], ticks[MAX_REPEATS], cycles[MAX_REPEATS];
};

static uint64_t ticks_now(void)
{
	unsigned int processor;
	uint64_t ticks;

	_mm_lfence();
	ticks = __rdtscp(&processor);
	_mm_lfence();
	return ticks;
}

static void flush(const char *memory, unsigned long bytes)
{
	for (unsigned long at = 0; at < bytes; at += 64)
		_mm_clflush(memory + at);
	_mm_mfence();
}

/* The state the operation finds; an area to restore from is filled in that state. */
static void enter_state(const struct setup *s, const struct kind *kind, unsigned long places)
{
	uint64_t settable = s->usable & ~BIT(PKRU);
	bool restores = kind->operation == XRSTOR || kind->operation == XRSTOR_COMPACTED;

	make_area(&s->machine, kind->mask, kind->state, state_area);
	restore(settable, state_area);
	for (unsigned long i = 0; i <= places; i += s->slot_bytes) {
		memset(s->memory + i, 0, s->slot_bytes);
		if (restores)
			once(is_compacted(kind->operation) ? XSAVEC : XSAVE, s->memory + i,
			     kind->mask);
	}
	/* memset may have used the registers. */
	restore(settable, state_area);
	if (kind->state == CLEAN) {
		once(XSAVE, s->memory, kind->mask);
		once(XRSTOR, s->memory, kind->mask); /* XSAVEOPT remembers where from */
	}
}

static void leave_state(const struct setup *s)
{
	make_area(&s->machine, 0, INIT, state_area);
	restore(s->usable & ~BIT(PKRU), state_area);
}

static sigjmp_buf faulted;

static void on_fault(int signal_number)
{
	siglongjmp(faulted, signal_number);
}

static void measure_once(const struct setup *s, const struct kind *kind, struct series *to, int i,
			 uint64_t *in_use)
{
	unsigned long places = kind->cold ? s->slot_bytes * (COLD_PLACES - 1) : 0;
	/* An odd number of slots: each place once, not one after the other. */
	unsigned long step = kind->cold ? s->slot_bytes * 101 : 0;
	long passes = kind->cold ? COLD_PLACES : s->passes;
	size_t bytes = area_bytes(&s->machine, kind->mask, false);
	uint64_t start_ns, ticks, cycles;

	if (kind->operation == COPY)
		memset(s->memory, 1, s->slot_bytes);
	else
		enter_state(s, kind, places);
	if (kind->cold) {
		flush(s->memory, places + s->slot_bytes);
		/*
		 * That takes long enough to lose the CPU, and after a switch the processor may call
		 * SSE in use that was not (seen on Zen 3): enter the state again, from an area of
		 * its own, so that what was flushed stays flushed.
		 */
		if (kind->operation != COPY)
			restore(s->usable & ~BIT(PKRU), state_area);
	}
	*in_use = s->machine.xgetbv1 && kind->operation != COPY ? xgetbv(1) : 0;
	cycles = read_counter(&s->cycles);
	start_ns = now_ns();
	ticks = ticks_now();
	if (kind->operation == COPY)
		copy(s->memory, s->source, bytes, passes, step, places);
	else
		move(kind->operation, s->memory, kind->mask, passes, step, places);
	ticks = ticks_now() - ticks;
	to->ns[i] = (double)(now_ns() - start_ns) / passes;
	to->cycles[i] = (double)(read_counter(&s->cycles) - cycles) / passes;
	to->ticks[i] = (double)ticks / passes;
	if (kind->operation != COPY)
		leave_state(s);
}

/* Returns the number of the signal that stopped it, 0 if none did. */
static int measure(const struct setup *s, const struct kind *kind, struct series *to,
		   uint64_t *in_use)
{
	struct sigaction action = {.sa_handler = on_fault, .sa_flags = SA_NODEFER};
	static const int signals[] = {SIGILL, SIGSEGV, SIGBUS, SIGFPE};
	int fault;

	for (size_t i = 0; i < sizeof(signals) / sizeof(*signals); i++)
		sigaction(signals[i], &action, NULL);
	fault = sigsetjmp(faulted, 1);
	if (!fault)
		for (int i = 0; i < s->repeats; i++)
			measure_once(s, kind, to, i, in_use);
	for (size_t i = 0; i < sizeof(signals) / sizeof(*signals); i++)
		signal(signals[i], SIG_DFL);
	return fault;
}

/* ---- the document ---------------------------------------------------------------------------- */

static void put_series(FILE *f, const char *name, double *values, int nr, bool there)
{
	fprintf(f, ", \"%s\": ", name);
	if (!there) {
		fputs("null", f);
		return;
	}
	qsort(values, nr, sizeof(*values), by_value);
	fprintf(f,
		"{\"min\": %.3f, \"lower_quartile\": %.3f, \"median\": %.3f, "
		"\"upper_quartile\": %.3f, \"max\": %.3f}",
		values[0], values[nr / 4], values[nr / 2], values[nr - 1 - nr / 4], values[nr - 1]);
}

static void put_mask(FILE *f, const char *name, uint64_t mask, bool there)
{
	if (there)
		fprintf(f, "\"%s\": \"0x%llx\"", name, (unsigned long long)mask);
	else
		fprintf(f, "\"%s\": null", name);
}

static void put_measurement(FILE *f, const struct setup *s, const struct kind *kind,
			    const char *separator)
{
	static struct series series;
	const struct machine *m = &s->machine;
	bool copies = kind->operation == COPY;
	uint64_t in_use = 0;
	int fault = measure(s, kind, &series, &in_use);

	fprintf(f, "%s\n  {\"operation\": \"%s\", ", separator, operation_names[kind->operation]);
	put_mask(f, "components", kind->mask, true);
	fprintf(f, ", \"state\": %s%s%s, \"memory\": \"%s\", ", copies ? "" : "\"",
		copies ? "null" : state_names[kind->state], copies ? "" : "\"",
		kind->cold ? "cold" : "hot");
	put_mask(f, "in_use", in_use, !copies && m->xgetbv1);
	fprintf(f, ", \"payload_bytes\": %u, \"area_bytes\": %u, \"fault\": ",
		payload_bytes(m, kind->mask),
		area_bytes(m, kind->mask, is_compacted(kind->operation)));
	if (fault)
		fprintf(f, "\"signal %d\"", fault);
	else
		fputs("null", f);
	put_series(f, "ns", series.ns, s->repeats, !fault);
	put_series(f, "tsc_ticks", series.ticks, s->repeats, !fault);
	put_series(f, "cycles", series.cycles, s->repeats, !fault && s->cycles.source);
	fputc('}', f);
}

static void put_set(FILE *f, const struct setup *s, uint64_t mask, const char **separator)
{
	const struct machine *m = &s->machine;
	const bool has[] = {
		[XSAVE] = true,	 [XSAVEC] = m->xsavec,		 [XSAVEOPT] = m->xsaveopt,
		[XRSTOR] = true, [XRSTOR_COMPACTED] = m->xsavec, [COPY] = true,
	};

	for (int cold = 0; cold < 2; cold++)
		for (enum operation operation = XSAVE; operation <= COPY; operation++)
			for (enum state state = INIT; state <= CLEAN; state++) {
				struct kind kind = {operation, mask, state, cold};

				if (!has[operation] || (operation == COPY && state != MODIFIED))
					continue;
				if (state == CLEAN && (operation != XSAVEOPT || cold))
					continue; /* there is one place it was restored from */
				if (state == INIT && mask == BIT(PKRU))
					continue; /* no process has it in this state */
				put_measurement(f, s, &kind, *separator);
				*separator = ",";
			}
}

static void put_measurements(FILE *f, const struct setup *s)
{
	const char *separator = "";
	uint64_t larger = 0;

	fputs(",\n \"measurements\": [", f);
	for (int i = 0; i < NR_COMPONENTS; i++) {
		if (!(s->usable & BIT(i)))
			continue;
		put_set(f, s, BIT(i), &separator);
		larger |= BIT(i);
		if (larger != BIT(i))
			put_set(f, s, larger, &separator);
	}
	fputs("\n ]", f);
}

static void put_components(FILE *f, const struct machine *m)
{
	const char *separator = "";

	fputs(",\n \"components\": [", f);
	for (int i = 0; i < NR_COMPONENTS; i++) {
		const struct size *size = &m->sizes[i];

		if (!size->present)
			continue;
		fprintf(f, "%s\n  {\"number\": %d, ", separator, i);
		put_text(f, "name", names[i]);
		fprintf(f, ", \"supervisor\": %s, \"bytes\": %u, \"offset\": ",
			size->supervisor ? "true" : "false", size->bytes);
		if (size->supervisor)
			fputs("null, \"enabled\": null", f);
		else
			fprintf(f, "%u, \"enabled\": %s", size->offset,
				size->enabled ? "true" : "false");
		fprintf(f, ", \"aligned\": %s}", size->aligned ? "true" : "false");
		separator = ",";
	}
	fputs("\n ]", f);
}

static void put_flag(FILE *f, const char *name, bool value, const char *separator)
{
	fprintf(f, "%s\"%s\": %s", separator, name, value ? "true" : "false");
}

static void put_machine(FILE *f, const struct machine *m)
{
	fputs(" \"cpu\": {", f);
	put_text(f, "vendor", m->vendor);
	fputs(", ", f);
	put_text(f, "brand", m->brand);
	fprintf(f, ", \"family\": %u, \"model\": %u, \"stepping\": %u, ", m->family, m->model,
		m->stepping);
	put_text(f, "hypervisor", *m->hypervisor ? m->hypervisor : NULL);
	fputs("},\n \"instructions\": {", f);
	put_flag(f, "xsavec", m->xsavec, "");
	put_flag(f, "xsaveopt", m->xsaveopt, ", ");
	put_flag(f, "xsaves", m->xsaves, ", ");
	put_flag(f, "xgetbv1", m->xgetbv1, ", ");
	put_flag(f, "avx2", m->avx2, ", ");
	put_flag(f, "avx512f", m->avx512f, ", ");
	fputs("},\n ", f);
	put_mask(f, "user_components", m->user_mask, true);
	fputs(", ", f);
	put_mask(f, "supervisor_components", m->supervisor_mask, true);
	fputs(", ", f);
	put_mask(f, "xcr0", m->xcr0, true);
	fprintf(f, ",\n \"legacy_bytes\": %d, \"header_bytes\": %d,\n", LEGACY_BYTES, HEADER_BYTES);
	fprintf(f, " \"enabled_standard_bytes\": %u, \"supported_standard_bytes\": %u, ",
		m->enabled_bytes, m->supported_bytes);
	if (m->xsavec)
		fprintf(f, "\"enabled_compacted_bytes\": %u", m->compacted_bytes);
	else
		fputs("\"enabled_compacted_bytes\": null", f);
}

static void put_kernel(FILE *f, const struct kernel *k)
{
	struct utsname kernel;

	uname(&kernel);
	fputs(",\n \"kernel\": {", f);
	put_text(f, "release", kernel.release);
	fputs(", ", f);
	put_mask(f, "supported", k->supported, k->has_supported);
	fputs(", ", f);
	put_mask(f, "permitted", k->permitted, k->has_permitted);
	fputs(", ", f);
	put_mask(f, "area_components", k->area_mask, k->has_area);
	if (k->has_area)
		fprintf(f, ", \"area_bytes\": %u", k->area_bytes);
	else
		fputs(", \"area_bytes\": null", f);
	if (k->signal_stack_bytes)
		fprintf(f, ", \"signal_stack_bytes\": %lu}", k->signal_stack_bytes);
	else
		fputs(", \"signal_stack_bytes\": null}", f);
}

static void put_document(FILE *f, const struct setup *s)
{

	fputs("{\n \"schema_version\": \"1\",\n", f);
	put_machine(f, &s->machine);
	put_components(f, &s->machine);
	put_kernel(f, &s->kernel);
	fprintf(f, ",\n \"passes\": %ld, \"repeats\": %ld, \"cold_places\": %d, ", s->passes,
		s->repeats, COLD_PLACES);
	put_text(f, "cycle_counter", s->cycles.source);
	fputs(", ", f);
	put_mask(f, "measured_components", s->usable, true);
	put_measurements(f, s);
	fputs("\n}\n", f);
}

static void prepare(struct setup *s)
{
	uint64_t amx = BIT(TILECFG) | BIT(TILEDATA);
	unsigned int largest;

	read_machine(&s->machine);
	read_kernel(&s->kernel);
	s->usable = s->machine.xcr0 & (BIT(NR_COMPONENTS) - 1);
	if (s->usable & amx && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILEDATA))
		s->usable &= ~amx;
	s->cycles = open_counter(PERF_COUNT_HW_CPU_CYCLES, false, NULL);
	largest = s->machine.supported_bytes;
	if (s->machine.compacted_bytes > largest)
		largest = s->machine.compacted_bytes;
	for (s->slot_bytes = 1024; s->slot_bytes < largest;)
		s->slot_bytes *= 2;
	s->memory = allocate(s->slot_bytes * COLD_PLACES);
	s->source = allocate(s->slot_bytes);
	state_area = allocate(s->slot_bytes);
}

int main(int argc, char **argv)
{
	static struct setup s = {.passes = 1000, .repeats = 21};
	static const struct number_option numbers[] = {
		{"passes", &s.passes, 1, 1000000},
		{"repeats", &s.repeats, 1, MAX_REPEATS},
		{},
	};
	const char *out = read_options(argc, argv, numbers, help_fmt);
	struct document document;

	stay_on_this_cpu();
	prepare(&s);
	document = document_begin(out);
	put_document(document.f, &s);
	document_end(&document);
	return 0;
}
