/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * The kernel's interface as far as the programs use it: types, helpers by their number (include/uapi/linux/bpf.h), and
 * the notation for maps and sections that libbpf reads. Kept here so that a policy compiles with clang alone.
 */
#pragma once

typedef unsigned char __u8;
typedef unsigned short __u16;
typedef short __s16;
typedef unsigned int __u32;
typedef int __s32;
typedef unsigned long long __u64;
typedef long long __s64;

#define SEC(name) __attribute__((section(name), used))
#define __uint(name, value) int(*name)[value]
#define __type(name, type) typeof(type) *name
#ifndef __always_inline
#define __always_inline inline __attribute__((always_inline))
#endif
#define likely(condition) __builtin_expect(!!(condition), 1)
#define unlikely(condition) __builtin_expect(!!(condition), 0)

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define KSF_BE16(value) __builtin_bswap16(value)
#define KSF_BE32(value) __builtin_bswap32(value)
#else
#define KSF_BE16(value) (value)
#define KSF_BE32(value) (value)
#endif

enum bpf_map_type {
	BPF_MAP_TYPE_HASH = 1,
	BPF_MAP_TYPE_ARRAY = 2,
	BPF_MAP_TYPE_PROG_ARRAY = 3,
	BPF_MAP_TYPE_PERCPU_HASH = 5,
	BPF_MAP_TYPE_PERCPU_ARRAY = 6,
	BPF_MAP_TYPE_LRU_HASH = 9,
	BPF_MAP_TYPE_LPM_TRIE = 11,
	BPF_MAP_TYPE_CPUMAP = 16,
};

enum xdp_action { XDP_ABORTED = 0, XDP_DROP, XDP_PASS, XDP_TX, XDP_REDIRECT };

struct xdp_md {
	__u32 data;
	__u32 data_end;
	__u32 data_meta;
	__u32 ingress_ifindex;
	__u32 rx_queue_index;
	__u32 egress_ifindex;
};

/* Value of a cpumap's entry, without a program of its own. */
struct bpf_cpumap_val {
	__u32 qsize; /* frames */
};

struct bpf_sock {
	__u32 bound_dev_if;
	__u32 family;
	__u32 type;
	__u32 protocol;
	__u32 mark;
	__u32 priority;
	__u32 src_ip4;
	__u32 src_ip6[4];
	__u32 src_port; /* host order */
	__u16 dst_port;
	__u16 : 16;
	__u32 dst_ip4;
	__u32 dst_ip6[4];
	__u32 state;
	__s32 rx_queue_mapping;
};

struct bpf_sock_addr {
	__u32 user_family;
	__u32 user_ip4;
	__u32 user_ip6[4];
	__u32 user_port;
	__u32 family;
	__u32 type;
	__u32 protocol;
	__u32 msg_src_ip4;
	__u32 msg_src_ip6[4];
	union {
		struct bpf_sock *sk;
		__u64 : 64;
	} __attribute__((aligned(8)));
};

struct bpf_sock_tuple {
	union {
		struct {
			__u32 saddr;
			__u32 daddr;
			__u16 sport;
			__u16 dport;
		} ipv4;
		struct {
			__u32 saddr[4];
			__u32 daddr[4];
			__u16 sport;
			__u16 dport;
		} ipv6;
	};
};

struct sockaddr_in {
	__u16 sin_family;
	__u16 sin_port;
	__u32 sin_addr;
	__u8 sin_zero[8];
};

struct sockaddr_in6 {
	__u16 sin6_family;
	__u16 sin6_port;
	__u32 sin6_flowinfo;
	__u32 sin6_addr[4];
	__u32 sin6_scope_id;
};

static void *(*const bpf_map_lookup_elem)(void *map, const void *key) = (void *)1;
static long (*const bpf_map_update_elem)(void *map, const void *key, const void *value, __u64 flags) = (void *)2;
static long (*const bpf_map_delete_elem)(void *map, const void *key) = (void *)3;
static __u64 (*const bpf_ktime_get_ns)(void) = (void *)5;
static __u32 (*const bpf_get_prandom_u32)(void) = (void *)7;
static __u32 (*const bpf_get_smp_processor_id)(void) = (void *)8;
static long (*const bpf_tail_call)(void *context, void *programs, __u32 index) = (void *)12;
static __s64 (*const bpf_csum_diff)(__u32 *from, __u32 from_size, __u32 *to, __u32 to_size, __u32 seed) = (void *)28;
static long (*const bpf_setsockopt)(void *context, int level, int option, void *value, int bytes) = (void *)49;
static long (*const bpf_redirect_map)(void *map, __u64 key, __u64 flags) = (void *)51;
static long (*const bpf_getsockopt)(void *context, int level, int option, void *value, int bytes) = (void *)57;
static long (*const bpf_bind)(struct bpf_sock_addr *context, void *address, int bytes) = (void *)64;
static long (*const bpf_sk_release)(void *sock) = (void *)86;
static struct bpf_sock *(*const bpf_skc_lookup_tcp)(void *context, struct bpf_sock_tuple *tuple, __u32 bytes,
						   __u64 netns, __u64 flags) = (void *)99;
static __u64 (*const bpf_get_netns_cookie)(void *context) = (void *)122;
static long (*const bpf_xdp_load_bytes)(struct xdp_md *xdp, __u32 offset, void *to, __u32 bytes) = (void *)189;
