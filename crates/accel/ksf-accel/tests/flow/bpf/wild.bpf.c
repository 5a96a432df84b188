// SPDX-License-Identifier: GPL-2.0-only OR MIT
/* Takes the port for the number of a CPU. */
#include "ksf-policy.h"

KSF_POLICY(wild)
{
	return packet->destination_port;
}

KSF_POLICY_LICENSE("Dual MIT/GPL");
