/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* What the programs of the hop and its guard share; the loader gives both the same maps. */
#pragma once

#include "ksf_hop_kernel.h"

#include "ksf_hop_abi.h"

/* What the writer's end knows of its direction. */
struct writer {
	struct ksf_hop_end reader_end;
	__u64 reader; /* struct sock, maybe stale; 0: not known yet */
	__u64 reader_cookie;
	__u32 joined;
	__u32 by_tcp; /* messages, until there were enough */
};

struct address {
	__u64 sock;
	__u64 cookie;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct ksf_hop_settings);
} ksf_hop_settings SEC(".maps");

/* A bit for each port that may be joined. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 65536 / 32);
	__type(key, __u32);
	__type(value, __u32);
} ksf_hop_ports SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_SOCKHASH);
	__uint(max_entries, 65536);
	__type(key, struct ksf_hop_end);
	__type(value, __u64);
} ksf_hop_sockets SEC(".maps");

/* Where the ends are in memory: a map of sockets does not show its sockets to programs of this type. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct ksf_hop_end);
	__type(value, struct address);
} ksf_hop_addresses SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct writer);
} ksf_hop_writers SEC(".maps");

/* Cookies of sockets that were read by splice(). */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, __u64);
	__type(value, __u32);
} ksf_hop_splicers SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, KSF_HOP_COUNTER_COUNT);
	__type(key, __u32);
	__type(value, __u64);
} ksf_hop_counts SEC(".maps");

static __always_inline void count(__u32 counter, __u64 by)
{
	__u64 *value = bpf_map_lookup_elem(&ksf_hop_counts, &counter);

	if (value)
		*value += by;
}

static __always_inline struct ksf_hop_settings *settings(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&ksf_hop_settings, &zero);
}

enum {
	/* net/sock.h: what sk_user_data points to, in its low bits. */
	SK_USER_DATA_PSOCK = 4,
	SK_USER_DATA_BITS = 7,
};

/* What a socket of a map of sockets has; null: it has none. */
static __always_inline struct sk_psock *psock_of(const struct sock *sk)
{
	void *data = 0;

	ksf_read(data, sk, sk_user_data);
	if (!((__u64)data & SK_USER_DATA_PSOCK))
		return 0;
	return (struct sk_psock *)((__u64)data & ~(__u64)SK_USER_DATA_BITS);
}
