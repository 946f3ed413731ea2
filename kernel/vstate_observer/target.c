// SPDX-License-Identifier: GPL-2.0
/*
 * The observed process and the machine, as /proc, /sys and the hardware tell.
 *
 * Promise: what cannot be observed is refused here by name, before a BPF program is loaded.
 * Limit: needs to read /proc/PID/exe and maps, which another user's process allows only with
 * CAP_SYS_PTRACE; process ids are those of the first pid namespace, as the kernel counts them.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <elf.h>
#include <errno.h>
#include <inttypes.h>
#include <linux/capability.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "loader.h"

#define MAX_SEGMENTS 64
#define INIT_PID_NAMESPACE 0xeffffffcUL /* its inode, PROC_PID_INIT_INO of the kernel */

static bool has_capability(const struct __user_cap_data_struct *data, int cap)
{
	return data[cap / 32].effective & (1U << (cap % 32));
}

static void require_capabilities(void)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct data[2] = {};
	bool bpf, perfmon;

	if (syscall(SYS_capget, &header, data))
		fail(EXIT_UNFIT, "capget: %s", strerror(errno));
	bpf = has_capability(data, CAP_BPF) || has_capability(data, CAP_SYS_ADMIN);
	perfmon = has_capability(data, CAP_PERFMON) || has_capability(data, CAP_SYS_ADMIN);
	if (!bpf || !perfmon)
		fail(EXIT_UNFIT, "lacks %s%s%s; run as root or give the program that capability",
		     bpf ? "" : "CAP_BPF", bpf || perfmon ? "" : " and ",
		     perfmon ? "" : "CAP_PERFMON");
}

void require_fit_machine(void)
{
	struct stat st;

	if (!(getauxval(AT_HWCAP) & (1UL << ('V' - 'A'))))
		fail(EXIT_UNFIT, "no V extension for programs here: hart without V, kernel without "
				 "CONFIG_RISCV_ISA_V, or sysctl abi.riscv_v_default_allow=0");
	if (stat("/sys/kernel/btf/vmlinux", &st))
		fail(EXIT_UNFIT,
		     "/sys/kernel/btf/vmlinux: %s; needs a kernel with CONFIG_DEBUG_INFO_BTF and "
		     "/sys mounted",
		     strerror(errno));
	require_capabilities();
	/* Without namespaces in the kernel the file is not there. */
	if (!stat("/proc/self/ns/pid", &st) && st.st_ino != INIT_PID_NAMESPACE)
		fail(EXIT_UNFIT, "runs in a pid namespace of its own, where process ids are not "
				 "those the kernel counts by; run it outside of the container");
}

unsigned int vlen_bits(void)
{
	unsigned long bytes;

	/* vlenb, by number: the rest of this program does without V */
	__asm__ volatile("csrr %0, 0xc22" : "=r"(bytes));
	return bytes * 8;
}

static bool read_line(const char *path, char *to, size_t size)
{
	FILE *file = fopen(path, "r");
	bool got = file && fgets(to, size, file);

	if (file)
		fclose(file);
	if (got)
		to[strcspn(to, "\n")] = '\0';
	return got;
}

void online_harts(char *to, size_t size)
{
	if (!read_line("/sys/devices/system/cpu/online", to, size))
		fail(EXIT_UNFIT, "/sys/devices/system/cpu/online: %s", strerror(errno));
}

static void require_process(pid_t tgid)
{
	char path[64], line[256];
	int of = 0;
	char state = 0;
	FILE *file;

	snprintf(path, sizeof(path), "/proc/%d/status", tgid);
	file = fopen(path, "r");
	if (!file)
		fail(EXIT_UNFIT, "--pid %d: there is no such process", tgid);
	while (fgets(line, sizeof(line), file)) {
		sscanf(line, "State: %c", &state);
		sscanf(line, "Tgid: %d", &of);
	}
	fclose(file);
	if (of != tgid)
		fail(EXIT_USAGE, "--pid %d: a thread of process %d; give --pid %d", tgid, of, of);
	if (state == 'Z' || state == 'X')
		fail(EXIT_UNFIT, "--pid %d: this process has ended", tgid);
}

/* The program headers of the target's main executable. */
static unsigned int read_segments(pid_t tgid, Elf64_Ehdr *header, Elf64_Phdr segments[MAX_SEGMENTS])
{
	char path[64];
	FILE *file;
	unsigned int nr;

	snprintf(path, sizeof(path), "/proc/%d/exe", tgid);
	file = fopen(path, "r");
	if (!file)
		fail(EXIT_UNFIT, "%s: %s; a kernel thread, or CAP_SYS_PTRACE is missing", path,
		     strerror(errno));
	if (fread(header, sizeof(*header), 1, file) != 1 ||
	    memcmp(header->e_ident, ELFMAG, SELFMAG) || header->e_ident[EI_CLASS] != ELFCLASS64 ||
	    header->e_phentsize != sizeof(*segments) || header->e_phnum > MAX_SEGMENTS)
		fail(EXIT_UNFIT, "%s: not a 64-bit ELF program with at most %d segments", path,
		     MAX_SEGMENTS);
	nr = header->e_phnum;
	if (fseek(file, header->e_phoff, SEEK_SET) ||
	    fread(segments, sizeof(*segments), nr, file) != nr)
		fail(EXIT_UNFIT, "%s: cannot read its program headers", path);
	fclose(file);
	return nr;
}

/* Where the first page of the executable lies in the target's memory. */
static uint64_t first_mapping(pid_t tgid)
{
	char path[64], line[512];
	struct stat exe, mapped;
	uint64_t start, offset;
	char name[512];
	FILE *file;

	snprintf(path, sizeof(path), "/proc/%d/exe", tgid);
	if (stat(path, &exe))
		fail(EXIT_UNFIT, "%s: %s", path, strerror(errno));
	snprintf(path, sizeof(path), "/proc/%d/maps", tgid);
	file = fopen(path, "r");
	if (!file)
		fail(EXIT_UNFIT, "%s: %s", path, strerror(errno));
	while (fgets(line, sizeof(line), file)) {
		unsigned long inode;

		if (sscanf(line, "%" SCNx64 "-%*x %*s %" SCNx64 " %*s %lu %511[^\n]", &start,
			   &offset, &inode, name) == 4 &&
		    offset == 0 && inode == exe.st_ino && !stat(name, &mapped) &&
		    mapped.st_dev == exe.st_dev) {
			fclose(file);
			return start;
		}
	}
	fclose(file);
	fail(EXIT_UNFIT, "%s: the executable is not mapped; was its file replaced?", path);
}

void target_read(struct target *to, pid_t tgid)
{
	Elf64_Phdr segments[MAX_SEGMENTS];
	Elf64_Ehdr header;
	unsigned int nr;

	require_process(tgid);
	to->tgid = tgid;
	if (!target_thread_name(tgid, tgid, to->name))
		fail(EXIT_UNFIT, "--pid %d: this process has ended", tgid);
	nr = read_segments(tgid, &header, segments);
	to->position_independent = header.e_type == ET_DYN;
	to->load_bias = 0;
	for (unsigned int i = 0; to->position_independent && i < nr; i++) {
		if (segments[i].p_type == PT_LOAD && segments[i].p_offset == 0) {
			to->load_bias = first_mapping(tgid) - segments[i].p_vaddr;
			return;
		}
	}
}

void target_place(const struct target *t, const struct spin_range *from, unsigned int nr,
		  struct spin_range *to)
{
	Elf64_Phdr segments[MAX_SEGMENTS];
	Elf64_Ehdr header;
	unsigned int nr_segments = read_segments(t->tgid, &header, segments);

	for (unsigned int i = 0; i < nr; i++) {
		bool inside = false;

		for (unsigned int s = 0; s < nr_segments; s++) {
			const Elf64_Phdr *code = &segments[s];

			inside |= code->p_type == PT_LOAD && code->p_flags & PF_X &&
				  from[i].start >= code->p_vaddr &&
				  from[i].end <= code->p_vaddr + code->p_filesz;
		}
		if (!inside)
			fail(EXIT_USAGE,
			     "--spin 0x%llx-0x%llx: no code of process %d (%s); expected addresses "
			     "of its executable's file",
			     from[i].start, from[i].end, t->tgid, t->name);
		to[i].start = from[i].start + t->load_bias;
		to[i].end = from[i].end + t->load_bias;
	}
}

void target_threads(pid_t tgid, void (*each)(void *data, pid_t tid), void *data)
{
	char path[64];
	struct dirent *entry;
	DIR *dir;

	snprintf(path, sizeof(path), "/proc/%d/task", tgid);
	dir = opendir(path);
	if (!dir)
		fail(EXIT_UNFIT, "--pid %d: this process has ended", tgid);
	while ((entry = readdir(dir))) {
		pid_t tid = atoi(entry->d_name);

		if (tid > 0)
			each(data, tid);
	}
	closedir(dir);
}

bool target_thread_name(pid_t tgid, pid_t tid, char name[COMM_SIZE])
{
	char path[64];

	snprintf(path, sizeof(path), "/proc/%d/task/%d/comm", tgid, tid);
	return read_line(path, name, COMM_SIZE);
}
