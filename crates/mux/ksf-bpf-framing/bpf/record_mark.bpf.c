// SPDX-License-Identifier: GPL-2.0-only OR MIT
/*
 * ONC RPC record marking (RFC 5531, section 11): fragments behind a big-endian word whose top bit marks the last one.
 * A message is the whole record with its marks. Every mark must have arrived before the length is known.
 */
#include "ksf_framing_program.h"

#define LAST 0x80000000u
/* Also the verifier's bound. A peer that sends more fragments gets EMSGSIZE. */
#define FRAGMENTS_MAX 256

KSF_FRAMING_PROGRAM(record_mark)
{
	__u64 length = 0;

	for (int fragment = 0; fragment < FRAGMENTS_MAX; fragment++) {
		__u32 mark;

		if (!ksf_load_be32(stream, length, &mark))
			return 0;
		length += 4 + (mark & ~LAST);
		if (length > KSF_LENGTH_MAX)
			break;
		if (mark & LAST)
			return length;
	}
	return -EMSGSIZE;
}

KSF_LICENSE("Dual MIT/GPL");
