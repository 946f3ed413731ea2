// SPDX-License-Identifier: GPL-2.0
/*
 * rvv_probe - how large is the vector register file, and what does moving it cost a program?
 *
 * Stores and loads all 32 registers as the kernel does when it switches threads (four groups of
 * eight), and moves the same number of bytes with scalar instructions beside it.
 *
 * Promise: VLEN is read from the hardware (vlenb); times are measured; instructions per pass are
 * those of the loops below, written in assembly so that they can be counted, and beside them stands
 * what the instruction counter says, where programs may read one.  One JSON document or none.
 * Limit: user space.  The kernel's save costs the same moves, and a trap's surroundings on top; on
 * an emulator the times say nothing about any hardware, and caches (cold) do not exist, so that
 * part is left out there unless asked for.
 */
#define _GNU_SOURCE
#include <sys/auxv.h>
#include <sys/utsname.h>

#include "probe.h"

#define MAX_REPEATS 1001
#define COLD_MIB 64 /* more than any cache of an RVV board */
#define SCALAR_STEP 64 /* bytes moved by one round of the scalar loops */

const char tool_name[] = "rvv_probe";
static const char help_fmt[] =
	"use: rvv_probe --out FILE [--passes N] [--repeats N] [--cold-mib N]\n"
	"\n"
	"Reads vlenb and measures what storing and loading the whole vector register file costs a\n"
	"program, against the same bytes with scalar code; writes JSON\n"
	"(schemas/rvv_probe.schema.json).\n"
	"\n"
	"  --out FILE     replaced whole\n"
	"  --passes N     stores or loads of the register file per repeat, 1..1000000 (default "
	"1000)\n"
	"  --repeats N    measurements of each kind, 1..1001 (default 21)\n"
	"  --cold-mib N   memory that the cold passes go through, a power of two, 1..1024 (default "
	"64;\n"
	"                 on an emulator none, unless given)\n"
	"\n"
	"Exit codes: 0 done; 2 usage; 3 no vector unit, or FILE cannot be written.\n";

/* ---- the moves: `passes` times all 32 registers, or as many bytes ---------------------------- */

static unsigned long read_vlenb(void)
{
	unsigned long bytes;

	__asm__ volatile("csrr %0, 0xc22" : "=r"(bytes));
	return bytes;
}

#define VECTOR_PASS(op)                          \
	"mv t1, %[at]\n\t" op " v0, (t1)\n\t"    \
	"add t1, t1, t0\n\t" op " v8, (t1)\n\t"  \
	"add t1, t1, t0\n\t" op " v16, (t1)\n\t" \
	"add t1, t1, t0\n\t" op " v24, (t1)\n\t"
#define VECTOR_PASS_INSTRUCTIONS 8

#define VECTOR_LOOP(op)                                                     \
	__asm__ volatile(".option push\n\t"                                 \
			 ".option arch, +v\n\t"                             \
			 "vsetvli t0, zero, e8, m8, ta, ma\n"               \
			 "1:\n\t" VECTOR_PASS(op) "addi %[n], %[n], -1\n\t" \
						  "bnez %[n], 1b\n\t"       \
						  ".option pop"             \
			 : [n] "+r"(passes)                                 \
			 : [at] "r"(at)                                     \
			 : "t0", "t1", "memory")

#define SCALAR_ROUND(op, reg)                                                                  \
	op " " reg ", 0(t1)\n\t" op " " reg ", 8(t1)\n\t" op " " reg ", 16(t1)\n\t" op " " reg \
	   ", 24(t1)\n\t" op " " reg ", 32(t1)\n\t" op " " reg ", 40(t1)\n\t" op " " reg       \
	   ", 48(t1)\n\t" op " " reg ", 56(t1)\n\t"
#define SCALAR_ROUND_INSTRUCTIONS 10 /* with the two that go on to the next one */

#define SCALAR_LOOP(op, reg)                                                      \
	__asm__ volatile("1:\n\t"                                                 \
			 "mv t1, %[at]\n"                                         \
			 "2:\n\t" SCALAR_ROUND(op, reg) "addi t1, t1, 64\n\t"     \
							"bne t1, %[end], 2b\n\t"  \
							"addi %[n], %[n], -1\n\t" \
							"bnez %[n], 1b\n\t"       \
			 : [n] "+r"(passes)                                       \
			 : [at] "r"(at), [end] "r"(at + bytes)                    \
			 : "t0", "t1", "memory")

#define LOOP_INSTRUCTIONS 2 /* addi, bnez around a pass */

static void vector_store(char *at, long bytes, long passes)
{
	(void)bytes;
	VECTOR_LOOP("vse8.v");
}

static void vector_load(char *at, long bytes, long passes)
{
	(void)bytes;
	VECTOR_LOOP("vle8.v");
}

static void scalar_store(char *at, long bytes, long passes)
{
	SCALAR_LOOP("sd", "zero");
}

static void scalar_load(char *at, long bytes, long passes)
{
	SCALAR_LOOP("ld", "t0");
}

struct kind {
	const char *name;
	void (*move)(char *at, long bytes, long passes);
	bool vector;
};

static const struct kind kinds[] = {
	{"vector-store", vector_store, true},
	{"vector-load", vector_load, true},
	{"scalar-store", scalar_store, false},
	{"scalar-load", scalar_load, false},
};

#define NR_KINDS (sizeof(kinds) / sizeof(kinds[0]))

/* Instructions of one pass of the loops above. */
static long instructions_per_pass(const struct kind *kind, long bytes)
{
	if (kind->vector)
		return VECTOR_PASS_INSTRUCTIONS + LOOP_INSTRUCTIONS;
	return 1 + bytes / SCALAR_STEP * SCALAR_ROUND_INSTRUCTIONS + LOOP_INSTRUCTIONS;
}

/* ---- measuring --------------------------------------------------------------------------------
 */

struct setup {
	long bytes; /* of the register file */
	long passes;
	long repeats;
	long cold_bytes; /* 0: no cold passes */
	const char *emulator;
	struct counter cycles, instructions;
};

struct series {
	double ns[MAX_REPEATS], cycles[MAX_REPEATS], instructions[MAX_REPEATS];
};

/* Each place of the memory once, in an order that no prefetcher guesses; returns their number. */
static long cold_passes(const struct kind *kind, char *memory, const struct setup *s)
{
	long nr = 1;
	unsigned long place = 0;

	while (nr * 2 * s->bytes <= s->cold_bytes)
		nr *= 2;
	/* A linear congruence with full period (Hull and Dobell: odd step, factor 1 mod 4). */
	for (long i = 0; i < nr; i++) {
		place = (place * 1664525 + 1013904223) & (nr - 1);
		kind->move(memory + place * s->bytes, s->bytes, 1);
	}
	return nr;
}

static void measure(const struct kind *kind, bool cold, char *memory, const struct setup *s,
		    struct series *to)
{
	for (int i = 0; i < s->repeats; i++) {
		uint64_t cycles, instructions, start;
		long passes = s->passes;

		instructions = read_counter(&s->instructions);
		cycles = read_counter(&s->cycles);
		start = now_ns();
		if (cold)
			passes = cold_passes(kind, memory, s);
		else
			kind->move(memory, s->bytes, passes);
		to->ns[i] = (double)(now_ns() - start) / passes;
		to->cycles[i] = (double)(read_counter(&s->cycles) - cycles) / passes;
		to->instructions[i] =
			(double)(read_counter(&s->instructions) - instructions) / passes;
	}
}

static void put_series(FILE *f, const char *name, double *values, int nr, bool there)
{
	fprintf(f, ", \"%s\": ", name);
	if (!there) {
		fputs("null", f);
		return;
	}
	qsort(values, nr, sizeof(*values), by_value);
	fprintf(f, "{\"min\": %.3f, \"median\": %.3f, \"max\": %.3f}", values[0], values[nr / 2],
		values[nr - 1]);
}

static void put_measurement(FILE *f, const struct kind *kind, bool cold, char *memory,
			    const struct setup *s, const char *separator)
{
	static struct series series;

	measure(kind, cold, memory, s, &series);
	fprintf(f, "%s\n  {\"kind\": \"%s\", \"memory\": \"%s\", \"instructions_per_pass\": %ld",
		separator, kind->name, cold ? "cold" : "hot",
		instructions_per_pass(kind, s->bytes));
	put_series(f, "ns_per_pass", series.ns, s->repeats, true);
	put_series(f, "cycles_per_pass", series.cycles, s->repeats, s->cycles.source);
	put_series(f, "counted_instructions_per_pass", series.instructions, s->repeats,
		   s->instructions.source);
	fputc('}', f);
}

/* ---- the document ---------------------------------------------------------------------------- */

static void put_document(FILE *f, const struct setup *s)
{
	char *hot = allocate(s->bytes);
	char *cold = s->cold_bytes ? allocate(s->cold_bytes) : NULL;
	struct utsname kernel;
	const char *separator = "";

	uname(&kernel);
	fputs("{\n \"schema_version\": \"1\",\n ", f);
	put_text(f, "kernel_release", kernel.release);
	fputs(",\n ", f);
	put_text(f, "emulator", s->emulator);
	fprintf(f, ",\n \"vlenb_bytes\": %ld,\n \"register_file_bytes\": %ld,\n", s->bytes / 32,
		s->bytes);
	fprintf(f, " \"passes\": %ld,\n \"repeats\": %ld,\n \"cold_bytes\": %ld,\n \"counters\": {",
		s->passes, s->repeats, s->cold_bytes);
	put_text(f, "cycles", s->cycles.source);
	fputs(", ", f);
	put_text(f, "instructions", s->instructions.source);
	fputs("},\n \"measurements\": [", f);
	for (size_t i = 0; i < NR_KINDS; i++, separator = ",")
		put_measurement(f, &kinds[i], false, hot, s, separator);
	for (size_t i = 0; cold && i < NR_KINDS; i++)
		put_measurement(f, &kinds[i], true, cold, s, separator);
	fputs("\n ]\n}\n", f);
	free(hot);
	free(cold);
}

int main(int argc, char **argv)
{
	struct setup s = {.passes = 1000, .repeats = 21};
	const char *emulator = emulator_name();
	long cold_mib = emulator ? 0 : COLD_MIB;
	const struct number_option numbers[] = {
		{"passes", &s.passes, 1, 1000000},
		{"repeats", &s.repeats, 1, MAX_REPEATS},
		{"cold-mib", &cold_mib, 1, 1024},
		{},
	};
	const char *out = read_options(argc, argv, numbers, help_fmt);
	struct document document;

	if (cold_mib & (cold_mib - 1))
		fail(EXIT_USAGE, "--cold-mib: got '%ld', expected a power of two", cold_mib);
	s.cold_bytes = cold_mib << 20;
	if (!(getauxval(AT_HWCAP) & (1UL << ('V' - 'A'))))
		fail(EXIT_UNFIT, "no V extension for programs here: hart without V, kernel without "
				 "CONFIG_RISCV_ISA_V, or sysctl abi.riscv_v_default_allow=0");
	stay_on_this_cpu();
	s.emulator = emulator;
	s.bytes = 32 * (long)read_vlenb();
	/* User-mode emulation gives programs the host's clock for either counter. */
	if (!emulator || strcmp(emulator, QEMU_USER)) {
		s.cycles = open_counter(PERF_COUNT_HW_CPU_CYCLES, false, read_cycle);
		s.instructions = open_counter(PERF_COUNT_HW_INSTRUCTIONS, false, read_instret);
	}
	document = document_begin(out);
	put_document(document.f, &s);
	document_end(&document);
	return 0;
}
