/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * What the programs and user space share: shapes of the maps, verdicts, counters.
 *
 * src/abi.rs mirrors the structs; the static assertions below and the ones there fail when the two drift apart. The
 * counters are generated from this file by build.rs.
 */
#pragma once

#include "ksf_kernel.h"

/* Raised whenever a shape below changes: the loader refuses an object made with another number. */
#ifndef KSF_ABI
#define KSF_ABI 3
#endif

/* Longest segment a service function is shown, and longest reply it can build. bpf_skb_change_tail() ends at
 * SKB_MAX_ALLOC, 16 KiB less the shared info (net/core/filter.c). */
#define KSF_BYTES_MAX 16000
/* Size of each buffer of a message. A power of two above KSF_BYTES_MAX, so that a length check bounds an offset. */
#define KSF_BUFFER_BYTES 16384
/* Messages answered in one segment; a segment with more goes to user space, which is the better place for batches. */
#define KSF_MESSAGES_MAX 32
/* Work areas per CPU: a verdict in process context can be interrupted by one in softirq, and a reply on its way
 * through a hop (ksf_stream.h) keeps its area until it is sent. */
#define KSF_SLOTS_PER_CPU 4

/* Interface indices below this can run several services' XDP programs, one after the other. */
#define KSF_INTERFACES_MAX 1024

/* What a service function says about one message. */
enum ksf_verdict {
	KSF_PASS = 0,  /* user space answers it, and the whole segment it came with */
	KSF_REPLY = 1, /* answered by the bytes put with ksf_put_*() */
	KSF_ECHO = 2,  /* answered by the message itself, as it was on the wire */
};

/* Where the message came from: ksf_transport(). */
enum ksf_transport {
	KSF_STREAM = 0,
	KSF_DATAGRAM = 1,
	KSF_CALL = 2, /* user space runs the function on a message that was passed to it */
};

enum ksf_framing_kind {
	KSF_FRAME_RAW = 0,
	KSF_FRAME_BLIND = 1, /* raw, and the function sees the length only: nothing is copied */
	KSF_FRAME_RECORD_MARK = 2,
	KSF_FRAME_LENGTH_PREFIX = 3,
	KSF_FRAME_DELIMITER = 4,
};

struct ksf_framing {
	__u32 kind;
	__u32 offset;	     /* length prefix: bytes before the field */
	__u32 width;	     /* of the field: 1, 2, 4 or 8 */
	__u32 little_endian; /* byte order of the field */
	__s32 adjust;	     /* added to the field gives the length of the whole message, header included */
	__u32 strip;	     /* the function sees the bytes after the field only */
	__u32 delimiter_bytes;
	__u8 delimiter[8];
	__u32 reserved;
};

/* .rodata.ksf of every object: the first part is the author's, the second the loader's. */
struct ksf_config {
	__u32 abi;
	__u32 bytes; /* sizeof(struct ksf_config) */
	char service[32];
	struct ksf_framing framing;

	__u32 window_bytes;   /* reply bytes that may be unacknowledged when another segment is answered */
	__u32 lag_bytes_max;  /* see ksf_stream.h */
	__u32 cpus;	      /* CPUs that have slots */
	__u32 hops;	      /* slots that have a hop; 0: only replies as long as their request are sent by the kernel */
};

/*
 * One connection. The first line is written by the program, the second by user space; neither writes the other's, so
 * there is no lock and a line never bounces between the two while one side is idle.
 */
struct ksf_conn {
	__u64 passed;	/* bytes given to user space */
	__u64 taken;	/* bytes answered here */
	__u64 replied;	/* reply bytes queued here */
	__u32 messages; /* messages answered here */
	__u32 trial_at; /* `messages` at which user space gets a turn: ksf_stream.h */
	__u32 lag;	/* bytes by which TCP's copied_seq is behind what was consumed: ksf_stream.h */
	__u32 base_seq; /* sequence number of the first byte ever sent */
	__u32 epoch_seen; /* 0: base_seq is not known yet */
	__u32 woken;  /* park_seq of the last wake-up sent */
	__u32 broken; /* a reply was lost after its request was consumed: user space closes the connection */
	__u32 next_seq; /* TCP's number of the byte behind the last one seen */
	__u32 hopping; /* a reply was sent through a hop and was not seen to have arrived */
	__u32 hop_end; /* `replied` and `sent` behind it, the low half of the sum */

	__u64 settled;	 /* bytes passed here that user space has answered; ~0: never settled */
	__u64 cookie;	 /* of the socket */
	__u64 sent;	 /* bytes user space has sent, those of the send under way included */
	__u32 epoch;	 /* changes with `sent`; not 0 once settled */
	__u32 parked;	 /* user space does not poll the socket for input */
	__u32 park_seq;	 /* raised by every park: one wake-up each */
	__u32 lag_floor; /* SO_RCVLOWAT less one: the lag at which the socket polls right */
	__u32 shard;	 /* who is woken */
	__u32 reserved_user[5];
};

/* A message on its way through a service function, with room for the reply. */
struct ksf_message {
	__u32 start; /* of the message in `in` */
	__u32 len;
	__u32 out_start; /* of its reply in `out`, behind the framing's header */
	__u32 out_len;	 /* end of what was written to `out` */
	__u32 bad;	 /* the function read outside of the message or wrote too much */
	__u32 transport;
	__u32 reserved[10];
	/* `out` before `in`, and a tail behind `in`: the verifier adds the largest offset to the largest length. */
	__u8 out[KSF_BUFFER_BYTES];
	__u8 in[KSF_BUFFER_BYTES];
	__u8 tail[KSF_BUFFER_BYTES];
};

/* A work area. Owned by who set `busy` from 0 to 1. */
struct ksf_slot {
	__u32 busy;
	__u32 conn;	 /* hop: index of the connection */
	__u32 reply_len; /* hop: bytes of `message.out` to send */
	__u32 echo;	 /* every message of the segment was KSF_ECHO */
	__u32 messages;	 /* messages of the segment */
	__u32 reserved;
	__u64 cookie; /* hop: socket that sends the reply */
	__u32 reserved_line[8];
	struct ksf_message message;
};

/* Argument of the program that user space calls when a hop has failed. */
struct ksf_hop_failed_args {
	__u32 slot;
	__u32 renewed; /* its sockets are new ones */
};

/* Argument of the program user space calls. */
struct ksf_call_args {
	__u32 caller; /* index of the caller's area in ksf_calls */
};

/* A local address and port whose datagrams XDP answers. */
struct ksf_port {
	__be16 port;
	__u16 family; /* 4 or 6 */
	__be32 address[4];
};

/* A program of ONC RPC whose NULL procedure is answered. */
struct ksf_rpc_versions {
	__u32 low;
	__u32 high;
};

_Static_assert(sizeof(struct ksf_framing) == 40, "mirrored by src/abi.rs");
_Static_assert(sizeof(struct ksf_config) == 96, "mirrored by src/abi.rs");
_Static_assert(sizeof(struct ksf_conn) == 128, "two cache lines");
_Static_assert(__builtin_offsetof(struct ksf_conn, settled) == 64, "a line each");
_Static_assert(sizeof(struct ksf_message) == 64 + 3 * KSF_BUFFER_BYTES, "mirrored by src/abi.rs");
_Static_assert(__builtin_offsetof(struct ksf_slot, message) == 64, "aligned");
_Static_assert(sizeof(struct ksf_port) == 20, "no padding: it is a map key");

/* Counters: build.rs reads the lines that start with X. */
/* clang-format off */
#define KSF_COUNTERS(X) \
	X(segments_answered, "TCP segments answered in the kernel") \
	X(messages_answered, "messages in them") \
	X(bytes_in, "bytes of the segments answered in the kernel") \
	X(bytes_out, "bytes of the replies made in the kernel") \
	X(segments_hopped, "of the segments answered, those whose reply went through a hop socket because its length differed") \
	X(segments_passed, "TCP segments passed to user space, for one of the reasons below") \
	X(segments_trimmed, "TCP segments that began with bytes seen before, which were cut off") \
	X(passed_unknown, "segment of a socket that is not registered") \
	X(passed_unsettled, "user space still owes the connection an answer") \
	X(passed_outstanding, "an earlier reply is not acknowledged yet") \
	X(passed_sndbuf, "the reply does not fit the send buffer with room to spare") \
	X(passed_partial, "the segment does not end at the end of a message") \
	X(passed_unanswerable, "the service function passed a message") \
	X(passed_limit, "the segment or the reply is too long, or holds too many messages") \
	X(passed_resize, "the segment could not be resized or written") \
	X(passed_busy, "no work area was free on this CPU") \
	X(passed_trial, "user space gets a turn now and then, and keeps a peer that has more than one message in flight") \
	X(passed_accounting, "the kernel counts consumed bytes in a way this SDK does not know") \
	X(passed_closing, "the peer has closed its side") \
	X(replies_broken, "replies lost after their request was consumed, and repeated bytes that could not be cut off; the connection is closed") \
	X(wakes_sent, "wake-ups of parked connections") \
	X(wakes_lost, "wake-ups that found no room in the ring") \
	X(xdp_answered, "datagrams answered by XDP") \
	X(xdp_bytes_in, "payload bytes of the datagrams answered by XDP") \
	X(xdp_bytes_out, "payload bytes of the answers of XDP") \
	X(xdp_passed_malformed, "datagram to a served port with lengths that do not fit, or an address that cannot be answered") \
	X(xdp_passed_fragment, "fragment of a datagram") \
	X(xdp_passed_options, "IPv4 options") \
	X(xdp_passed_checksum, "wrong UDP or IPv4 checksum") \
	X(xdp_passed_loop, "from a served port: two echo services would never stop") \
	X(xdp_passed_limit, "datagram or reply too long") \
	X(xdp_passed_unanswerable, "the service function passed the datagram") \
	X(xdp_passed_busy, "no work area was free on this CPU, or the frame could not be resized")
/* clang-format on */

enum ksf_counter {
#define KSF_COUNTER_NAME(name, help) KSF_COUNT_##name,
	KSF_COUNTERS(KSF_COUNTER_NAME)
#undef KSF_COUNTER_NAME
	KSF_COUNTER_COUNT,
};
