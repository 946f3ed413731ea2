// SPDX-License-Identifier: GPL-2.0
/*
 * switch_bench - what vector state adds to a context switch.
 *
 * Two threads on one CPU hand a byte to and fro through pipes.  In mode `none` they use no vector
 * register; in the other modes each fills the vector registers before every hand-over.  Between the
 * modes nothing else differs, so the difference is the price of the vector state: its save, its
 * restore, and filling the registers, which is measured alone and given beside.
 *
 * Times are CPU times of the two threads together, so that what other programs of the machine take
 * in between is not in them; wall times are beside.
 *
 * Promise: one source for x86-64 and RISC-V, one JSON document (schemas/switch_bench.schema.json)
 * with every repeat in it; the modes take turns, so that what changes in the machine meets them
 * alike; how often the threads were switched is the kernel's own count.
 * Limit: both threads wait in system calls, where RISC-V Linux has discarded the vector registers
 * and saves them all the same; what a preemption in the middle of a computation costs beyond that
 * (misses in the cache) is not here.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sys/resource.h>
#include <sys/utsname.h>

#ifdef __riscv
#include <sys/auxv.h>
#else
#include <cpuid.h>
#endif

#include "probe.h"

#define MAX_REPEATS 10001
#define WARM_UP 20 /* round trips before the measured ones */

const char tool_name[] = "switch_bench";

static const char help_fmt[] =
	"use: switch_bench --out FILE [--rounds N] [--repeats N]\n"
	"\n"
	"Measures what a context switch costs with and without vector state, between two threads "
	"on\n"
	"one CPU; writes JSON (schemas/switch_bench.schema.json).\n"
	"\n"
	"  --out FILE    replaced whole\n"
	"  --rounds N    round trips per repeat, two switches each, 1..1000000 (default 50)\n"
	"  --repeats N   repeats of each mode, 1..10001 (default 4001)\n"
	"\n"
	"Exit codes: 0 done; 2 usage; 3 FILE cannot be written, or threads cannot be made.\n";

/* ---- the architectures ----------------------------------------------------------------------- */

struct mode {
	const char *name;
	void (*fill)(void); /* NULL: leaves the vector registers alone */
	unsigned int state_bytes; /* that the mode adds to a thread's state; 0 if not available */
};

/* No library function may run between filling the registers and the system call: it might use or
 * clear them. */
#ifdef __riscv
#define ARCHITECTURE "riscv64"

static long call(long number, long a, long b, long c)
{
	register long a0 __asm__("a0") = a, a1 __asm__("a1") = b, a2 __asm__("a2") = c;
	register long a7 __asm__("a7") = number;

	__asm__ volatile("ecall" : "+r"(a0) : "r"(a1), "r"(a2), "r"(a7) : "memory");
	return a0;
}

static void fill_v(void)
{
	__asm__ volatile(".option push\n\t"
			 ".option arch, +v\n\t"
			 "vsetvli t0, zero, e8, m8, ta, ma\n\t"
			 "vmv.v.i v0, 5\n\t"
			 "vmv.v.i v8, 5\n\t"
			 "vmv.v.i v16, 5\n\t"
			 "vmv.v.i v24, 5\n\t"
			 ".option pop" ::
				 : "t0");
}

static unsigned int register_file_bytes(void)
{
	unsigned long vlenb;

	if (!(getauxval(AT_HWCAP) & (1UL << ('V' - 'A'))))
		return 0;
	__asm__ volatile("csrr %0, 0xc22" : "=r"(vlenb));
	return 32 * vlenb;
}

/* A thread that has used V once keeps it: only the threads of a mode may ask for vlenb. */
static void find_modes(struct mode *modes)
{
	modes[0] = (struct mode){"none", NULL, 0};
	modes[1] = (struct mode){"v", fill_v, register_file_bytes()};
}

static bool in_use(uint64_t *mask)
{
	(void)mask;
	return false; /* sstatus.VS is not a program's to read */
}
#else
#define ARCHITECTURE "x86_64"

static long call(long number, long a, long b, long c)
{
	long result;

	__asm__ volatile("syscall"
			 : "=a"(result)
			 : "a"(number), "D"(a), "S"(b), "d"(c)
			 : "rcx", "r11", "memory");
	return result;
}

/* The compiler is told of no AVX: it would add vzeroupper at the end, and the state were gone. */
#define ALL_XMM                                                                                  \
	"xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", \
		"xmm11", "xmm12", "xmm13", "xmm14", "xmm15"

static void fill_avx2(void)
{
	__asm__ volatile("vpcmpeqd %%ymm0, %%ymm0, %%ymm0\n\t"
			 ".irp n, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15\n\t"
			 "vmovdqa %%ymm0, %%ymm\\n\n\t"
			 ".endr" ::
				 : ALL_XMM);
}

static void fill_avx512(void)
{
	__asm__ volatile("vpternlogd $255, %%zmm0, %%zmm0, %%zmm0\n\t"
			 ".irp n, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, "
			 "19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31\n\t"
			 "vmovdqa64 %%zmm0, %%zmm\\n\n\t"
			 ".endr\n\t"
			 "kxnorw %%k1, %%k1, %%k1" ::
				 : ALL_XMM);
}

static unsigned int component_bytes(int number)
{
	unsigned int a, b, c, d;

	return __get_cpuid_count(0xd, number, &a, &b, &c, &d) ? a : 0;
}

static void find_modes(struct mode *modes)
{
	modes[0] = (struct mode){"none", NULL, 0};
	if (__builtin_cpu_supports("avx2"))
		modes[1] = (struct mode){"avx2", fill_avx2, component_bytes(2)};
	if (__builtin_cpu_supports("avx512f"))
		modes[2] = (struct mode){"avx512", fill_avx512,
					 component_bytes(2) + component_bytes(5) +
						 component_bytes(6) + component_bytes(7)};
}

/* XINUSE: the components that are not in their initial state, where the processor says. */
static bool in_use(uint64_t *mask)
{
	unsigned int a, b, c, d, low, high;

	if (!__get_cpuid_count(0xd, 1, &a, &b, &c, &d) || !(a & 1U << 2))
		return false;
	__asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(1));
	*mask = low | (uint64_t)high << 32;
	return true;
}
#endif

#define MAX_MODES 3

/* ---- two threads ----------------------------------------------------------------------------- */

struct repeat {
	uint64_t wall_ns, cpu_ns, instructions, fill_cpu_ns, fill_instructions;
	long switches;
	bool has_in_use;
	uint64_t in_use;
};

struct bench {
	long rounds;
	long repeats;
	int cpu, nr_modes;
	struct mode modes[MAX_MODES];
	struct repeat results[MAX_MODES][MAX_REPEATS];
	struct counter instructions;
};

struct pair {
	struct bench *bench;
	const struct mode *mode;
	struct repeat *to;
	int there[2], back[2];
	long other_switches;
};

static void pass(int from, int to)
{
	char byte = 0;

	if (from >= 0 && call(SYS_read, from, (long)&byte, 1) != 1)
		_exit(EXIT_UNFIT);
	if (to >= 0 && call(SYS_write, to, (long)&byte, 1) != 1)
		_exit(EXIT_UNFIT);
}

/* Of the process: its third thread sleeps meanwhile. */
static uint64_t cpu_now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts);
	return ts.tv_sec * 1000000000ULL + ts.tv_nsec;
}

static long switches_of_this_thread(void)
{
	struct rusage usage;

	getrusage(RUSAGE_THREAD, &usage);
	return usage.ru_nvcsw + usage.ru_nivcsw;
}

static void rounds_of_first(const struct pair *pair, long rounds)
{
	void (*fill)(void) = pair->mode->fill;

	for (long i = 0; i < rounds; i++) {
		if (fill)
			fill();
		pass(-1, pair->there[1]);
		pass(pair->back[0], -1);
	}
}

static void *second(void *data)
{
	struct pair *pair = data;
	void (*fill)(void) = pair->mode->fill;
	long before = 0;

	for (long i = 0; i < WARM_UP + pair->bench->rounds; i++) {
		if (i == WARM_UP)
			before = switches_of_this_thread();
		pass(pair->there[0], -1);
		if (fill)
			fill();
		pass(-1, pair->back[1]);
	}
	pair->other_switches = switches_of_this_thread() - before;
	return NULL;
}

static void *first(void *data)
{
	struct pair *pair = data;
	struct bench *bench = pair->bench;
	struct repeat *to = pair->to;
	uint64_t start_ns, cpu_ns, instructions;

	rounds_of_first(pair, WARM_UP);
	to->switches = switches_of_this_thread();
	cpu_ns = cpu_now_ns();
	instructions = read_counter(&bench->instructions);
	start_ns = now_ns();
	rounds_of_first(pair, bench->rounds);
	to->wall_ns = now_ns() - start_ns;
	to->instructions = read_counter(&bench->instructions) - instructions;
	to->cpu_ns = cpu_now_ns() - cpu_ns;
	to->switches = switches_of_this_thread() - to->switches;

	cpu_ns = cpu_now_ns();
	instructions = read_counter(&bench->instructions);
	for (long i = 0; pair->mode->fill && i < 2 * bench->rounds; i++)
		pair->mode->fill();
	to->has_in_use = in_use(&to->in_use);
	to->fill_instructions = read_counter(&bench->instructions) - instructions;
	to->fill_cpu_ns = cpu_now_ns() - cpu_ns;
	return NULL;
}

static void measure(struct bench *bench, int mode, int repeat)
{
	struct pair pair = {
		.bench = bench,
		.mode = &bench->modes[mode],
		.to = &bench->results[mode][repeat],
	};
	pthread_t threads[2];

	/* New threads each time: one that has used vectors never gets rid of their state. */
	if (pipe(pair.there) || pipe(pair.back) ||
	    pthread_create(&threads[1], NULL, second, &pair) ||
	    pthread_create(&threads[0], NULL, first, &pair))
		fail(EXIT_UNFIT, "cannot make two threads and two pipes: %s", strerror(errno));
	pthread_join(threads[0], NULL);
	pthread_join(threads[1], NULL);
	pair.to->switches += pair.other_switches;
	for (int i = 0; i < 2; i++) {
		close(pair.there[i]);
		close(pair.back[i]);
	}
}

/* ---- the document ---------------------------------------------------------------------------- */

static void put_repeat(FILE *f, const struct repeat *r, bool counted)
{
	fprintf(f, "{\"wall_ns\": %llu, \"cpu_ns\": %llu, \"fill_cpu_ns\": %llu, \"switches\": %ld",
		(unsigned long long)r->wall_ns, (unsigned long long)r->cpu_ns,
		(unsigned long long)r->fill_cpu_ns, r->switches);
	if (counted)
		fprintf(f, ", \"instructions\": %llu, \"fill_instructions\": %llu}",
			(unsigned long long)r->instructions,
			(unsigned long long)r->fill_instructions);
	else
		fputs(", \"instructions\": null, \"fill_instructions\": null}", f);
}

static void put_mode(FILE *f, const struct bench *bench, int mode)
{
	const struct mode *m = &bench->modes[mode];
	const struct repeat *first = &bench->results[mode][0];

	fprintf(f, "\n  {\"mode\": \"%s\", \"state_bytes\": %u, \"in_use\": ", m->name,
		m->state_bytes);
	if (first->has_in_use)
		fprintf(f, "\"0x%llx\"", (unsigned long long)first->in_use);
	else
		fputs("null", f);
	fputs(", \"repeats\": [", f);
	for (int i = 0; i < bench->repeats; i++) {
		fputs(i ? ",\n   " : "\n   ", f);
		put_repeat(f, &bench->results[mode][i], bench->instructions.source);
	}
	fputs("]}", f);
}

static void put_document(FILE *f, const struct bench *bench)
{
	struct utsname kernel;

	uname(&kernel);
	fputs("{\n \"schema_version\": \"1\",\n \"architecture\": \"" ARCHITECTURE "\",\n ", f);
	put_text(f, "kernel_release", kernel.release);
	fputs(",\n ", f);
	put_text(f, "emulator", emulator_name());
	fprintf(f, ",\n \"cpu\": %d,\n \"rounds\": %ld,\n ", bench->cpu, bench->rounds);
	put_text(f, "instruction_counter", bench->instructions.source);
	fputs(",\n \"modes\": [", f);
	for (int mode = 0; mode < bench->nr_modes; mode++) {
		put_mode(f, bench, mode);
		fputs(mode + 1 < bench->nr_modes ? "," : "\n ]\n}\n", f);
	}
}

int main(int argc, char **argv)
{
	static struct bench bench = {.rounds = 50, .repeats = 4001};
	static const struct number_option numbers[] = {
		{"rounds", &bench.rounds, 1, 1000000},
		{"repeats", &bench.repeats, 1, MAX_REPEATS},
		{},
	};
	const char *out = read_options(argc, argv, numbers, help_fmt);
	struct document document;

	bench.cpu = stay_on_this_cpu();
	bench.instructions = open_counter(PERF_COUNT_HW_INSTRUCTIONS, true, read_instret);
	find_modes(bench.modes);
	while (bench.nr_modes < MAX_MODES && bench.modes[bench.nr_modes].name &&
	       (!bench.modes[bench.nr_modes].fill || bench.modes[bench.nr_modes].state_bytes))
		bench.nr_modes++;
	for (int i = 0; i < bench.repeats; i++)
		for (int mode = 0; mode < bench.nr_modes; mode++)
			measure(&bench, (mode + i) % bench.nr_modes, i);
	document = document_begin(out);
	put_document(document.f, &bench);
	document_end(&document);
	return 0;
}
