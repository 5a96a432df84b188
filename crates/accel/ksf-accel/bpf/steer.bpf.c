/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Level 1: an sk_lookup program (kernel 5.9), attached to the network namespace. It sees every connection request that
 * looks for a listener, before the kernel's own search, and sends those of the accelerated program to a worker's
 * queue. The queues are bound somewhere else entirely; the program's own listener stays what it was, as the fallback.
 *
 * The order of the search is the kernel's (net/ipv4/inet_hashtables.c, __inet_lookup_listener): the exact address
 * before the wildcard, a socket bound to the device before one that is not.
 */
#include "pick.h"

enum { KSF_AF_INET = 2, KSF_IPPROTO_TCP = 6, KSF_TCP_LISTEN = 10 };

/* What to do with a request to one address. */
enum { KSF_STEER = 0, KSF_LEAVE = 1, KSF_REFUSE = 2 };

struct ksf_key {
	__u32 address[4]; /* IPv4: the first word. Network order. */
	__u32 ifindex; /* 0: whatever device */
	__u16 port; /* host order */
	__u16 family;
};

struct ksf_rule {
	__u32 action;
	__u32 listener;
};

/* One bit per port with a rule: what the requests of everybody else cost. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 65536 / 64);
	__type(key, __u32);
	__type(value, __u64);
} ksf_ports SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, struct ksf_key);
	__type(value, struct ksf_rule);
} ksf_rules SEC(".maps");

/* Queue of listener l and worker w: l * KSF_WORKERS_MAX + w. */
struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__uint(max_entries, KSF_LISTENERS_MAX * KSF_WORKERS_MAX);
	__type(key, __u32);
	__type(value, __u32);
} ksf_queues SEC(".maps");

/*
 * The program's own socket that the queue of the same index stands for. The kernel takes a socket out of a map when it is
 * closed, however that comes about: a rule that the holder has not withdrawn yet ends with it.
 */
struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__uint(max_entries, KSF_LISTENERS_MAX * KSF_WORKERS_MAX);
	__type(key, __u32);
	__type(value, __u32);
} ksf_owners SEC(".maps");

/* 1: the loader may read kernel structures (CAP_PERFMON), so that full queues are seen. */
const volatile __u32 ksf_sees_backlog = 0;

static __always_inline struct ksf_rule *ksf_find(struct bpf_sk_lookup *ctx)
{
	struct ksf_key key = { .port = ctx->local_port, .family = ctx->family };
	if (ctx->family == KSF_AF_INET) {
		key.address[0] = ctx->local_ip4;
	} else {
		key.address[0] = ctx->local_ip6[0];
		key.address[1] = ctx->local_ip6[1];
		key.address[2] = ctx->local_ip6[2];
		key.address[3] = ctx->local_ip6[3];
	}
	struct ksf_rule *rule;
	key.ifindex = ctx->ingress_ifindex;
	if ((rule = bpf_map_lookup_elem(&ksf_rules, &key)))
		return rule;
	key.ifindex = 0;
	if ((rule = bpf_map_lookup_elem(&ksf_rules, &key)))
		return rule;
	key.address[0] = key.address[1] = key.address[2] = key.address[3] = 0;
	key.ifindex = ctx->ingress_ifindex;
	if ((rule = bpf_map_lookup_elem(&ksf_rules, &key)))
		return rule;
	key.ifindex = 0;
	return bpf_map_lookup_elem(&ksf_rules, &key);
}

/* A full queue drops what it is sent; the program's own listener may still have room. */
static __always_inline int ksf_is_full(struct bpf_sock *queue)
{
	if (!ksf_sees_backlog)
		return 0;
	struct tcp_sock *tp = bpf_skc_to_tcp_sock(queue);
	if (!tp)
		return 0;
	struct sock *sk = &tp->inet_conn.icsk_inet.sk;
	return sk->sk_ack_backlog > sk->sk_max_ack_backlog;
}

SEC("sk_lookup")
int ksf_steer(struct bpf_sk_lookup *ctx)
{
	if (ctx->protocol != KSF_IPPROTO_TCP)
		return SK_PASS;
	__u32 word = ctx->local_port / 64;
	__u64 *ports = bpf_map_lookup_elem(&ksf_ports, &word);
	if (!ports || !(KSF_READ(*ports) & 1ULL << (ctx->local_port & 63)))
		return SK_PASS;
	/* Another program has chosen already: its answer stands. */
	if (ctx->sk)
		return SK_PASS;
	struct ksf_rule *rule = ksf_find(ctx);
	if (!rule || rule->action == KSF_LEAVE)
		return SK_PASS;
	if (rule->action == KSF_REFUSE)
		return SK_DROP;

	__u32 zero = 0;
	struct ksf_state *state = bpf_map_lookup_elem(&ksf_state, &zero);
	if (!state)
		return SK_PASS;
	__u32 listener = rule->listener;
	int w = ksf_pick(state, listener);
	if (w < 0)
		return SK_PASS;
	__u32 index = listener * KSF_WORKERS_MAX + (w & (KSF_WORKERS_MAX - 1));
	struct bpf_sock *owner = bpf_map_lookup_elem(&ksf_owners, &index);
	if (!owner)
		return SK_PASS;
	/* After shutdown() it is still open, and may listen elsewhere. */
	int listens = owner->state == KSF_TCP_LISTEN && owner->src_port == ctx->local_port;
	bpf_sk_release(owner);
	if (!listens)
		return SK_PASS;
	struct bpf_sock *queue = bpf_map_lookup_elem(&ksf_queues, &index);
	if (!queue)
		return SK_PASS;
	/* The queues of a listener are a reuseport group of their own (SYN cookies), which must not choose again. */
	if (!ksf_is_full(queue) && !bpf_sk_assign(ctx, queue, BPF_SK_LOOKUP_F_NO_REUSEPORT))
		ksf_count(&state->workers[w & (KSF_WORKERS_MAX - 1)]);
	bpf_sk_release(queue);
	return SK_PASS;
}

char _license[] SEC("license") = "Dual MIT/GPL";
