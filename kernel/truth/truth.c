// SPDX-License-Identifier: GPL-2.0
/*
 * truth - a QEMU TCG plugin: what the guest did with its vector registers, seen from outside.
 *
 * Promise: inside the window that the guest opens and closes (marker.h), every execution of the
 * first vector store of each save site and of the first vector load of each restore site is
 * counted, per hart, with the bytes that these and the three accesses after it move; for the whole
 * system and for the target process. Also counted, per hart: the instructions the target executes
 * in user mode, inside and outside the ranges named as spin loops; and the instructions of code
 * ranges that the guest names. Nothing in the guest depends on any of it. What went wrong is listed
 * under `problems`; a site whose code is not there is one.
 * Limit: the current task of a hart is learnt at each __switch_to, so the kernel's layout must be
 * the one the arguments were made from. An instruction that faults and is executed again counts
 * twice. Named code ranges are counted by blocks: one left in the middle by a trap counts whole.
 *
 * QEMU 10.0 shares translated code between harts when one host thread runs them all, and yet writes
 * the number of the hart it translates for into that code (gen_cpu_index() in
 * accel/tcg/plugin-gen.c takes the absence of CF_PARALLEL for a machine of one hart). So the hart
 * that is handed to a callback may be another one, and the inline operations on scoreboards even
 * change the constant in place: from hart 1 on they write anywhere. Hence no inline operations
 * here, and the hart is read from mhartid.
 *
 * Arguments: out=FILE switch=ADDRESS tgid=OFFSET kernel=START-END
 *            site=save|restore:ROLE:STATE:ADDRESS.ADDRESS.ADDRESS.ADDRESS (repeated)
 *            spin=START-END (repeated)
 */
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <qemu-plugin.h>

#include "marker.h"

QEMU_PLUGIN_EXPORT int qemu_plugin_version = QEMU_PLUGIN_VERSION;

#define MAX_SITES 64
#define MAX_SPINS 1024
#define MAX_RANGES 256
#define MAX_PROBLEMS (MAX_SITES + 32)
#define NAME_BYTES 48
#define ACCESSES 4
#define KERNEL_HALF (UINT64_C(1) << 63)

enum scope {
	SYSTEM,
	TARGET,
	SCOPES
};
enum privilege {
	USER = 0,
	SUPERVISOR = 1
};

struct moved {
	uint64_t count;
	uint64_t bytes;
};

struct site {
	bool save;
	char role[NAME_BYTES];
	char state[NAME_BYTES];
	uint64_t access[ACCESSES]; /* addresses, in order */
	struct moved (*moved)[SCOPES]; /* one per hart */
};

struct hart {
	int32_t tgid; /* of the task it runs */
	uint64_t switches; /* in the window */
	uint64_t instructions[2]; /* of the target in user mode, [1]: in spin loops */
	const struct site *moving; /* the site whose bytes count; null outside the window */
	bool moving_target;
	bool ran; /* a task was ever switched to here */
};

struct range {
	uint64_t start, end;
};

struct named_range {
	struct range range;
	uint64_t number;
	uint64_t instructions;
};

/* A block of kernel code outside the kernel's image. */
struct block {
	uint64_t start;
	uint64_t instructions;
	uint64_t executions; /* in the window */
};

static struct site sites[MAX_SITES];
static int nr_sites;
static struct range spins[MAX_SPINS];
static int nr_spins;
static struct named_range ranges[MAX_RANGES];
static int nr_ranges;
static struct block **blocks;
static size_t nr_blocks;
static char problems[MAX_PROBLEMS][160];
static int nr_problems;

static const char *out_path;
static uint64_t switch_address;
static uint64_t tgid_offset;
static struct range kernel;

static struct hart *harts;
static int nr_harts;
static struct qemu_plugin_register *a0, *a1, *a2, *privilege, *mhartid;
static GByteArray *buffer;

static bool window_open;
static int opened, closed;
static int64_t target_tgid;
static bool sites_checked;

__attribute__((format(printf, 1, 2))) static void problem(const char *format, ...)
{
	char text[sizeof(problems[0])];
	va_list args;

	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	for (int i = 0; i < nr_problems; i++)
		if (!strcmp(problems[i], text))
			return;
	if (nr_problems < MAX_PROBLEMS)
		strcpy(problems[nr_problems++], text);
}

static uint64_t read_register(struct qemu_plugin_register *handle)
{
	uint64_t value = 0;

	g_byte_array_set_size(buffer, 0);
	if (qemu_plugin_read_register(handle, buffer) > 0)
		memcpy(&value, buffer->data,
		       buffer->len < sizeof(value) ? buffer->len : sizeof(value));
	return value;
}

/* The hart that executes now, whatever number the callback was given: see above. */
static struct hart *this_hart(void)
{
	uint64_t index = read_register(mhartid);

	if (index >= (uint64_t)nr_harts) {
		problem("hart %" PRIu64 " is one too many", index);
		index = 0;
	}
	return &harts[index];
}

/*
 * The hart again, for what is called at every few instructions: reading a register costs more than
 * these take. Translated code keeps the address of the executing hart's state in rbp (TCG_AREG0 of
 * tcg/i386/tcg-target.h), this file is compiled to leave rbp alone, and so the register is read
 * again only when that address has changed. at_switch() holds the shortcut against mhartid.
 */
static struct {
	uintptr_t state;
	struct hart *hart;
} latest;

static inline uintptr_t executing_state(void)
{
	uintptr_t state;

	__asm__ volatile("mov %%rbp, %0" : "=r"(state));
	return state;
}

static inline struct hart *this_hart_quickly(void)
{
	uintptr_t state = executing_state();

	if (state != latest.state) {
		latest.state = state;
		latest.hart = this_hart();
	}
	return latest.hart;
}

static bool read_u32(uint64_t address, uint32_t *value)
{
	if (!qemu_plugin_read_memory_vaddr(address, buffer, sizeof(*value)))
		return false;
	memcpy(value, buffer->data, sizeof(*value));
	return true;
}

static bool is_access(uint32_t word, bool save, unsigned int reg)
{
	/* vse8.v or vle8.v, unmasked, any pointer */
	return (word & ~(31U << 15)) == ((save ? 0x02000027U : 0x02000007U) | reg << 7);
}

/* -- window --------------------------------------------------------------------------------- */

static void open_window(int64_t tgid)
{
	opened++;
	if (window_open) {
		problem("the window was opened again while it was open");
		return;
	}
	if (closed) {
		problem("the window was opened again after it had been closed");
		return;
	}
	target_tgid = tgid;
	window_open = true;
}

static void close_window(void)
{
	if (!window_open) {
		problem("the window was closed while it was not open");
		return;
	}
	for (int i = 0; i < nr_ranges; i++)
		for (size_t j = 0; j < nr_blocks; j++)
			if (blocks[j]->start >= ranges[i].range.start &&
			    blocks[j]->start < ranges[i].range.end)
				ranges[i].instructions +=
					blocks[j]->executions * blocks[j]->instructions;
	window_open = false;
	closed++;
}

static void name_range(uint64_t number, uint64_t start, uint64_t end)
{
	if (start >= end || nr_ranges == MAX_RANGES) {
		problem("range %" PRIu64 " from 0x%" PRIx64 " to 0x%" PRIx64 " is %s", number,
			start, end, start >= end ? "empty" : "one too many");
		return;
	}
	if (closed)
		problem("range %" PRIu64 " was named after the window", number);
	ranges[nr_ranges++] = (struct named_range){{start, end}, number, 0};
}

static void at_marker(unsigned int vcpu, void *number)
{
	switch ((uintptr_t)number) {
	case MARKER_OPEN:
		open_window((int64_t)read_register(a0));
		break;
	case MARKER_CLOSE:
		close_window();
		break;
	case MARKER_RANGE:
		name_range(read_register(a0), read_register(a1), read_register(a2));
		break;
	}
}

/* -- tasks and sites ------------------------------------------------------------------------ */

static void check_site(const struct site *site)
{
	for (int access = 0; access < ACCESSES; access++) {
		uint32_t word = 0;

		if (read_u32(site->access[access], &word) &&
		    is_access(word, site->save, access * 8))
			continue;
		problem("at 0x%" PRIx64 " stands %08" PRIx32
			", not the %s of v%d: the sites are of "
			"another kernel",
			site->access[access], word, site->save ? "store" : "load", access * 8);
		return;
	}
}

/* __switch_to(prev, next), in the kernel: its own code and data are mapped here. */
static void at_switch(unsigned int vcpu, void *unused)
{
	struct hart *hart = this_hart();
	uint32_t tgid = 0;

	if (this_hart_quickly() != hart)
		problem("the executing hart is not told by rbp: another QEMU or another host");

	for (int i = 0; i < nr_sites && !sites_checked; i++)
		check_site(&sites[i]);
	sites_checked = true;
	if (!read_u32(read_register(a1) + tgid_offset, &tgid))
		problem("the task that is switched to cannot be read");
	hart->tgid = (int32_t)tgid;
	hart->ran = true;
	if (window_open)
		hart->switches++;
}

static void at_first_access(unsigned int vcpu, void *data)
{
	const struct site *site = data;
	struct hart *hart = this_hart();
	struct moved *moved = site->moved[hart - harts];

	hart->moving = window_open ? site : NULL;
	if (!window_open)
		return;
	hart->moving_target = target_tgid && hart->tgid == target_tgid;
	moved[SYSTEM].count++;
	if (hart->moving_target)
		moved[TARGET].count++;
}

static void at_memory(unsigned int vcpu, qemu_plugin_meminfo_t info, uint64_t address, void *data)
{
	const struct site *site = data;
	struct hart *hart = this_hart();
	struct moved *moved = site->moved[hart - harts];
	uint64_t bytes = UINT64_C(1) << qemu_plugin_mem_size_shift(info);

	if (hart->moving != site) /* begun outside the window */
		return;
	moved[SYSTEM].bytes += bytes;
	if (hart->moving_target)
		moved[TARGET].bytes += bytes;
}

/* -- instructions --------------------------------------------------------------------------- */

/* data: how many instructions, and in the lowest bit whether in a spin loop. */
static void at_user(unsigned int vcpu, void *data)
{
	struct hart *hart;

	if (!window_open)
		return;
	hart = this_hart_quickly();
	if (hart->tgid == target_tgid && target_tgid)
		hart->instructions[(uintptr_t)data & 1] += (uintptr_t)data >> 1;
}

static void at_block(unsigned int vcpu, void *data)
{
	struct block *block = data;

	if (window_open)
		block->executions++;
}

/* -- translation ---------------------------------------------------------------------------- */

static void instrument_access(struct qemu_plugin_insn *insn, uint64_t address, uint32_t word)
{
	for (int i = 0; i < nr_sites; i++)
		for (int access = 0; access < ACCESSES; access++) {
			if (sites[i].access[access] != address ||
			    !is_access(word, sites[i].save, access * 8))
				continue;
			if (access == 0)
				qemu_plugin_register_vcpu_insn_exec_cb(
					insn, at_first_access, QEMU_PLUGIN_CB_R_REGS, &sites[i]);
			qemu_plugin_register_vcpu_mem_cb(insn, at_memory, QEMU_PLUGIN_CB_R_REGS,
							 QEMU_PLUGIN_MEM_RW, &sites[i]);
		}
}

static bool in_spin(uint64_t address)
{
	for (int i = 0; i < nr_spins; i++)
		if (address >= spins[i].start && address < spins[i].end)
			return true;
	return false;
}

/* Whether the instruction may trap, so that those after it in the block may not be executed. */
static bool may_trap(uint32_t word)
{
	if ((word & 3) == 3)
		switch (word & 0x7f) {
		case 0x13: /* integer with immediate */
		case 0x1b:
		case 0x33: /* integer */
		case 0x3b:
		case 0x17: /* auipc */
		case 0x37: /* lui */
		case 0x63: /* branches and jumps end a block anyway */
		case 0x67:
		case 0x6f:
			return false;
		default:
			return true;
		}
	if ((word & 3) == 1)
		return false;
	if ((word & 3) == 2) /* c.slli, or c.mv, c.add, c.jr, c.jalr; not c.ebreak */
		return word >> 13 != 0 && (word >> 13 != 4 || word == 0x9002);
	return word >> 13 != 0; /* c.addi4spn, else loads and stores */
}

static bool is_marker(uint32_t word)
{
	return word == MARKER_WORD(MARKER_OPEN) || word == MARKER_WORD(MARKER_CLOSE) ||
	       word == MARKER_WORD(MARKER_RANGE);
}

/*
 * Adds are placed before the first instruction of each stretch that, once begun, is begun to its
 * last instruction: a trap can only come from there. A marker ends a stretch, too: what follows the
 * one that opens the window counts, and what precedes the one that closes it, and that one itself.
 */
static void count_user(struct qemu_plugin_tb *tb)
{
	size_t length = qemu_plugin_tb_n_insns(tb);
	struct qemu_plugin_insn *first = NULL;
	uint64_t pending[2] = {0, 0};

	for (size_t i = 0; i < length; i++) {
		struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, i);
		uint32_t word = 0;

		qemu_plugin_insn_data(insn, &word, sizeof(word));
		if (!first)
			first = insn;
		pending[in_spin(qemu_plugin_insn_vaddr(insn))]++;
		if (i + 1 < length && !may_trap(word) && !is_marker(word))
			continue;
		for (int spin = 0; spin < 2; spin++) {
			if (pending[spin])
				qemu_plugin_register_vcpu_insn_exec_cb(
					first, at_user, QEMU_PLUGIN_CB_R_REGS,
					(void *)(uintptr_t)(pending[spin] << 1 | spin));
			pending[spin] = 0;
		}
		first = NULL;
	}
}

static struct block *block_of(uint64_t start, uint64_t instructions)
{
	struct block **more, *block;

	for (size_t i = 0; i < nr_blocks; i++)
		if (blocks[i]->start == start && blocks[i]->instructions == instructions)
			return blocks[i];
	more = realloc(blocks, (nr_blocks + 1) * sizeof(struct block *));
	if (more)
		blocks = more;
	block = calloc(1, sizeof(*block));
	if (!more || !block) {
		free(block);
		problem("out of memory");
		return NULL;
	}
	block->start = start;
	block->instructions = instructions;
	return blocks[nr_blocks++] = block;
}

static void count_block(struct qemu_plugin_tb *tb)
{
	struct block *block = block_of(qemu_plugin_tb_vaddr(tb), qemu_plugin_tb_n_insns(tb));

	if (block)
		qemu_plugin_register_vcpu_tb_exec_cb(tb, at_block, QEMU_PLUGIN_CB_NO_REGS, block);
}

static void at_translation(qemu_plugin_id_t id, struct qemu_plugin_tb *tb)
{
	uint64_t start = qemu_plugin_tb_vaddr(tb);
	/* Blocks are translated apart for each privilege, at the time they are first executed. */
	uint64_t mode = read_register(privilege);

	if (mode == USER)
		count_user(tb);
	else if (mode == SUPERVISOR && start >= KERNEL_HALF &&
		 (start < kernel.start || start >= kernel.end))
		count_block(tb);

	for (size_t i = 0; i < qemu_plugin_tb_n_insns(tb); i++) {
		struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, i);
		uint64_t address = qemu_plugin_insn_vaddr(insn);
		uint32_t word = 0;

		if (address == switch_address)
			qemu_plugin_register_vcpu_insn_exec_cb(insn, at_switch,
							       QEMU_PLUGIN_CB_R_REGS, NULL);
		if (qemu_plugin_insn_size(insn) != sizeof(word))
			continue;
		qemu_plugin_insn_data(insn, &word, sizeof(word));
		if (is_marker(word))
			qemu_plugin_register_vcpu_insn_exec_cb(insn, at_marker,
							       QEMU_PLUGIN_CB_R_REGS,
							       (void *)(uintptr_t)(word >> 20));
		if ((word & 0x5f) == 0x07) /* loads and stores of vectors and floating point */
			instrument_access(insn, address, word);
	}
}

static void at_vcpu_init(qemu_plugin_id_t id, unsigned int vcpu)
{
	GArray *registers;
	qemu_plugin_reg_descriptor *found;

	if (privilege)
		return;
	registers = qemu_plugin_get_registers();
	found = (qemu_plugin_reg_descriptor *)registers->data;
	for (unsigned int i = 0; i < registers->len; i++) {
		if (!strcmp(found[i].name, "a0"))
			a0 = found[i].handle;
		else if (!strcmp(found[i].name, "a1"))
			a1 = found[i].handle;
		else if (!strcmp(found[i].name, "a2"))
			a2 = found[i].handle;
		else if (!strcmp(found[i].name, "priv"))
			privilege = found[i].handle;
		else if (!strcmp(found[i].name, "mhartid"))
			mhartid = found[i].handle;
	}
	g_array_unref(registers);
	if (!a0 || !a1 || !a2 || !privilege || !mhartid) {
		fprintf(stderr, "truth: this QEMU does not show a0, a1, a2, priv and mhartid\n");
		exit(1);
	}
}

/* -- report --------------------------------------------------------------------------------- */

static struct moved sum_of(const struct site *site, enum scope scope)
{
	struct moved sum = {0, 0};

	for (int i = 0; i < nr_harts; i++) {
		sum.count += site->moved[i][scope].count;
		sum.bytes += site->moved[i][scope].bytes;
	}
	return sum;
}

static void print_total(FILE *out, bool save, enum scope scope, const char *end)
{
	struct moved total = {0, 0};

	for (int i = 0; i < nr_sites; i++)
		if (sites[i].save == save) {
			struct moved sum = sum_of(&sites[i], scope);

			total.count += sum.count;
			total.bytes += sum.bytes;
		}
	fprintf(out, "{\"count\": %" PRIu64 ", \"bytes\": %" PRIu64 "}%s", total.count, total.bytes,
		end);
}

static void print_sites(FILE *out)
{
	fprintf(out, " \"sites\": [");
	for (int i = 0; i < nr_sites; i++) {
		const char *comma = "";

		fprintf(out,
			"%s\n  {\"kind\": \"%s\", \"role\": \"%s\", \"state\": \"%s\", "
			"\"address\": "
			"\"0x%" PRIx64 "\", \"harts\": [",
			i ? "," : "", sites[i].save ? "save" : "restore", sites[i].role,
			sites[i].state, sites[i].access[0]);
		for (int j = 0; j < nr_harts; j++) {
			const struct moved *moved = sites[i].moved[j];

			if (!moved[SYSTEM].count)
				continue;
			fprintf(out,
				"%s{\"hart\": %d, \"system_count\": %" PRIu64
				", \"system_bytes\": %" PRIu64 ", \"target_count\": %" PRIu64
				", \"target_bytes\": %" PRIu64 "}",
				comma, j, moved[SYSTEM].count, moved[SYSTEM].bytes,
				moved[TARGET].count, moved[TARGET].bytes);
			comma = ", ";
		}
		fprintf(out, "]}");
	}
	fprintf(out, "\n ],\n");
}

static void print_report(FILE *out)
{
	uint64_t critical = 0, work = 0, spin = 0;
	const char *comma = "";

	fprintf(out, "{\n \"schema_version\": \"1\",\n \"window\": \"%s\",\n",
		window_open ? "open"
		: closed    ? "closed"
			    : "never-opened");
	fprintf(out, " \"target_tgid\": %" PRId64 ",\n \"problems\": [", target_tgid);
	for (int i = 0; i < nr_problems; i++)
		fprintf(out, "%s\"%s\"", i ? ", " : "", problems[i]);
	fprintf(out, "],\n \"saves\": {\"system\": ");
	print_total(out, true, SYSTEM, ", \"target\": ");
	print_total(out, true, TARGET, "},\n \"restores\": {\"system\": ");
	print_total(out, false, SYSTEM, ", \"target\": ");
	print_total(out, false, TARGET, "},\n");
	print_sites(out);
	fprintf(out, " \"harts\": [");
	for (int i = 0; i < nr_harts; i++) {
		if (!harts[i].ran)
			continue;
		fprintf(out,
			"%s\n  {\"hart\": %d, \"switches\": %" PRIu64 ", \"instructions\": %" PRIu64
			", \"spin_instructions\": %" PRIu64 "}",
			comma, i, harts[i].switches, harts[i].instructions[0],
			harts[i].instructions[1]);
		comma = ",";
		work += harts[i].instructions[0];
		spin += harts[i].instructions[1];
		if (harts[i].instructions[0] > critical)
			critical = harts[i].instructions[0];
	}
	fprintf(out,
		"\n ],\n \"instructions\": %" PRIu64 ",\n \"spin_instructions\": %" PRIu64
		",\n \"critical_instructions\": %" PRIu64 ",\n \"ranges\": [",
		work, spin, critical);
	for (int i = 0; i < nr_ranges; i++)
		fprintf(out,
			"%s\n  {\"number\": %" PRIu64 ", \"start\": \"0x%" PRIx64
			"\", \"end\": \"0x%" PRIx64 "\", \"instructions\": %" PRIu64 "}",
			i ? "," : "", ranges[i].number, ranges[i].range.start, ranges[i].range.end,
			ranges[i].instructions);
	fprintf(out, "\n ]\n}\n");
}

static void at_exit(qemu_plugin_id_t id, void *unused)
{
	char temporary[4096];
	FILE *out;
	bool failed;

	if (window_open)
		problem("the window was never closed");
	else if (!opened)
		problem("the window was never opened");
	if (!sites_checked)
		problem("no task switch was seen: the address of __switch_to is of another kernel");
	snprintf(temporary, sizeof(temporary), "%s.new", out_path);
	out = fopen(temporary, "w");
	if (!out) {
		fprintf(stderr, "truth: %s: cannot write: %s\n", temporary, strerror(errno));
		return;
	}
	print_report(out);
	failed = ferror(out);
	if (fclose(out) || failed || rename(temporary, out_path)) {
		fprintf(stderr, "truth: %s: cannot write: %s\n", out_path, strerror(errno));
		remove(temporary);
	}
}

/* -- arguments ------------------------------------------------------------------------------ */

static bool parse_range(const char *text, struct range *range)
{
	return sscanf(text, "%" SCNx64 "-%" SCNx64, &range->start, &range->end) == 2 &&
	       range->start < range->end;
}

static bool parse_site(const char *text)
{
	struct site *site = &sites[nr_sites];
	char kind[NAME_BYTES];

	if (nr_sites == MAX_SITES ||
	    sscanf(text, "%47[a-z]:%47[a-z-]:%47[a-z]:%" SCNx64 ".%" SCNx64 ".%" SCNx64 ".%" SCNx64,
		   kind, site->role, site->state, &site->access[0], &site->access[1],
		   &site->access[2], &site->access[3]) != 7)
		return false;
	site->save = !strcmp(kind, "save");
	site->moved = calloc(nr_harts, sizeof(*site->moved));
	nr_sites++;
	return site->moved && (site->save || !strcmp(kind, "restore"));
}

static bool parse(const char *name, const char *value)
{
	if (!strcmp(name, "out")) {
		out_path = value;
		return true;
	}
	if (!strcmp(name, "switch"))
		return sscanf(value, "%" SCNx64, &switch_address) == 1;
	if (!strcmp(name, "tgid"))
		return sscanf(value, "%" SCNx64, &tgid_offset) == 1;
	if (!strcmp(name, "kernel"))
		return parse_range(value, &kernel);
	if (!strcmp(name, "site"))
		return parse_site(value);
	if (!strcmp(name, "spin"))
		return nr_spins < MAX_SPINS && parse_range(value, &spins[nr_spins++]);
	return false;
}

QEMU_PLUGIN_EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t *info, int argc,
					   char **argv)
{
	if (!info->system_emulation || strcmp(info->target_name, "riscv64")) {
		fprintf(stderr, "truth: made for qemu-system-riscv64, this is %s\n",
			info->target_name);
		return -1;
	}
	nr_harts = info->system.max_vcpus;
	harts = calloc(nr_harts, sizeof(*harts));
	for (int i = 0; i < argc; i++) {
		char *equals = strchr(argv[i], '=');

		if (equals)
			*equals = '\0';
		if (!equals || !parse(argv[i], equals + 1)) {
			fprintf(stderr,
				"truth: argument %s=%s: unknown or not of the form in truth.c\n",
				argv[i], equals ? equals + 1 : "");
			return -1;
		}
	}
	if (!harts || !out_path || !switch_address || !tgid_offset || !kernel.end || !nr_sites) {
		fprintf(stderr, "truth: out, switch, tgid, kernel and a site are needed\n");
		return -1;
	}
	buffer = g_byte_array_new();
	qemu_plugin_register_vcpu_init_cb(id, at_vcpu_init);
	qemu_plugin_register_vcpu_tb_trans_cb(id, at_translation);
	qemu_plugin_register_atexit_cb(id, at_exit, NULL);
	return 0;
}
