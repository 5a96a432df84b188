// SPDX-License-Identifier: GPL-2.0-only OR MIT
/* An echo that changes the first byte. */
#include "ksf.bpf.h"

KSF_SERVICE(liar, KSF_RAW)
{
	__u32 len = ksf_len(m);

	if (!len)
		return KSF_PASS;
	ksf_put_u8(m, ksf_msg_u8(m, 0) ^ 1);
	ksf_copy(m, 1, len - 1);
	return KSF_REPLY;
}
