// SPDX-License-Identifier: GPL-2.0-only OR MIT
/* Replies twice as long as their requests: the case that stalls a connection without the hop. */
#include "ksf.bpf.h"

KSF_SERVICE(grow, KSF_DELIMITER("\r\n"))
{
	if (ksf_len(m) && ksf_msg_u8(m, 0) == '!')
		return KSF_PASS;
	ksf_copy(m, 0, ksf_len(m));
	ksf_put_u8(m, ' ');
	ksf_copy(m, 0, ksf_len(m));
	return KSF_REPLY;
}
