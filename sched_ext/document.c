// SPDX-License-Identifier: GPL-2.0
/*
 * Write what the scheduler did as one JSON document, schemas/scheduler.schema.json.
 */
#include <stdio.h>
#include <string.h>
#include <sys/utsname.h>
#include "loader.h"

#define NAME_OF(name) #name,
const char *const counter_names[VSTAT_NR] = {VSTATE_COUNTERS(NAME_OF)};

static void put_named(FILE *f, const char *before, const char *name, const char *value)
{
	fprintf(f, "%s\"%s\": ", before, name);
	put_string(f, value);
}

static void put_knobs(FILE *f, const struct settings *s)
{
	for (int k = 0; k < NR_KNOBS; k++) {
		const char *choice = knob_choice(k, s->knob[k]);
		char key[32];

		snprintf(key, sizeof(key), "%s", knob_name(k));
		for (char *c = key; *c; c++)
			*c = *c == '-' ? '_' : *c;
		if (choice)
			put_named(f, k ? ", " : "", key, choice);
		else
			fprintf(f, "%s\"%s\": %ld", k ? ", " : "", key, s->knob[k]);
	}
}

static void put_state(FILE *f, const char *name, const struct kernel_state *s)
{
	fprintf(f, " \"%s\": {", name);
	put_named(f, "", "state", s->state);
	put_named(f, ", ", "ops", s->ops);
	fprintf(f,
		", \"enable_seq\": %ld, \"hotplug_seq\": %ld, \"nr_rejected\": %ld, "
		"\"switch_all\": %ld},\n",
		s->enable_seq, s->hotplug_seq, s->nr_rejected, s->switch_all);
}

static void put_exit(FILE *f, const struct exit_info *e)
{
	if (!e->kind) {
		fputs(" \"ejected\": null,\n", f);
		return;
	}
	fprintf(f, " \"ejected\": {\"kind\": %d, \"code\": %ld", e->kind, e->code);
	put_named(f, ", ", "reason", e->reason);
	put_named(f, ", ", "message", e->message);
	fputs("},\n", f);
}

static void put_hints(FILE *f, const struct report *r)
{
	const struct vstate_phase_hint *h = &r->last_hint;

	if (r->hinted)
		fprintf(f,
			" \"announced\": {\"batches\": %u, \"prefill_tokens\": %llu, "
			"\"decode_tokens\": %llu},\n",
			h->sequence, h->prefill_total, h->decode_total);
	else
		fputs(" \"announced\": null,\n", f);
}

static void put_threads(FILE *f, const struct roll *roll)
{
	fputs(" \"threads\": [", f);
	for (unsigned int i = 0; i < roll->nr; i++) {
		const struct thread *t = &roll->thread[i];

		fprintf(f, "%s\n  {\"tid\": %d", i ? "," : "", t->tid);
		put_named(f, ", ", "name", t->name);
		put_named(f, ", ", "policy", sched_policy_name(t->policy));
		fprintf(f, ", \"managed\": %s}", t->managed ? "true" : "false");
	}
	fputs("\n ]\n}\n", f);
}

static bool put_reasons(FILE *f, const struct report *r)
{
	const char *separator = "";
	bool gone = !strcmp(r->stopped_by, "target-exit");
	const struct {
		const char *name;
		bool holds;
	} reasons[] = {
		{"scheduler-ejected", r->exit.kind},
		{"scheduler-not-in-charge", !r->exit.kind && !kernel_state_is_ours(&r->at_stop)},
		{"scheduler-restarted", r->restarts},
		{"scheduler-target-exited", gone},
		{"scheduler-lost-threads", r->counters.counter[VSTAT_threads_lost]},
		{"scheduler-thread-not-managed", !gone && r->roll.nr_managed != r->roll.nr},
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

static bool put_document(FILE *f, const struct report *r)
{
	const struct settings *s = &r->options->set;
	struct utsname kernel;
	bool valid;

	uname(&kernel);
	fputs("{\n \"schema_version\": \"1\",\n \"kernel\": {", f);
	put_named(f, "", "release", kernel.release);
	put_named(f, ", ", "version", kernel.version);
	put_named(f, "},\n ", "policy", policy_names[s->policy]);
	put_named(f, ",\n ", "mode", mode_names[s->mode]);
	put_named(f, ",\n ", "scope", scope_names[s->scope]);
	fputs(",\n \"knobs\": {", f);
	put_knobs(f, s);
	fprintf(f, "},\n \"target\": {\"tgid\": %d", r->options->pid);
	put_named(f, ", ", "name", r->target_name);
	fprintf(f, "},\n \"window\": {\"start_ns\": %llu, \"stop_ns\": %llu",
		(unsigned long long)r->start_ns, (unsigned long long)r->stop_ns);
	put_named(f, ", ", "stopped_by", r->stopped_by);
	fputs("},\n", f);
	put_state(f, "at_start", &r->at_start);
	put_state(f, "at_stop", &r->at_stop);
	put_exit(f, &r->exit);
	fprintf(f, " \"restarts\": %u,\n \"counters\": {", r->restarts);
	for (int i = 0; i < VSTAT_NR; i++)
		fprintf(f, "%s\"%s\": %llu", i ? ", " : "", counter_names[i],
			r->counters.counter[i]);
	fputs("},\n", f);
	put_hints(f, r);
	valid = put_reasons(f, r);
	put_threads(f, &r->roll);
	return valid;
}

bool document_write(const char *path, const struct report *r)
{
	struct document d = document_begin(path);
	bool valid = put_document(d.f, r);

	document_end(&d);
	return valid;
}
