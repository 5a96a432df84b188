// SPDX-License-Identifier: GPL-2.0-only OR MIT
/*
 * Echo (RFC 862): what comes goes back. Over TCP the segment itself is sent back, so nothing is copied and any length
 * is answered.
 */
#include "ksf.bpf.h"

KSF_SERVICE(echo, KSF_RAW_BLIND)
{
	return KSF_ECHO;
}
