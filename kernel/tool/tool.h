/* SPDX-License-Identifier: GPL-2.0 */
/*
 * tool.h - what the programs that write one JSON document have in common.
 *
 * Promise: every failure ends in fail(): one line on standard error and a documented exit code; a
 * document is replaced whole or left as it was, and nothing half-written stays.
 * Limit: each program defines `tool_name`; a folder that fills up is noticed when the document is
 * written.
 */
#ifndef TOOL_H
#define TOOL_H

#include <stdio.h>

#define EXIT_DONE 0
#define EXIT_USAGE 2
#define EXIT_UNFIT 3
#define EXIT_INVALID 4
#define EXIT_INTERRUPTED 130

extern const char tool_name[];

__attribute__((noreturn, format(printf, 2, 3))) void fail(int code, const char *format, ...);

/* The value of the option called `option`, without dashes; what is none is fail(EXIT_USAGE). */
long number(const char *option, const char *text, long least, long most);

struct document {
	FILE *f;
	const char *path;
	char *temporary;
};

/* Fail now rather than at the end where the document could not be written. */
void document_check_writable(const char *path);
struct document document_begin(const char *path);
void document_end(struct document *d);

/* A JSON string, or null; names come from the kernel and may hold any byte. */
void put_string(FILE *f, const char *text);

#endif
