// SPDX-License-Identifier: GPL-2.0
/*
 * The command line: every knob by name, its choices, its bounds and its defaults, in one table.
 *
 * Promise: a knob that is not in this table does not exist; --help, the lines printed at start and
 * the JSON document come from it.  What cannot be understood is one line and exit code 2.
 * Limit: the original design's report names neither the vector and normal slices, nor the vector
 * weight, nor the hints' time to live; those defaults are ours in both modes.
 */
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "loader.h"

#define NR_POLICIES 3
#define NR_MODES 2
#define FIRST_KNOB 256 /* option values below are characters */

const char *const policy_names[] = {"long-slice", "vhot", "cooperative", NULL};
const char *const mode_names[] = {"faithful", "revised", NULL};
const char *const scope_names[] = {"partial", "all", NULL};

static const char *const rules[] = {"declared", "declared-or-dirty", "any-dirty", "live-dirty",
				    NULL};
static const char *const samples[] = {"stop", "tick", NULL};
static const char *const switches[] = {"off", "on", NULL};
static const char *const mixes[] = {"proportional", "larger", NULL};
static const char *const stickies[] = {"off", "always", "adaptive", NULL};
static const char *const placements[] = {"off", "last", "workers", NULL};
static const char *const nexts[] = {"head", "earliest", NULL};
static const char *const credits[] = {"enqueue", "wakeup", NULL};

// clang-format off
static const struct {
	const char *name;
	const char *const *choices; /* NULL: a number */
	long least, most;
	long by_mode[NR_MODES];
	const char *help;
} knobs[NR_KNOBS] = {
	[KNOB_RULE] = {"rule", rules, 0, 3, {0, 0},
		"who is hot (default: by policy)"},
	[KNOB_SAMPLE] = {"sample", samples, 0, 1, {0, 1},
		"look at VS when a turn ends, or also at ticks"},
	[KNOB_HINTS] = {"hints", switches, 0, 1, {0, 0},
		"follow phase hints (default: by policy)"},
	[KNOB_VECTOR_MS] = {"vector-ms", NULL, 1, 1000, {50, 50},
		"slice of a hot thread"},
	[KNOB_NORMAL_MS] = {"normal-ms", NULL, 1, 1000, {20, 20},
		"slice of any other"},
	[KNOB_PREFILL_MS] = {"prefill-ms", NULL, 1, 1000, {50, 50},
		"slice in a prefill phase"},
	[KNOB_DECODE_MS] = {"decode-ms", NULL, 1, 1000, {30, 30},
		"slice in a decode phase"},
	[KNOB_VECTOR_WEIGHT] = {"vector-weight", NULL, 1, 100, {2, 2},
		"charge of a hot thread is divided by it"},
	[KNOB_PREFILL_WEIGHT] = {"prefill-weight", NULL, 1, 100, {3, 3},
		"the same in a prefill phase"},
	[KNOB_DECODE_WEIGHT] = {"decode-weight", NULL, 1, 100, {2, 2},
		"the same in a decode phase"},
	[KNOB_MIXED] = {"mixed", mixes, 0, 1, {0, 0},
		"mixed batches: by token share, or the larger part"},
	[KNOB_STICKY] = {"sticky", stickies, 0, 2, {0, 0},
		"wait for a busy home CPU (default: by policy)"},
	[KNOB_PLACEMENT] = {"placement", placements, 0, 2, {1, 1},
		"home CPU: none, the last one, or one per worker"},
	[KNOB_NEXT] = {"next", nexts, 0, 1, {0, 1},
		"when a turn ends: the head of the queue, or the earliest, itself included"},
	[KNOB_CREDIT] = {"credit", credits, 0, 1, {0, 1},
		"bound sleep credit at each queueing, or at wake-ups"},
	[KNOB_DECAY_MS] = {"decay-ms", NULL, 1, 60000, {200, 200},
		"how long a thread stays hot"},
	[KNOB_HINT_TTL_MS] = {"hint-ttl-ms", NULL, 1, 60000, {5000, 5000},
		"how long a hint holds"},
	[KNOB_BOOST_LIMIT_MS] = {"boost-limit-ms", NULL, 0, 60000, {0, 20},
		"what weights may spare a thread before it sleeps; 0: no limit"},
	[KNOB_PATIENCE_MS] = {"patience-ms", NULL, 0, 60000, {0, 50},
		"how long sticking may pass over the queue; 0: for ever"},
	[KNOB_DEFER_MS] = {"defer-ms", NULL, 0, 200, {0, 20},
		"time between interruptions of hot threads, unless one waits as long; 0: none"},
	[KNOB_LEAD_MS] = {"lead-ms", NULL, 0, 60000, {0, 100},
		"run time that a thread may owe when it is queued; 0: any"},
	[KNOB_MAX_THREADS] = {"max-threads", NULL, 1, 1 << 20, {16384, 16384},
		"rows for threads in the class"},
	[KNOB_WATCHDOG_MS] = {"watchdog-ms", NULL, 100, 30000, {30000, 30000},
		"the kernel ends a scheduler that lets a thread wait longer"},
	[KNOB_INTERVAL_MS] = {"interval-ms", NULL, 1, 3600000, {10000, 10000},
		"a line of statistics"},
};
// clang-format on

/* [policy][mode] */
static const long default_rule[NR_POLICIES][NR_MODES] = {
	{VSTATE_RULE_DECLARED, VSTATE_RULE_DECLARED},
	{VSTATE_RULE_DECLARED_OR_DIRTY, VSTATE_RULE_LIVE_DIRTY},
	{VSTATE_RULE_ANY_DIRTY, VSTATE_RULE_LIVE_DIRTY},
};
static const long default_hints[NR_POLICIES] = {0, 0, 1};
static const long default_sticky[NR_POLICIES] = {VSTATE_STICKY_OFF, VSTATE_STICKY_OFF,
						 VSTATE_STICKY_ADAPTIVE};

const char *knob_name(enum knob k)
{
	return knobs[k].name;
}

const char *knob_choice(enum knob k, long value)
{
	return knobs[k].choices ? knobs[k].choices[value] : NULL;
}

static void put_choices(FILE *to, const char *const *names)
{
	for (int i = 0; names[i]; i++)
		fprintf(to, "%s%s", i ? "|" : "", names[i]);
}

static __attribute__((noreturn)) void help(void)
{
	fputs("use: scx_vstate --policy P --pid TGID --out FILE [--scope S] [--mode M] [--KNOB "
	      "VALUE]...\n"
	      "\n"
	      "Schedules a running process so that its vector work is interrupted less; writes "
	      "one\n"
	      "JSON document (schemas/scheduler.schema.json) when it ends.\n"
	      "\n"
	      "  --policy long-slice    every thread of the process counts as hot: knows no "
	      "vectors\n"
	      "  --policy vhot          threads that were seen with live vector registers\n"
	      "  --policy cooperative   those, and what the process says in its phase hints\n"
	      "  --pid TGID             the process; its threads move over, and all it will make\n"
	      "  --out FILE             replaced whole at the end\n"
	      "  --scope partial|all    the process only (default), or all threads of the machine\n"
	      "  --mode revised|faithful  defaults of the knobs: ours, or the original design's\n"
	      "\n"
	      "Knobs (default revised / faithful where they differ):\n",
	      stdout);
	for (int k = 0; k < NR_KNOBS; k++) {
		const long *d = knobs[k].by_mode;

		printf("  --%s ", knobs[k].name);
		if (knobs[k].choices)
			put_choices(stdout, knobs[k].choices);
		else
			printf("%ld..%ld", knobs[k].least, knobs[k].most);
		printf("\n      %s", knobs[k].help);
		if (k == KNOB_RULE || k == KNOB_HINTS || k == KNOB_STICKY)
			;
		else if (knobs[k].choices)
			printf(" (%s / %s)", knobs[k].choices[d[1]], knobs[k].choices[d[0]]);
		else if (d[0] != d[1])
			printf(" (%ld / %ld)", d[1], d[0]);
		else
			printf(" (%ld)", d[1]);
		putchar('\n');
	}
	fputs("  --hold\n      do what takes long, print \"loaded\", take over when SIGUSR1 comes\n"
	      "  --verbose\n      all that libbpf says, with the verifier's log when a load fails\n"
	      "  --help\n      this text\n"
	      "\n"
	      "Example, with the process under the scheduler until Ctrl-C:\n"
	      "  scx_vstate --policy cooperative --pid $(pidof llama-server) --out scheduler.json\n"
	      "\n"
	      "Settings and threads are printed first, then \"ready\": the kernel says it is "
	      "enabled.\n"
	      "SIGINT or SIGTERM ends it in order.\n"
	      "\n"
	      "Exit codes: 0 valid document written; 2 usage; 3 machine or kernel unfit, or the "
	      "kernel\n"
	      "ended the scheduler before it was ready, nothing written; 4 document written, but\n"
	      "invalid_reasons is not empty; 130 a signal came before \"ready\", nothing "
	      "written.\n",
	      stdout);
	exit(EXIT_DONE);
}

static int choice(const char *option, const char *text, const char *const *names)
{
	char expected[128] = "";

	for (int i = 0; names[i]; i++) {
		size_t used = strlen(expected);

		if (!strcmp(text, names[i]))
			return i;
		snprintf(expected + used, sizeof(expected) - used, "%s%s", i ? ", " : "", names[i]);
	}
	fail(EXIT_USAGE, "--%s: got '%s', expected one of %s", option, text, expected);
}

static void set_defaults(struct settings *s, const bool given[NR_KNOBS])
{
	long value[NR_KNOBS];

	for (int k = 0; k < NR_KNOBS; k++)
		value[k] = knobs[k].by_mode[s->mode];
	value[KNOB_RULE] = default_rule[s->policy][s->mode];
	value[KNOB_HINTS] = default_hints[s->policy];
	value[KNOB_STICKY] = default_sticky[s->policy];
	for (int k = 0; k < NR_KNOBS; k++)
		if (!given[k])
			s->knob[k] = value[k];
}

void options_parse(int argc, char **argv, struct options *o)
{
	struct option known[NR_KNOBS + 9] = {
		{"policy", required_argument, NULL, 'p'}, {"mode", required_argument, NULL, 'm'},
		{"scope", required_argument, NULL, 's'},  {"pid", required_argument, NULL, 't'},
		{"out", required_argument, NULL, 'o'},	  {"help", no_argument, NULL, 'h'},
		{"verbose", no_argument, NULL, 'v'},	  {"hold", no_argument, NULL, 'w'},
	};
	bool given[NR_KNOBS] = {};
	int c;

	memset(o, 0, sizeof(*o));
	o->set.policy = -1;
	o->set.mode = 1;
	for (int k = 0; k < NR_KNOBS; k++)
		known[8 + k] =
			(struct option){knobs[k].name, required_argument, NULL, FIRST_KNOB + k};
	while ((c = getopt_long(argc, argv, "", known, NULL)) != -1) {
		int k = c - FIRST_KNOB;

		switch (c) {
		case 'p':
			o->set.policy = choice("policy", optarg, policy_names);
			break;
		case 'm':
			o->set.mode = choice("mode", optarg, mode_names);
			break;
		case 's':
			o->set.scope = choice("scope", optarg, scope_names);
			break;
		case 't':
			o->pid = number("pid", optarg, 1, 1 << 22);
			break;
		case 'o':
			o->out = optarg;
			break;
		case 'v':
			o->verbose = true;
			break;
		case 'w':
			o->hold = true;
			break;
		case 'h':
			help();
		case '?': /* getopt has said what is wrong */
			exit(EXIT_USAGE);
		default:
			given[k] = true;
			o->set.knob[k] = knobs[k].choices
						 ? choice(knobs[k].name, optarg, knobs[k].choices)
						 : number(knobs[k].name, optarg, knobs[k].least,
							  knobs[k].most);
		}
	}
	if (optind < argc)
		fail(EXIT_USAGE, "'%s': expected options only; see --help", argv[optind]);
	if (o->set.policy < 0 || !o->pid || !o->out)
		fail(EXIT_USAGE, "%s is missing; see --help",
		     o->set.policy < 0 ? "--policy"
		     : !o->pid	       ? "--pid"
				       : "--out");
	set_defaults(&o->set, given);
}
