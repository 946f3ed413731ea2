/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The little of GLib's stable ABI that qemu-plugin.h and truth.c mention. QEMU itself is linked
 * with GLib, so the functions are there when the plugin is loaded; the pinned tree has no headers.
 */
#ifndef TRUTH_GLIB_H
#define TRUTH_GLIB_H

typedef struct {
	char *data;
	unsigned int len; /* elements */
} GArray;

typedef struct {
	unsigned char *data;
	unsigned int len; /* bytes */
} GByteArray;

GByteArray *g_byte_array_new(void);
GByteArray *g_byte_array_set_size(GByteArray *array, unsigned int length);
void g_array_unref(GArray *array);

#endif
