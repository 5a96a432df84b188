// SPDX-License-Identifier: GPL-2.0-only OR MIT
/*
 * The XDP program of an interface, and the policies that come with ksf.
 *
 * ksf_flow reads the headers and calls the first policy of the chain; ksf-policy.h is what happens then.
 */
#include "parse.h"

SEC("xdp") int ksf_flow(struct xdp_md *xdp)
{
	__u32 zero = 0, why;
	struct ksf_packet *packet = bpf_map_lookup_elem(&ksf_packets, &zero);

	if (!packet)
		return XDP_PASS;
	why = ksf_parse(packet, xdp);
	if (why != KSF_FLOW_COUNTER_COUNT)
		return ksf_flow_passed(why);
	packet->slot = 0;
	packet->cpu = bpf_get_smp_processor_id();
	packet->interface = xdp->ingress_ifindex;
	packet->queue = xdp->rx_queue_index;
	bpf_tail_call(xdp, &ksf_policies, 0);
	return ksf_flow_passed(KSF_FLOW_passed_no_policy);
}

/*
 * Ports inside a chunk that somebody listens on: their packets do not belong to active connections. One bit each,
 * learned when a connection is opened to such a port. Only a socket that listens sets a bit: a port scan does not.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 65536 / 32);
	__type(key, __u32);
	__type(value, __u32);
} ksf_listening SEC(".maps");

static __always_inline int is_listened_on(struct xdp_md *xdp, const struct ksf_packet *packet)
{
	const __u64 this_netns = -1; /* that of the interface */
	const __u32 tcp_listen = 10;
	struct bpf_sock_tuple tuple = {};
	struct bpf_sock *sock;
	int listens;

	if (packet->family == 4) {
		tuple.ipv4.saddr = packet->source[0];
		tuple.ipv4.daddr = packet->destination[0];
		tuple.ipv4.sport = KSF_BE16(packet->source_port);
		tuple.ipv4.dport = KSF_BE16(packet->destination_port);
		sock = bpf_skc_lookup_tcp(xdp, &tuple, sizeof(tuple.ipv4), this_netns, 0);
	} else {
#pragma unroll
		for (int word = 0; word < 4; word++) {
			tuple.ipv6.saddr[word] = packet->source[word];
			tuple.ipv6.daddr[word] = packet->destination[word];
		}
		tuple.ipv6.sport = KSF_BE16(packet->source_port);
		tuple.ipv6.dport = KSF_BE16(packet->destination_port);
		sock = bpf_skc_lookup_tcp(xdp, &tuple, sizeof(tuple.ipv6), this_netns, 0);
	}
	if (!sock)
		return 0;
	listens = sock->state == tcp_listen;
	bpf_sk_release(sock);
	return listens;
}

/* Replies to active connections go to the CPU whose chunk their port lies in. */
KSF_POLICY(ksf_ports)
{
	__u32 zero = 0, index, word, bit;
	struct ksf_flow_settings *settings = bpf_map_lookup_elem(&ksf_settings, &zero);
	__u32 *listening;

	if (!settings || packet->protocol != KSF_IPPROTO_TCP)
		return KSF_NEXT;
	index = ksf_flow_index(&settings->layout, packet->destination_port);
	if (index >= settings->layout.chunks)
		return KSF_NEXT;
	word = packet->destination_port / 32;
	bit = 1U << packet->destination_port % 32;
	listening = bpf_map_lookup_elem(&ksf_listening, &word);
	if (!listening)
		return KSF_NEXT;
	if (unlikely(ksf_is_opening(packet))) {
		if (is_listened_on(xdp, packet))
			__sync_fetch_and_or(listening, bit);
		else
			__sync_fetch_and_and(listening, ~bit);
	}
	if (*(volatile __u32 *)listening & bit)
		return KSF_NEXT;
	return ksf_cpu_at(index);
}

/* Every connection to one CPU, evenly. */
KSF_POLICY(ksf_by_hash)
{
	return ksf_cpu_of_hash(packet->hash);
}

struct ksf_flow_key {
	__u32 source[4];
	__u32 destination[4];
	__u16 source_port;
	__u16 destination_port;
	__u8 protocol;
	__u8 family;
	__u16 zero;
};

/* The CPU of each connection that was seen to open. What is not used for long falls out. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct ksf_flow_key);
	__type(value, __u32);
} ksf_flows SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} ksf_turn SEC(".maps");

/* New TCP connections in turn; the packets of each follow its first. */
KSF_POLICY(ksf_round_robin)
{
	struct ksf_flow_key key = {
		.source = { packet->source[0], packet->source[1], packet->source[2], packet->source[3] },
		.destination = { packet->destination[0], packet->destination[1], packet->destination[2],
				 packet->destination[3] },
		.source_port = packet->source_port,
		.destination_port = packet->destination_port,
		.protocol = packet->protocol,
		.family = packet->family,
	};
	__u32 zero = 0, cpus = ksf_cpu_count(), cpu, *known, *turn;

	if (packet->protocol != KSF_IPPROTO_TCP || !cpus)
		return KSF_NEXT;
	known = bpf_map_lookup_elem(&ksf_flows, &key);
	if (known)
		return *known;
	turn = bpf_map_lookup_elem(&ksf_turn, &zero);
	/* A connection that is older than this program stays where it is. */
	if (!turn || !ksf_is_opening(packet))
		return KSF_NEXT;
	cpu = ksf_cpu_at(__sync_fetch_and_add(turn, 1) % cpus);
	/* If there is no room, its next packets stay where they are, too. */
	bpf_map_update_elem(&ksf_flows, &key, &cpu, 0);
	return cpu;
}

/* Everything stays: to see what the program alone costs. */
KSF_POLICY(ksf_stay)
{
	return KSF_PASS;
}

KSF_POLICY_LICENSE("Dual MIT/GPL");
