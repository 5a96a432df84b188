/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * From a segment to its replies: cut it into messages, have the author's function answer each, frame the replies. The
 * bytes are in the work area; nothing here touches a socket or a packet, so nothing has to be undone when a message
 * turns out to be for user space.
 */
#pragma once

#include "ksf_framing.h"

/* True from 1 to KSF_BYTES_MAX. The verifier learns from an addition that a length is not 0, from a comparison with 0 only since
 * Linux 6.8. */
static __always_inline _Bool ksf_is_length(__u32 *len)
{
	__u32 above_one = *len - 1;

	KSF_HIDE(above_one);
	if (above_one >= KSF_BYTES_MAX)
		return 0;
	*len = above_one + 1;
	return 1;
}

/* Defined by KSF_SERVICE. A global function: the verifier checks it once per program, whoever calls it. */
int ksf_answer(struct ksf_message *m);

/* Has the function answer one message; its reply is appended to m->out. */
static __always_inline int ksf_call_service(struct ksf_message *m, __u32 start, __u32 len, __u32 transport)
{
	int verdict;

	m->start = start;
	m->len = len;
	m->bad = 0;
	m->transport = transport;
	m->out_start = m->out_len;
	verdict = ksf_answer(m);
	if (m->bad)
		return KSF_PASS;
	return verdict;
}

/*
 * Answers the `len` bytes in slot->message.in. Returns 0 with the replies in slot->message.out, or slot->echo when
 * the answer is the segment itself; else the counter that says why not.
 */
static __always_inline __u32 ksf_answer_segment(struct ksf_slot *slot, __u32 len)
{
	struct ksf_message *m = &slot->message;
	__u32 at = 0, replies = 0, echoes = 0;

	m->out_len = 0;
	slot->echo = 0;
	for (__u32 i = 0; i < KSF_MESSAGES_MAX; i++) {
		__u32 header = ksf_reply_header(), out = m->out_len;
		struct ksf_cut cut;
		int verdict;

		if (at >= len)
			break;
		cut = ksf_cut_message(m, at, len);
		if (!(cut.header + cut.body + cut.trailer))
#ifdef KSF_MUTANT_NO_BOUNDARY
			break;
#else
			return KSF_COUNT_passed_partial;
#endif
		/* Header bytes are put like any other, so that they are counted against the limit. */
		for (__u32 k = 0; k < 8; k++)
			if (k < header)
				ksf_put_u8(m, 0);
		if (m->out_len != out + header)
			return KSF_COUNT_passed_limit;
		verdict = ksf_call_service(m, at + cut.header, cut.body, KSF_STREAM);
		at += cut.header + cut.body + cut.trailer;
		if (verdict == KSF_ECHO) {
			m->out_len = out;
			echoes++;
			continue;
		}
		if (verdict != KSF_REPLY)
			return KSF_COUNT_passed_unanswerable;
		if (!ksf_frame_reply(m, out))
			return KSF_COUNT_passed_limit;
		replies++;
	}
#ifndef KSF_MUTANT_NO_BOUNDARY
	if (at < len)
		return KSF_COUNT_passed_limit;
#endif
	/* Echoes and built replies in one segment would need the echoed bytes copied; leave that to user space. */
	if (echoes && replies)
		return KSF_COUNT_passed_unanswerable;
	slot->messages = echoes + replies;
	slot->echo = echoes != 0;
	if (slot->echo)
		m->out_len = len;
	/* A segment that needs no reply would have to be dropped, which would not be told from a loss. */
	if (!m->out_len)
		return KSF_COUNT_passed_unanswerable;
	return 0;
}
