/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * What the steering programs use of the kernel: contexts and helpers by their number in the stable interface
 * (include/uapi/linux/bpf.h), and the notation for maps and sections that libbpf reads. clang alone compiles it.
 */
#pragma once

typedef unsigned char __u8;
typedef unsigned short __u16;
typedef unsigned int __u32;
typedef int __s32;
typedef unsigned long long __u64;

#define SEC(name) __attribute__((section(name), used))
#define __uint(name, value) int(*name)[value]
#define __type(name, type) typeof(type) *name
#define __always_inline inline __attribute__((always_inline))

/* A field that somebody else writes. */
#define KSF_READ(field) (*(const volatile typeof(field) *)&(field))

enum bpf_map_type {
	BPF_MAP_TYPE_HASH = 1,
	BPF_MAP_TYPE_ARRAY = 2,
	BPF_MAP_TYPE_PERCPU_ARRAY = 6,
	BPF_MAP_TYPE_SOCKMAP = 15,
	BPF_MAP_TYPE_REUSEPORT_SOCKARRAY = 20,
};

enum { BPF_F_MMAPABLE = 1024 };
enum { BPF_SK_LOOKUP_F_NO_REUSEPORT = 2 };
enum { KSF_AF_INET = 2, KSF_AF_INET6 = 10, KSF_IPPROTO_TCP = 6 };
enum sk_action { SK_DROP = 0, SK_PASS = 1 };

struct bpf_sock;

/* Kernel 5.9. */
struct bpf_sk_lookup {
	union {
		struct bpf_sock *sk; /* what an earlier program has selected */
		__u64 : 64;
	} __attribute__((aligned(8)));
	__u32 family;
	__u32 protocol;
	__u32 remote_ip4;
	__u32 remote_ip6[4];
	__u16 remote_port;
	__u16 : 16;
	__u32 local_ip4; /* network order */
	__u32 local_ip6[4];
	__u32 local_port; /* host order */
	__u32 ingress_ifindex;
};

/* Kernel 4.19; only its address is used here. */
struct sk_reuseport_md {
	void *data;
	void *data_end;
	__u32 len;
	__u32 eth_protocol;
	__u32 ip_protocol;
	__u32 bind_inany;
	__u32 hash;
};

/* Kernel 4.17. */
struct bpf_sock_addr {
	__u32 user_family;
	__u32 user_ip4;
	__u32 user_ip6[4];
	__u32 user_port; /* network order */
	__u32 family;
	__u32 type;
	__u32 protocol;
};

/* Kernel-private: the loader finds the real offsets in the running kernel's BTF. */
struct sock {
	__u32 sk_ack_backlog;
	__u32 sk_max_ack_backlog;
} __attribute__((preserve_access_index));

static void *(*const bpf_map_lookup_elem)(void *map, const void *key) = (void *)1;
static __u64 (*const bpf_ktime_get_ns)(void) = (void *)5;
static __u32 (*const bpf_get_smp_processor_id)(void) = (void *)8;
static long (*const bpf_setsockopt)(void *ctx, int level, int name, void *value, int bytes) = (void *)49;
static long (*const bpf_sk_select_reuseport)(struct sk_reuseport_md *md, void *map, void *key, __u64 flags) = (void *)82;
static long (*const bpf_sk_release)(void *sock) = (void *)86;
static long (*const bpf_sk_assign)(struct bpf_sk_lookup *ctx, void *sk, __u64 flags) = (void *)124;
static struct sock *(*const bpf_skc_to_tcp_sock)(void *sk) = (void *)137;
