/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * SDK of steering policies: which CPU handles a received packet.
 *
 *	#include "ksf-policy.h"
 *
 *	KSF_POLICY(https_first)
 *	{
 *		if (packet->destination_port == 443)
 *			return ksf_cpu_at(0);
 *		return KSF_NEXT;
 *	}
 *	KSF_POLICY_LICENSE("GPL");
 *
 * A policy is shown whole TCP and UDP headers of unfragmented IPv4 and IPv6 packets without options, behind up to two
 * VLAN tags; everything else has passed before. It returns the number of a CPU, KSF_NEXT (the next policy decides) or
 * KSF_PASS (the packet stays where it is). It may have maps of its own and use every helper of XDP programs; it must
 * not change the packet. examples/rps-policy is made to be copied.
 *
 * Compile:  ksf sdk --dir sdk
 *           clang -O2 -g -target bpf -mcpu=v3 -std=gnu11 -I sdk -c policy.bpf.c -o policy.bpf.o
 * Load:     ksf accel flow attach IFACE --policy policy.bpf.o
 */
#pragma once

#include "ksf_kernel.h"
#include "ksf_flow_abi.h"

/* Not CPU numbers. */
#define KSF_PASS 0xffffffffU
#define KSF_NEXT 0xfffffffeU

/* What the programs of an interface share: the loader puts one set of maps below all of them. */

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct ksf_flow_settings);
} ksf_settings SEC(".maps");

/* Numbers of the CPUs in use, in ascending order. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, KSF_FLOW_CPUS_MAX);
	__type(key, __u32);
	__type(value, __u32);
} ksf_cpu_list SEC(".maps");

/* By CPU number: where frames are queued for it. The loader makes it as large as the machine. */
struct {
	__uint(type, BPF_MAP_TYPE_CPUMAP);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32); /* frames: the first member of struct bpf_cpumap_val */
} ksf_cpus SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, KSF_FLOW_POLICIES_MAX);
	__type(key, __u32);
	__type(value, __u32);
} ksf_policies SEC(".maps");

/* The packet under way. One is enough: XDP is not interrupted by XDP on its CPU. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct ksf_packet);
} ksf_packets SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, KSF_FLOW_COUNTER_COUNT);
	__type(key, __u32);
	__type(value, __u64);
} ksf_flow_counts SEC(".maps");

/* Frames by the CPU they were meant for. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, KSF_FLOW_CPUS_MAX);
	__type(key, __u32);
	__type(value, __u64);
} ksf_flow_targets SEC(".maps");

/* CPUs in use. */
static __always_inline __u32 ksf_cpu_count(void)
{
	__u32 zero = 0;
	struct ksf_flow_settings *settings = bpf_map_lookup_elem(&ksf_settings, &zero);

	return settings ? settings->cpus : 0;
}

/* Number of the index-th CPU in use, from 0; KSF_PASS if there is none. */
static __always_inline __u32 ksf_cpu_at(__u32 index)
{
	__u32 *cpu = bpf_map_lookup_elem(&ksf_cpu_list, &index);

	return cpu && index < ksf_cpu_count() ? *cpu : KSF_PASS;
}

/* The CPU that a hash falls to, evenly over those in use. */
static __always_inline __u32 ksf_cpu_of_hash(__u32 hash)
{
	/* The high half of the product: no division, and every bit of the hash counts. */
	return ksf_cpu_at((__u64)hash * ksf_cpu_count() >> 32);
}

/* Begins a connection, as its client sends it. */
static __always_inline int ksf_is_opening(const struct ksf_packet *packet)
{
	return (packet->tcp_flags & (KSF_TCP_SYN | KSF_TCP_ACK)) == KSF_TCP_SYN;
}

/* Below: how a policy becomes a program. */

static __always_inline int ksf_flow_passed(__u32 counter)
{
	__u64 *count = bpf_map_lookup_elem(&ksf_flow_counts, &counter);

	if (count)
		++*count;
	return XDP_PASS;
}

/*
 * Is the segment's checksum whole? A veth hands over packets whose checksum the sender left to the device; only the
 * socket buffer knows, and native XDP loses it when the frame changes CPUs. The receiver would drop every one of them.
 */
static __always_inline int ksf_checksum_is_whole(struct xdp_md *xdp, const struct ksf_packet *packet)
{
	__u32 words[KSF_FLOW_CHECKED_BYTES_MAX / 4] = {};
	__u32 pseudo[10] = {};
	__u32 bytes = packet->segment_bytes;
	__s64 sum;

	if (bytes < 8 || bytes > KSF_FLOW_CHECKED_BYTES_MAX)
		return 0;
	if (bpf_xdp_load_bytes(xdp, packet->segment_at, words, bytes) < 0)
		return 0;
	/* RFC 768: a UDP checksum of 0 says that there is none. */
	if (packet->protocol == 17 && !(words[1] & KSF_BE32(0xffff)))
		return packet->family == 4;
#pragma unroll
	for (int at = 0; at < 4; at++) {
		pseudo[at] = packet->source[at];
		pseudo[4 + at] = packet->destination[at];
	}
	pseudo[8] = KSF_BE32(bytes);
	pseudo[9] = KSF_BE32((__u32)packet->protocol);
	sum = bpf_csum_diff(0, 0, pseudo, sizeof(pseudo), 0);
	if (sum < 0)
		return 0;
	sum = bpf_csum_diff(0, 0, words, sizeof(words), sum);
	if (sum < 0)
		return 0;
	sum = (sum & 0xffff) + (sum >> 16 & 0xffff);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum == 0xffff;
}

/*
 * What the frame teaches about the device. Openings are always looked at: behind a bridge are senders of both kinds.
 * Frames that are on their CPU already teach as well.
 */
static __always_inline void ksf_learn(struct xdp_md *xdp, const struct ksf_packet *packet,
				      struct ksf_flow_settings *settings)
{
	if (!settings->guard || settings->proof == KSF_BROKEN || packet->segment_bytes > KSF_FLOW_CHECKED_BYTES_MAX)
		return;
	if (settings->proof == KSF_PROVEN && !(packet->tcp_flags & KSF_TCP_SYN))
		return;
	settings->proof = ksf_checksum_is_whole(xdp, packet) ? KSF_PROVEN : KSF_BROKEN;
}

/* Why the frame would not survive the way to another CPU; KSF_FLOW_COUNTER_COUNT if it does. */
static __always_inline __u32 ksf_obstacle(const struct ksf_flow_settings *settings, __u32 proof_before)
{
	if (!settings->guard || settings->proof == KSF_PROVEN)
		return KSF_FLOW_COUNTER_COUNT;
	if (settings->proof == KSF_UNPROVEN)
		return KSF_FLOW_passed_unproven;
	return proof_before == KSF_BROKEN ? KSF_FLOW_passed_broken : KSF_FLOW_passed_checksum;
}

static __always_inline int ksf_flow_next(struct xdp_md *xdp, struct ksf_packet *packet)
{
	__u32 slot = packet->slot + 1;

	packet->slot = slot;
	bpf_tail_call(xdp, &ksf_policies, slot);
	/* Returns only if there is none. */
	return ksf_flow_passed(KSF_FLOW_passed_policy);
}

/* Carries out what the policy said. */
static __always_inline int ksf_flow_decide(struct xdp_md *xdp, struct ksf_packet *packet, __u32 cpu)
{
	__u32 zero = 0, proof_before, obstacle;
	struct ksf_flow_settings *settings = bpf_map_lookup_elem(&ksf_settings, &zero);
	__u64 *target;

	if (!settings)
		return XDP_PASS;
	if (cpu == KSF_NEXT)
		return ksf_flow_next(xdp, packet);
	if (cpu == KSF_PASS)
		return ksf_flow_passed(KSF_FLOW_passed_policy);
	proof_before = settings->proof;
	ksf_learn(xdp, packet, settings);
	if (cpu == packet->cpu) {
		ksf_flow_passed(KSF_FLOW_local);
	} else {
		obstacle = ksf_obstacle(settings, proof_before);
		if (obstacle != KSF_FLOW_COUNTER_COUNT)
			return ksf_flow_passed(obstacle);
		/* The low bits of the flags are what it returns if the map has no such entry. */
		if (bpf_redirect_map(&ksf_cpus, cpu, XDP_PASS) != XDP_REDIRECT)
			return ksf_flow_passed(KSF_FLOW_passed_bad_cpu);
		ksf_flow_passed(KSF_FLOW_redirected);
	}
	target = bpf_map_lookup_elem(&ksf_flow_targets, &cpu);
	if (target)
		++*target;
	return cpu == packet->cpu ? XDP_PASS : XDP_REDIRECT;
}

/* The loader reads it to tell an object of another version from one that is none of ours. */
const volatile __u32 ksf_policy_abi SEC(".rodata.ksf") = KSF_FLOW_ABI;

/*
 * A program around the function that follows. Not "xdp.frags": the loader says which programs take frames of several
 * buffers, because all of a chain must agree.
 */
#define KSF_POLICY(name)                                                                                             \
	static __always_inline __u32 name##_policy(struct xdp_md *xdp, const struct ksf_packet *packet);             \
	SEC("xdp") int name(struct xdp_md *xdp)                                                                \
	{                                                                                                            \
		__u32 zero = 0;                                                                                      \
		struct ksf_packet *packet = bpf_map_lookup_elem(&ksf_packets, &zero);                                \
		if (!packet)                                                                                         \
			return XDP_PASS;                                                                             \
		return ksf_flow_decide(xdp, packet, name##_policy(xdp, packet));                                     \
	}                                                                                                            \
	static __always_inline __u32 name##_policy(__attribute__((unused)) struct xdp_md *xdp,                       \
						  __attribute__((unused)) const struct ksf_packet *packet)

#define KSF_POLICY_LICENSE(text) char ksf_policy_license[] SEC("license") = text
