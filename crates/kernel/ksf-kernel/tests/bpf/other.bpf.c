// SPDX-License-Identifier: GPL-2.0-only OR MIT
/* Somebody else's XDP program: passes everything. */
__attribute__((section("xdp"), used)) int other_program(void *context)
{
	return 2; /* XDP_PASS */
}

__attribute__((section("license"), used)) char other_license[] = "Dual MIT/GPL";
