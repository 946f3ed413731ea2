// hints PAUSE_MS BATCH...: announce batches as llama-server does, computing nothing.
//
// BATCH is PREFILL,DECODE (tokens), with a ! behind it for one that fails.  Before each batch, and
// while it is announced, it sleeps PAUSE_MS; each batch is a line with its phase's number.
// Promise: the code that writes is llama-server's own (server-vstate.cpp).
// Limit: its arguments are not checked; it is for tests.
#include "server-vstate.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

static void pause_ms(int ms)
{
	fflush(stdout);
	usleep(useconds_t(ms) * 1000);
}

int main(int argc, char **argv)
{
	const int ms = argc > 1 ? atoi(argv[1]) : 0;

	for (int i = 2; i < argc; i++) {
		unsigned int n_prefill = 0;
		unsigned int n_decode = 0;
		server_vstate_batch batch;

		sscanf(argv[i], "%u,%u", &n_prefill, &n_decode);
		for (unsigned int n = 0; n < n_prefill; n++) {
			batch.add(true);
		}
		for (unsigned int n = 0; n < n_decode; n++) {
			batch.add(false);
		}
		pause_ms(ms);
		server_vstate_scope scope(batch);
		printf("%u\n", batch.phase());
		pause_ms(ms);
		scope.computed = !strchr(argv[i], '!');
	}
}
