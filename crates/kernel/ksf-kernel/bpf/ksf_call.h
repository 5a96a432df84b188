/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * User space runs the author's function on a message that was passed to it: it puts the message into its area of
 * ksf_calls, runs the program with BPF_PROG_RUN, and finds the reply there. The verifier has checked the function, so a
 * mistake in it cannot harm the server either.
 */
#pragma once

#include "ksf_segment.h"

static __always_inline int ksf_call_verdict(__u32 caller)
{
	struct ksf_message *m = ksf_call_at(caller);
	__u32 len;

	if (!m)
		return -1;
	len = m->len;
	if (len > KSF_BYTES_MAX)
		return -1;
	m->out_len = 0;
	return ksf_call_service(m, 0, len, KSF_CALL);
}
