/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * UDP: the verdict on each frame of an interface, before the network stack sees it (XDP).
 *
 * A datagram to a served local address and port is given to the author's function and the reply leaves by the same
 * interface. Anything unusual passes to the stack untouched: VLANs, options, extension headers, fragments, a wrong
 * checksum, a broadcast or multicast address at either end, a source port that is served as well (two echo services
 * would otherwise entertain each other for ever).
 *
 * Checksums. A frame from lo or veth may carry CHECKSUM_PARTIAL: the field holds the sum of the pseudo header only,
 * and the sender expects hardware that is not there to do the rest. Accepted are that, a valid checksum, and none
 * (IPv4). Replies always carry a complete one.
 */
#pragma once

#include "ksf_segment.h"

#define KSF_ETH_IPV4 0x0800
#define KSF_ETH_IPV6 0x86dd
#define KSF_IP_UDP 17
#define KSF_IP_TTL 64

/* The headers of a datagram that may be answered. */
struct ksf_datagram {
	__u32 ip_bytes; /* length of the IP header: 20 or 40 */
	__u32 payload;	/* bytes behind the UDP header */
	__u32 frame;	/* bytes of the frame that belong to it: a short one is padded by Ethernet */
	__wsum pseudo;	/* sum of the pseudo header without the length, the same in both directions */
};

static __always_inline __u16 ksf_fold(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return (__u16)sum;
}

struct ksf_sum {
	__u8 *bytes;
	__u64 total;
	__u32 len; /* multiple of 4 */
};

/* bpf_csum_diff() takes at most 512 bytes (its scratch area, net/core/filter.c up to 6.12). */
#define KSF_SUM_STEP 512

static long ksf_sum_step(__u32 i, struct ksf_sum *sum)
{
	__u32 at = i * KSF_SUM_STEP, bytes;
	__s64 part;

	if (at >= sum->len)
		return 1;
	bytes = sum->len - at;
	if (bytes > KSF_SUM_STEP)
		bytes = KSF_SUM_STEP;
	KSF_HIDE(at);
	if (at >= KSF_BUFFER_BYTES)
		return 1;
	part = bpf_csum_diff(0, 0, (__be32 *)(sum->bytes + at), bytes & ~3u, 0);
	if (part < 0)
		return 1;
	sum->total += (__u32)part;
	return 0;
}

/* One's complement sum of `len` bytes of a work area, which may be written up to three bytes behind them. */
static __always_inline __u64 ksf_sum_bytes(__u8 *bytes, __u32 len)
{
	struct ksf_sum sum = { .bytes = bytes, .len = (len + 3) & ~3u };

	KSF_HIDE(len);
	if (len >= KSF_BUFFER_BYTES)
		return 0;
	for (__u32 k = 0; k < 3; k++)
		bytes[len + k] = 0;
	ksf_loop(KSF_BUFFER_BYTES / KSF_SUM_STEP, ksf_sum_step, &sum);
	return sum.total;
}

/* lo has this index in every network namespace. */
#define KSF_LOOPBACK_IFINDEX 1

/* Checks the IPv4 header: 0, or the counter that says why the datagram passes. */
static __always_inline __u32 ksf_read_ipv4(struct iphdr *ip, __u32 ifindex, struct ksf_datagram *d)
{
	__u32 total = KSF_BE16(ip->tot_len), source = KSF_BE32(ip->saddr), target = KSF_BE32(ip->daddr);
	__u64 sum;

	if (ip->version_ihl != 0x45)
		return KSF_COUNT_xdp_passed_options;
	if (ip->frag_off & KSF_BE16(0x3fff)) /* more fragments, or an offset; "do not fragment" is welcome */
		return KSF_COUNT_xdp_passed_fragment;
	sum = (__u32)bpf_csum_diff(0, 0, (__be32 *)ip, sizeof(*ip), 0);
	if (ksf_fold(sum) != 0xffff)
		return KSF_COUNT_xdp_passed_checksum;
	/* Source 0.0.0.0/8, multicast, reserved: no reply can go there. The destination was looked up. */
	if (source >> 24 == 0 || source >> 28 >= 14)
		return KSF_COUNT_xdp_passed_malformed;
	/* From outside with our own address: forged, to make two services here answer each other. */
	if (ifindex != KSF_LOOPBACK_IFINDEX && (source == target || source >> 24 == 127 || target >> 24 == 127))
		return KSF_COUNT_xdp_passed_malformed;
	if (total < sizeof(*ip) + sizeof(struct udphdr))
		return KSF_COUNT_xdp_passed_malformed;
	d->ip_bytes = sizeof(*ip);
	d->payload = total - sizeof(*ip) - sizeof(struct udphdr);
	d->frame = sizeof(struct ethhdr) + total;
	d->pseudo = (__u32)bpf_csum_diff(0, 0, &ip->saddr, 8, KSF_BE32(KSF_IP_UDP));
	return 0;
}

/* The unspecified address, or the loopback address where it does not belong. */
static __always_inline _Bool ksf_ipv6_is_local_only(const __be32 *address, __u32 ifindex)
{
	if (address[0] || address[1] || address[2])
		return 0;
	return !address[3] || (address[3] == KSF_BE32(1) && ifindex != KSF_LOOPBACK_IFINDEX);
}

static __always_inline __u32 ksf_read_ipv6(struct ipv6hdr *ip, __u32 ifindex, struct ksf_datagram *d)
{
	__u32 total = KSF_BE16(ip->payload_len);

	if (ifindex != KSF_LOOPBACK_IFINDEX && ip->saddr[0] == ip->daddr[0] && ip->saddr[1] == ip->daddr[1] &&
	    ip->saddr[2] == ip->daddr[2] && ip->saddr[3] == ip->daddr[3])
		return KSF_COUNT_xdp_passed_malformed;
	if (ksf_ipv6_is_local_only(ip->saddr, ifindex) || ksf_ipv6_is_local_only(ip->daddr, ifindex))
		return KSF_COUNT_xdp_passed_malformed;
	if ((KSF_BE32(ip->saddr[0]) >> 24) == 0xff)
		return KSF_COUNT_xdp_passed_malformed;
	if (total < sizeof(struct udphdr))
		return KSF_COUNT_xdp_passed_malformed;
	d->ip_bytes = sizeof(*ip);
	d->payload = total - sizeof(struct udphdr);
	d->frame = sizeof(struct ethhdr) + sizeof(*ip) + total;
	d->pseudo = (__u32)bpf_csum_diff(0, 0, ip->saddr, 32, KSF_BE32(KSF_IP_UDP));
	return 0;
}

/* Reads headers up to UDP. True: to a served port, with `*why` 0 when it may be answered. */
static __always_inline _Bool ksf_read_frame(struct xdp_md *xdp, struct ksf_datagram *d, __u32 *why)
{
	void *data = (void *)(long)xdp->data, *end = (void *)(long)xdp->data_end;
	struct ethhdr *eth = data;
	struct ksf_port port = {}, source;
	struct udphdr *udp;
	__u32 udp_len;

	if ((void *)(eth + 1) > end)
		return 0;
	if (eth->h_proto == KSF_BE16(KSF_ETH_IPV4)) {
		struct iphdr *ip = (void *)(eth + 1);

		if ((void *)(ip + 1) > end || ip->protocol != KSF_IP_UDP || ip->version_ihl >> 4 != 4)
			return 0;
		/* With options the UDP header is elsewhere: the port cannot be told here. */
		if (ip->version_ihl != 0x45) {
			*why = KSF_COUNT_xdp_passed_options;
			return 0;
		}
		udp = (void *)(ip + 1);
		if ((void *)(udp + 1) > end)
			return 0;
		port.family = 4;
		port.address[0] = ip->daddr;
		source = port;
		port.port = udp->dest;
		if (!ksf_port_served(&port))
			return 0;
		*why = ksf_read_ipv4(ip, xdp->ingress_ifindex, d);
	} else if (eth->h_proto == KSF_BE16(KSF_ETH_IPV6)) {
		struct ipv6hdr *ip = (void *)(eth + 1);

		if ((void *)(ip + 1) > end || ip->version_class >> 4 != 6)
			return 0;
		/* Extension headers, fragments among them, are the stack's business. */
		if (ip->nexthdr != KSF_IP_UDP)
			return 0;
		udp = (void *)(ip + 1);
		if ((void *)(udp + 1) > end)
			return 0;
		port.family = 6;
		for (__u32 i = 0; i < 4; i++)
			port.address[i] = ip->daddr[i];
		source = port;
		port.port = udp->dest;
		if (!ksf_port_served(&port))
			return 0;
		*why = ksf_read_ipv6(ip, xdp->ingress_ifindex, d);
	} else {
		return 0;
	}
	if (*why)
		return 1;
	udp_len = KSF_BE16(udp->len);
	if (eth->h_dest[0] & 1 || udp->source == 0 || udp_len != d->payload + sizeof(*udp) ||
	    (void *)data + d->frame > end)
		*why = KSF_COUNT_xdp_passed_malformed;
	source.port = udp->source;
	if (ksf_port_served(&source))
		*why = KSF_COUNT_xdp_passed_loop;
	if (d->payload > KSF_BYTES_MAX)
		*why = KSF_COUNT_xdp_passed_limit;
	return 1;
}

/* Is the checksum field right for a payload with this sum? */
static __always_inline _Bool ksf_checksum_right(const struct ksf_datagram *d, const struct udphdr *udp, __u64 payload)
{
	__u16 length = KSF_BE16((__u16)(d->payload + sizeof(*udp)));
	__u64 pseudo = (__u64)d->pseudo + length;

	if (udp->check == 0)
		return d->ip_bytes == sizeof(struct iphdr);
	if (ksf_fold(pseudo + udp->source + udp->dest + length + udp->check + payload) == 0xffff)
		return 1;
	return udp->check == ksf_fold(pseudo); /* CHECKSUM_PARTIAL */
}

/* Swaps the ends and fills in what a payload of `len` bytes with this sum needs. */
static __always_inline _Bool ksf_write_headers(struct xdp_md *xdp, const struct ksf_datagram *d, __u32 len,
					       __u64 payload)
{
	void *data = (void *)(long)xdp->data, *end = (void *)(long)xdp->data_end;
	__u16 length = KSF_BE16((__u16)(len + sizeof(struct udphdr)));
	struct ethhdr *eth = data;
	struct udphdr *udp;
	__be16 port;
	__u16 sum;

	if (data + sizeof(*eth) + sizeof(struct iphdr) + sizeof(*udp) > end)
		return 0;
	for (__u32 i = 0; i < 6; i++) {
		__u8 byte = eth->h_dest[i];

		eth->h_dest[i] = eth->h_source[i];
		eth->h_source[i] = byte;
	}
	if (d->ip_bytes == sizeof(struct iphdr)) {
		struct iphdr *ip = (void *)(eth + 1);
		__be32 address = ip->saddr;

		ip->saddr = ip->daddr;
		ip->daddr = address;
		ip->tot_len = KSF_BE16((__u16)(sizeof(*ip) + sizeof(*udp) + len));
		ip->ttl = KSF_IP_TTL;
		ip->check = 0;
		ip->check = ~ksf_fold((__u32)bpf_csum_diff(0, 0, (__be32 *)ip, sizeof(*ip), 0));
		udp = (void *)(ip + 1);
	} else {
		struct ipv6hdr *ip = (void *)(eth + 1);

		if ((void *)(ip + 1) + sizeof(*udp) > end)
			return 0;
		for (__u32 i = 0; i < 4; i++) {
			__be32 address = ip->saddr[i];

			ip->saddr[i] = ip->daddr[i];
			ip->daddr[i] = address;
		}
		ip->payload_len = length;
		ip->hop_limit = KSF_IP_TTL;
		udp = (void *)(ip + 1);
	}
	port = udp->source;
	udp->source = udp->dest;
	udp->dest = port;
	udp->len = length;
	sum = ~ksf_fold((__u64)d->pseudo + length + udp->source + udp->dest + length + payload);
	udp->check = sum ? sum : 0xffff; /* 0 would mean "none" (RFC 768) */
	return 1;
}

/* Answers the datagram in a work area: 0, or the counter that says why it passes; `*action` when it was changed. */
static __always_inline __u32 ksf_datagram_answer(struct xdp_md *xdp, const struct ksf_datagram *d,
						 struct ksf_slot *slot, int *action)
{
	void *data = (void *)(long)xdp->data, *end = (void *)(long)xdp->data_end;
	__u32 headers = sizeof(struct ethhdr) + d->ip_bytes + sizeof(struct udphdr);
	__u32 len = d->payload, reply_len;
	struct ksf_message *m = &slot->message;
	struct udphdr *udp;
	__u64 sum, frame;
	int verdict, delta;

	if (len && !ksf_is_length(&len))
		return KSF_COUNT_xdp_passed_limit;
	if (len && bpf_xdp_load_bytes(xdp, headers, m->in, len))
		return KSF_COUNT_xdp_passed_malformed;
	sum = ksf_sum_bytes(m->in, len);
	udp = d->ip_bytes == sizeof(struct iphdr) ? data + sizeof(struct ethhdr) + sizeof(struct iphdr)
						  : data + sizeof(struct ethhdr) + sizeof(struct ipv6hdr);
	if ((void *)(udp + 1) > end)
		return KSF_COUNT_xdp_passed_malformed;
	if (!ksf_checksum_right(d, udp, sum))
		return KSF_COUNT_xdp_passed_checksum;

	m->out_len = 0;
	verdict = ksf_call_service(m, 0, len, KSF_DATAGRAM);
	reply_len = verdict == KSF_ECHO ? len : m->out_len;
	if (verdict != KSF_ECHO && verdict != KSF_REPLY)
		return KSF_COUNT_xdp_passed_unanswerable;
	if (reply_len && !ksf_is_length(&reply_len))
		return KSF_COUNT_xdp_passed_limit;
	if (verdict == KSF_REPLY)
		sum = ksf_sum_bytes(m->out, reply_len);
	/* The frame may be longer than the datagram in it: Ethernet pads to 60 bytes. Growing fails where the driver
	 * has no room; nothing has been written then. */
	frame = (__u64)end - (__u64)data;
	KSF_HIDE(frame); /* a number from here on: pointer arithmetic in 32 bits is refused */
	delta = (int)(headers + reply_len) - (int)frame;
	if (delta && bpf_xdp_adjust_tail(xdp, delta))
		return KSF_COUNT_xdp_passed_busy;
	*action = XDP_DROP;
	if (verdict == KSF_REPLY && reply_len && bpf_xdp_store_bytes(xdp, headers, m->out, reply_len))
		return KSF_COUNT_xdp_passed_busy;
	if (!ksf_write_headers(xdp, d, reply_len, sum))
		return KSF_COUNT_xdp_passed_busy;
	*action = XDP_TX;
	ksf_count(KSF_COUNT_xdp_answered, 1);
	ksf_count(KSF_COUNT_xdp_bytes_in, len);
	ksf_count(KSF_COUNT_xdp_bytes_out, reply_len);
	return 0;
}

static __always_inline int ksf_datagram_verdict(struct xdp_md *xdp)
{
	struct ksf_datagram datagram = {};
	struct ksf_slot *slot;
	int action = XDP_PASS;
	__u32 why = 0, index;

	if (!ksf_read_frame(xdp, &datagram, &why)) {
		if (why)
			ksf_count(why, 1);
		/* An interface has one XDP program: the services of a process share it in a row. Does not return if
		 * there is a next one. */
		bpf_tail_call(xdp, &ksf_xdp_next, xdp->ingress_ifindex);
		return XDP_PASS;
	}
	if (why)
		goto pass;
	slot = ksf_slot_take(&index);
	why = KSF_COUNT_xdp_passed_busy;
	if (!slot)
		goto pass;
	why = ksf_datagram_answer(xdp, &datagram, slot, &action);
	ksf_slot_give(slot);
	if (!why)
		return action;
pass:
	if (why)
		ksf_count(why, 1);
	return action;
}
