// SPDX-License-Identifier: GPL-2.0-only OR MIT
/* A BPF object that has nothing to do with the SDK. */
__attribute__((section("socket"), used)) int plain(void *context)
{
	return 0;
}

__attribute__((section("license"), used)) char plain_license[] = "Dual MIT/GPL";
