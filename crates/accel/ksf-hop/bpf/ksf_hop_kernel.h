/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * The kernel's interface as far as the programs use it: helpers by their number (include/uapi/linux/bpf.h), contexts,
 * and of the kernel's own structs the fields that are read, which libbpf finds by name on the running kernel (CO-RE).
 */
#pragma once

typedef unsigned char __u8;
typedef unsigned short __u16;
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

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define KSF_BE16(value) __builtin_bswap16(value)
#define KSF_BE32(value) __builtin_bswap32(value)
#else
#define KSF_BE16(value) (value)
#define KSF_BE32(value) (value)
#endif

enum bpf_map_type {
	BPF_MAP_TYPE_ARRAY = 2,
	BPF_MAP_TYPE_PERCPU_ARRAY = 6,
	BPF_MAP_TYPE_LRU_HASH = 9,
	BPF_MAP_TYPE_SOCKHASH = 18,
	BPF_MAP_TYPE_SK_STORAGE = 24,
};

enum {
	BPF_F_NO_PREALLOC = 1U << 0,
	BPF_ANY = 0,
	BPF_NOEXIST = 1,
	BPF_F_INGRESS = 1,
	BPF_SK_STORAGE_GET_F_CREATE = 1,
	BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB = 4,
	BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB = 5,
	BPF_SOCK_OPS_STATE_CB = 10,
	BPF_SOCK_OPS_STATE_CB_FLAG = 1 << 2,
};

enum sk_action { SK_DROP = 0, SK_PASS };

struct bpf_sock;

struct bpf_sock_ops {
	__u32 op;
	union {
		__u32 args[4];
		__u32 reply;
		__u32 replylong[4];
	};
	__u32 family;
	__u32 remote_ip4;
	__u32 local_ip4;
	__u32 remote_ip6[4];
	__u32 local_ip6[4];
	__u32 remote_port;
	__u32 local_port;
	__u32 is_fullsock;
	__u32 snd_cwnd;
	__u32 srtt_us;
	__u32 bpf_sock_ops_cb_flags;
	__u32 state;
	__u32 rtt_min;
	__u32 snd_ssthresh;
	__u32 rcv_nxt;
	__u32 snd_nxt;
	__u32 snd_una;
	__u32 mss_cache;
	__u32 ecn_flags;
	__u32 rate_delivered;
	__u32 rate_interval_us;
	__u32 packets_out;
	__u32 retrans_out;
	__u32 total_retrans;
	__u32 segs_in;
	__u32 data_segs_in;
	__u32 segs_out;
	__u32 data_segs_out;
	__u32 lost_out;
	__u32 sacked_out;
	__u32 sk_txhash;
	__u64 bytes_received;
	__u64 bytes_acked;
	union {
		struct bpf_sock *sk;
		__u64 : 64;
	} __attribute__((aligned(8)));
};

struct sk_msg_md {
	union {
		void *data;
		__u64 : 64;
	} __attribute__((aligned(8)));
	union {
		void *data_end;
		__u64 : 64;
	} __attribute__((aligned(8)));
	__u32 family;
	__u32 remote_ip4;
	__u32 local_ip4;
	__u32 remote_ip6[4];
	__u32 local_ip6[4];
	__u32 remote_port;
	__u32 local_port;
	__u32 size;
	union {
		struct bpf_sock *sk;
		__u64 : 64;
	} __attribute__((aligned(8)));
};

#define KSF_KERNEL __attribute__((preserve_access_index))

typedef struct {
	__s64 counter;
} KSF_KERNEL atomic64_t;

struct in6_addr {
	union {
		__u32 u6_addr32[4];
	} in6_u;
} KSF_KERNEL;

struct sock_common {
	__u32 skc_daddr;
	__u32 skc_rcv_saddr;
	__u16 skc_dport;
	__u16 skc_num;
	unsigned short skc_family;
	struct in6_addr skc_v6_daddr;
	struct in6_addr skc_v6_rcv_saddr;
	atomic64_t skc_cookie;
} KSF_KERNEL;

struct net_device {
	int ifindex;
} KSF_KERNEL;

struct dst_entry {
	struct net_device *dev;
} KSF_KERNEL;

struct file {
	unsigned int f_flags;
} KSF_KERNEL;

struct socket;

struct list_head {
	struct list_head *next;
} KSF_KERNEL;

struct wait_queue_head {
	struct list_head head;
} KSF_KERNEL;

struct wait_queue_entry {
	struct list_head entry;
} KSF_KERNEL;

struct socket_wq {
	struct wait_queue_head wait;
} KSF_KERNEL;

/* fs/eventpoll.c: a socket in a set of epoll. */
struct epoll_filefd {
	struct file *file;
} KSF_KERNEL;

struct epoll_event {
	__u32 events;
} KSF_KERNEL;

struct epitem {
	struct epoll_filefd ffd;
	struct epoll_event event;
} KSF_KERNEL;

/* Its place among those who wait for the socket. */
struct eppoll_entry {
	struct epitem *base;
	struct wait_queue_entry wait;
} KSF_KERNEL;

struct sock {
	struct sock_common __sk_common;
	struct socket_wq *sk_wq;
	int sk_rcvbuf;
	__u8 sk_shutdown;
	void *sk_user_data;
	struct dst_entry *sk_dst_cache;
	struct socket *sk_socket;
} KSF_KERNEL;

struct socket {
	struct file *file;
	struct sock *sk;
} KSF_KERNEL;

struct inet_sock {
	struct sock sk;
} KSF_KERNEL;

struct tcp_ulp_ops;

struct inet_connection_sock {
	struct inet_sock icsk_inet;
	const struct tcp_ulp_ops *icsk_ulp_ops;
} KSF_KERNEL;

struct tcp_sock {
	struct inet_connection_sock inet_conn;
	__u32 copied_seq;
	__u32 write_seq;
	_Bool is_mptcp;
} KSF_KERNEL;

struct bpf_prog;

struct sk_psock_progs {
	struct bpf_prog *msg_parser;
	struct bpf_prog *stream_parser;
	struct bpf_prog *stream_verdict;
	struct bpf_prog *skb_verdict;
} KSF_KERNEL;

struct sk_psock {
	struct sk_psock_progs progs;
	__u32 msg_tot_len; /* kernel 7.0 (929e30f93125), and stable ones since */
} KSF_KERNEL;

/* Does the running kernel have the field, and where in the struct? */
#define ksf_has_field(type, field) __builtin_preserve_field_info(((struct type *)0)->field, 2)
#define ksf_offset_of(type, field) __builtin_preserve_field_info(((struct type *)0)->field, 0)

/*
 * Reads a field through a pointer that may be stale: then there are other bytes, or zeroes, but no fault. The pointer is
 * evaluated outside of what becomes a relocation. (The struct's attribute makes the field one.)
 */
#define ksf_read(to, pointer, field)                                                                                   \
	({                                                                                                             \
		typeof(pointer) ksf_from = (pointer);                                                                  \
		bpf_probe_read_kernel(&(to), sizeof(to), &ksf_from->field);                                            \
	})

static void *(*const bpf_map_lookup_elem)(void *map, const void *key) = (void *)1;
static long (*const bpf_map_update_elem)(void *map, const void *key, const void *value, __u64 flags) = (void *)2;
static long (*const bpf_map_delete_elem)(void *map, const void *key) = (void *)3;
static __u64 (*const bpf_get_socket_cookie)(void *context) = (void *)46;
static long (*const bpf_sock_ops_cb_flags_set)(struct bpf_sock_ops *ops, int flags) = (void *)59;
static long (*const bpf_sock_hash_update)(struct bpf_sock_ops *ops, void *map, void *key, __u64 flags) = (void *)70;
static long (*const bpf_msg_redirect_hash)(struct sk_msg_md *msg, void *map, void *key, __u64 flags) = (void *)71;
static void *(*const bpf_sk_storage_get)(void *map, void *sk, void *value, __u64 flags) = (void *)107;
static long (*const bpf_probe_read_kernel)(void *to, __u32 bytes, const void *from) = (void *)113;
static __u64 (*const bpf_get_netns_cookie)(void *context) = (void *)122;
static struct tcp_sock *(*const bpf_skc_to_tcp_sock)(void *sk) = (void *)137;
