// SPDX-License-Identifier: GPL-2.0
/*
 * burn - how parallel is this machine?
 *
 * Promise: `burn vector N MS` runs N threads of vector multiply-adds for MS milliseconds and prints
 * the iterations of all of them per second; `burn barrier N MS` lets N threads meet at a spinning
 * barrier, as ggml's thread pool does, and prints the meetings per second.
 * Each thread is bound to a hart of its own, so that the machine is measured and not its scheduler.
 * Limit: needs RVV 1.0 and the last N harts otherwise idle; times are CLOCK_MONOTONIC.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAX_THREADS 64
#define BATCH 64 /* iterations between two looks at the clock */

struct worker {
	pthread_t thread;
	unsigned long iterations;
	long elapsed_ns;
	char pad[40]; /* a cache line of its own */
};

static struct worker workers[MAX_THREADS];
static int nr_threads;
static long duration_ns;
static atomic_int nr_ready;
static atomic_int nr_arrived;
static atomic_int nr_passed;
static atomic_bool go;
static atomic_bool stop;
static long start_ns;

static long now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return ts.tv_sec * 1000000000L + ts.tv_nsec;
}

/* Returns true in the thread that came last. */
static bool meet(void)
{
	int passed = atomic_load_explicit(&nr_passed, memory_order_relaxed);

	if (atomic_fetch_add(&nr_arrived, 1) == nr_threads - 1) {
		atomic_store_explicit(&nr_arrived, 0, memory_order_relaxed);
		atomic_fetch_add(&nr_passed, 1);
		return true;
	}
	while (atomic_load_explicit(&nr_passed, memory_order_relaxed) == passed)
		__asm__ volatile(".insn i 0x0F, 0, x0, x0, 0x010"); /* pause */
	atomic_thread_fence(memory_order_seq_cst);
	return false;
}

/* The clock starts when the last thread has come: making threads is not what is measured. */
static void wait_for_all(void)
{
	if (atomic_fetch_add(&nr_ready, 1) == nr_threads - 1) {
		start_ns = now_ns();
		atomic_store(&go, true);
	}
	while (!atomic_load(&go))
		;
}

static void *vector_worker(void *arg)
{
	struct worker *self = arg;
	float buffer[256];
	size_t vl;

	memset(buffer, 0, sizeof(buffer));
	wait_for_all();
	while (now_ns() - start_ns < duration_ns) {
		for (int i = 0; i < BATCH; i++)
			__asm__ volatile("vsetvli %0, zero, e32, m8, ta, ma\n\t"
					 "vle32.v v8, (%1)\n\t"
					 "vfmacc.vv v16, v8, v8\n\t"
					 "vfmacc.vv v24, v8, v8\n\t"
					 "vse32.v v16, (%1)\n\t"
					 : "=&r"(vl)
					 : "r"(buffer)
					 : "memory");
		self->iterations += BATCH;
	}
	self->elapsed_ns = now_ns() - start_ns;
	return NULL;
}

static void *barrier_worker(void *arg)
{
	struct worker *self = arg;

	wait_for_all();
	for (;;) {
		/* The last one to come decides for all, before it lets them go. */
		if (meet() && now_ns() - start_ns >= duration_ns)
			atomic_store(&stop, true);
		meet();
		if (atomic_load(&stop)) {
			self->elapsed_ns = now_ns() - start_ns;
			return NULL;
		}
		self->iterations += 2;
	}
}

static long number(const char *text, const char *what, long least, long most)
{
	char *end;
	long value = strtol(text, &end, 10);

	if (*end || value < least || value > most) {
		fprintf(stderr, "burn: %s: got '%s', expected %ld..%ld\n", what, text, least, most);
		exit(2);
	}
	return value;
}

int main(int argc, char **argv)
{
	void *(*body)(void *);
	double per_second = 0;
	int nr_harts = (int)sysconf(_SC_NPROCESSORS_ONLN);

	if (argc != 4 || (strcmp(argv[1], "vector") && strcmp(argv[1], "barrier"))) {
		fprintf(stderr, "use: burn vector|barrier THREADS MILLISECONDS\n");
		return 2;
	}
	body = strcmp(argv[1], "vector") ? barrier_worker : vector_worker;
	nr_threads =
		(int)number(argv[2], "threads", 1, nr_harts < MAX_THREADS ? nr_harts : MAX_THREADS);
	duration_ns = number(argv[3], "milliseconds", 1, 3600000) * 1000000L;

	for (int i = 0; i < nr_threads; i++) {
		pthread_attr_t bound;
		cpu_set_t hart;
		int err;

		CPU_ZERO(&hart);
		/* From the last one down: the first hart also does the kernel's errands. */
		CPU_SET(nr_harts - 1 - i, &hart);
		pthread_attr_init(&bound);
		pthread_attr_setaffinity_np(&bound, sizeof(hart), &hart);
		err = pthread_create(&workers[i].thread, &bound, body, &workers[i]);
		pthread_attr_destroy(&bound);
		if (err) {
			fprintf(stderr, "burn: thread %d: %s\n", i, strerror(err));
			return 1;
		}
	}
	for (int i = 0; i < nr_threads; i++) {
		pthread_join(workers[i].thread, NULL);
		per_second += (double)workers[i].iterations * 1e9 / (double)workers[i].elapsed_ns;
	}
	/* Every thread counts each meeting; vector iterations are each thread's own. */
	if (body == barrier_worker)
		per_second /= nr_threads;
	printf("{\"kind\": \"%s\", \"threads\": %d, \"per_second\": %.3f}\n", argv[1], nr_threads,
	       per_second);
	return 0;
}
