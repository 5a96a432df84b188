// SPDX-License-Identifier: GPL-2.0-only OR MIT
/*
 * A steering policy to copy: TLS has a CPU of its own, and each tenant, told by its VLAN, another.
 */
#include "ksf-policy.h"

/* Packets by VLAN: a policy may have maps of its own. `bpftool map dump name tenant_packets` shows them. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, __u64);
} tenant_packets SEC(".maps");

KSF_POLICY(tenants)
{
	__u32 vlan = packet->vlan;
	__u64 *count = bpf_map_lookup_elem(&tenant_packets, &vlan);
	__u32 cpus = ksf_cpu_count();

	if (count)
		++*count;
	if (packet->protocol == 6 && packet->destination_port == 443)
		return ksf_cpu_at(0);
	if (!vlan || !cpus)
		return KSF_NEXT; /* the next policy of the chain decides, if there is one */
	return ksf_cpu_at(vlan % cpus);
}

KSF_POLICY_LICENSE("GPL");
