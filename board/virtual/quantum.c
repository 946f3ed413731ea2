// SPDX-License-Identifier: GPL-2.0
/*
 * quantum - a QEMU TCG plugin: bound the harts' turns only while there is more than one hart.
 *
 * The bound is a virtual timer (machine.py).  While one hart is up nobody takes turns with it, and
 * the timer does nothing but make QEMU pass over all other harts hundreds of times in each quantum.
 * So it is off until the kernel starts a second hart, and again when the last but one stops.
 *
 * Promise: the switch is made while the guest stands still, at the first instruction of the hart
 * that starts, or near the last of the one that stops: the same instruction in every run.
 * Limit: harts come and go at the addresses given as arguments; a kernel without them gets a turn
 * that is not bounded.
 *
 * How: this runs in the thread that executes the harts, which waits here until QEMU's main thread
 * has done what it is asked for over QMP.
 *
 * Arguments: start=ADDRESS stop=ADDRESS (physical and virtual, of code that a starting and a
 * stopping hart executes once) qmp=PATH (a UNIX socket) timer=PATH (the QOM path of the timer)
 */
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <qemu-plugin.h>

QEMU_PLUGIN_EXPORT int qemu_plugin_version = QEMU_PLUGIN_VERSION;

static uint64_t start_address, stop_address;
static const char *qmp_path, *timer_path;
static int others; /* harts that are up but the first */

static __attribute__((noreturn)) void die(const char *what)
{
	fprintf(stderr, "quantum: %s\n", what);
	exit(1);
}

/* A whole line; the monitor's answers are lines. */
static void read_line(FILE *qmp, char *line, int size)
{
	if (!fgets(line, size, qmp))
		die("QEMU's monitor hung up");
}

static void ask(FILE *qmp, const char *command)
{
	char line[4096];

	if (write(fileno(qmp), command, strlen(command)) != (ssize_t)strlen(command))
		die("cannot write to QEMU's monitor");
	do { /* events come in between */
		read_line(qmp, line, sizeof(line));
		if (!strncmp(line, "{\"error\"", 8))
			die(line);
	} while (strncmp(line, "{\"return\"", 9));
}

static void switch_timer(const char *status)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	char line[4096];
	FILE *qmp;

	snprintf(address.sun_path, sizeof(address.sun_path), "%s", qmp_path);
	if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof(address)))
		die("cannot connect to QEMU's monitor");
	qmp = fdopen(fd, "r");
	if (!qmp)
		die("out of memory");
	read_line(qmp, line, sizeof(line)); /* the greeting */
	ask(qmp, "{\"execute\": \"qmp_capabilities\"}\n");
	snprintf(line, sizeof(line),
		 "{\"execute\": \"qom-set\", \"arguments\": "
		 "{\"path\": \"%s\", \"property\": \"status\", \"value\": \"%s\"}}\n",
		 timer_path, status);
	ask(qmp, line);
	fclose(qmp);
	fprintf(stderr, "quantum: timer %s\n", status);
}

static bool began;

/* The timer cannot be made switched off (filter_buffer_setup() arms it whatever its status is). */
static void at_first_instruction(unsigned int vcpu, void *unused)
{
	if (!began)
		switch_timer("off");
	began = true;
}

static void at_start(unsigned int vcpu, void *unused)
{
	if (others++ == 0)
		switch_timer("on");
}

static void at_stop(unsigned int vcpu, void *unused)
{
	if (--others == 0)
		switch_timer("off");
}

static void at_translation(qemu_plugin_id_t id, struct qemu_plugin_tb *tb)
{
	uint64_t address = qemu_plugin_tb_vaddr(tb);

	if (!began)
		qemu_plugin_register_vcpu_tb_exec_cb(tb, at_first_instruction,
						     QEMU_PLUGIN_CB_NO_REGS, NULL);
	if (address == start_address)
		qemu_plugin_register_vcpu_tb_exec_cb(tb, at_start, QEMU_PLUGIN_CB_NO_REGS, NULL);
	else if (address == stop_address)
		qemu_plugin_register_vcpu_tb_exec_cb(tb, at_stop, QEMU_PLUGIN_CB_NO_REGS, NULL);
}

QEMU_PLUGIN_EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t *info, int argc,
					   char **argv)
{
	for (int i = 0; i < argc; i++) {
		char *value = strchr(argv[i], '=');

		if (!value)
			die(argv[i]);
		*value++ = '\0';
		if (!strcmp(argv[i], "start"))
			start_address = strtoull(value, NULL, 0);
		else if (!strcmp(argv[i], "stop"))
			stop_address = strtoull(value, NULL, 0);
		else if (!strcmp(argv[i], "qmp"))
			qmp_path = strdup(value);
		else if (!strcmp(argv[i], "timer"))
			timer_path = strdup(value);
		else
			die(argv[i]);
	}
	if (!start_address || !stop_address || !qmp_path || !timer_path)
		die("expected start=, stop=, qmp= and timer=");
	qemu_plugin_register_vcpu_tb_trans_cb(id, at_translation);
	return 0;
}
