// SPDX-License-Identifier: GPL-2.0
/*
 * bystander - scalar work beside the server, to see what a policy takes from it.
 *
 *   bystander N FILE   run N threads until killed; FILE gets N counters of 64 bits, rounds done
 *
 * Promise: a thread computes without vector registers and without a system call; a round is always
 * the same ROUND_LOOPS loops.  FILE is written through memory, so that reading it disturbs nobody.
 * Limit: it never sleeps; what a thread that does would see is another question.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAX_THREADS 64
#define ROUND_LOOPS 1000

static __attribute__((noreturn)) void die(const char *what)
{
	fprintf(stderr, "bystander: %s: %s\n", what, strerror(errno));
	exit(1);
}

static void *work(void *data)
{
	volatile uint64_t *rounds = data;

	for (;;) {
		for (int i = 0; i < ROUND_LOOPS; i++)
			__asm__ volatile("" ::: "memory");
		*rounds += 1;
	}
	return NULL;
}

int main(int argc, char **argv)
{
	int n = argc == 3 ? atoi(argv[1]) : 0, file;
	uint64_t *rounds;

	if (n < 1 || n > MAX_THREADS) {
		fprintf(stderr, "use: bystander N FILE, N from 1 to %d\n", MAX_THREADS);
		return 2;
	}
	file = open(argv[2], O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
	if (file < 0 || ftruncate(file, n * sizeof(*rounds)))
		die(argv[2]);
	rounds = mmap(NULL, n * sizeof(*rounds), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	if (rounds == MAP_FAILED)
		die("mmap");
	for (int i = 0; i < n; i++) {
		pthread_t thread;

		if (pthread_create(&thread, NULL, work, &rounds[i]))
			die("pthread_create");
	}
	puts("ready");
	fflush(stdout);
	for (;;)
		pause();
}
