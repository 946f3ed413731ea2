/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What scx_vstate shares with llama-server: the phase hints, ABI version 3.
 *
 * While scx_vstate runs, a hash map is pinned at VSTATE_PHASE_MAP_PATH.  The process
 * that computes (the writer) sets an element before each batch and sets it to VSTATE_PHASE_IDLE
 * after it.  The key is the writer's TGID; a thread may have an element of its own under its TID,
 * which then counts instead.  A hint that is not valid in every point below is counted by what is
 * wrong with it, and has no effect.
 *
 * Promise: a layout never changes under the same version; the size is asserted on both sides.
 * Limit: a hint says what the writer claims.  Only threads that used vector registers follow it.
 */
#ifndef SCX_VSTATE_H
#define SCX_VSTATE_H

#define VSTATE_PHASE_ABI_VERSION 3
#define VSTATE_PIN_DIR "/sys/fs/bpf/scx_vstate"
#define VSTATE_PHASE_MAP_PATH VSTATE_PIN_DIR "/phase_hints"
#define VSTATE_WORKER_MAP_PATH VSTATE_PIN_DIR "/workers"
#define VSTATE_MAX_HINTS 64
#define VSTATE_MAX_WORKERS 256
#define VSTATE_TICKS_PER_S 100 /* of writer_start_ticks: USER_HZ, the unit of /proc/PID/stat */

enum vstate_phase {
	VSTATE_PHASE_NONE, /* no hint; the same as no element */
	VSTATE_PHASE_IDLE, /* between batches; no tokens */
	VSTATE_PHASE_PREFILL, /* prompt tokens only */
	VSTATE_PHASE_DECODE, /* generated tokens only */
	VSTATE_PHASE_MIXED, /* both */
	VSTATE_NR_PHASES,
};

struct vstate_phase_hint {
	unsigned int abi_version; /* VSTATE_PHASE_ABI_VERSION */
	unsigned int phase; /* enum vstate_phase */
	unsigned long long updated_ns; /* CLOCK_MONOTONIC; not in the future, within the TTL */
	unsigned long long writer_start_ticks; /* field 22 of /proc/self/stat */
	unsigned int prefill_tokens; /* of this batch */
	unsigned int decode_tokens; /* of this batch */
	unsigned int batch_tokens; /* the sum of both */
	unsigned int sequence; /* batches announced, this one included; IDLE repeats it */
	unsigned long long prefill_total; /* of all batches but failed ones, this one included */
	unsigned long long decode_total;
};
_Static_assert(sizeof(struct vstate_phase_hint) == 56, "phase hint ABI changed");

#endif
