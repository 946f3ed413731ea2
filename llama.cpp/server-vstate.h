// Phase hints for scx_vstate: what llama-server is about to compute, told to the scheduler.
//
// Promise: off unless LLAMA_VSTATE_PHASE_HINTS=1; then two updates of one BPF map element for each
// batch (announced, idle again) and one look at the map's path a second.  No scheduler, or a map
// that is not its: one line on stderr, and the batch is computed as ever.
// Limit: one thread computes batches at a time (llama-server's); a hint under a thread ID is not
// written.  The contract is scx_vstate.h.
#pragma once

#include <cstdint>

// The tokens of a batch by what they are for.
struct server_vstate_batch {
	uint32_t n_prefill = 0;
	uint32_t n_decode = 0;

	void add(bool is_prompt)
	{
		++(is_prompt ? n_prefill : n_decode);
	}

	// enum vstate_phase of scx_vstate.h
	uint32_t phase() const;
};

// Announces the batch for as long as it lives.
struct server_vstate_scope {
	explicit server_vstate_scope(const server_vstate_batch &batch);
	~server_vstate_scope();

	server_vstate_scope(const server_vstate_scope &) = delete;
	server_vstate_scope &operator=(const server_vstate_scope &) = delete;

	// Set when the batch went through: one that failed is tried again in parts, and its tokens
	// must not count twice.
	bool computed = false;

      private:
	const server_vstate_batch batch;
};
