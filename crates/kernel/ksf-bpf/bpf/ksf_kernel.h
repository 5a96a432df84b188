/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * The kernel, as eBPF programs of ksf see it. All of them include this, so each type stands here once.
 *
 * Helpers, and the notation for maps and sections, are libbpf's (bpf/ beside the installed headers). Types of the stable
 * interface have the layout of include/uapi/linux/bpf.h, as far as they are used. Of the structs that are private to the
 * kernel only names matter: every access goes through CO-RE (preserve_access_index), so the loader finds the real
 * offsets in the running kernel's BTF. No vmlinux.h is needed and none is committed; a program that includes one, or
 * linux/bpf.h, before this has those types from there.
 *
 * With -DKSF_HOST a program of the host has the types alone.
 */
#pragma once

#ifndef __BYTE_ORDER__
#error "the compiler does not say its byte order"
#endif

#if !defined(__VMLINUX_H__) && !defined(__LINUX_BPF_H__)

typedef unsigned char __u8;
typedef signed char __s8;
typedef unsigned short __u16;
typedef signed short __s16;
typedef unsigned int __u32;
typedef signed int __s32;
typedef unsigned long long __u64;
typedef signed long long __s64;
typedef __u16 __be16;
typedef __u32 __be32;
typedef __u64 __be64;
typedef __u16 __sum16;
typedef __u32 __wsum;

enum bpf_map_type {
	BPF_MAP_TYPE_HASH = 1,
	BPF_MAP_TYPE_ARRAY = 2,
	BPF_MAP_TYPE_PROG_ARRAY = 3,
	BPF_MAP_TYPE_PERCPU_HASH = 5,
	BPF_MAP_TYPE_PERCPU_ARRAY = 6,
	BPF_MAP_TYPE_LRU_HASH = 9,
	BPF_MAP_TYPE_LPM_TRIE = 11,
	BPF_MAP_TYPE_ARRAY_OF_MAPS = 12,
	BPF_MAP_TYPE_SOCKMAP = 15,
	BPF_MAP_TYPE_CPUMAP = 16,
	BPF_MAP_TYPE_SOCKHASH = 18,
	BPF_MAP_TYPE_RINGBUF = 27,
};

enum { BPF_F_MMAPABLE = 1024 };
enum { BPF_RB_FORCE_WAKEUP = 2 };
enum { BPF_SK_LOOKUP_F_NO_REUSEPORT = 2 };

enum sk_action { SK_DROP = 0, SK_PASS = 1 };

enum xdp_action { XDP_ABORTED = 0, XDP_DROP, XDP_PASS, XDP_TX, XDP_REDIRECT };

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
	__be16 dst_port;
	__u16 : 16;
	__u32 dst_ip4;
	__u32 dst_ip6[4];
	__u32 state;
	__s32 rx_queue_mapping;
};

struct __sk_buff {
	__u32 len;
	__u32 pkt_type;
	__u32 mark;
	__u32 queue_mapping;
	__u32 protocol;
	__u32 vlan_present;
	__u32 vlan_tci;
	__u32 vlan_proto;
	__u32 priority;
	__u32 ingress_ifindex;
	__u32 ifindex;
	__u32 tc_index;
	__u32 cb[5];
	__u32 hash;
	__u32 tc_classid;
	__u32 data;
	__u32 data_end;
	__u32 napi_id;
	__u32 family;
	__u32 remote_ip4;
	__u32 local_ip4;
	__u32 remote_ip6[4];
	__u32 local_ip6[4];
	__u32 remote_port;
	__u32 local_port;
	__u32 data_meta;
	union {
		void *flow_keys;
		__u64 : 64;
	} __attribute__((aligned(8)));
	__u64 tstamp;
	__u32 wire_len;
	__u32 gso_segs;
	union {
		struct bpf_sock *sk;
		__u64 : 64;
	} __attribute__((aligned(8)));
};

struct xdp_md {
	__u32 data;
	__u32 data_end;
	__u32 data_meta;
	__u32 ingress_ifindex;
	__u32 rx_queue_index;
	__u32 egress_ifindex;
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
			__be32 saddr;
			__be32 daddr;
			__be16 sport;
			__be16 dport;
		} ipv4;
		struct {
			__be32 saddr[4];
			__be32 daddr[4];
			__be16 sport;
			__be16 dport;
		} ipv6;
	};
};

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
	__be16 remote_port;
	__u16 : 16;
	__u32 local_ip4; /* network order */
	__u32 local_ip6[4];
	__u32 local_port; /* host order */
	__u32 ingress_ifindex;
};

#endif

#ifndef __VMLINUX_H__

/* Network headers, as on the wire. */
struct ethhdr {
	__u8 h_dest[6];
	__u8 h_source[6];
	__be16 h_proto;
} __attribute__((packed));

/* Behind the addresses of ethhdr, or behind another tag. */
struct vlan_hdr {
	__be16 h_vlan_TCI;
	__be16 h_vlan_encapsulated_proto;
};

struct iphdr {
	__u8 version_ihl;
	__u8 tos;
	__be16 tot_len;
	__be16 id;
	__be16 frag_off;
	__u8 ttl;
	__u8 protocol;
	__sum16 check;
	__be32 saddr;
	__be32 daddr;
};

struct ipv6hdr {
	__u8 version_class;
	__u8 flow_lbl[3];
	__be16 payload_len;
	__u8 nexthdr;
	__u8 hop_limit;
	__be32 saddr[4];
	__be32 daddr[4];
};

struct tcphdr {
	__be16 source;
	__be16 dest;
	__be32 seq;
	__be32 ack_seq;
	__u8 doff_reserved;
	__u8 flags;
	__be16 window;
	__sum16 check;
	__be16 urg_ptr;
};

struct udphdr {
	__be16 source;
	__be16 dest;
	__be16 len;
	__sum16 check;
};

/* Addresses, as bpf_bind() takes them. */
struct sockaddr_in {
	__u16 sin_family;
	__be16 sin_port;
	__be32 sin_addr;
	__u8 sin_zero[8];
};

struct sockaddr_in6 {
	__u16 sin6_family;
	__be16 sin6_port;
	__be32 sin6_flowinfo;
	__be32 sin6_addr[4];
	__u32 sin6_scope_id;
};

#endif

#ifndef KSF_HOST

#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

#ifndef __VMLINUX_H__

struct sock {
	int sk_sndbuf;
	int sk_wmem_queued;
	__u8 sk_shutdown;
	__u32 sk_ack_backlog;
	__u32 sk_max_ack_backlog;
};

struct inet_sock {
	struct sock sk;
};

struct inet_connection_sock {
	struct inet_sock icsk_inet;
};

struct tcp_sock {
	struct inet_connection_sock inet_conn;
	__u32 rcv_nxt;
	__u32 copied_seq;
	__u32 snd_una;
	__u32 write_seq;
	__u64 bytes_acked;
};

#endif

/* What strparser keeps in sk_buff.cb. The loader ignores what follows ___ in a name. */
struct strp_msg___ksf {
	int offset;
};

struct _strp_msg___ksf {
	struct strp_msg___ksf strp;
};

struct sk_skb_cb___ksf {
	struct _strp_msg___ksf strp;
};

struct sk_buff___ksf {
	char cb[48];
};

#pragma clang attribute pop

#endif

/* A field the other side writes. */
#define KSF_READ(field) (*(const volatile typeof(field) *)&(field))

/* From and to the byte order of the name; constants stay constants. libbpf's bpf_endian.h has no little end. */
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define KSF_BE16(value) __builtin_bswap16(value)
#define KSF_BE32(value) __builtin_bswap32(value)
#define KSF_BE64(value) __builtin_bswap64(value)
#define KSF_LE16(value) (value)
#define KSF_LE32(value) (value)
#define KSF_LE64(value) (value)
#else
#define KSF_BE16(value) (value)
#define KSF_BE32(value) (value)
#define KSF_BE64(value) (value)
#define KSF_LE16(value) __builtin_bswap16(value)
#define KSF_LE32(value) __builtin_bswap32(value)
#define KSF_LE64(value) __builtin_bswap64(value)
#endif
