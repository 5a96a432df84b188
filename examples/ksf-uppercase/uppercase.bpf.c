// SPDX-License-Identifier: GPL-2.0-only OR MIT
/*
 * A service in the kernel: it returns every message in capital letters. A message is a two-byte big-endian length and
 * that many bytes. Messages that start with '!' are left to user space, as an example of work that is not for the kernel.
 *
 * docs/writing-a-kernel-service.md explains each line.
 */
#include "ksf.bpf.h"

/* Called for each byte of a message. */
static long upper_byte(__u32 i, struct ksf_each *each)
{
	__u8 byte = ksf_msg_u8(each->m, i);

	if (byte >= 'a' && byte <= 'z')
		byte -= 'a' - 'A';
	ksf_put_u8(each->m, byte);
	return 0;
}

KSF_SERVICE(uppercase, KSF_LENGTH_PREFIXED(2, KSF_BIG_ENDIAN))
{
	if (ksf_len(m) && ksf_msg_u8(m, 0) == '!')
		return KSF_PASS;
	ksf_for_each(m, ksf_len(m), upper_byte, 0);
	return KSF_REPLY;
}
