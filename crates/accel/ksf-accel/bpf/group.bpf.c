/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Level 2: an sk_reuseport program (kernel 4.19; CAP_BPF is enough), one per listener. The queues are siblings of the
 * program's own listener on its own port, so the kernel finds the group by itself and asks whom in it to take.
 *
 * Without an answer the kernel takes any member by hash; the program's own listener must be chosen by name.
 */
#include "pick.h"

enum { KSF_OWN_LISTENER = KSF_WORKERS_MAX };

/* Queue of worker w, and the program's own listener. */
struct {
	__uint(type, BPF_MAP_TYPE_REUSEPORT_SOCKARRAY);
	__uint(max_entries, KSF_WORKERS_MAX + 1);
	__type(key, __u32);
	__type(value, __u64);
} ksf_members SEC(".maps");

const volatile __u32 ksf_listener = 0;

SEC("sk_reuseport")
int ksf_group(struct sk_reuseport_md *ctx)
{
	__u32 zero = 0;
	struct ksf_state *state = bpf_map_lookup_elem(&ksf_state, &zero);
	int w = state ? ksf_pick(state, ksf_listener) : KSF_NOBODY;
	__u32 member = KSF_OWN_LISTENER;
	if (state && w >= 0) {
		member = w & (KSF_WORKERS_MAX - 1);
		if (!bpf_sk_select_reuseport(ctx, &ksf_members, &member, 0)) {
			ksf_count(&state->workers[w & (KSF_WORKERS_MAX - 1)]);
			return SK_PASS;
		}
		member = KSF_OWN_LISTENER;
	}
	bpf_sk_select_reuseport(ctx, &ksf_members, &member, 0);
	return SK_PASS;
}

char _license[] SEC("license") = "Dual MIT/GPL";
