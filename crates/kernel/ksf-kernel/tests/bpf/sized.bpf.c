// SPDX-License-Identifier: GPL-2.0-only OR MIT
/* 9P's framing: a little-endian length of the whole message at its front, which the function sees and writes. */
#include "ksf.bpf.h"

KSF_SERVICE(sized, KSF_LENGTH_PREFIX(0, 4, KSF_LITTLE_ENDIAN, 0))
{
	ksf_put_u32_le(m, 4 + 1 + 2);
	ksf_put_u8(m, ksf_msg_u8(m, 4) + 1);
	ksf_put_u16_le(m, ksf_msg_u16_le(m, 5));
	return KSF_REPLY;
}
