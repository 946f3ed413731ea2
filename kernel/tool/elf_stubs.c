// SPDX-License-Identifier: GPL-2.0
/*
 * Two functions that Debian's static libelf of trixie calls and does not contain.
 *
 * elfutils 0.192 keeps what elf_getdata_rawchunk() returned in a search tree of its own library
 * libeu, which is linked into the shared libelf but not packed into libelf.a.  elf_begin() and
 * elf_end() set one up and take it down for every file, used or not.
 *
 * Promise: does nothing, which is enough here: nobody in this program calls elf_getdata_rawchunk(),
 * the only function that puts something into such a tree (it would not link, either).
 * Limit: a newer elfutils may contain the functions; the link then fails with a duplicate, and this
 * file can go.
 */
void eu_search_tree_init(void *tree, int (*compare)(const void *, const void *));
void eu_search_tree_fini(void *tree, void (*free_node)(void *));

void eu_search_tree_init(void *tree, int (*compare)(const void *, const void *))
{
	(void)tree;
	(void)compare;
}

void eu_search_tree_fini(void *tree, void (*free_node)(void *))
{
	(void)tree;
	(void)free_node;
}
