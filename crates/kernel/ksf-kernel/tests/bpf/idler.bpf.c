// SPDX-License-Identifier: GPL-2.0-only OR MIT
/* An echo that leaves everything to user space. */
#include "ksf.bpf.h"

KSF_SERVICE(idler, KSF_RAW)
{
	return KSF_PASS;
}
