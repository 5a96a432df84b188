// SPDX-License-Identifier: GPL-2.0-only OR MIT
/*
 * A length field at a fixed place of a fixed header. The loader writes the parameters into the object's constants, so
 * the verifier sees them as such and drops the branches they rule out.
 */
#include "ksf_framing_program.h"

struct parameters {
	__u32 offset; /* bytes before the field */
	__u32 width;  /* 1, 2, 4 or 8 */
	__u32 big;    /* byte order */
	__s32 adjust; /* added to the field to get the length of the whole message */
};

const volatile struct parameters ksf_parameters = {.offset = 0, .width = 4, .big = 1, .adjust = 4};

static inline _Bool field(const struct ksf_stream *stream, __u64 *value)
{
	__u32 offset = ksf_parameters.offset;
	__u8 byte;
	__u16 half;
	__u32 word;
	_Bool there;

	switch (ksf_parameters.width) {
	case 1:
		there = ksf_load_u8(stream, offset, &byte);
		*value = byte;
		return there;
	case 2:
		there = ksf_load_le16(stream, offset, &half);
		*value = ksf_parameters.big ? __builtin_bswap16(half) : half;
		return there;
	case 4:
		there = ksf_load_le32(stream, offset, &word);
		*value = ksf_parameters.big ? __builtin_bswap32(word) : word;
		return there;
	default:
		there = ksf_load_le64(stream, offset, value);
		if (ksf_parameters.big)
			*value = __builtin_bswap64(*value);
		return there;
	}
}

KSF_FRAMING_PROGRAM(length_prefix)
{
	__u64 value;
	__s64 length;

	if (!field(stream, &value))
		return 0;
	/* Far above what `adjust` can bring back, far below an overflow. */
	if (value > 1ull << 40)
		return -EMSGSIZE;
	length = (__s64)value + ksf_parameters.adjust;
	if (length < (__s64)ksf_parameters.offset + ksf_parameters.width)
		return -EBADMSG;
	return length > KSF_LENGTH_MAX ? -EMSGSIZE : length;
}

KSF_LICENSE("Dual MIT/GPL");
