// SPDX-License-Identifier: GPL-2.0-only OR MIT
/*
 * A message ends with a sequence of 1 to 8 bytes, which is part of its length.
 *
 * Every call searches from the front: a program has no memory between calls. It looks at 8 bytes at a time for the
 * last byte of the delimiter, and at single places only where that occurs.
 */
#include "ksf_framing_program.h"

/* Longest message; also the verifier's bound. A longer one gets EMSGSIZE. */
#define MESSAGE_BYTES_MAX 4096

#define ONES 0x0101010101010101ull
#define TOPS 0x8080808080808080ull

struct parameters {
	/* The delimiter as a number whose lowest byte comes first on the wire, moved to the upper end: its last byte is the
	 * top one. The mask has ones where it is. */
	__u64 pattern;
	__u64 mask;
	__u32 bytes;
	__u32 unused;
};

const volatile struct parameters ksf_parameters = {
	.pattern = 0x0a00000000000000ull, .mask = 0xff00000000000000ull, .bytes = 1};

/*
 * Looks for the end of the delimiter at each byte of `word`, the 8 bytes at `at`, behind the 8 bytes `before`. Returns
 * the length of the message, or 0. A function of its own, not static, so that the verifier looks at it once and not in
 * every turn of the loop.
 */
__attribute__((noinline)) __u32 delimiter_end(__u64 word, __u64 before, __u32 at, __u32 arrived)
{
	__u64 pattern = ksf_parameters.pattern;
	__u64 mask = ksf_parameters.mask;

#pragma unroll
	for (__u32 place = 0; place < 8; place++) {
		/* The 8 bytes that end at this place, the last of them on top. */
		__u64 window = place == 7 ? word : word << (56 - 8 * place) | before >> (8 + 8 * place);
		__u32 length = at + place + 1;

		/* Zeros stand for what lies before the message and behind what has arrived. */
		if (((window ^ pattern) & mask) == 0 && length >= ksf_parameters.bytes && length <= arrived)
			return length;
	}
	return 0;
}

KSF_FRAMING_PROGRAM(delimiter)
{
	__u32 arrived = ksf_arrived(stream);
	__u64 lasts = (ksf_parameters.pattern >> 56) * ONES;
	__u64 before = 0;
	__u64 word;
	__u64 rest;
	__u32 at;

	for (at = 0; at < MESSAGE_BYTES_MAX; at += 8) {
		__u64 differs;

		if (!ksf_load_le64(stream, at, &word))
			break;
		/* Does it have the last byte of the delimiter? Then a byte of `differs` is zero. */
		differs = word ^ lasts;
		if ((differs - ONES) & ~differs & TOPS) {
			__u32 length = delimiter_end(word, before, at, arrived);

			if (length)
				return length;
		}
		before = word;
	}
	if (at >= MESSAGE_BYTES_MAX)
		return -EMSGSIZE;
	/* The end of what has arrived: fewer than 8 bytes. */
	rest = arrived - at;
	if (rest < 1 || rest > 7)
		return 0;
	/* The verifier of Linux 6.1 does not learn from a comparison that something is not 0; this it understands. The
	 * compiler, which knows better, must not take it out. */
	asm volatile("" : "+r"(rest));
	rest = ((rest - 1) & 7) + 1;
	word = 0;
	if (!ksf_load(stream, at, &word, rest))
		return 0;
	return delimiter_end(KSF_LE64(word), before, at, arrived);
}

KSF_LICENSE("Dual MIT/GPL");
