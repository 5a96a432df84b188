// SPDX-License-Identifier: GPL-2.0-only OR MIT
/* Two policies in one object: which is meant? */
#include "ksf-policy.h"

KSF_POLICY(one)
{
	return KSF_NEXT;
}

KSF_POLICY(other)
{
	return KSF_PASS;
}

KSF_POLICY_LICENSE("Dual MIT/GPL");
