/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * From a frame to the fields that a policy is shown.
 *
 * Only what can be told at once is taken: no fragments (the ports are in the first one only), no IPv4 options and no
 * IPv6 extension headers. Those pass, and the stack steers nothing wrong.
 */
#pragma once

#include "ksf-policy.h"

enum {
	KSF_ETH_IPV4 = 0x0800,
	KSF_ETH_IPV6 = 0x86dd,
	KSF_ETH_8021Q = 0x8100,
	KSF_ETH_8021AD = 0x88a8,
	KSF_IPPROTO_TCP = 6,
	KSF_IPPROTO_UDP = 17,
	KSF_IPPROTO_FRAGMENT = 44,
	KSF_VLANS_MAX = 2,
};

/* The finalizer of MurmurHash3: every bit of the input moves every bit of the result. */
static __always_inline __u32 ksf_mix(__u32 hash)
{
	hash ^= hash >> 16;
	hash *= 0x85ebca6b;
	hash ^= hash >> 13;
	hash *= 0xc2b2ae35;
	return hash ^ hash >> 16;
}

/* The same for both directions of a connection: ends are hashed apart and added. */
static __always_inline __u32 ksf_hash(const struct ksf_packet *packet)
{
	__u32 here = ksf_mix(packet->destination_port), there = ksf_mix(packet->source_port);

#pragma unroll
	for (int at = 0; at < 4; at++) {
		here = ksf_mix(here ^ packet->destination[at]);
		there = ksf_mix(there ^ packet->source[at]);
	}
	return ksf_mix(here + there);
}

/* TCP and UDP. KSF_FLOW_COUNTER_COUNT if all is well, otherwise why the frame passes. */
static __always_inline __u32 ksf_parse_segment(struct ksf_packet *packet, void *at, void *begin, void *end)
{
	packet->segment_at = at - begin;
	if (packet->protocol == KSF_IPPROTO_TCP) {
		struct tcphdr *tcp = at;

		if ((void *)(tcp + 1) > end || packet->segment_bytes < sizeof(*tcp))
			return KSF_FLOW_passed_truncated;
		packet->source_port = KSF_BE16(tcp->source);
		packet->destination_port = KSF_BE16(tcp->dest);
		packet->tcp_flags = tcp->flags;
	} else if (packet->protocol == KSF_IPPROTO_UDP) {
		struct udphdr *udp = at;

		if ((void *)(udp + 1) > end || packet->segment_bytes < sizeof(*udp))
			return KSF_FLOW_passed_truncated;
		packet->source_port = KSF_BE16(udp->source);
		packet->destination_port = KSF_BE16(udp->dest);
		packet->tcp_flags = 0;
	} else {
		return KSF_FLOW_passed_protocol;
	}
	packet->hash = ksf_hash(packet);
	return KSF_FLOW_COUNTER_COUNT;
}

static __always_inline __u32 ksf_parse_ipv4(struct ksf_packet *packet, void *at, void *begin, void *end)
{
	struct iphdr *ip = at;

	if ((void *)(ip + 1) > end)
		return KSF_FLOW_passed_truncated;
	if (ip->version_ihl >> 4 != 4 || (ip->version_ihl & 15) < 5)
		return KSF_FLOW_passed_truncated;
	if ((ip->version_ihl & 15) != 5)
		return KSF_FLOW_passed_options;
	/* More fragments, or an offset. "Don't fragment" is fine. */
	if (ip->frag_off & KSF_BE16(0x3fff))
		return KSF_FLOW_passed_fragment;
	if (KSF_BE16(ip->tot_len) < sizeof(*ip))
		return KSF_FLOW_passed_truncated;
	packet->family = 4;
	packet->protocol = ip->protocol;
	packet->segment_bytes = KSF_BE16(ip->tot_len) - sizeof(*ip);
	packet->source[0] = ip->saddr;
	packet->destination[0] = ip->daddr;
#pragma unroll
	for (int word = 1; word < 4; word++) {
		packet->source[word] = 0;
		packet->destination[word] = 0;
	}
	return ksf_parse_segment(packet, ip + 1, begin, end);
}

static __always_inline __u32 ksf_parse_ipv6(struct ksf_packet *packet, void *at, void *begin, void *end)
{
	struct ipv6hdr *ip = at;

	if ((void *)(ip + 1) > end)
		return KSF_FLOW_passed_truncated;
	if (ip->version_class >> 4 != 6)
		return KSF_FLOW_passed_truncated;
	switch (ip->nexthdr) {
	case 0:	  /* hop-by-hop options: also a jumbogram, whose length is elsewhere */
	case 43:  /* routing */
	case 51:  /* authentication */
	case 60:  /* destination options */
	case 135: /* mobility */
		return KSF_FLOW_passed_options;
	case KSF_IPPROTO_FRAGMENT:
		return KSF_FLOW_passed_fragment;
	}
	packet->family = 6;
	packet->protocol = ip->nexthdr;
	packet->segment_bytes = KSF_BE16(ip->payload_len);
#pragma unroll
	for (int word = 0; word < 4; word++) {
		packet->source[word] = ip->saddr[word];
		packet->destination[word] = ip->daddr[word];
	}
	return ksf_parse_segment(packet, ip + 1, begin, end);
}

static __always_inline __u32 ksf_parse(struct ksf_packet *packet, struct xdp_md *xdp)
{
	void *begin = (void *)(long)xdp->data, *end = (void *)(long)xdp->data_end, *at;
	struct ethhdr *ethernet = begin;
	__u16 protocol;

	if ((void *)(ethernet + 1) > end)
		return KSF_FLOW_passed_truncated;
	packet->vlan = 0;
	protocol = ethernet->h_proto;
	at = ethernet + 1;
#pragma unroll
	for (int tags = 0; tags < KSF_VLANS_MAX; tags++) {
		struct vlan_hdr *vlan = at;

		if (protocol != KSF_BE16(KSF_ETH_8021Q) && protocol != KSF_BE16(KSF_ETH_8021AD))
			break;
		if ((void *)(vlan + 1) > end)
			return KSF_FLOW_passed_truncated;
		if (!tags)
			packet->vlan = KSF_BE16(vlan->h_vlan_TCI) & 0xfff;
		protocol = vlan->h_vlan_encapsulated_proto;
		at = vlan + 1;
	}
	if (protocol == KSF_BE16(KSF_ETH_IPV4))
		return ksf_parse_ipv4(packet, at, begin, end);
	if (protocol == KSF_BE16(KSF_ETH_IPV6))
		return ksf_parse_ipv6(packet, at, begin, end);
	return KSF_FLOW_passed_not_ip;
}
