/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * What a service function works with: reading a message, putting a reply.
 *
 * Every access is checked. Reading outside of the message gives 0, putting more than fits puts nothing; either way the
 * message is marked and goes to user space, whatever the function returns, so a mistake never becomes a wrong reply.
 * Numbers are in network byte order unless the name says _le.
 */
#pragma once

#include "ksf_platform.h"

/* Bytes of the message. */
static __always_inline __u32 ksf_len(const struct ksf_message *m)
{
	return m->len;
}

/* Where the message came from: enum ksf_transport. */
static __always_inline __u32 ksf_transport(const struct ksf_message *m)
{
	return m->transport;
}

/* `width` readable bytes at `offset` of the message, or NULL. */
static __always_inline const __u8 *ksf_in(struct ksf_message *m, __u32 offset, __u32 width)
{
	__u32 at = m->start + offset;

	if (offset > m->len || m->len - offset < width) {
		m->bad = 1;
		return 0;
	}
	/* The verifier does not know what start and len mean; without the barrier clang would drop this check. */
	KSF_HIDE(at);
	if (at >= KSF_BUFFER_BYTES)
		return 0;
	return &m->in[at];
}

static __always_inline __u8 *ksf_out(struct ksf_message *m, __u32 width)
{
	__u32 at = m->out_len;

	KSF_HIDE(at);
	if (at >= KSF_BYTES_MAX || KSF_BYTES_MAX - at < width) {
		m->bad = 1;
		return 0;
	}
	m->out_len = at + width;
	return &m->out[at];
}

#define KSF_READER(name, type, load, order)                                            \
	static __always_inline type ksf_msg_##name(struct ksf_message *m, __u32 offset) \
	{                                                                              \
		const __u8 *at = ksf_in(m, offset, sizeof(type));                      \
                                                                                       \
		return at ? order(load(at)) : 0;                                       \
	}

#define KSF_WRITER(name, type, store, order)                                          \
	static __always_inline void ksf_put_##name(struct ksf_message *m, type value) \
	{                                                                             \
		__u8 *at = ksf_out(m, sizeof(type));                                  \
                                                                                      \
		if (at)                                                               \
			store(at, order(value));                                      \
	}

KSF_READER(u8, __u8, KSF_LOAD8, KSF_SAME)
KSF_READER(u16, __u16, KSF_LOAD16, KSF_BE16)
KSF_READER(u32, __u32, KSF_LOAD32, KSF_BE32)
KSF_READER(u64, __u64, KSF_LOAD64, KSF_BE64)
KSF_READER(u16_le, __u16, KSF_LOAD16, KSF_LE16)
KSF_READER(u32_le, __u32, KSF_LOAD32, KSF_LE32)
KSF_READER(u64_le, __u64, KSF_LOAD64, KSF_LE64)

KSF_WRITER(u8, __u8, KSF_STORE8, KSF_SAME)
KSF_WRITER(u16, __u16, KSF_STORE16, KSF_BE16)
KSF_WRITER(u32, __u32, KSF_STORE32, KSF_BE32)
KSF_WRITER(u64, __u64, KSF_STORE64, KSF_BE64)
KSF_WRITER(u16_le, __u16, KSF_STORE16, KSF_LE16)
KSF_WRITER(u32_le, __u32, KSF_STORE32, KSF_LE32)
KSF_WRITER(u64_le, __u64, KSF_STORE64, KSF_LE64)

/* Appends `len` bytes of the message, from `offset` on, to the reply. */
static __always_inline void ksf_copy(struct ksf_message *m, __u32 offset, __u32 len)
{
	__u32 from = m->start + offset, to = m->out_len;

	if (!len)
		return;
	if (offset > m->len || m->len - offset < len) {
		m->bad = 1;
		return;
	}
	KSF_HIDE(from);
	KSF_HIDE(to);
	KSF_HIDE(len);
	if (from >= KSF_BUFFER_BYTES || to >= KSF_BYTES_MAX || len > KSF_BYTES_MAX || KSF_BYTES_MAX - to < len) {
		m->bad = 1;
		return;
	}
	if (ksf_memcpy(&m->out[to], &m->in[from], len))
		m->bad = 1;
	m->out_len = to + len;
}

/* Appends the bytes of a constant: ksf_put_text(m, "+PONG\r\n"). */
#define ksf_put_text(m, text)                                                                   \
	do {                                                                                    \
		KSF_UNROLL for (__u32 ksf_i = 0; ksf_i < sizeof(text) - 1; ksf_i++)       \
			ksf_put_u8(m, (text)[ksf_i]);                                           \
	} while (0)

/* What a function given to ksf_each() is called with. */
struct ksf_each {
	struct ksf_message *m;
	__u64 value; /* free for the author: starts as given, stays between the calls */
};

/*
 * Calls `function(i, each)` for i = 0 .. count-1, at most KSF_BYTES_MAX times, until it returns other than 0, and
 * returns the last each.value. The verifier looks at the function once; a plain `for` over a message it would follow
 * 16,000 times.
 */
typedef long (*ksf_each_function)(__u32 i, struct ksf_each *each);

static __always_inline __u64 ksf_for_each(struct ksf_message *m, __u32 count, ksf_each_function function, __u64 value)
{
	struct ksf_each each = { .m = m, .value = value };

	if (count > KSF_BYTES_MAX)
		count = KSF_BYTES_MAX;
	ksf_loop(count, function, &each);
	return each.value;
}
