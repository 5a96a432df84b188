/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * A model of one TCP connection under a sockmap verdict, as far as the logic depends on it (net/core/skmsg.c and
 * net/ipv4/tcp_bpf.c, Linux 6.18):
 *
 *   - the program runs when rcv_nxt - copied_seq is positive, on each queued segment;
 *   - a redirected or dropped segment adds its length after the program to copied_seq; a passed one adds what user
 *     space reads of it;
 *   - a redirected segment waits in a work queue and is sent later; a send that does not fit the buffer breaks the
 *     connection and loses what was to be sent;
 *   - a segment for a hop waits in the same way, and comes out as a datagram;
 *   - a passed segment waits behind the others when the work queue is not empty, and an empty one breaks the
 *     connection then.
 */
#include "sim.h"

#include <stdio.h>
#include <stdlib.h>

struct ksf_config ksf_config;
struct sim sim;

/* A segment or datagram in the model. `base` first: the logic sees that. */
struct sim_skb {
	struct __sk_buff base;
	bool hop;	/* came out of a hop */
	bool to_socket; /* redirected */
	bool to_hop;
	__u32 slot;
	__u32 linear; /* bytes at the front that are not in fragments */
	__u8 bytes[SIM_SEGMENT_MAX];
};

static struct sim_skb *skb_of(const void *skb)
{
	return (struct sim_skb *)(uintptr_t)skb;
}

__u32 sim_random(__u32 below)
{
	sim.seed ^= sim.seed << 13;
	sim.seed ^= sim.seed >> 7;
	sim.seed ^= sim.seed << 17;
	return below ? (__u32)(sim.seed >> 16) % below : 0;
}

void sim_start(__u64 seed, __s32 sndbuf)
{
	free(sim.queue_bytes);
	memset(&sim, 0, sizeof(sim));
	sim.seed = seed * 0x9e3779b97f4a7c15ull + 1;
	sim.tcp.sndbuf = sndbuf;
	/* Sequence numbers that wrap soon. */
	sim.tcp.write_seq = sim.tcp.snd_una = sim.tcp.first_seq = 0xfffff000u;
	sim.tcp.rcv_nxt = sim.tcp.copied_seq = 0xffffe000u;
	sim.rcvlowat = 1;
	sim.conn.cookie = SIM_COOKIE;
	sim.conn.epoch = 1;
	sim.conn.trial_at = 0x7fffffff; /* far away */
	ksf_config.cpus = 1;
	ksf_config.hops = KSF_SLOTS_PER_CPU;
	ksf_config.lag_bytes_max = 256;
	ksf_config.window_bytes = 0;
}

/* The helpers. */

long bpf_skb_load_bytes(const void *skb, __u32 offset, void *to, __u32 len)
{
	if ((__u64)offset + len > skb_of(skb)->base.len)
		return -14;
	memcpy(to, skb_of(skb)->bytes + offset, len);
	return 0;
}

long bpf_skb_store_bytes(struct __sk_buff *skb, __u32 offset, const void *from, __u32 len, __u64 flags)
{
	(void)flags;
	if ((__u64)offset + len > skb->len)
		return -14;
	memcpy(skb_of(skb)->bytes + offset, from, len);
	return 0;
}

long bpf_skb_change_tail(struct __sk_buff *skb, __u32 len, __u64 flags)
{
	(void)flags;
	/* BPF_SKB_MAX_LEN, and the failures met on coalesced segments. A datagram out of a hop is freshly made. */
	if (len > 16064 || (!skb_of(skb)->hop && sim_random(100) < sim.resize_fails_percent))
		return -22;
	/* What was behind the end is anything. */
	if (len > skb->len)
		memset(skb_of(skb)->bytes + skb->len, 0xa5, len - skb->len);
	skb->len = len;
	return 0;
}

/* __pskb_pull_tail(): what is not linear is copied to a new linear part. */
long bpf_skb_pull_data(struct __sk_buff *skb, __u32 len)
{
	struct sim_skb *segment = skb_of(skb);

	if (len > skb->len)
		return -12;
	if (len <= segment->linear)
		return 0;
	if (sim.no_memory)
		return -12;
	sim.grown++;
	segment->linear = len;
	return 0;
}

long bpf_skb_adjust_room(struct __sk_buff *skb, __s32 by, __u32 mode, __u64 flags)
{
	struct sim_skb *segment = skb_of(skb);

	if (mode || flags || by > 0 || by < -4095)
		return -14;
	if (bpf_skb_pull_data(skb, -by))
		return -12;
	skb->len += by;
	segment->linear += by;
	memmove(segment->bytes, segment->bytes - by, skb->len);
	return 0;
}

__u64 bpf_get_socket_cookie(void *skb)
{
	return skb_of(skb)->hop ? SIM_HOP_COOKIE + skb_of(skb)->slot : SIM_COOKIE;
}

void *bpf_map_lookup_elem(void *map, const void *key)
{
	static struct ksf_rpc_versions nfs = { 3, 3 }, mount = { 1, 3 };
	__u32 program;

	(void)map; /* the only one a service looks into is the table of RPC programs */
	memcpy(&program, key, sizeof(program));
	return program == 100003 ? (void *)&nfs : program == 100005 ? (void *)&mount : NULL;
}

long ksf_memcpy(void *to, const void *from, __u32 len)
{
	memcpy(to, from, len);
	return 0;
}

/* The maps. */

void ksf_count(__u32 counter, __u64 add)
{
	sim.counters[counter] += add;
}

struct ksf_conn *ksf_conn_at(__u32 index)
{
	return index == 0 ? &sim.conn : NULL;
}

struct ksf_conn *ksf_conn_of(__u64 cookie, __u32 *index)
{
	*index = 0;
	return cookie == SIM_COOKIE ? &sim.conn : NULL;
}

struct ksf_slot *ksf_slot_of_hop(__u64 cookie)
{
	__u64 slot = cookie - SIM_HOP_COOKIE;

	return slot < KSF_SLOTS_PER_CPU ? &sim.slots[slot] : NULL;
}

struct ksf_slot *ksf_slot_at(__u32 index)
{
	return index < sizeof(sim.slots) / sizeof(*sim.slots) ? &sim.slots[index] : 0;
}

struct ksf_slot *ksf_slot_take(__u32 *index)
{
	for (__u32 i = 0; i < KSF_SLOTS_PER_CPU; i++) {
		if (sim.slots[i].busy)
			continue;
		sim.slots[i].busy = 1;
		/* A work area is not cleaned between owners. */
		memset(sim.slots[i].message.out, 0xc3, sizeof(sim.slots[i].message.out));
		*index = i;
		return &sim.slots[i];
	}
	return NULL;
}

void ksf_slot_give(struct ksf_slot *slot)
{
	slot->busy = 0;
}

void ksf_barrier(struct ksf_conn *conn)
{
	(void)conn;
}

_Bool ksf_wake(__u32 shard, __u64 cookie)
{
	(void)shard;
	(void)cookie;
	if (sim.ring_full)
		return 0;
	sim.wakes++;
	return 1;
}

long ksf_redirect_to(struct __sk_buff *skb, __u64 cookie)
{
	if (cookie != SIM_COOKIE || sim.detached)
		return SK_DROP;
	skb_of(skb)->to_socket = true;
	return SK_PASS;
}

long ksf_redirect_hop(struct __sk_buff *skb, __u32 slot)
{
	skb_of(skb)->to_hop = true;
	skb_of(skb)->slot = slot;
	return SK_PASS;
}

_Bool ksf_tcp_read(struct __sk_buff *skb, struct ksf_tcp *tcp)
{
	(void)skb;
	*tcp = sim.tcp;
	return 1;
}

struct ksf_message *ksf_call_at(__u32 index)
{
	return index == 0 ? &sim.call : NULL;
}

/* The kernel. */

static void work_queue_push(struct sim_skb *skb)
{
	if (sim.work_len == SIM_WORK_MAX)
		sim_fail("the work queue of the model is too short");
	sim.work[sim.work_len++] = skb;
}

static void to_user(struct sim_skb *skb)
{
	if (sim.user_len + skb->base.len > sizeof(sim.user))
		sim_fail("user space's queue of the model is too short");
	memcpy(sim.user + sim.user_len, skb->bytes, skb->base.len);
	sim.user_len += skb->base.len;
	free(skb);
}

/* sk_psock_verdict_recv() and sk_psock_verdict_apply() */
static void verdict(struct sim_skb *skb)
{
	int action = ksf_stream_verdict(&skb->base);

	if (action == SK_DROP) {
		sim.tcp.copied_seq += skb->base.len;
		sim.dropped += skb->base.len > 0;
		free(skb);
	} else if (skb->to_socket || skb->to_hop) {
		sim.tcp.copied_seq += skb->base.len; /* tcp_eat_skb() */
		work_queue_push(skb);
	} else if (sim.work_len) {
		work_queue_push(skb);
	} else {
		to_user(skb);
	}
}

/* tcp_data_ready(): the gate that a wrong copied_seq closes. */
static void data_ready(void)
{
	if (!sim.tcp.shutdown && (__s32)(sim.tcp.rcv_nxt - sim.tcp.copied_seq) < (__s32)sim.rcvlowat)
		return;
	while (sim.queue_len) {
		struct sim_skb *skb = sim.queue[0];

		memmove(sim.queue, sim.queue + 1, --sim.queue_len * sizeof(sim.queue[0]));
		verdict(skb);
	}
}

void sim_segment(const __u8 *bytes, __u32 len)
{
	sim_segment_repeating(bytes, len, 0);
}

void sim_segment_repeating(const __u8 *bytes, __u32 len, __u32 repeated)
{
	struct sim_skb *skb = calloc(1, sizeof(*skb));

	if (!len)
		sim.tcp.shutdown = 1;
	if (!skb || len > SIM_SEGMENT_MAX || sim.queue_len == SIM_QUEUE_MAX)
		sim_fail("the segment does not fit the model");
	skb->base.len = len;
	skb->base.cb[0] = sim.tcp.rcv_nxt - repeated;
	memcpy(skb->bytes, bytes, len);
	sim.tcp.rcv_nxt += len - repeated;
	sim.queue[sim.queue_len++] = skb;
	data_ready();
}

/* sk_psock_backlog(), one item. */
bool sim_work(void)
{
	struct sim_skb *skb;

	if (!sim.work_len)
		return false;
	skb = sim.work[0];
	memmove(sim.work, sim.work + 1, --sim.work_len * sizeof(sim.work[0]));
	if (skb->to_hop) {
		struct sim_skb *datagram = calloc(1, sizeof(*datagram));

		if (!datagram)
			sim_fail("no memory");
		datagram->base.len = skb->base.len;
		datagram->hop = true;
		datagram->slot = skb->slot;
		memcpy(datagram->bytes, skb->bytes, skb->base.len);
		free(skb);
		if (ksf_hop_verdict(&datagram->base) == SK_PASS && datagram->to_socket) {
			work_queue_push(datagram);
		} else {
			sim.dropped++;
			free(datagram);
		}
		return true;
	}
	if (!skb->to_socket) {
		sim.broken |= !skb->base.len;
		to_user(skb);
		return true;
	}
	if (sim.broken || sim.tcp.wmem_queued + (__s32)skb->base.len > sim.tcp.sndbuf) {
		sim.broken = true;
		sim.lost++;
	} else {
		sim_tcp_send(skb->bytes, skb->base.len);
		sim.kernel_taken += skb->base.len;
	}
	free(skb);
	return true;
}

void sim_tcp_send(const __u8 *bytes, __u32 len)
{
	if (sim.wire_len + len > sizeof(sim.wire))
		sim_fail("the wire of the model is too short");
	memcpy(sim.wire + sim.wire_len, bytes, len);
	sim.wire_len += len;
	sim.tcp.write_seq += len;
	sim.tcp.wmem_queued += len;
}

__u32 sim_client_read(__u32 len)
{
	__u32 unread = sim.wire_len - sim.client_len;

	if (len > unread)
		len = unread;
	sim.client_len += len;
	sim.tcp.snd_una += len;
	sim.tcp.wmem_queued -= len;
	return len;
}

__u32 sim_user_read(__u8 *to, __u32 len)
{
	__u32 unread = sim.user_len - sim.user_read;

	/* tcp_bpf_recvmsg_parser(): looks after segments that wait, through the same gate. */
	if (sim.queue_len)
		data_ready();
	if (len > unread)
		len = unread;
	memcpy(to, sim.user + sim.user_read, len);
	sim.user_read += len;
	sim.tcp.copied_seq += len;
	return len;
}

bool sim_user_polls_readable(void)
{
	return sim.user_read < sim.user_len ||
	       (__s32)(sim.tcp.rcv_nxt - sim.tcp.copied_seq) >= (__s32)sim.rcvlowat;
}

void sim_set_rcvlowat(__u32 bytes)
{
	sim.rcvlowat = bytes;
	data_ready();
}

void sim_end(void)
{
	for (__u32 i = 0; i < sim.queue_len; i++)
		free(sim.queue[i]);
	for (__u32 i = 0; i < sim.work_len; i++)
		free(sim.work[i]);
	sim.queue_len = sim.work_len = 0;
}

void sim_fail(const char *what)
{
	fprintf(stderr, "FAILED: %s (%s)\n", what, sim.test ? sim.test : "?");
	exit(1);
}
