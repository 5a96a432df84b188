/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Where a message ends, and how a reply is framed. The same rules as the framework's Framing (crates/core/ksf/src/framing.rs):
 *
 *   record mark     | mark 4 | body ............ |   one fragment, marked last (RFC 5531, section 11); others pass
 *   length prefix   | ... len ... | body ....... |   the header belongs to the message unless stripped
 *   delimiter       | body ........... | delim   |
 *   raw             | the segment as it came     |
 */
#pragma once

#include "ksf_message.h"

/* The framings an author chooses from; the values of struct ksf_framing. */
#define KSF_RAW { .kind = KSF_FRAME_RAW }
#define KSF_RAW_BLIND { .kind = KSF_FRAME_BLIND }
#define KSF_RECORD_MARK { .kind = KSF_FRAME_RECORD_MARK }
/* field = `width_` bytes at `offset_`; message length = field + `adjust_`; the function sees header and body */
#define KSF_LENGTH_PREFIX(offset_, width_, endian_, adjust_)                                                     \
	{                                                                                                        \
		.kind = KSF_FRAME_LENGTH_PREFIX, .offset = offset_, .width = width_, .little_endian = endian_,    \
		.adjust = adjust_                                                                                \
	}
/* a count of the bytes that follow it; the function sees those only, and replies get their own */
#define KSF_LENGTH_PREFIXED(width_, endian_)                                                                     \
	{                                                                                                        \
		.kind = KSF_FRAME_LENGTH_PREFIX, .width = width_, .little_endian = endian_, .adjust = width_,     \
		.strip = 1                                                                                       \
	}
/* 1 to 8 bytes, given as a string */
#define KSF_DELIMITER(text_)                                                                                     \
	{                                                                                                        \
		.kind = KSF_FRAME_DELIMITER, .delimiter_bytes = sizeof(text_) - 1, .delimiter = text_             \
	}
#define KSF_BIG_ENDIAN 0
#define KSF_LITTLE_ENDIAN 1

/* The cut of one message: bytes before it, bytes of it, bytes behind it. All 0: not whole. */
struct ksf_cut {
	__u32 header;
	__u32 body;
	__u32 trailer;
};

#define KSF_RECORD_LAST 0x80000000u

/* The length field of a prefix at `at`; the caller has checked that it lies in the buffer. */
static __always_inline __u64 ksf_field_load(const __u8 *at)
{
	__u32 width = ksf_config.framing.width;

	if (ksf_config.framing.little_endian)
		return width == 1   ? KSF_LOAD8(at)
		       : width == 2 ? KSF_LE16(KSF_LOAD16(at))
		       : width == 4 ? KSF_LE32(KSF_LOAD32(at))
				    : KSF_LE64(KSF_LOAD64(at));
	return width == 1   ? KSF_LOAD8(at)
	       : width == 2 ? KSF_BE16(KSF_LOAD16(at))
	       : width == 4 ? KSF_BE32(KSF_LOAD32(at))
			    : KSF_BE64(KSF_LOAD64(at));
}

static __always_inline void ksf_field_store(__u8 *at, __u64 value)
{
	__u32 width = ksf_config.framing.width;
	_Bool little = ksf_config.framing.little_endian;

	if (width == 1)
		KSF_STORE8(at, (__u8)value);
	else if (width == 2)
		KSF_STORE16(at, little ? KSF_LE16((__u16)value) : KSF_BE16((__u16)value));
	else if (width == 4)
		KSF_STORE32(at, little ? KSF_LE32((__u32)value) : KSF_BE32((__u32)value));
	else
		KSF_STORE64(at, little ? KSF_LE64(value) : KSF_BE64(value));
}

struct ksf_search {
	struct ksf_message *m;
	__u32 from;
	__u32 last; /* offset at which the delimiter fits for the last time, plus one */
	__u32 found;
	__u32 hit;
};

static long ksf_search_step(__u32 i, struct ksf_search *search)
{
	__u32 at = search->from + i;
	__u32 same = 0;

	KSF_HIDE(at);
	if (at >= search->last || at >= KSF_BUFFER_BYTES)
		return 1;
	for (__u32 k = 0; k < sizeof(ksf_config.framing.delimiter); k++) {
		if (k >= ksf_config.framing.delimiter_bytes)
			break;
		/* `tail` follows `in`, so this stays inside the message. */
		if (search->m->in[at + k] != ksf_config.framing.delimiter[k])
			break;
		same++;
	}
	if (same != ksf_config.framing.delimiter_bytes)
		return 0;
	search->found = at;
	search->hit = 1;
	return 1;
}

static __always_inline struct ksf_cut ksf_cut_delimiter(struct ksf_message *m, __u32 at, __u32 end)
{
	__u32 delimiter = ksf_config.framing.delimiter_bytes;
	struct ksf_cut cut = { 0 };
	struct ksf_search search = { .m = m, .from = at };

	if (end - at < delimiter)
		return cut;
	search.last = end - delimiter + 1;
	ksf_loop(KSF_BYTES_MAX, ksf_search_step, &search);
	if (search.hit) {
		cut.body = search.found - at;
		cut.trailer = delimiter;
	}
	return cut;
}

static __always_inline struct ksf_cut ksf_cut_prefix(struct ksf_message *m, __u32 at, __u32 end)
{
	__u32 header = ksf_config.framing.offset + ksf_config.framing.width;
	__u32 field = at + ksf_config.framing.offset;
	struct ksf_cut cut = { 0 };
	__s64 total;

	KSF_HIDE(field);
	if (end - at < header || field >= KSF_BUFFER_BYTES)
		return cut;
	total = (__s64)(ksf_field_load(&m->in[field]) & 0x7fffffffffffffffull);
	/* Far beyond any segment, and far from an overflow of the sum. */
	if (total > 0xffffffffll)
		return cut;
	total += ksf_config.framing.adjust;
	if (total < header || total > end - at)
		return cut;
	cut.header = ksf_config.framing.strip ? header : 0;
	cut.body = (__u32)total - cut.header;
	return cut;
}

static __always_inline struct ksf_cut ksf_cut_record(struct ksf_message *m, __u32 at, __u32 end)
{
	struct ksf_cut cut = { 0 };
	__u32 mark, body;

	KSF_HIDE(at);
	if (end - at < 4 || at >= KSF_BUFFER_BYTES)
		return cut;
	mark = KSF_BE32(KSF_LOAD32(&m->in[at]));
	body = mark & ~KSF_RECORD_LAST;
	if (!(mark & KSF_RECORD_LAST) || body > end - at - 4)
		return cut;
	cut.header = 4;
	cut.body = body;
	return cut;
}

/* Cuts the message at `at` off a segment that ends at `end`. `at` < `end`. */
static __always_inline struct ksf_cut ksf_cut_message(struct ksf_message *m, __u32 at, __u32 end)
{
	switch (ksf_config.framing.kind) {
	case KSF_FRAME_RECORD_MARK:
		return ksf_cut_record(m, at, end);
	case KSF_FRAME_LENGTH_PREFIX:
		return ksf_cut_prefix(m, at, end);
	case KSF_FRAME_DELIMITER:
		return ksf_cut_delimiter(m, at, end);
	default: {
		struct ksf_cut all = { .body = end - at };

		return all;
	}
	}
}

/* Bytes in front of a reply that ksf_frame_reply() fills. */
static __always_inline __u32 ksf_reply_header(void)
{
	if (ksf_config.framing.kind == KSF_FRAME_RECORD_MARK)
		return 4;
	if (ksf_config.framing.kind == KSF_FRAME_LENGTH_PREFIX && ksf_config.framing.strip)
		return ksf_config.framing.width;
	return 0;
}

/* Completes the reply whose header starts at `at`. False: its length has no place in the field. */
static __always_inline _Bool ksf_frame_reply(struct ksf_message *m, __u32 at)
{
	__u32 header = ksf_reply_header();
	__u32 body = m->out_len - at - header;

	if (ksf_config.framing.kind == KSF_FRAME_DELIMITER) {
		for (__u32 k = 0; k < sizeof(ksf_config.framing.delimiter); k++) {
			if (k >= ksf_config.framing.delimiter_bytes)
				break;
			ksf_put_u8(m, ksf_config.framing.delimiter[k]);
		}
		return !m->bad;
	}
	if (!header)
		return 1;
	KSF_HIDE(at);
	if (at >= KSF_BYTES_MAX)
		return 0;
	if (ksf_config.framing.kind == KSF_FRAME_RECORD_MARK) {
		KSF_STORE32(&m->out[at], KSF_BE32(KSF_RECORD_LAST | body));
		return 1;
	}
	if (ksf_config.framing.width < 4 && (body + header - ksf_config.framing.adjust) >> (8 * ksf_config.framing.width))
		return 0;
	ksf_field_store(&m->out[at], (__u64)body + header - ksf_config.framing.adjust);
	return 1;
}
