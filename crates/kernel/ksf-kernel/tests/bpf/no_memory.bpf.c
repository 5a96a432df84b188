// SPDX-License-Identifier: GPL-2.0-only OR MIT
/* A service of this crate, -DSERVICE, on a kernel that has no memory when repeated bytes are to be cut off. */
#include "../../bpf/ksf_platform.h"

static __always_inline long no_memory(struct __sk_buff *skb)
{
	(void)skb;
	return -12; /* ENOMEM */
}

#define bpf_skb_adjust_room(skb, by, mode, flags) no_memory(skb)

#include SERVICE
