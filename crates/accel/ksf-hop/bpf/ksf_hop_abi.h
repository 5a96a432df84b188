/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * The shapes that the programs of the hop and user space share. src/abi.rs mirrors the struct; the assertions here and
 * there fail when they drift apart.
 */
#pragma once

struct ksf_hop_settings {
	__u64 netns_cookie; /* only sockets of this network namespace */
	__u32 any_port;	    /* 1: whatever its ports; 0: one of its ports is in ksf_hop_ports */
	__u32 limit_bytes;  /* unread bytes of a direction that may wait outside of TCP */
	__u32 warm_up;	    /* messages of a direction that must have gone, and been read, by TCP before it leaves it */
	__u32 stopped;	    /* 1: everything goes by TCP; written by user space */
	__u32 spliced;	    /* 1: the same, because a reader took splice() to bytes it cannot see; written by the program */
	__u32 zero;
};

_Static_assert(sizeof(struct ksf_hop_settings) == 32, "mirrored by src/abi.rs");

/* An end of a connection as it sees itself: addresses as on the wire (IPv4 in the last word), ports in host order. */
struct ksf_hop_end {
	__u64 netns;
	__u32 local[4];
	__u32 remote[4];
	__u16 local_port;
	__u16 remote_port;
	__u32 zero;
};

_Static_assert(sizeof(struct ksf_hop_end) == 48, "a map key has no holes");

/* Counters: build.rs reads the lines that start with X. */
/* clang-format off */
#define KSF_HOP_COUNTERS(X) \
	X(watched, "ends of connections that may be joined") \
	X(not_local, "ends left alone: the connection leaves this machine") \
	X(not_plain, "ends left alone: MPTCP, or connected to itself") \
	X(not_taken, "ends left alone: the map is full, or the socket is in somebody else's") \
	X(joined, "times a direction of a connection left TCP") \
	X(left, "times it went back") \
	X(messages, "messages handed over") \
	X(bytes, "bytes handed over") \
	X(tcp_young, "messages by TCP: the direction has not had enough of them yet") \
	X(tcp_unread, "messages by TCP: the reader has not read what came by TCP before") \
	X(tcp_blocking, "messages by TCP: the reader's socket blocks") \
	X(tcp_edge, "messages by TCP: the reader waits edge-triggered") \
	X(tcp_alone, "messages by TCP: the other end is not watched, or is closed") \
	X(tcp_large, "messages by TCP: larger than what may wait") \
	X(tcp_layered, "messages by TCP: an end has TLS, or another program that reads it") \
	X(tcp_splice, "messages by TCP: the reader takes splice()") \
	X(tcp_ended, "messages by TCP: the direction was shut down") \
	X(tcp_stopped, "messages by TCP: the hop has ended") \
	X(tcp_full, "messages by TCP: as many bytes wait as may") \
	X(tcp_uncounted, "messages by TCP: this kernel does not count the bytes that wait") \
	X(spliced, "ends that were read by splice(): they stay on TCP") \
	X(stuck, "times splice() was taken to joined bytes, which it does not see") \
	X(refused, "messages refused: they would have passed joined bytes that splice() does not see")
/* clang-format on */

#define KSF_HOP_COUNTER(name, help) KSF_HOP_##name,
enum ksf_hop_counter { KSF_HOP_COUNTERS(KSF_HOP_COUNTER) KSF_HOP_COUNTER_COUNT };
#undef KSF_HOP_COUNTER
