// SPDX-License-Identifier: GPL-2.0-only OR MIT
/*
 * Source ports for programs that no library can be put into: static ones, and those that make their own system calls.
 *
 * Runs in connect(2) of every process of a cgroup. The connection gets a port of the chunk of the CPU that calls. Where
 * the kernel takes IP_LOCAL_PORT_RANGE from here it picks the port itself, as it does for the library; else a free port
 * is bound. A bound port belongs to one connection only, and for as long as TIME_WAIT lasts, so a chunk can run out;
 * then the connection is left alone: it gets a port as if this program were not there.
 */
#include "ksf_kernel.h"
#include "ksf_flow_abi.h"

#define ALLOW 1

enum {
	AF_INET = 2,
	AF_INET6 = 10,
	SOCK_STREAM = 1,
	IPPROTO_IP = 0,
	IPPROTO_TCP = 6,
	SOL_SOCKET = 1,
	SO_REUSEADDR = 2,
	SO_REUSEPORT = 15,
	IP_LOCAL_PORT_RANGE = 51, /* kernel 6.3 */
	EADDRINUSE = 98,
	TRIES_MAX = 64,
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct ksf_connect_settings);
} ksf_settings SEC(".maps");

/* By CPU number: one more than the index of its chunk; 0: it has none. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, KSF_FLOW_CPUS_MAX);
	__type(key, __u32);
	__type(value, __u32);
} ksf_chunk_of SEC(".maps");

/* net.ipv4.ip_local_reserved_ports, one bit each: the kernel would not pick them, so neither do we. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 65536 / 32);
	__type(key, __u32);
	__type(value, __u32);
} ksf_reserved SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, KSF_CONNECT_COUNTER_COUNT);
	__type(key, __u32);
	__type(value, __u64);
} ksf_connect_counts SEC(".maps");

static __always_inline int counted(__u32 counter)
{
	__u64 *count = bpf_map_lookup_elem(&ksf_connect_counts, &counter);

	/* Atomic: two processes can be in connect() on one CPU. */
	if (count)
		__sync_fetch_and_add(count, 1);
	return ALLOW;
}

/* What of the socket decides whether it is left alone, and what binding it needs. */
struct source {
	__u32 ip6[4];
	__u32 ip4;
	__u32 family;
};

static __always_inline int bind_to(struct bpf_sock_addr *ctx, const struct source *source, __u32 port)
{
	if (source->family == AF_INET) {
		struct sockaddr_in address = {
			.sin_family = AF_INET,
			.sin_port = KSF_BE16((__u16)port),
			.sin_addr = source->ip4,
		};

		return bpf_bind(ctx, (struct sockaddr *)&address, sizeof(address));
	} else {
		struct sockaddr_in6 address = {
			.sin6_family = AF_INET6,
			.sin6_port = KSF_BE16((__u16)port),
			.sin6_addr = { source->ip6[0], source->ip6[1], source->ip6[2], source->ip6[3] },
		};

		return bpf_bind(ctx, (struct sockaddr *)&address, sizeof(address));
	}
}

static __always_inline int is_reserved(__u32 port)
{
	__u32 word = port / 32, *reserved = bpf_map_lookup_elem(&ksf_reserved, &word);

	return reserved && *reserved & 1U << port % 32;
}

/* Switches an option off and says whether it was on. */
static __always_inline int take_off(struct bpf_sock_addr *ctx, int option)
{
	int on = 0, off = 0;

	if (bpf_getsockopt(ctx, SOL_SOCKET, option, &on, sizeof(on)) || !on)
		return 0;
	return !bpf_setsockopt(ctx, SOL_SOCKET, option, &off, sizeof(off));
}

static __always_inline void put_back(struct bpf_sock_addr *ctx, int option, int was_on)
{
	int on = 1;

	if (was_on)
		bpf_setsockopt(ctx, SOL_SOCKET, option, &on, sizeof(on));
}

static __always_inline int choose(struct bpf_sock_addr *ctx, struct ksf_connect_settings *settings,
				  const struct source *source)
{
	__u32 cpu = bpf_get_smp_processor_id(), *chunk = bpf_map_lookup_elem(&ksf_chunk_of, &cpu);
	__u32 index, mask, first, result = KSF_CONNECT_left_exhausted;
	int reuse_address, reuse_port;

	if (!chunk || !*chunk)
		return counted(KSF_CONNECT_left_cpu);
	index = *chunk - 1;
	if (!settings->range_refused) {
		__u32 range = ksf_flow_range(&settings->layout, index);

		if (!bpf_setsockopt(ctx, IPPROTO_IP, IP_LOCAL_PORT_RANGE, &range, sizeof(range)))
			return counted(KSF_CONNECT_by_range);
		settings->range_refused = 1;
	}
	/*
	 * With these options the port could be one that another socket has, or a connection in TIME_WAIT, and connect()
	 * would fail with EADDRNOTAVAIL where it would have taken another port without us.
	 */
	reuse_address = take_off(ctx, SO_REUSEADDR);
	reuse_port = take_off(ctx, SO_REUSEPORT);
	mask = (1U << (settings->layout.chunk_bits & 15)) - 1;
	first = ksf_flow_first_port(&settings->layout, index);
	for (__u32 at = 0; at < TRIES_MAX; at++) {
		__u32 port = first | (bpf_get_prandom_u32() & mask);
		int error;

		if (at >= settings->tries)
			break;
		if (is_reserved(port))
			continue;
		error = bind_to(ctx, source, port);
		if (!error) {
			result = KSF_CONNECT_by_bind;
			break;
		}
		if (error != -EADDRINUSE) {
			result = KSF_CONNECT_left_error;
			break;
		}
	}
	put_back(ctx, SO_REUSEADDR, reuse_address);
	put_back(ctx, SO_REUSEPORT, reuse_port);
	return counted(result);
}

static __always_inline struct ksf_connect_settings *settings_for(struct bpf_sock_addr *ctx, __u32 *why)
{
	__u32 zero = 0;
	struct ksf_connect_settings *settings = bpf_map_lookup_elem(&ksf_settings, &zero);

	*why = KSF_CONNECT_left_cpu;
	if (!settings || !settings->layout.chunks)
		return 0;
	*why = KSF_CONNECT_left_not_tcp;
	/* MPTCP is a protocol of its own: its subflows choose ports later. */
	if (ctx->type != SOCK_STREAM || ctx->protocol != IPPROTO_TCP)
		return 0;
	*why = KSF_CONNECT_left_netns;
	if (settings->netns_cookie && bpf_get_netns_cookie(ctx) != settings->netns_cookie)
		return 0;
	return settings;
}

SEC("cgroup/connect4") int ksf_connect4(struct bpf_sock_addr *ctx)
{
	struct source source = { .family = AF_INET };
	struct ksf_connect_settings *settings;
	struct bpf_sock *sock = ctx->sk;
	__u32 why;

	settings = settings_for(ctx, &why);
	if (!settings)
		return counted(why);
	if (!sock || sock->src_port)
		return counted(KSF_CONNECT_left_bound);
	if (!settings->loopback && (ctx->user_ip4 & KSF_BE32(0xff000000)) == KSF_BE32(0x7f000000))
		return counted(KSF_CONNECT_left_loopback);
	/* Bound to an address only (IP_BIND_ADDRESS_NO_PORT): it stays. */
	source.ip4 = sock->src_ip4;
	return choose(ctx, settings, &source);
}

SEC("cgroup/connect6") int ksf_connect6(struct bpf_sock_addr *ctx)
{
	struct source source = { .family = AF_INET6 };
	struct ksf_connect_settings *settings;
	struct bpf_sock *sock = ctx->sk;
	__u32 to[4], why;

	settings = settings_for(ctx, &why);
	if (!settings)
		return counted(why);
	if (!sock || sock->src_port)
		return counted(KSF_CONNECT_left_bound);
	to[0] = ctx->user_ip6[0];
	to[1] = ctx->user_ip6[1];
	to[2] = ctx->user_ip6[2];
	to[3] = ctx->user_ip6[3];
	if (!settings->loopback && !to[0] && !to[1]) {
		int mapped = to[2] == KSF_BE32(0xffff) && (to[3] & KSF_BE32(0xff000000)) == KSF_BE32(0x7f000000);

		if (mapped || (!to[2] && to[3] == KSF_BE32(1)))
			return counted(KSF_CONNECT_left_loopback);
	}
	source.ip6[0] = sock->src_ip6[0];
	source.ip6[1] = sock->src_ip6[1];
	source.ip6[2] = sock->src_ip6[2];
	source.ip6[3] = sock->src_ip6[3];
	/* A link-local source (fe80::/10) needs an interface beside it, which is not to be had here. */
	if ((source.ip6[0] & KSF_BE32(0xffc00000)) == KSF_BE32(0xfe800000))
		return counted(KSF_CONNECT_left_bound);
	return choose(ctx, settings, &source);
}

char ksf_connect_license[] SEC("license") = "Dual MIT/GPL";
