// SPDX-License-Identifier: GPL-2.0
/*
 * Write what was observed as one JSON document, schemas/observer.schema.json.
 *
 * Promise: the sums are those of the cells beside them; the rest is tool.h's.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <sys/utsname.h>
#include "loader.h"

static const char *const why_names[NR_WHYS] = {
	[WHY_RUNNABLE] = "runnable",
	[WHY_BLOCKING] = "blocking",
};

static const char *const outcome_names[NR_OUTCOMES] = {
	[OUT_OFF] = "off",
	[OUT_INITIAL] = "initial",
	[OUT_CLEAN] = "clean",
	[OUT_DISCARDED] = "discarded_saves",
	[OUT_COMPUTE] = "compute_saves",
	[OUT_SPIN] = "spin_saves",
	[OUT_KERNEL_SAVE] = "kernel_saves",
	[OUT_KERNEL_CLEAN] = "kernel_mode_clean",
};

static void put_optional(FILE *f, const char *text)
{
	put_string(f, text && text[0] ? text : NULL);
}

static void put_range(FILE *f, uint64_t start, uint64_t end)
{
	fprintf(f, "{\"start\": \"0x%llx\", \"end\": \"0x%llx\"}", (unsigned long long)start,
		(unsigned long long)end);
}

static uint64_t sum_of(const struct counters *c, enum outcome first, enum outcome last)
{
	uint64_t sum = 0;

	for (int why = 0; why < NR_WHYS; why++)
		for (int out = first; out <= (int)last; out++)
			sum += c->outs[why][out];
	return sum;
}

/* By hand: a document of many threads is mostly these, and printf is slow at it. */
static void put_count(FILE *f, const char *name, unsigned long long value)
{
	char digits[24];
	char *at = &digits[sizeof(digits) - 1];

	*at = '\0';
	do
		*--at = '0' + value % 10;
	while (value /= 10);
	putc_unlocked('"', f);
	fputs_unlocked(name, f);
	fputs_unlocked("\": ", f);
	fputs_unlocked(at, f);
}

static void put_outs(FILE *f, const struct counters *c)
{
	for (int why = 0; why < NR_WHYS; why++) {
		fputs_unlocked(why ? ", \"" : "\"", f);
		fputs_unlocked(why_names[why], f);
		fputs_unlocked("\": {", f);
		for (int out = 0; out < NR_OUTCOMES; out++) {
			if (out)
				fputs_unlocked(", ", f);
			put_count(f, outcome_names[out], c->outs[why][out]);
		}
		putc_unlocked('}', f);
	}
}

static void put_counters(FILE *f, const struct counters *c, bool with_migrations)
{
	put_outs(f, c);
	fputs_unlocked(", ", f);
	put_count(f, "pending_restores", c->pending_restores);
	fputs_unlocked(", ", f);
	if (with_migrations)
		put_count(f, "migrations", c->migrations);
	else
		fputs_unlocked("\"migrations\": null", f);
}

static void put_sums(FILE *f, const struct counters *c)
{
	const struct {
		const char *name;
		enum outcome first, last;
	} sums[] = {
		{"switches", OUT_OFF, OUT_KERNEL_CLEAN},
		{"user_saves", OUT_DISCARDED, OUT_SPIN},
		{"discarded_saves", OUT_DISCARDED, OUT_DISCARDED},
		{"undiscarded_saves", OUT_COMPUTE, OUT_SPIN},
		{"compute_saves", OUT_COMPUTE, OUT_COMPUTE},
		{"spin_saves", OUT_SPIN, OUT_SPIN},
		{"kernel_saves", OUT_KERNEL_SAVE, OUT_KERNEL_SAVE},
	};

	for (size_t i = 0; i < sizeof(sums) / sizeof(sums[0]); i++)
		fprintf(f, "%s\"%s\": %llu", i ? ", " : "", sums[i].name,
			(unsigned long long)sum_of(c, sums[i].first, sums[i].last));
}

struct row_writer {
	FILE *f;
	pid_t tgid;
	bool with_migrations;
	const char *separator;
};

static void put_row(void *data, pid_t tid, const struct thread_row *row)
{
	struct row_writer *w = data;
	char name[COMM_SIZE];

	fprintf(w->f, "%s\n  {\"tid\": %d, \"name\": ", w->separator, tid);
	if (!row->comm[0] && target_thread_name(w->tgid, tid, name))
		put_string(w->f, name);
	else
		put_optional(w->f, row->comm);
	fprintf(w->f, ", \"threads\": %u, \"exited\": %u, ", row->threads, row->exited);
	put_counters(w->f, &row->counters, w->with_migrations);
	fputc('}', w->f);
	w->separator = ",";
}

static bool attached(const struct observation *seen, const char *name)
{
	for (int i = 0; i < NR_PROGRAMS; i++)
		if (!strcmp(seen->programs[i].name, name))
			return seen->programs[i].attached;
	return false;
}

static void put_programs(FILE *f, const struct observation *seen)
{
	fputs(" \"programs\": [", f);
	for (int i = 0; i < NR_PROGRAMS; i++) {
		const struct program *p = &seen->programs[i];

		fprintf(f, "%s\n  {\"name\": \"%s\", \"event\": \"%s\", \"attached\": %s, ",
			i ? "," : "", p->name, p->event, p->attached ? "true" : "false");
		fputs("\"reason\": ", f);
		put_optional(f, p->reason);
		fprintf(f, ", \"instructions\": %u, \"jit\": ", p->instructions);
		if (p->jit_start)
			put_range(f, p->jit_start, p->jit_end);
		else
			fputs("null", f);
		fputc('}', f);
	}
	fputs("\n ],\n", f);
}

static bool put_reasons(FILE *f, const struct observation *seen, struct instance *in)
{
	const char *separator = "";
	const struct {
		const char *name;
		bool holds;
	} reasons[] = {
		{"observer-program-missing",
		 !attached(seen, "on_migrate") || !attached(seen, "on_new")},
		{"observer-lost-threads", instance_lost_threads(in) > 0},
		{"observer-target-exited", !strcmp(seen->stopped_by, "target-exit")},
	};

	fputs(" \"invalid_reasons\": [", f);
	for (size_t i = 0; i < sizeof(reasons) / sizeof(reasons[0]); i++) {
		if (reasons[i].holds) {
			fprintf(f, "%s\"%s\"", separator, reasons[i].name);
			separator = ", ";
		}
	}
	fputs("],\n", f);
	return !separator[0];
}

static bool put_document(FILE *f, const struct observation *seen, struct instance *in)
{
	struct row_writer writer = {f, seen->target->tgid, attached(seen, "on_migrate"), ""};
	struct counters c;
	struct utsname kernel;
	bool valid;

	uname(&kernel);
	fputs("{\n \"schema_version\": \"1\",\n", f);
	fputs(" \"kernel\": {\"release\": ", f);
	put_string(f, kernel.release);
	fputs(", \"version\": ", f);
	put_string(f, kernel.version);
	fprintf(f, "},\n \"vlen_bits\": %u,\n", vlen_bits());
	fprintf(f, " \"target\": {\"tgid\": %d, \"name\": ", seen->target->tgid);
	put_string(f, seen->target->name);
	fprintf(f, ", \"position_independent\": %s, \"load_bias\": \"0x%llx\"},\n",
		seen->target->position_independent ? "true" : "false",
		(unsigned long long)seen->target->load_bias);
	fprintf(f,
		" \"window\": {\"start_ns\": %llu, \"stop_ns\": %llu, \"stopped_by\": \"%s\", "
		"\"harts_online_start\": \"%s\", \"harts_online_stop\": \"%s\"},\n",
		(unsigned long long)seen->start_ns, (unsigned long long)seen->stop_ns,
		seen->stopped_by, seen->harts_start, seen->harts_stop);
	fprintf(f, " \"semantics\": {\"syscall_state\": \"%s\", \"blocked\": {",
		seen->semantics->syscall_state);
	put_outs(f, &seen->semantics->blocked);
	fputs("}, \"preempted\": {", f);
	put_outs(f, &seen->semantics->preempted);
	fputs("}},\n", f);
	put_programs(f, seen);
	fputs(" \"spin_ranges\": [", f);
	for (unsigned int i = 0; i < seen->nr_spin; i++) {
		fputs(i ? ", " : "", f);
		put_range(f, seen->spin[i].start, seen->spin[i].end);
	}
	fputs("],\n", f);
	instance_totals(in, SLOT_ALL, &c);
	fputs(" \"totals\": {", f);
	put_sums(f, &c);
	fputs(", ", f);
	put_counters(f, &c, writer.with_migrations);
	fputs("},\n", f);
	instance_totals(in, SLOT_WITHOUT_ROW, &c);
	fputs(" \"without_row\": {", f);
	put_counters(f, &c, writer.with_migrations);
	fprintf(f, "},\n \"max_threads\": %u,\n", seen->max_threads);
	if (attached(seen, "on_new"))
		fprintf(f, " \"threads_made\": %llu,\n \"lost_threads\": %llu,\n",
			(unsigned long long)seen->threads_made,
			(unsigned long long)instance_lost_threads(in));
	else
		fputs(" \"threads_made\": null,\n \"lost_threads\": null,\n", f);
	valid = put_reasons(f, seen, in);
	fputs(" \"threads\": [", f);
	writer.separator = "";
	instance_rows(in, put_row, &writer);
	fputs("\n ]\n}\n", f);
	return valid;
}

bool document_write(const char *path, const struct observation *seen, struct instance *in)
{
	struct document d = document_begin(path);
	bool valid = put_document(d.f, seen, in);

	document_end(&d);
	return valid;
}
