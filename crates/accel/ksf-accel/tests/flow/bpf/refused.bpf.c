// SPDX-License-Identifier: GPL-2.0-only OR MIT
/* Reads the frame without looking where it ends: the verifier refuses it. */
#include "ksf-policy.h"

KSF_POLICY(refused)
{
	return *(__u8 *)(long)xdp->data;
}

KSF_POLICY_LICENSE("Dual MIT/GPL");
