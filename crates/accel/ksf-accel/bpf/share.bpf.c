/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * For programs that no library can be loaded into: in bind() of every process of a cgroup, TCP sockets get SO_REUSEPORT
 * (bpf_setsockopt() in these hooks: kernel 5.8). Then several copies of a program can listen on one port, each with a
 * queue of its own. bind() itself goes on as it would.
 *
 * A socket without a port yet is left alone: what it gets is nobody else's.
 */
#include "ksf_kernel.h"

enum { KSF_SOL_SOCKET = 1, KSF_SO_REUSEPORT = 15, KSF_SOCK_STREAM = 1, KSF_IPPROTO_TCP = 6, KSF_ALLOW = 1 };

/* Sockets that got the option, and those that did not. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, __u64);
} ksf_shared SEC(".maps");

static __always_inline int ksf_share(struct bpf_sock_addr *ctx)
{
	if (ctx->type != KSF_SOCK_STREAM || ctx->protocol != KSF_IPPROTO_TCP || !ctx->user_port)
		return KSF_ALLOW;
	int on = 1;
	__u32 failed = bpf_setsockopt(ctx, KSF_SOL_SOCKET, KSF_SO_REUSEPORT, &on, sizeof(on)) != 0;
	__u64 *count = bpf_map_lookup_elem(&ksf_shared, &failed);
	if (count)
		__sync_fetch_and_add(count, 1);
	return KSF_ALLOW;
}

SEC("cgroup/bind4")
int ksf_share4(struct bpf_sock_addr *ctx)
{
	return ksf_share(ctx);
}

SEC("cgroup/bind6")
int ksf_share6(struct bpf_sock_addr *ctx)
{
	return ksf_share(ctx);
}

char _license[] SEC("license") = "Dual MIT/GPL";
