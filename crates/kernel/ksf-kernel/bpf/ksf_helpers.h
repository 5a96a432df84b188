/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * The helpers the SDK calls, by their number in the stable interface (include/uapi/linux/bpf.h), and the notation for
 * maps and sections that libbpf reads. Kept here so that a service compiles with clang alone, without libbpf's headers.
 */
#pragma once

#include "ksf_kernel_types.h"

#define SEC(name) __attribute__((section(name), used))
#define __uint(name, value) int(*name)[value]
#define __type(name, type) typeof(type) *name
#define __array(name, type) typeof(type) *name[]
#define __hidden __attribute__((visibility("hidden")))

static void *(*const bpf_map_lookup_elem)(void *map, const void *key) = (void *)1;
static __u32 (*const bpf_get_smp_processor_id)(void) = (void *)8;
static long (*const bpf_tail_call)(void *context, void *programs, __u32 index) = (void *)12;
static long (*const bpf_skb_store_bytes)(struct __sk_buff *skb, __u32 offset, const void *from, __u32 len,
					 __u64 flags) = (void *)9;
static long (*const bpf_skb_load_bytes)(const void *skb, __u32 offset, void *to, __u32 len) = (void *)26;
static __s64 (*const bpf_csum_diff)(__be32 *from, __u32 from_size, __be32 *to, __u32 to_size,
				    __wsum seed) = (void *)28;
static long (*const bpf_skb_change_tail)(struct __sk_buff *skb, __u32 len, __u64 flags) = (void *)38;
static long (*const bpf_skb_pull_data)(struct __sk_buff *skb, __u32 len) = (void *)39;
static __u64 (*const bpf_get_socket_cookie)(void *skb) = (void *)46;
static long (*const bpf_sk_redirect_map)(struct __sk_buff *skb, void *map, __u32 key, __u64 flags) = (void *)52;
static long (*const bpf_skb_adjust_room)(struct __sk_buff *skb, __s32 by, __u32 mode, __u64 flags) = (void *)50;
static long (*const bpf_xdp_adjust_tail)(struct xdp_md *xdp, int delta) = (void *)65;
static long (*const bpf_sk_redirect_hash)(struct __sk_buff *skb, void *map, void *key, __u64 flags) = (void *)72;
static long (*const bpf_probe_read_kernel)(void *to, __u32 size, const void *from) = (void *)113;
static long (*const bpf_ringbuf_output)(void *ring, void *data, __u64 size, __u64 flags) = (void *)130;
static struct tcp_sock *(*const bpf_skc_to_tcp_sock)(void *sk) = (void *)137;
static long (*const bpf_loop)(__u32 count, void *callback, void *context, __u64 flags) = (void *)181;
static long (*const bpf_xdp_load_bytes)(struct xdp_md *xdp, __u32 offset, void *to, __u32 len) = (void *)189;
static long (*const bpf_xdp_store_bytes)(struct xdp_md *xdp, __u32 offset, void *from, __u32 len) = (void *)190;
