// SPDX-License-Identifier: GPL-2.0-only OR MIT
/* Reads memory it has not checked: the verifier refuses it. */
#include "ksf.bpf.h"

KSF_SERVICE(refused, KSF_RAW)
{
	ksf_put_u8(m, m->in[ksf_msg_u32(m, 0)]);
	return KSF_REPLY;
}
