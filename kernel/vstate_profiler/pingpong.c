// SPDX-License-Identifier: GPL-2.0
/*
 * pingpong - a process whose vector-state saves are known beforehand.
 *
 * Two threads on one hart hand a byte to and fro through pipes, ROUNDS times each way, and touch
 * the vector registers in between. Whoever waits blocks in read(), and every system call leaves the
 * registers Dirty on this kernel: each of the 2 * ROUNDS hand-overs is one save, and nothing else
 * makes the hart switch but the tick and the start and end.
 * Writes its process number to standard output, then waits for a line on standard input before it
 * begins and for another before it ends, so that a window can be opened and closed around the work.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static long rounds;
static int there[2], back[2];

static void touch_vector(void)
{
	unsigned long vl;

	__asm__ volatile("vsetvli %0, zero, e32, m8, ta, ma\n\t"
			 "vadd.vi v8, v8, 1\n\t"
			 : "=r"(vl));
}

static void hand_over(int from, int to)
{
	char byte;

	if (read(from, &byte, 1) != 1)
		exit(1);
	touch_vector();
	if (write(to, &byte, 1) != 1)
		exit(1);
}

static void *other(void *unused)
{
	for (long i = 0; i < rounds; i++)
		hand_over(there[0], back[1]);
	return unused;
}

int main(int argc, char **argv)
{
	pthread_t thread;
	cpu_set_t hart;
	char byte;

	rounds = argc == 2 ? atol(argv[1]) : 0;
	CPU_ZERO(&hart);
	CPU_SET(0, &hart);
	if (rounds < 1 || sched_setaffinity(0, sizeof(hart), &hart) || pipe(there) || pipe(back) ||
	    pthread_create(&thread, NULL, other, NULL))
		return 2;
	printf("%d\n", getpid());
	fflush(stdout);
	if (read(0, &byte, 1) != 1)
		return 3;
	touch_vector();
	for (long i = 0; i < rounds; i++) {
		if (write(there[1], "x", 1) != 1)
			return 4;
		if (read(back[0], &byte, 1) != 1)
			return 5;
		touch_vector();
	}
	pthread_join(thread, NULL);
	printf("done\n");
	fflush(stdout);
	return read(0, &byte, 1) == 1 ? 0 : 6;
}
