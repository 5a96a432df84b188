/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * The ground of the logic in a program of the host: helpers and maps as plain C, and a model of what the kernel does
 * with a verdict (simulator.c). Included by bpf/ksf_platform.h with -DKSF_HOST.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "ksf_abi.h"

#undef __always_inline
#define __always_inline inline __attribute__((unused))
#define KSF_GLOBAL __attribute__((unused))
#define SEC(name)
#define __uint(name, value) int(*name)[value]
#define __type(name, type) typeof(type) *name

#define KSF_HIDE(value) ((void)(value))
#define KSF_UNROLL
#define likely(condition) (condition)

/* memcpy, because the sanitizer rightly dislikes unaligned access in a C program. */
#define SIM_LOAD(type) ({ type value_; memcpy(&value_, at_, sizeof(value_)); value_; })
#define KSF_LOAD8(at) (*(const __u8 *)(at))
#define KSF_LOAD16(at) ({ const void *at_ = (at); SIM_LOAD(__u16); })
#define KSF_LOAD32(at) ({ const void *at_ = (at); SIM_LOAD(__u32); })
#define KSF_LOAD64(at) ({ const void *at_ = (at); SIM_LOAD(__u64); })
#define SIM_STORE(type, at, value) do { type value_ = (value); memcpy(at, &value_, sizeof(value_)); } while (0)
#define KSF_STORE8(at, value) (*(__u8 *)(at) = (value))
#define KSF_STORE16(at, value) SIM_STORE(__u16, at, value)
#define KSF_STORE32(at, value) SIM_STORE(__u32, at, value)
#define KSF_STORE64(at, value) SIM_STORE(__u64, at, value)

extern struct ksf_config ksf_config;

/* Helpers: simulator.c. */
long bpf_skb_load_bytes(const void *skb, __u32 offset, void *to, __u32 len);
long bpf_skb_store_bytes(struct __sk_buff *skb, __u32 offset, const void *from, __u32 len, __u64 flags);
long bpf_skb_change_tail(struct __sk_buff *skb, __u32 len, __u64 flags);
long bpf_skb_pull_data(struct __sk_buff *skb, __u32 len);
long bpf_skb_adjust_room(struct __sk_buff *skb, __s32 by, __u32 mode, __u64 flags);
__u64 bpf_get_socket_cookie(void *skb);
void *bpf_map_lookup_elem(void *map, const void *key);

/* The operations of ksf_maps.h. */
struct ksf_tcp {
	__u32 write_seq;
	__u32 snd_una;
	__u32 rcv_nxt;
	__u32 copied_seq;
	__s32 wmem_queued;
	__s32 sndbuf;
	__u32 shutdown;
	__u32 first_seq;
};

void ksf_count(__u32 counter, __u64 add);
struct ksf_conn *ksf_conn_at(__u32 index);
struct ksf_conn *ksf_conn_of(__u64 cookie, __u32 *index);
struct ksf_slot *ksf_slot_of_hop(__u64 cookie);
struct ksf_slot *ksf_slot_at(__u32 index);
struct ksf_slot *ksf_slot_take(__u32 *index);
void ksf_slot_give(struct ksf_slot *slot);
void ksf_barrier(struct ksf_conn *conn);
_Bool ksf_wake(__u32 shard, __u64 cookie);
long ksf_redirect_to(struct __sk_buff *skb, __u64 cookie);
long ksf_redirect_hop(struct __sk_buff *skb, __u32 slot);
_Bool ksf_tcp_read(struct __sk_buff *skb, struct ksf_tcp *tcp);
struct ksf_message *ksf_call_at(__u32 index);
long ksf_memcpy(void *to, const void *from, __u32 len);

#define ksf_loop(count, function, context)                                                   \
	do {                                                                                 \
		for (__u32 step_ = 0; step_ < (count) && !function(step_, context); step_++)  \
			;                                                                    \
	} while (0)
