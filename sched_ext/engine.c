// SPDX-License-Identifier: GPL-2.0
/*
 * Load the BPF programs, put them in charge, and take the kernel's word for whether they are.
 *
 * Promise: everything hangs on this process's file descriptors but for the two pinned maps, which
 * are unlinked however the process ends short of SIGKILL; what a killed one left is taken over (the
 * phase hints, so that a writer's descriptor stays good) or replaced.  Counters and hints outlive a
 * restart, the order of the queue does not.
 * Limit: kernels are told apart by what they have, never by their version.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/capability.h>
#include <linux/magic.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <bpf/bpf.h>
#include <bpf/libbpf.h>
#include <scx/common.h>
#include "loader.h"
#include "scx_vstate.bpf.skel.h"

#define SYSFS "/sys/kernel/sched_ext"
#define BPF_FS "/sys/fs/bpf"
#define NS_PER_MS 1000000ULL
#define INIT_PID_NAMESPACE 0xEFFFFFFCU /* include/linux/proc_ns.h */
#define MOST_CPUS 512

struct engine {
	const struct settings *set;
	pid_t tgid;
	struct scx_vstate_bpf *skel;
	struct bpf_link *link;
	int hints_fd, workers_fd, stats_fd; /* -1: not made yet */
};

/* libbpf explains a failure in a warning before it returns a bare number. */
static char last_warning[256];
static bool no_private_stack; /* the verifier's own words: the error code says nothing of it */
static bool verbose;

static int keep_warning(enum libbpf_print_level level, const char *format, va_list args)
{
	va_list again;

	if (level == LIBBPF_WARN) {
		va_copy(again, args);
		vsnprintf(last_warning, sizeof(last_warning), format, again);
		no_private_stack |= strstr(last_warning, "Private stack not supported") != NULL;
		last_warning[strcspn(last_warning, "\n")] = '\0';
		va_end(again);
	}
	return verbose ? vfprintf(stderr, format, args) : 0;
}

/* ---- What the kernel says ------------------------------------------------------------------ */

static bool read_line(const char *path, char *to, size_t size)
{
	FILE *file = fopen(path, "r");
	bool got = file && fgets(to, size, file);

	if (file)
		fclose(file);
	if (!got)
		to[0] = '\0';
	to[strcspn(to, "\n")] = '\0';
	return got;
}

static long read_number(const char *path)
{
	char line[64];

	return read_line(path, line, sizeof(line)) ? strtol(line, NULL, 10) : -1;
}

void kernel_state_read(struct kernel_state *to)
{
	read_line(SYSFS "/state", to->state, sizeof(to->state));
	read_line("/sys/kernel/sched_ext/root/ops", to->ops, sizeof(to->ops));
	to->enable_seq = read_number(SYSFS "/enable_seq");
	to->hotplug_seq = read_number(SYSFS "/hotplug_seq");
	to->nr_rejected = read_number(SYSFS "/nr_rejected");
	to->switch_all = read_number(SYSFS "/switch_all");
}

bool kernel_state_is_ours(const struct kernel_state *s)
{
	return !strcmp(s->state, "enabled") && !strcmp(s->ops, OPS_NAME);
}

static bool capable(const struct __user_cap_data_struct data[2], int capability)
{
	return data[capability / 32].effective & (1U << capability % 32);
}

static void require_capabilities(void)
{
	static const struct {
		const char *name;
		int number;
	} wanted[] = {
		{"CAP_BPF", CAP_BPF}, {"CAP_PERFMON", CAP_PERFMON}, {"CAP_SYS_NICE", CAP_SYS_NICE}};
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct data[2] = {};

	if (syscall(SYS_capget, &header, data))
		fail(EXIT_UNFIT, "capget: %s", strerror(errno));
	for (size_t i = 0; i < sizeof(wanted) / sizeof(wanted[0]); i++)
		if (!capable(data, wanted[i].number) &&
		    (wanted[i].number == CAP_SYS_NICE || !capable(data, CAP_SYS_ADMIN)))
			fail(EXIT_UNFIT, "lacks %s; run as root", wanted[i].name);
}

void engine_require_fit_machine(void)
{
	struct kernel_state now;
	struct statfs fs;
	struct stat st;

	if (stat(SYSFS "/state", &st))
		fail(EXIT_UNFIT,
		     SYSFS "/state: %s; this kernel has no sched_ext: it needs Linux 6.12 "
			   "or later, built with CONFIG_SCHED_CLASS_EXT=y",
		     strerror(errno));
	if (stat("/sys/kernel/btf/vmlinux", &st))
		fail(EXIT_UNFIT,
		     "/sys/kernel/btf/vmlinux: %s; needs a kernel with "
		     "CONFIG_DEBUG_INFO_BTF",
		     strerror(errno));
	require_capabilities();
	if (!stat("/proc/self/ns/pid", &st) && st.st_ino != INIT_PID_NAMESPACE)
		fail(EXIT_UNFIT, "runs in a pid namespace of its own, where process ids are not "
				 "those the kernel counts by; run it outside of the container");
	if (read_number("/proc/sys/net/core/bpf_jit_enable") == 0)
		fail(EXIT_UNFIT, "the BPF JIT is off, which sched_ext needs; switch it on with "
				 "sysctl net.core.bpf_jit_enable=1");
	if (statfs(BPF_FS, &fs) || fs.f_type != BPF_FS_MAGIC)
		fail(EXIT_UNFIT,
		     BPF_FS ": no BPF file system is mounted there; mount -t bpf bpf " BPF_FS);
	kernel_state_read(&now);
	if (strcmp(now.state, "disabled"))
		fail(EXIT_UNFIT,
		     "another sched_ext scheduler, '%s', is in charge (%s); end it first", now.ops,
		     now.state);
}

/* ---- The pinned maps ----------------------------------------------------------------------- */

static void unpin(void)
{
	unlink(VSTATE_PHASE_MAP_PATH);
	unlink(VSTATE_WORKER_MAP_PATH);
	rmdir(VSTATE_PIN_DIR);
}

/* A map that a killed scx_vstate left, or -1. */
static int adopt_hints(const struct bpf_map *ours)
{
	struct bpf_map_info info = {};
	__u32 size = sizeof(info);
	int fd = bpf_obj_get(VSTATE_PHASE_MAP_PATH);

	if (fd < 0) {
		if (errno == ENOENT)
			return -1;
		fail(EXIT_UNFIT,
		     VSTATE_PHASE_MAP_PATH ": %s; expected nothing there, or the map of an "
					   "earlier scx_vstate; remove it",
		     strerror(errno));
	}
	if (bpf_map_get_info_by_fd(fd, &info, &size))
		fail(EXIT_UNFIT, VSTATE_PHASE_MAP_PATH ": pinned there is no map; remove it");
	if (info.type != bpf_map__type(ours) || info.key_size != bpf_map__key_size(ours) ||
	    info.value_size != bpf_map__value_size(ours) ||
	    info.max_entries != bpf_map__max_entries(ours))
		fail(EXIT_UNFIT,
		     VSTATE_PHASE_MAP_PATH
		     ": a map of type %u with values of %u bytes, "
		     "expected type %u and %u bytes (ABI version %d); remove it",
		     info.type, info.value_size, bpf_map__type(ours), bpf_map__value_size(ours),
		     VSTATE_PHASE_ABI_VERSION);
	return fd;
}

static int keep(const struct bpf_map *map)
{
	int fd = dup(bpf_map__fd(map));

	if (fd < 0)
		fail(EXIT_UNFIT, "dup: %s", strerror(errno));
	return fd;
}

static void pin(const struct bpf_map *map, const char *path)
{
	if (bpf_obj_pin(bpf_map__fd(map), path))
		fail(EXIT_UNFIT, "%s: cannot pin: %s", path, strerror(errno));
}

static void make_pins(struct engine *e, bool adopted)
{
	if (mkdir(VSTATE_PIN_DIR, 0755) && errno != EEXIST)
		fail(EXIT_UNFIT, VSTATE_PIN_DIR ": %s", strerror(errno));
	atexit(unpin);
	if (!adopted)
		pin(e->skel->maps.phase_hints, VSTATE_PHASE_MAP_PATH);
	unlink(VSTATE_WORKER_MAP_PATH); /* its thread ids may be others' by now */
	pin(e->skel->maps.workers, VSTATE_WORKER_MAP_PATH);
	e->hints_fd = keep(e->skel->maps.phase_hints);
	e->workers_fd = keep(e->skel->maps.workers);
	e->stats_fd = keep(e->skel->maps.stats);
}

/* ---- The programs -------------------------------------------------------------------------- */

static void set_knobs(struct engine *e)
{
	const long *k = e->set->knob;
	struct scx_vstate_bpf__rodata *to = e->skel->rodata;

	to->target_tgid = e->tgid;
	to->nr_cpu_ids = libbpf_num_possible_cpus();
	to->rule = k[KNOB_RULE];
	to->sample_at_tick = k[KNOB_SAMPLE];
	to->target_only = e->set->scope == SCOPE_PARTIAL;
	to->use_hints = k[KNOB_HINTS];
	to->vector_slice_ns = k[KNOB_VECTOR_MS] * NS_PER_MS;
	to->normal_slice_ns = k[KNOB_NORMAL_MS] * NS_PER_MS;
	to->prefill_slice_ns = k[KNOB_PREFILL_MS] * NS_PER_MS;
	to->decode_slice_ns = k[KNOB_DECODE_MS] * NS_PER_MS;
	to->vector_boost = k[KNOB_VECTOR_WEIGHT];
	to->prefill_boost = k[KNOB_PREFILL_WEIGHT];
	to->decode_boost = k[KNOB_DECODE_WEIGHT];
	to->mixed = k[KNOB_MIXED];
	to->sticky = k[KNOB_STICKY];
	to->placement = k[KNOB_PLACEMENT];
	to->next = k[KNOB_NEXT];
	to->credit = k[KNOB_CREDIT];
	to->hot_decay_ns = k[KNOB_DECAY_MS] * NS_PER_MS;
	to->hint_ttl_ns = k[KNOB_HINT_TTL_MS] * NS_PER_MS;
	to->boost_limit_ns = k[KNOB_BOOST_LIMIT_MS] * NS_PER_MS;
	to->patience_ns = k[KNOB_PATIENCE_MS] * NS_PER_MS;
	to->defer_ns = k[KNOB_DEFER_MS] * NS_PER_MS;
	to->lead_ns = k[KNOB_LEAD_MS] * NS_PER_MS;
}

static uint64_t ops_flag(const char *name, const char *instead)
{
	u64 value;

	if (!__COMPAT_read_enum("scx_ops_flags", name, &value))
		fail(EXIT_UNFIT, "this kernel's sched_ext has no %s; %s", name, instead);
	return value;
}

static void reuse(struct bpf_map *map, int fd)
{
	int err = fd < 0 ? 0 : bpf_map__reuse_fd(map, fd);

	if (err)
		fail(EXIT_UNFIT, "cannot reuse map %s: %s", bpf_map__name(map), strerror(-err));
}

static void open_and_load(struct engine *e)
{
	struct scx_vstate_bpf *skel = scx_vstate_bpf__open();
	bool first = e->hints_fd < 0, adopted = false;
	int err;

	if (!skel)
		fail(EXIT_UNFIT, "cannot open the BPF programs: %s", strerror(errno));
	e->skel = skel;
	if (first)
		adopted = (e->hints_fd = adopt_hints(skel->maps.phase_hints)) >= 0;
	set_knobs(e);
	bpf_map__set_max_entries(skel->maps.rows, e->set->knob[KNOB_MAX_THREADS]);
	reuse(skel->maps.phase_hints, e->hints_fd);
	reuse(skel->maps.workers, e->workers_fd);
	reuse(skel->maps.stats, e->stats_fd);
	/* hotplug_seq stays 0, unchecked: nothing here depends on which harts are online, so they
	 * may come and go until it is attached. */
	skel->struct_ops.vstate_ops->timeout_ms = e->set->knob[KNOB_WATCHDOG_MS];
	/* Else an exiting thread waits on its CPU's own queue, whoever has the CPU. */
	skel->struct_ops.vstate_ops->flags =
		ops_flag("SCX_OPS_ENQ_EXITING", "it needs Linux 6.12 or later");
	if (e->set->scope == SCOPE_PARTIAL)
		skel->struct_ops.vstate_ops->flags |=
			ops_flag("SCX_OPS_SWITCH_PARTIAL", "use --scope all");
	UEI_SET_SIZE(skel, vstate_ops, uei);
	__SCX_OPS_DISABLE_AUTOATTACH(skel, vstate_ops);
	err = scx_vstate_bpf__load(skel);
	if (err && no_private_stack)
		fail(EXIT_UNFIT,
		     "this kernel's sched_ext has sub-schedulers (CONFIG_EXT_SUB_SCHED), for "
		     "which it wants private BPF stacks; its JIT has none on this machine, so "
		     "that no scheduler with a dispatch operation loads; use an earlier kernel, "
		     "6.12 to 7.0");
	if (err)
		fail(EXIT_UNFIT, "the kernel refuses the BPF programs: %s (%s)", strerror(-err),
		     last_warning);
	if (first)
		make_pins(e, adopted);
}

struct engine *engine_create(const struct options *o)
{
	struct engine *e = calloc(1, sizeof(*e));

	if (!e)
		fail(EXIT_UNFIT, "out of memory");
	verbose = o->verbose;
	libbpf_set_print(keep_warning);
	e->set = &o->set;
	e->tgid = o->pid;
	e->hints_fd = e->workers_fd = e->stats_fd = -1;
	return e;
}

bool engine_ended(struct engine *e, struct exit_info *to)
{
	const struct user_exit_info *uei = &e->skel->data->uei;

	memset(to, 0, sizeof(*to));
	to->kind = UEI_EXITED(e->skel, uei);
	if (!to->kind)
		return false;
	to->code = uei->exit_code;
	to->restart = UEI_ECODE_RESTART(uei->exit_code);
	snprintf(to->reason, sizeof(to->reason), "%s", uei->reason);
	snprintf(to->message, sizeof(to->message), "%s", uei->msg);
	to->message[strcspn(to->message, "\n")] = '\0';
	return true;
}

void engine_load(struct engine *e)
{
	if (!e->skel)
		open_and_load(e);
}

bool engine_start(struct engine *e)
{
	struct kernel_state now;
	struct exit_info ended;

	engine_load(e);
	e->link = bpf_map__attach_struct_ops(e->skel->maps.vstate_ops);
	if (!e->link)
		fail(EXIT_UNFIT, "the kernel does not take the scheduler: %s (%s)", strerror(errno),
		     last_warning);
	/* Success of the call does not mean that it is in charge. */
	kernel_state_read(&now);
	return !engine_ended(e, &ended) && kernel_state_is_ours(&now);
}

int engine_ended_fd(struct engine *e)
{
	return bpf_map__fd(e->skel->maps.ended);
}

void engine_stop(struct engine *e)
{
	struct timespec nap = {.tv_nsec = 1000000};
	struct kernel_state now;

	bpf_link__destroy(e->link);
	e->link = NULL;
	for (int i = 0; i < 5000; i++) {
		kernel_state_read(&now);
		if (strcmp(now.ops, OPS_NAME) || !strcmp(now.state, "disabled"))
			break;
		nanosleep(&nap, NULL);
	}
	scx_vstate_bpf__destroy(e->skel);
	e->skel = NULL;
}

void engine_destroy(struct engine *e)
{
	if (e->skel)
		engine_stop(e);
	unpin();
	close(e->hints_fd);
	close(e->workers_fd);
	close(e->stats_fd);
	free(e);
}

void engine_counters(struct engine *e, struct vstate_stats *to)
{
	int nr = libbpf_num_possible_cpus();
	struct vstate_stats *each = nr > 0 ? calloc(nr, sizeof(*each)) : NULL;
	__u32 zero = 0;

	memset(to, 0, sizeof(*to));
	if (!each || bpf_map_lookup_elem(e->stats_fd, &zero, each))
		fail(EXIT_UNFIT, "cannot read the counters: %s", strerror(errno));
	for (int cpu = 0; cpu < nr; cpu++)
		for (int i = 0; i < VSTAT_NR; i++)
			to->counter[i] += each[cpu].counter[i];
	free(each);
}

bool engine_hint(struct engine *e, pid_t tgid, struct vstate_phase_hint *to)
{
	return !bpf_map_lookup_elem(e->hints_fd, &tgid, to) &&
	       to->abi_version == VSTATE_PHASE_ABI_VERSION;
}
