// SPDX-License-Identifier: GPL-2.0
/*
 * Load the BPF programs, attach them, aim them at a process, read what they counted.
 *
 * Promise: a program whose tracepoint the kernel does not have is left out and says why; only
 * without on_switch there is nothing to observe, and that ends the observer.  When counting is
 * switched off and instance_count() has returned, no program is in the middle of counting any more.
 * Limit: everything hangs on this process's file descriptors; the kernel unloads it all when the
 * process ends, however it ends.
 */
#include <errno.h>
#include <linux/membarrier.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <bpf/bpf.h>
#include <bpf/btf.h>
#include <bpf/libbpf.h>
#include "loader.h"
#include "vstate_observer.skel.h"

struct instance {
	struct vstate_observer_bpf *skel;
	uint64_t threads_made_before;
};

static const struct program known[NR_PROGRAMS] = {
	{.name = "on_switch", .event = "sched_switch"},
	{.name = "on_migrate", .event = "sched_migrate_task"},
	{.name = "on_new", .event = "sched_wakeup_new"},
};

/* libbpf explains a failure in a warning before it returns a bare number. */
static char last_warning[256];

static int keep_warning(enum libbpf_print_level level, const char *format, va_list args)
{
	if (level == LIBBPF_WARN) {
		vsnprintf(last_warning, sizeof(last_warning), format, args);
		last_warning[strcspn(last_warning, "\n")] = '\0';
	}
	return 0;
}

static bool has_member(const struct btf *btf, const char *name, const char *member)
{
	int id = btf__find_by_name_kind(btf, name, BTF_KIND_STRUCT);
	const struct btf_type *type = id < 0 ? NULL : btf__type_by_id(btf, id);

	for (int i = 0; type && i < btf_vlen(type); i++) {
		const struct btf_member *m = &btf_members(type)[i];

		if (!strcmp(btf__name_by_offset(btf, m->name_off), member))
			return true;
	}
	return false;
}

static struct bpf_program *find(struct instance *in, const struct program *p)
{
	return bpf_object__find_program_by_name(in->skel->obj, p->name);
}

static void leave_out(struct program *p, const char *format, ...)
	__attribute__((format(printf, 2, 3)));

static void leave_out(struct program *p, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vsnprintf(p->reason, sizeof(p->reason), format, args);
	va_end(args);
	if (!strcmp(p->name, "on_switch"))
		fail(EXIT_UNFIT, "%s on %s: %s; nothing can be counted", p->name, p->event,
		     p->reason);
}

static void describe(struct program *p, int fd)
{
	struct bpf_prog_info info = {};
	__u32 size = sizeof(info);
	__u64 start = 0;
	__u32 bytes = 0;

	info.nr_jited_ksyms = 1;
	info.jited_ksyms = (uintptr_t)&start;
	info.nr_jited_func_lens = 1;
	info.jited_func_lens = (uintptr_t)&bytes;
	if (bpf_prog_get_info_by_fd(fd, &info, &size))
		return;
	p->instructions = info.xlated_prog_len / 8;
	p->jit_start = start;
	/* With the JIT switched off there is a symbol all the same, of no length. */
	p->jit_start = bytes ? start : 0;
	p->jit_end = bytes ? start + bytes : 0;
}

struct instance *instance_load(unsigned int max_threads, struct program programs[NR_PROGRAMS])
{
	struct instance *in = calloc(1, sizeof(*in));
	struct btf *btf;
	int err;

	libbpf_set_print(keep_warning);
	memcpy(programs, known, sizeof(known));
	btf = btf__load_vmlinux_btf();
	if (!in || !btf)
		fail(EXIT_UNFIT,
		     "/sys/kernel/btf/vmlinux: %s; needs a kernel with CONFIG_DEBUG_INFO_BTF",
		     strerror(errno));
	if (!has_member(btf, "thread_struct", "riscv_v_flags"))
		fail(EXIT_UNFIT,
		     "this kernel's thread_struct has no riscv_v_flags; needs Linux 6.8 or later "
		     "with CONFIG_RISCV_ISA_V");
	in->skel = vstate_observer_bpf__open();
	if (!in->skel)
		fail(EXIT_UNFIT, "cannot open the BPF programs: %s", strerror(errno));
	bpf_map__set_max_entries(in->skel->maps.rows, max_threads);
	for (int i = 0; i < NR_PROGRAMS; i++) {
		struct program *p = &programs[i];
		char type[64];

		snprintf(type, sizeof(type), "btf_trace_%s", p->event);
		if (btf__find_by_name_kind(btf, type, BTF_KIND_TYPEDEF) < 0) {
			leave_out(p, "this kernel has no tracepoint of that name");
			bpf_program__set_autoload(find(in, p), false);
		}
	}
	btf__free(btf);
	err = vstate_observer_bpf__load(in->skel);
	if (err)
		fail(EXIT_UNFIT, "the kernel refuses the BPF programs: %s (%s)", strerror(-err),
		     last_warning);
	for (int i = 0; i < NR_PROGRAMS; i++) {
		struct program *p = &programs[i];
		struct bpf_program *prog = find(in, p);
		struct bpf_link *link;

		if (p->reason[0])
			continue;
		describe(p, bpf_program__fd(prog));
		link = bpf_program__attach(prog);
		if (!link)
			leave_out(p, "attaching failed: %s", strerror(errno));
		p->attached = link;
		/* The skeleton's own field, so that unloading detaches it. */
		if (!strcmp(p->name, "on_switch"))
			in->skel->links.on_switch = link;
		else if (!strcmp(p->name, "on_migrate"))
			in->skel->links.on_migrate = link;
		else
			in->skel->links.on_new = link;
	}
	return in;
}

void instance_unload(struct instance *in)
{
	vstate_observer_bpf__destroy(in->skel);
	free(in);
}

void instance_aim(struct instance *in, pid_t tgid, const struct spin_range *spin,
		  unsigned int nr_spin)
{
	int nr = libbpf_num_possible_cpus();
	struct counters *zero = nr > 0 ? calloc(nr, sizeof(*zero)) : NULL;
	int err = zero ? 0 : -ENOMEM;

	for (__u32 slot = 0; !err && slot < NR_SLOTS; slot++)
		err = bpf_map__update_elem(in->skel->maps.totals, &slot, sizeof(slot), zero,
					   nr * sizeof(*zero), BPF_ANY);
	if (err)
		fail(EXIT_UNFIT, "cannot reset the totals: %s", strerror(-err));
	free(zero);
	for (unsigned int i = 0; i < nr_spin; i++) {
		in->skel->bss->spin[i].start = spin[i].start;
		in->skel->bss->spin[i].end = spin[i].end;
	}
	in->skel->bss->nr_spin = nr_spin;
	in->skel->bss->target_tgid = tgid;
}

bool instance_add_thread(struct instance *in, pid_t tid)
{
	struct thread_row row = {.threads = 1};
	int err = bpf_map__update_elem(in->skel->maps.rows, &tid, sizeof(tid), &row, sizeof(row),
				       BPF_NOEXIST);

	return !err || err == -EEXIST;
}

void instance_count(struct instance *in, bool on)
{
	if (on)
		in->threads_made_before = in->skel->bss->threads_made;
	in->skel->bss->counting = on;
	/* Wait for programs that still see it on: they run with preemption off. */
	if (!on && syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0))
		fail(EXIT_UNFIT, "membarrier: %s; needs a kernel with CONFIG_MEMBARRIER",
		     strerror(errno));
}

static void add(struct counters *to, const struct counters *from)
{
	for (int why = 0; why < NR_WHYS; why++)
		for (int out = 0; out < NR_OUTCOMES; out++)
			to->outs[why][out] += from->outs[why][out];
	to->pending_restores += from->pending_restores;
	to->migrations += from->migrations;
}

void instance_totals(struct instance *in, enum slot slot, struct counters *to)
{
	int nr = libbpf_num_possible_cpus();
	struct counters *each = nr > 0 ? calloc(nr, sizeof(*each)) : NULL;
	__u32 key = slot;
	int err = each ? bpf_map__lookup_elem(in->skel->maps.totals, &key, sizeof(key), each,
					      nr * sizeof(*each), 0)
		       : -ENOMEM;

	if (err)
		fail(EXIT_UNFIT, "cannot read the totals: %s", strerror(-err));
	memset(to, 0, sizeof(*to));
	for (int i = 0; i < nr; i++)
		add(to, &each[i]);
	free(each);
}

uint64_t instance_threads_made(struct instance *in)
{
	return in->skel->bss->threads_made - in->threads_made_before;
}

uint64_t instance_lost_threads(struct instance *in)
{
	return in->skel->bss->lost_threads;
}

struct tid_row {
	pid_t tid;
	const struct thread_row *row;
};

static int by_tid(const void *a, const void *b)
{
	const struct tid_row *x = a, *y = b;

	return (x->tid > y->tid) - (x->tid < y->tid);
}

void instance_rows(struct instance *in,
		   void (*each)(void *data, pid_t tid, const struct thread_row *row), void *data)
{
	struct bpf_map *map = in->skel->maps.rows;
	__u32 nr = bpf_map__max_entries(map), batch;
	struct thread_row *rows = calloc(nr, sizeof(*rows));
	struct tid_row *sorted = calloc(nr, sizeof(*sorted));
	pid_t *tids = calloc(nr, sizeof(*tids));
	int err;

	if (!rows || !sorted || !tids)
		fail(EXIT_UNFIT, "out of memory for %u threads", nr);
	/* All at once; ENOENT says that there were no more than these. */
	err = bpf_map_lookup_batch(bpf_map__fd(map), NULL, &batch, tids, rows, &nr, NULL);
	if (err && err != -ENOENT)
		fail(EXIT_UNFIT, "cannot read the rows of the threads: %s", strerror(-err));
	for (__u32 i = 0; i < nr; i++)
		sorted[i] = (struct tid_row){tids[i], &rows[i]};
	qsort(sorted, nr, sizeof(*sorted), by_tid);
	for (__u32 i = 0; i < nr; i++)
		each(data, sorted[i].tid, sorted[i].row);
	free(rows);
	free(sorted);
	free(tids);
}
