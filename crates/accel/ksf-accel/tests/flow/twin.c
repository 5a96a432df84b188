// SPDX-License-Identifier: GPL-2.0-only OR MIT
/* Says for a layout what bpf/flow/ksf_flow_abi.h makes of every chunk and every port: twins.rs compares. */
#include <linux/types.h>
#include <stdio.h>
#include <stdlib.h>

#include "ksf_flow_abi.h"

int main(int argc, char **argv)
{
	if (argc != 4)
		return 2;
	struct ksf_flow_layout layout = {
		.chunk_bits = strtoul(argv[1], 0, 10),
		.first_chunk = strtoul(argv[2], 0, 10),
		.chunks = strtoul(argv[3], 0, 10),
	};
	for (__u32 index = 0; index < layout.chunks; index++)
		printf("%u\n", ksf_flow_range(&layout, index));
	for (__u32 port = 0; port < 65536; port++)
		printf("%u\n", ksf_flow_index(&layout, port));
	return 0;
}
