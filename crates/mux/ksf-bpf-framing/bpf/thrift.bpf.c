// SPDX-License-Identifier: GPL-2.0-only OR MIT
/*
 * The example: Thrift's framed transport. A big-endian word counts the bytes that follow it.
 *
 *   clang -O2 -g -target bpf -mcpu=v3 -DKSF_AF_KCM -c thrift.bpf.c -o thrift.bpf.o
 */
#include "ksf_framing_program.h"

KSF_FRAMING_PROGRAM(thrift)
{
	__u32 body;

	if (!ksf_load_be32(stream, 0, &body))
		return 0;
	return body > KSF_BODY_MAX ? -EMSGSIZE : (int)(4 + body);
}

KSF_LICENSE("Dual MIT/GPL");
