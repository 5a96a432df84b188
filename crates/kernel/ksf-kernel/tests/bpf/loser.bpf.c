// SPDX-License-Identifier: GPL-2.0-only OR MIT
/* An echo that loses all but the first byte. */
#include "ksf.bpf.h"

KSF_SERVICE(loser, KSF_RAW)
{
	if (!ksf_len(m))
		return KSF_PASS;
	ksf_put_u8(m, ksf_msg_u8(m, 0));
	return KSF_REPLY;
}
