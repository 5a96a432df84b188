/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Which worker gets the connection? The same answer for all programs.
 *
 *   1. a worker at home on this CPU that waits for work
 *   2. one at home here that has been busy for a short time only
 *   3. any worker that waits
 *   4. any that has been busy for a short time only
 *   5. one at home here, however busy
 *   6. nobody: the program's own listener
 *
 * Only workers that are ready for the listener and not marked as stalled count. Equals take turns.
 *
 * The state can be written by the accelerated program, so nothing in it is trusted further than this choice.
 */
#pragma once

#include "state.h"

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct ksf_state);
} ksf_state SEC(".maps");

/* Where this CPU's next search begins. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} ksf_turn SEC(".maps");

enum { KSF_NOBODY = -1 };

/* How busy a worker is; less is better. */
enum { KSF_WAITS, KSF_BUSY, KSF_LONG_BUSY, KSF_UNUSABLE };

static __always_inline int ksf_worker_is(struct ksf_worker *worker, __u64 listener_bit, __u64 now, __u64 limit)
{
	if (!(KSF_READ(worker->ready) & listener_bit) || KSF_READ(worker->stalled))
		return KSF_UNUSABLE;
	__u64 since = KSF_READ(worker->busy_since_ns);
	if (!since)
		return KSF_WAITS;
	/* A stamp from a CPU whose clock is a little ahead is young. */
	return now <= since || now - since < limit ? KSF_BUSY : KSF_LONG_BUSY;
}

static __always_inline int ksf_pick(struct ksf_state *state, __u32 listener)
{
	__u32 zero = 0;
	__u32 *turn = bpf_map_lookup_elem(&ksf_turn, &zero);
	if (!turn || !KSF_READ(state->control.on) || listener >= KSF_LISTENERS_MAX)
		return KSF_NOBODY;
	__u64 bit = 1ULL << listener;
	__u64 now = bpf_ktime_get_ns();
	__u64 limit = KSF_READ(state->control.busy_limit_ns);
	__u32 start = (*turn)++;
	int own_busy = KSF_NOBODY, own = KSF_NOBODY;

	struct ksf_home *home = &state->homes[bpf_get_smp_processor_id() & (KSF_CPUS_MAX - 1)];
	__u32 len = KSF_READ(home->len);
	for (__u32 i = 0; i < KSF_HOME_MAX && i < len; i++) {
		__u32 at = (start + i) % len;
		if (at >= KSF_HOME_MAX)
			break;
		__u32 w = KSF_READ(home->worker[at]);
		int is = ksf_worker_is(&state->workers[w & (KSF_WORKERS_MAX - 1)], bit, now, limit);
		if (is == KSF_WAITS)
			return w;
		if (is == KSF_BUSY && own_busy == KSF_NOBODY)
			own_busy = w;
		if (is == KSF_LONG_BUSY && own == KSF_NOBODY)
			own = w;
	}
	if (own_busy != KSF_NOBODY)
		return own_busy;

	__u32 end = KSF_READ(state->control.workers_end);
	int any_busy = KSF_NOBODY;
	for (__u32 i = 0; i < KSF_WORKERS_MAX && i < end; i++) {
		__u32 w = (start + i) % end & (KSF_WORKERS_MAX - 1);
		int is = ksf_worker_is(&state->workers[w], bit, now, limit);
		if (is == KSF_WAITS)
			return w;
		if (is == KSF_BUSY && any_busy == KSF_NOBODY)
			any_busy = w;
	}
	return any_busy != KSF_NOBODY ? any_busy : own;
}

static __always_inline void ksf_count(struct ksf_worker *worker)
{
	if (KSF_READ(worker->cpu) == (__s32)bpf_get_smp_processor_id())
		__sync_fetch_and_add(&worker->steered_local, 1);
	else
		__sync_fetch_and_add(&worker->steered_remote, 1);
}
