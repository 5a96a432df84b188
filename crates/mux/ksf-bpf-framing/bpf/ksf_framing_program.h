/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * ksf_framing_program.h: for authors of framing programs.
 *
 * A framing program looks at the front of a byte stream and returns the length of the message there:
 *
 *   > 0   length of the message in bytes, header included; it need not have arrived in full
 *   = 0   too few bytes to tell, call again when there are more
 *   < 0   negated error number for the connection; -ESTRPIPE hands the stream back to its owner
 *
 *   #include "ksf_framing_program.h"
 *
 *   KSF_FRAMING_PROGRAM(thrift)
 *   {
 *           __u32 body;
 *           if (!ksf_load_be32(stream, 0, &body))
 *                   return 0;
 *           return body > KSF_BODY_MAX ? -EMSGSIZE : (int)(4 + body);
 *   }
 *   KSF_LICENSE("Dual MIT/GPL");
 *
 *   ksf sdk --dir sdk
 *   clang -O2 -g -target bpf -mcpu=v3 -I sdk -DKSF_AF_KCM -c thrift.bpf.c -o thrift.bpf.o
 *
 * The object is run by ksf's interpreter, or by the kernel for AF_KCM as a socket filter. For AF_KCM compile with
 * -DKSF_AF_KCM: AF_KCM calls the program on the socket buffer in which a message starts, but says nowhere a filter can
 * see at which byte; a program that reads at 0 takes the first message's length for all messages of a segment, without
 * any error. Under KSF_AF_KCM the true offset is read from the kernel's own data (sk_skb_cb.strp.strp.offset, relocated
 * by CO-RE) with bpf_probe_read_kernel. That needs Linux 5.16 with BTF, CAP_BPF and CAP_PERFMON, and a licence that is
 * compatible with the GPL. In ksf's interpreter that helper fails, the offset is 0, and the same object runs.
 *
 * All reads go through the functions below: they are right in both cases, and check the length.
 */
#ifndef KSF_FRAMING_PROGRAM_H
#define KSF_FRAMING_PROGRAM_H

#include "ksf_kernel.h"

#ifndef EFAULT
#define EFAULT 14
#endif
#ifndef EPROTO
#define EPROTO 71
#endif
#ifndef EBADMSG
#define EBADMSG 74
#endif
#ifndef ESTRPIPE
#define ESTRPIPE 86
#endif
#ifndef EMSGSIZE
#define EMSGSIZE 90
#endif

/* The longest length a program can return. */
#define KSF_LENGTH_MAX 0x7fffffff
/* The longest body behind a header of up to 4095 bytes. */
#define KSF_BODY_MAX (KSF_LENGTH_MAX - 4095)

#define KSF_INLINE static inline __attribute__((always_inline, unused))

/* The front of a stream. */
struct ksf_stream {
	struct __sk_buff *skb;
	/* First byte of the message in the socket buffer; 0 in user space. */
	__u32 start;
};

KSF_INLINE struct ksf_stream ksf_stream_of(struct __sk_buff *skb)
{
	struct ksf_stream stream = {.skb = skb, .start = 0};
#ifdef KSF_AF_KCM
	/* The context of a socket filter is the socket buffer itself; a failed read leaves 0. */
	struct sk_buff___ksf *buffer = (void *)skb;
	struct sk_skb_cb___ksf *cb = (void *)&buffer->cb;
	__u32 start = 0;

	bpf_core_read(&start, sizeof(start), &cb->strp.strp.offset);
	stream.start = start;
#endif
	return stream;
}

/* Bytes that have arrived, from the front of the message. */
KSF_INLINE __u32 ksf_arrived(const struct ksf_stream *stream)
{
	__u32 len = stream->skb->len;

	return len > stream->start ? len - stream->start : 0;
}

/* Copies `len` bytes (1 to 512) at `offset` of the message; false if they have not all arrived. */
KSF_INLINE _Bool ksf_load(const struct ksf_stream *stream, __u32 offset, void *to, __u32 len)
{
	/* The sum must not wrap back into what is there. */
	return offset <= KSF_LENGTH_MAX &&
	       bpf_skb_load_bytes(stream->skb, stream->start + offset, to, len) == 0;
}

#define KSF_LOAD_FUNCTION(order, ORDER, bits)                                                                \
	KSF_INLINE _Bool ksf_load_##order##bits(const struct ksf_stream *stream, __u32 offset, __u##bits *value) \
	{                                                                                                    \
		__u##bits raw = 0;                                                                           \
		_Bool there = ksf_load(stream, offset, &raw, sizeof(raw));                                   \
                                                                                                             \
		*value = KSF_##ORDER##bits(raw);                                                             \
		return there;                                                                                \
	}

/* _Bool ksf_load_be16(stream, offset, &value), and so on: a number; false if it has not arrived in full. */
KSF_LOAD_FUNCTION(be, BE, 16)
KSF_LOAD_FUNCTION(be, BE, 32)
KSF_LOAD_FUNCTION(be, BE, 64)
KSF_LOAD_FUNCTION(le, LE, 16)
KSF_LOAD_FUNCTION(le, LE, 32)
KSF_LOAD_FUNCTION(le, LE, 64)

KSF_INLINE _Bool ksf_load_u8(const struct ksf_stream *stream, __u32 offset, __u8 *value)
{
	*value = 0;
	return ksf_load(stream, offset, value, sizeof(*value));
}

/* Defines the program; its body follows and has `const struct ksf_stream *stream`. */
#define KSF_FRAMING_PROGRAM(name)                                                        \
	KSF_INLINE int ksf_program_##name(const struct ksf_stream *stream);              \
	SEC("socket") int name(struct __sk_buff *skb)         \
	{                                                                                \
		struct ksf_stream stream = ksf_stream_of(skb);                           \
                                                                                         \
		return ksf_program_##name(&stream);                                      \
	}                                                                                \
	KSF_INLINE int ksf_program_##name(const struct ksf_stream *stream)

#define KSF_LICENSE(text) char ksf_license[] SEC("license") = text

#endif
