// SPDX-License-Identifier: GPL-2.0
/* What the programs that write one JSON document have in common: see tool.h. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "tool.h"

void fail(int code, const char *format, ...)
{
	va_list args;

	fflush(stdout);
	fprintf(stderr, "%s: ", tool_name);
	va_start(args, format);
	vfprintf(stderr, format, args);
	va_end(args);
	fputc('\n', stderr);
	exit(code);
}

long number(const char *option, const char *text, long least, long most)
{
	char *end;
	long value;

	errno = 0;
	value = strtol(text, &end, 10);
	if (errno || end == text || *end || value < least || value > most)
		fail(EXIT_USAGE, "--%s: got '%s', expected an integer of %ld..%ld", option, text,
		     least, most);
	return value;
}

static __attribute__((noreturn)) void cannot_write(const struct document *d)
{
	int err = errno;

	unlink(d->temporary);
	fail(EXIT_UNFIT, "%s: cannot write: %s; free some space or name another --out", d->path,
	     strerror(err));
}

struct document document_begin(const char *path)
{
	struct document d = {.path = path};

	if (asprintf(&d.temporary, "%s.%d.tmp", path, getpid()) < 0)
		fail(EXIT_UNFIT, "out of memory");
	d.f = fopen(d.temporary, "wxe");
	if (!d.f)
		cannot_write(&d);
	return d;
}

void document_end(struct document *d)
{
	if (ferror(d->f) || fflush(d->f) || fsync(fileno(d->f)) || fclose(d->f) ||
	    rename(d->temporary, d->path))
		cannot_write(d);
	free(d->temporary);
}

void document_check_writable(const char *path)
{
	struct document d = document_begin(path);

	if (fputc('\n', d.f) == EOF || fclose(d.f))
		cannot_write(&d);
	unlink(d.temporary);
	free(d.temporary);
}

void put_string(FILE *f, const char *text)
{
	if (!text) {
		fputs("null", f);
		return;
	}
	fputc('"', f);
	for (const unsigned char *c = (const unsigned char *)text; *c; c++) {
		if (*c == '"' || *c == '\\')
			fprintf(f, "\\%c", *c);
		else if (*c < 0x20 || *c >= 0x7f)
			fprintf(f, "\\u%04x", *c);
		else
			fputc(*c, f);
	}
	fputc('"', f);
}
