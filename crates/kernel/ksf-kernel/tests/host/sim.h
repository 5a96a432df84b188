/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* The model of the kernel that simulator.c implements; see there. */
#pragma once

#include "ksf.bpf.h"

#define SIM_COOKIE 0x1001
#define SIM_HOP_COOKIE 0x2000
#define SIM_SEGMENT_MAX 20000
#define SIM_QUEUE_MAX 256
#define SIM_WORK_MAX 256
#define SIM_STREAM_MAX (4 << 20)

struct sim_skb;

struct sim {
	const char *test;
	__u64 seed;
	__u32 resize_fails_percent;

	struct ksf_conn conn;
	struct ksf_slot slots[KSF_SLOTS_PER_CPU];
	struct ksf_message call;
	__u64 counters[KSF_COUNTER_COUNT];
	__u32 wakes;
	bool ring_full;
	bool detached;
	bool no_memory; /* for a linear part that must grow */
	__u32 grown;	/* times one did */

	struct ksf_tcp tcp;
	__u32 rcvlowat;
	struct sim_skb *queue[SIM_QUEUE_MAX]; /* the receive queue */
	__u32 queue_len;
	struct sim_skb *work[SIM_WORK_MAX];
	__u32 work_len;
	void *queue_bytes;

	__u8 user[SIM_STREAM_MAX]; /* passed to user space */
	__u32 user_len, user_read;
	__u8 wire[SIM_STREAM_MAX]; /* sent to the client */
	__u32 wire_len, client_len;
	__u64 kernel_taken; /* reply bytes of the program that TCP has taken */
	__u32 lost, dropped;
	bool broken;
};

extern struct sim sim;

void sim_start(__u64 seed, __s32 sndbuf);
void sim_end(void);
/* A segment of the client arrives. */
void sim_segment(const __u8 *bytes, __u32 len);
/* One whose first `repeated` bytes arrived before, as TCP queues a retransmission that was joined to what follows. */
void sim_segment_repeating(const __u8 *bytes, __u32 len, __u32 repeated);
/* One item of the work queue; false: there is none. */
bool sim_work(void);
void sim_tcp_send(const __u8 *bytes, __u32 len);
__u32 sim_client_read(__u32 len);
__u32 sim_user_read(__u8 *to, __u32 len);
bool sim_user_polls_readable(void);
void sim_set_rcvlowat(__u32 bytes);
__u32 sim_random(__u32 below);
void sim_fail(const char *what) __attribute__((noreturn));
