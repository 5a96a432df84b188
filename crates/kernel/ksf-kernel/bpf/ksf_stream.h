/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * TCP: the verdict on each segment of a connection.
 *
 * One rule: a segment is answered here only when nothing of its connection is outstanding, and it passes to user space
 * untouched otherwise. "Nothing outstanding" means that user space has answered every byte it was ever passed
 * (settled == passed), that TCP has taken every reply queued here and the peer has acknowledged it, that the reply fits
 * the send buffer with room to spare, and that the segment starts and ends at a message boundary and every message in
 * it is answered by the author's function. So replies keep their order without any ids, neither half cuts into the
 * other's message, the backlog never fills, and under pipelining user space does the batching.
 *
 *      segment ─► verdict ──┬─ pass ──────────────────────────► user space's receive queue
 *                           ├─ direct ─► work queue ──────────► TCP out       the reply is as long as the request
 *                           └─ hop ────► work queue ─► unix ─► verdict ─► work queue ─► TCP out        any length
 *
 * Why the hop. A redirected segment is counted as consumed by its length at that time: tcp_eat_skb() adds skb->len to
 * copied_seq after the program has run (net/core/skmsg.c, net/ipv4/tcp_bpf.c, seen on 6.18). A segment replaced by a
 * longer reply moves copied_seq past rcv_nxt, and TCP stops calling the verdict program: the connection stalls after a
 * few messages. A shorter one leaves copied_seq behind for ever: the socket polls readable without end, and after 2 GiB
 * the sign turns and it stalls as well. So a reply of another length takes a detour: the request goes, in its own
 * length, through a pair of Unix datagram sockets, and the program at the far end, where no TCP counts, swaps it for
 * the reply. The second work item runs on the same worker, so the detour costs no further switch.
 *
 * The lag. While user space does not poll the socket (parked), a small lag harms nobody, and shorter replies go direct,
 * which is a fifth faster. The lag is kept in ksf_conn.lag, bounded, and repaid by the next hop, which consumes exactly
 * that much more. When user space starts to poll again it sets SO_RCVLOWAT to the lag plus one, which makes both
 * TCP's readiness test and its call of the verdict program exact again; that value is lag_floor + 1.
 * Parking takes it back, so that a lag can be repaid in full.
 *
 * Trials. On a CPU that client, worker and server share, the worker may send each reply before the client sends its
 * next request, also when the client would send a hundred without waiting: then nothing is ever seen outstanding, and
 * every message pays for two context switches (measured: a quarter of the rate of user space). One message cannot tell
 * such a client from one that waits. So now and then a message is passed: user space takes its time for that one, and
 * finds more of them if there are more. A trial per 16384 messages cannot be seen in a p99.9.
 *
 * Repeated bytes. TCP queues a retransmitted segment whole when only its front is old: the backlog of a busy socket
 * joins the repeated part to what follows it. A reader of TCP skips the front by its sequence number; the code that
 * calls this program does not (tcp_read_skb(), Linux 6.18) and would deliver those bytes twice. So every segment is
 * held against the number of the byte that must come next, and what is old is cut off first. Only the linear part of a
 * segment can be cut, so what is old must first be made linear, which takes memory, up to 128 KiB in one piece. Where the
 * kernel has none the connection is broken, and user space resets it: passed as it is, the segment would be counted with
 * its old bytes when user space reads it, and copied_seq would be ahead of rcv_nxt for ever.
 */
#pragma once

#include "ksf_segment.h"

#define KSF_RCV_SHUTDOWN 1

static __always_inline void ksf_wake_if_parked(struct ksf_conn *conn)
{
	__u32 park_seq;

	/* User space sets parked and then looks at `passed`; the caller has raised `passed`, and looks at parked here.
	 * With a full barrier on both sides one of the two sees the other. */
	ksf_barrier(conn);
	if (!KSF_READ(conn->parked))
		return;
	/* User space raises park_seq before it sets parked: a read of it that came early would take this park for the
	 * last one, which has had its wake-up. */
	ksf_barrier(conn);
	park_seq = KSF_READ(conn->park_seq);
	if (conn->woken == park_seq)
		return;
	/* A wake-up that found no room is tried again with the next segment. */
#ifdef KSF_MUTANT_WOKEN_BEFORE_WAKE
	conn->woken = park_seq;
#endif
	if (ksf_wake(KSF_READ(conn->shard), KSF_READ(conn->cookie)))
		conn->woken = park_seq;
}

/* A reply was lost after its request was consumed. User space closes the connection when it learns of it. */
static __always_inline void ksf_break(struct ksf_conn *conn)
{
	conn->broken = 1;
	ksf_count(KSF_COUNT_replies_broken, 1);
	ksf_wake_if_parked(conn);
}

/* Is anything of a settled connection outstanding? 0, or the counter that says what. */
static __always_inline __u32 ksf_outstanding(struct ksf_conn *conn, const struct ksf_tcp *tcp, __u32 len)
{
	__u32 unacknowledged __attribute__((unused)), gap, epoch, ours;

	/* `epoch` and `sent` were written before `settled`. */
	ksf_barrier(conn);
	epoch = KSF_READ(conn->epoch);
	ours = (__u32)conn->replied + (__u32)KSF_READ(conn->sent);
	if (conn->epoch_seen != epoch) { /* never 0 on a settled connection */
		if (!conn->epoch_seen)
			conn->base_seq = tcp->first_seq;
		/* User space settles just before it sends, so that the next request, which the client sends as soon as
		 * it is woken, finds the connection settled. Until all of it is in TCP a reply would overtake it. */
#ifndef KSF_MUTANT_NO_EPOCH
		if (conn->base_seq + ours != tcp->write_seq)
			return KSF_COUNT_passed_outstanding;
#endif
		conn->epoch_seen = epoch;
	}
	unacknowledged = conn->base_seq + ours - tcp->snd_una;
#ifndef KSF_MUTANT_NO_OUTSTANDING
	if (unacknowledged > ksf_config.window_bytes)
		return KSF_COUNT_passed_outstanding;
#endif
	/* A reply in a hop would be overtaken by one that goes direct, or through another hop. */
	if (conn->hopping && (__s32)(conn->base_seq + conn->hop_end - tcp->write_seq) > 0)
		return KSF_COUNT_passed_outstanding;
	conn->hopping = 0;
	/* Later segments may be queued behind this one, so the gap can be larger than the lag, never smaller. */
	gap = tcp->rcv_nxt - tcp->copied_seq - len;
	if ((__s32)(gap - conn->lag) < 0)
		return KSF_COUNT_passed_accounting;
	/* User space must find the end of stream behind the last bytes, and there is no more latency to win. */
	if (tcp->shutdown & KSF_RCV_SHUTDOWN)
		return KSF_COUNT_passed_closing;
	return 0;
}

#define KSF_TRIAL_STEP_MIN 256
#define KSF_TRIAL_STEP_MAX 16384

/* Is it time that user space gets a message of this connection? */
static __always_inline _Bool ksf_is_trial(struct ksf_conn *conn)
{
	__u32 messages = conn->messages, step = KSF_TRIAL_STEP_MAX;

	if ((__s32)(messages - conn->trial_at) < 0)
		return 0;
	/* At 256, 1024, 4096, and then every 16384. The count starts again at 0 after 2^32 messages. */
	if (messages < KSF_TRIAL_STEP_MAX / 3)
		step = 3 * messages;
	conn->trial_at = messages + (step < KSF_TRIAL_STEP_MIN ? KSF_TRIAL_STEP_MIN : step);
	return 1;
}

/* Room for a reply, with a margin: TCP counts the memory of buffers, not bytes, and the work queue breaks the
 * connection for good (SK_PSOCK_TX_ENABLED is cleared) when a send fails hard. */
static __always_inline _Bool ksf_sndbuf_has_room(const struct ksf_tcp *tcp, __u32 reply_len)
{
#ifdef KSF_MUTANT_NO_GATE
	return 1;
#else
	return tcp->wmem_queued + (__s64)reply_len + reply_len / 4 + 4096 <= tcp->sndbuf;
#endif
}

static __always_inline void ksf_account(struct ksf_conn *conn, __u32 len, __u32 reply_len, __u32 eaten,
					__u32 messages)
{
	conn->taken += len;
	conn->replied += reply_len;
	conn->messages += messages;
	conn->lag += len - eaten;
	ksf_count(KSF_COUNT_segments_answered, 1);
	ksf_count(KSF_COUNT_messages_answered, messages);
	ksf_count(KSF_COUNT_bytes_in, len);
	ksf_count(KSF_COUNT_bytes_out, reply_len);
}

/* Sends the segment back as it is. */
static __always_inline __u32 ksf_send_echo(struct __sk_buff *skb, struct ksf_conn *conn, __u64 cookie, __u32 len,
					   __u32 messages)
{
	/* Fails only when the socket has left the map: then it is user space's, untouched. */
	if (ksf_redirect_to(skb, cookie) != SK_PASS)
		return KSF_COUNT_passed_unknown;
	ksf_account(conn, len, len, len, messages);
	return 0;
}

/* What became of a segment that was to be replaced by its reply. */
enum ksf_stored {
	KSF_STORED = 0,
	KSF_UNTOUCHED, /* could not be resized: pass it */
	KSF_RUINED,    /* resized and not written: must not reach anybody */
};

/* Turns the segment into the reply in the work area. First resize, which can fail, then write. */
static __always_inline enum ksf_stored ksf_store_reply(struct __sk_buff *skb, struct ksf_message *m, __u32 reply_len)
{
	if (!ksf_is_length(&reply_len))
		return KSF_UNTOUCHED;
#ifdef KSF_MUTANT_STORE_BEFORE_RESIZE
	bpf_skb_store_bytes(skb, 0, m->out, reply_len < skb->len ? reply_len : skb->len, 0);
#endif
	/* Also without a change of length: it makes all of the segment linear and writable, so the store cannot fail. */
	if (bpf_skb_change_tail(skb, reply_len, 0))
		return KSF_UNTOUCHED;
	return bpf_skb_store_bytes(skb, 0, m->out, reply_len, 0) ? KSF_RUINED : KSF_STORED;
}

static __always_inline __u32 ksf_send_direct(struct __sk_buff *skb, struct ksf_conn *conn, struct ksf_slot *slot,
					     __u64 cookie, __u32 len, __u32 reply_len)
{
	enum ksf_stored stored = ksf_store_reply(skb, &slot->message, reply_len);

	if (stored == KSF_UNTOUCHED)
		return KSF_COUNT_passed_resize;
	/* The redirect fails when user space has just taken the socket out to close it. The request is gone either way,
	 * so the connection must not go on. */
	if (stored == KSF_RUINED || ksf_redirect_to(skb, cookie) != SK_PASS) {
		ksf_break(conn);
		return KSF_COUNT_replies_broken;
	}
	ksf_account(conn, len, reply_len, reply_len, slot->messages);
	return 0;
}

/* The slot stays busy until the far end of the hop has sent the reply. */
static __always_inline __u32 ksf_send_hop(struct __sk_buff *skb, struct ksf_conn *conn, struct ksf_slot *slot,
					  __u32 index, __u64 cookie, __u32 conn_index, __u32 len, __u32 reply_len)
{
	__u32 eaten = len + conn->lag - KSF_READ(conn->lag_floor);

	/* One datagram only: the work queue sends the linear part and each fragment by itself. */
	if (bpf_skb_pull_data(skb, len))
		return KSF_COUNT_passed_resize;
	slot->conn = conn_index;
	slot->cookie = cookie;
	slot->reply_len = reply_len;
	if (ksf_redirect_hop(skb, index) != SK_PASS)
		return KSF_COUNT_passed_busy;
	/* From here on the segment is consumed. Repaying the lag is a wish: a failed resize changes nothing. */
	if (eaten != len && (eaten > KSF_BYTES_MAX || bpf_skb_change_tail(skb, eaten, 0)))
		eaten = len;
	ksf_account(conn, len, reply_len, eaten, slot->messages);
	conn->hop_end = (__u32)conn->replied + (__u32)KSF_READ(conn->sent);
	conn->hopping = 1;
	ksf_count(KSF_COUNT_segments_hopped, 1);
	return 0;
}

/* Answers the segment: 0, or the counter that says why it passes. */
static __always_inline __u32 ksf_stream_answer(struct __sk_buff *skb, struct ksf_conn *conn, __u32 conn_index,
					       __u64 cookie)
{
	__u32 len = skb->len, index, why, reply_len, lag;
	struct ksf_slot *slot;
	struct ksf_tcp tcp;

#ifndef KSF_MUTANT_NO_SETTLE
	/* First, because under pipelining nearly every segment ends here. */
	if (KSF_READ(conn->settled) != conn->passed || conn->broken)
		return KSF_COUNT_passed_unsettled;
#endif
	if (!ksf_tcp_read(skb, &tcp))
		return KSF_COUNT_passed_unknown;
	why = ksf_outstanding(conn, &tcp, len);
	if (why)
		return why;
	if (ksf_is_trial(conn))
		return KSF_COUNT_passed_trial;
	if (ksf_config.framing.kind == KSF_FRAME_BLIND) {
		if (!ksf_sndbuf_has_room(&tcp, len))
			return KSF_COUNT_passed_sndbuf;
		return ksf_send_echo(skb, conn, cookie, len, 1);
	}
	KSF_HIDE(len);
	if (len > KSF_BYTES_MAX || !len)
		return KSF_COUNT_passed_limit;
	slot = ksf_slot_take(&index);
	if (!slot)
		return KSF_COUNT_passed_busy;
	why = KSF_COUNT_passed_resize;
	/* Asked again, because the verifier forgets the bounds of a value that clang has put aside. */
	if (!ksf_is_length(&len) || bpf_skb_load_bytes(skb, 0, slot->message.in, len))
		goto give;
	why = ksf_answer_segment(slot, len);
	if (why)
		goto give;
	reply_len = slot->message.out_len;
	why = KSF_COUNT_passed_sndbuf;
	if (!ksf_sndbuf_has_room(&tcp, reply_len))
		goto give;
	if (slot->echo) {
		why = ksf_send_echo(skb, conn, cookie, len, slot->messages);
		goto give;
	}
	lag = conn->lag + len - reply_len;
#ifdef KSF_MUTANT_NO_LAG
	why = ksf_send_direct(skb, conn, slot, cookie, len, reply_len);
	goto give;
#endif
	if (reply_len == len || (KSF_READ(conn->parked) && (__s32)(lag - KSF_READ(conn->lag_floor)) >= 0 &&
				 (__s32)(lag - ksf_config.lag_bytes_max) <= 0)) {
		why = ksf_send_direct(skb, conn, slot, cookie, len, reply_len);
		goto give;
	}
	why = KSF_COUNT_passed_busy;
	if (index < ksf_config.hops) {
		why = ksf_send_hop(skb, conn, slot, index, cookie, conn_index, len, reply_len);
		if (!why)
			return 0;
	}
give:
	ksf_slot_give(slot);
	return why;
}

/* Most that one call can cut off (sk_skb_adjust_room(), net/core/filter.c), and calls that suffice for any segment:
 * MAX_SKB_FRAGS fragments of 32 KiB. */
#define KSF_TRIM_STEP 4095
#define KSF_TRIM_STEPS 140

struct ksf_trim {
	struct __sk_buff *skb;
	__u32 bytes; /* still to be cut off */
};

static __attribute__((unused)) long ksf_trim_step(__u32 i, struct ksf_trim *trim)
{
	__u32 step = trim->bytes < KSF_TRIM_STEP ? trim->bytes : KSF_TRIM_STEP;

	if (!step || bpf_skb_adjust_room(trim->skb, -(__s32)step, 0, 0))
		return 1;
	trim->bytes -= step;
	return 0;
}

/* Cuts off the front of a segment that was seen before. False: it could not be done. */
static __always_inline _Bool ksf_trim_repeated(struct __sk_buff *skb, struct ksf_conn *conn)
{
	/* TCP_SKB_CB(skb)->seq. */
	__u32 seq = skb->cb[0], end = seq + skb->len, repeated;
	/* volatile: clang would join this load with the one below into one by a pointer of two kinds. */
	__u32 expected = KSF_READ(conn->next_seq);
	struct ksf_trim trim __attribute__((unused)) = { .skb = skb };
	struct ksf_tcp tcp;

	if (!(conn->passed | conn->taken)) {
		/* The first: user space may have read in it before the socket was attached. */
		if (!ksf_tcp_read(skb, &tcp))
			return 1;
		expected = tcp.copied_seq;
	}
	repeated = expected - seq;
	if (likely(!repeated) || (__s32)repeated < 0) {
		conn->next_seq = end;
		return 1;
	}
	ksf_count(KSF_COUNT_segments_trimmed, 1);
	if ((__s32)(end - expected) < 0) { /* TCP drops these; what matters is not to go back */
		end = expected;
		repeated = skb->len;
	}
	conn->next_seq = end;
#ifndef KSF_MUTANT_NO_TRIM
#ifndef KSF_MUTANT_TRIM_BY_STEPS
	/* All of it becomes linear by one allocation, so that no step needs one: each would ask for a longer linear part
	 * than the one before, and each could fail. If this one fails, so does a step. */
	bpf_skb_pull_data(skb, repeated);
#endif
	trim.bytes = repeated;
	ksf_loop(KSF_TRIM_STEPS, ksf_trim_step, &trim);
	return !trim.bytes;
#else
	return 1;
#endif
}

static __always_inline int ksf_stream_verdict(struct __sk_buff *skb)
{
	__u64 cookie = bpf_get_socket_cookie(skb);
	__u32 index, why, len;
	struct ksf_conn *conn = ksf_conn_of(cookie, &index);

	if (!conn) {
		ksf_count(KSF_COUNT_passed_unknown, 1);
		return SK_PASS;
	}
	if (skb->len && !ksf_trim_repeated(skb, conn)) {
		ksf_break(conn);
		return SK_DROP;
	}
	len = skb->len;
	if (!len) {
		/* The peer's FIN, which holds no bytes. Passed, it may have to wait in the work queue, which takes an
		 * empty segment for a failed send and breaks the connection (sk_psock_backlog(), ret == 0, Linux 6.18).
		 * User space learns of the end from the socket's state, so it can go. */
		ksf_wake_if_parked(conn);
#ifdef KSF_MUTANT_PASS_FIN
		return SK_PASS;
#else
		return SK_DROP;
#endif
	}
	why = ksf_stream_answer(skb, conn, index, cookie);
	if (!why)
		return SK_PASS; /* with a redirect set: SK_REDIRECT to the kernel */
	if (why == KSF_COUNT_replies_broken)
		return SK_DROP; /* overwritten already, and the connection closes */
	ksf_count(KSF_COUNT_segments_passed, 1);
	ksf_count(why, 1);
	conn->passed += len;
	ksf_wake_if_parked(conn);
	return SK_PASS;
}

/* The far end of a hop: the datagram is a request that has been consumed; its reply waits in the slot. */
static __always_inline int ksf_hop_verdict(struct __sk_buff *skb)
{
	struct ksf_slot *slot = ksf_slot_of_hop(bpf_get_socket_cookie(skb));
	struct ksf_conn *conn;
	int verdict = SK_DROP;

	if (!slot || !slot->busy)
		return SK_DROP;
	conn = ksf_conn_at(slot->conn);
	if (ksf_store_reply(skb, &slot->message, slot->reply_len) == KSF_STORED)
		/* Fails only when the connection is gone: then nobody waits for the reply. */
		verdict = ksf_redirect_to(skb, slot->cookie);
	else if (conn && KSF_READ(conn->cookie) == slot->cookie)
		ksf_break(conn);
	ksf_slot_give(slot);
	return verdict;
}

/* A send into a hop failed for good: for want of memory, because its sockets are nobody else's. The work queue has given
 * that socket up, and would throw away what is sent into it next, so the slot may be used again with new sockets only. */
static __always_inline int ksf_hop_failed_verdict(__u32 index, _Bool is_renewed)
{
	struct ksf_slot *slot = ksf_slot_at(index);
	struct ksf_conn *conn;

	if (!slot || !KSF_READ(slot->busy))
		return 0;
	/* The request is gone, and its reply with it. */
	conn = ksf_conn_at(slot->conn);
	if (conn && KSF_READ(conn->cookie) == slot->cookie)
		ksf_break(conn);
	if (is_renewed)
		ksf_slot_give(slot);
	return 1;
}
