/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * The port layout, and the shapes that the programs and user space share.
 *
 * Active connections say with their source port which CPU opened them. The ephemeral range is cut into chunks of a
 * power of two, each aligned to its size, so a chunk is what the high bits of a port say:
 *
 *      15            chunk_bits            0
 *     +----------------+-------------------+
 *     |  chunk number  |  any port of it   |      chunk number = first_chunk + index of the CPU
 *     +----------------+-------------------+
 *
 * High bits, because connect() tries ports of one parity first: the low bit says nothing. Aligned, because then a NIC
 * can match a chunk with a mask, and a program with a shift.
 *
 * src/layout.rs is the twin of the functions; tests/twins.rs compares the two for every port. src/abi.rs mirrors the
 * structs; the assertions below and there fail when they drift apart. Compiles for the host, too.
 */
#pragma once

/* Raised whenever a shape below changes: the loader refuses a policy made with another number. */
#ifndef KSF_FLOW_ABI
#define KSF_FLOW_ABI 1
#endif

/* CPU numbers below this can be steered to. */
#define KSF_FLOW_CPUS_MAX 1024
/* Policies that can stand behind one another. */
#define KSF_FLOW_POLICIES_MAX 8
/* Longest TCP or UDP segment whose checksum is looked at: a SYN has at most 60 bytes. */
#define KSF_FLOW_CHECKED_BYTES_MAX 64

struct ksf_flow_layout {
	__u32 chunk_bits;  /* log2 of the ports of a chunk */
	__u32 first_chunk; /* its number: the chunk begins at port first_chunk << chunk_bits */
	__u32 chunks;	   /* one for each CPU, in ascending order of the CPUs; 0: no chunks */
};

/* Which chunk a port (host order) lies in: 0 for the first CPU's, or a number from `chunks` on for none. */
static inline __attribute__((always_inline)) __u32 ksf_flow_index(const struct ksf_flow_layout *layout, __u32 port)
{
	/* Below the first chunk it wraps to something large. */
	__u32 index = ((port & 0xffff) >> (layout->chunk_bits & 15)) - layout->first_chunk;

	return index < layout->chunks ? index : layout->chunks;
}

/* First port of a chunk. */
static inline __attribute__((always_inline)) __u32 ksf_flow_first_port(const struct ksf_flow_layout *layout,
								      __u32 index)
{
	return (layout->first_chunk + index) << (layout->chunk_bits & 15);
}

/* A chunk as IP_LOCAL_PORT_RANGE takes it (ip(7)): the lowest port, and in the upper half the highest. */
static inline __attribute__((always_inline)) __u32 ksf_flow_range(const struct ksf_flow_layout *layout, __u32 index)
{
	__u32 low = ksf_flow_first_port(layout, index);

	return low | (low | ((1U << (layout->chunk_bits & 15)) - 1)) << 16;
}

/* The XDP program's settings, and what it has learned. */
struct ksf_flow_settings {
	struct ksf_flow_layout layout;
	__u32 cpus;  /* entries of ksf_cpu_list */
	__u32 guard; /* 1: frames lose the notes about their checksum on the way to another CPU (native XDP) */
	__u32 proof; /* enum ksf_flow_proof, written by the program */
};

enum ksf_flow_proof {
	KSF_UNPROVEN = 0, /* no checksum was looked at yet */
	KSF_PROVEN = 1,	  /* frames arrive with a whole checksum */
	KSF_BROKEN = 2,	  /* a frame came with an unfinished one: nothing is steered any more */
};

/* What a policy is shown. Ports and lengths are in host order, addresses as on the wire. */
struct ksf_packet {
	__u8 family;	/* 4 or 6 */
	__u8 protocol;	/* 6 TCP, 17 UDP */
	__u8 tcp_flags; /* KSF_TCP_*; 0 for UDP */
	__u8 slot;	/* which policy of the chain runs */
	__u16 source_port;
	__u16 destination_port;
	__u16 vlan;	    /* of the outer tag; 0: none */
	__u16 segment_at;   /* offset of the TCP or UDP header in the frame */
	__u32 segment_bytes; /* from there on, as the IP header says */
	__u32 cpu;	    /* that runs this program */
	__u32 interface;    /* index of the one the frame came from */
	__u32 queue;	    /* of it */
	__u32 hash;	    /* of addresses and ports; the same for both directions */
	__u32 source[4];    /* IPv4 in the first word, the others 0 */
	__u32 destination[4];
};

#define KSF_TCP_FIN 0x01
#define KSF_TCP_SYN 0x02
#define KSF_TCP_RST 0x04
#define KSF_TCP_ACK 0x10

/* Settings of the connect programs. */
struct ksf_connect_settings {
	struct ksf_flow_layout layout;
	__u32 loopback;	      /* 1: connections to loopback addresses, too */
	__u64 netns_cookie;   /* only sockets of this network namespace; 0: of any */
	__u32 range_refused;  /* 1: bpf_setsockopt() does not take IP_LOCAL_PORT_RANGE; written by the program */
	__u32 tries;	      /* ports that are tried before the connection is left alone */
};

_Static_assert(sizeof(struct ksf_flow_settings) == 24, "mirrored by src/abi.rs");
_Static_assert(sizeof(struct ksf_packet) == 64, "one cache line");
_Static_assert(sizeof(struct ksf_connect_settings) == 32, "mirrored by src/abi.rs");

/* Counters: build.rs reads the lines that start with X. */
/* clang-format off */
#define KSF_FLOW_COUNTERS(X) \
	X(redirected, "frames sent to another CPU") \
	X(local, "frames that were on their CPU already") \
	X(passed_policy, "no policy wanted the frame elsewhere") \
	X(passed_not_ip, "neither IPv4 nor IPv6, or more than two VLAN tags") \
	X(passed_protocol, "neither TCP nor UDP") \
	X(passed_truncated, "shorter than its headers say") \
	X(passed_options, "IPv4 options or IPv6 extension headers") \
	X(passed_fragment, "fragment of a datagram") \
	X(passed_bad_cpu, "a policy named a CPU that is not in the map") \
	X(passed_no_policy, "no policy is loaded") \
	X(passed_unproven, "too long to check whether its checksum is whole, and none was seen yet") \
	X(passed_checksum, "unfinished or wrong checksum: on another CPU the stack would drop the frame") \
	X(passed_broken, "the device hands over unfinished checksums: nothing is steered")

#define KSF_CONNECT_COUNTERS(X) \
	X(by_range, "connections given the CPU's chunk by IP_LOCAL_PORT_RANGE") \
	X(by_bind, "connections given a port of the CPU's chunk by bpf_bind") \
	X(left_bound, "left alone: the program chose the port, or a link-local source") \
	X(left_not_tcp, "left alone: not TCP") \
	X(left_loopback, "left alone: to a loopback address") \
	X(left_cpu, "left alone: on a CPU without a chunk") \
	X(left_netns, "left alone: in another network namespace") \
	X(left_exhausted, "left alone: every port of the chunk that was tried is taken") \
	X(left_error, "left alone: the kernel refused to bind for another reason")
/* clang-format on */

enum ksf_flow_counter {
#define KSF_FLOW_COUNTER_NAME(name, help) KSF_FLOW_##name,
	KSF_FLOW_COUNTERS(KSF_FLOW_COUNTER_NAME)
#undef KSF_FLOW_COUNTER_NAME
	KSF_FLOW_COUNTER_COUNT,
};

enum ksf_connect_counter {
#define KSF_CONNECT_COUNTER_NAME(name, help) KSF_CONNECT_##name,
	KSF_CONNECT_COUNTERS(KSF_CONNECT_COUNTER_NAME)
#undef KSF_CONNECT_COUNTER_NAME
	KSF_CONNECT_COUNTER_COUNT,
};
