// SPDX-License-Identifier: GPL-2.0-only OR MIT
/* An XDP program that is no policy. */
#include "ksf_kernel.h"

SEC("xdp") int plain(struct xdp_md *xdp)
{
	(void)xdp;
	return XDP_PASS;
}

char plain_license[] SEC("license") = "Dual MIT/GPL";
