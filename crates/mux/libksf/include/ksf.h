/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * libksf: message sockets over TCP.
 *
 * A multiplexor cuts the byte streams of its connections into messages. Threads receive messages, of whichever
 * connection, each from a socket of its own (ksf_clone), and answer to the connection a message came from.
 *
 * Calls return 0 or a positive number, or a negative error number of errno.h; ksf_last_error() explains the last one of
 * the calling thread. Every call may be made from any thread. See libksf(3).
 */
#ifndef KSF_H
#define KSF_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* One thread's side of a multiplexor. */
typedef struct ksf_socket ksf_socket;
/* A message that was received. Until it is freed it counts against the limits of its connection. */
typedef struct ksf_message ksf_message;

/* How streams are cut. */
enum ksf_framing {
	/* A length field at a fixed place; messages are seen and written as on the wire. */
	KSF_FRAMING_LENGTH = 1,
	/* ONC RPC record marking (RFC 5531, section 11); messages are seen and written without marks. */
	KSF_FRAMING_RECORD_MARK = 2,
	/* An eBPF program: an object file, or instructions. Messages are seen and written as on the wire. */
	KSF_FRAMING_PROGRAM = 3,
};

/* Set once, with ksf_options_init and what differs. 0 in a limit: the default. */
struct ksf_options {
	size_t size;                    /* of this struct, set by ksf_options_init: newer fields are found by it */
	uint32_t framing;               /* enum ksf_framing; KSF_FRAMING_LENGTH of 4 bytes, counting what follows */
	uint32_t length_offset;         /* bytes before the length field */
	uint32_t length_width;          /* of the field: 1, 2, 4 or 8 bytes */
	int32_t length_adjust;          /* added to its value: the length of the whole message */
	uint32_t length_little_endian;  /* 1: least significant byte first */
	uint32_t in_order;              /* 1: one message of a connection is worked on at a time, in order */
	const char *program_path;       /* object file of the framing program, or NULL */
	const void *instructions;       /* else its instructions, 8 bytes each */
	size_t instructions_bytes;
	uint64_t message_bytes_max;     /* longest message */
	uint64_t header_bytes_max;      /* most bytes before a message's length is known */
	uint64_t assembly_timeout_ms;   /* from the first byte of a message to its last */
	uint64_t send_timeout_ms;       /* for a peer to take some of what is queued for it */
	uint64_t connection_bytes_max;  /* budget of a connection, 4 MiB: messages not done with, and what is queued for
	                                 * it; then it is not read, and takes no reply */
	uint64_t out_queue_bytes_max;   /* queued for a connection, 256 KiB: then it is not read, its messages are not
	                                 * received, and it takes no ksf_send */
	uint64_t mux_bytes_max;         /* budget of all connections, 256 MiB: messages not done with, and what is queued;
	                                 * and a quarter of it for messages that have not arrived in full */
	uint64_t connections_max;
	/* Tells long work from short: the class of a message, from 0 on, or -1. NULL: there are none. Threads that receive
	 * call it, several at once: it must be quick, and make no call of this library. */
	int (*classify)(const void *bytes, size_t count, void *context);
	void *classify_context;         /* handed to it */
	const uint32_t *class_caps;     /* how many messages of each class may be worked on at once */
	size_t class_count;             /* of them; messages of other classes are not capped */
};

/* Fills in the defaults; size is sizeof(struct ksf_options). */
int ksf_options_init(struct ksf_options *options, size_t size);

/* Makes a multiplexor and its first socket. EINVAL: options that make no sense; ENOENT and others: the program. */
int ksf_open(const struct ksf_options *options, ksf_socket **socket);
/* Makes another socket of the same multiplexor, for another thread. */
int ksf_clone(ksf_socket *socket, ksf_socket **other);
/* Closes a socket. With the last one of a multiplexor its connections are closed. Messages stay valid. */
void ksf_close(ksf_socket *socket);

/* Attaches a connected TCP or Unix stream socket, and tells its name. On success fd belongs to the multiplexor.
 * EOPNOTSUPP: not such a socket; EALREADY: attached already; ENOBUFS: too many. */
int ksf_attach(ksf_socket *socket, int fd, uint64_t *connection);
/* Takes a connection away. *fd is the caller's again. *unread: bytes received that belong to no whole message; they
 * come before what can still be read from it, and must be freed with ksf_free. Both may be NULL: the connection is
 * closed, the bytes are dropped. What was queued for it and not sent is dropped. ENOENT: no such connection. */
int ksf_detach(ksf_socket *socket, uint64_t connection, int *fd, void **unread, size_t *unread_bytes);
/* Frees what ksf_detach returned. */
void ksf_free(void *bytes);
/* How many connections are attached. */
int ksf_connections(ksf_socket *socket);

/* Receives a message: returns 1, or 0 if none came in time. timeout_ms: 0 does not wait, -1 waits for ever. EAGAIN: the
 * socket would wait and does not receive (ksf_set_receiving). */
int ksf_receive(ksf_socket *socket, int timeout_ms, ksf_message **message);
/* Waits like ksf_receive for the first message, and takes up to max that are there, 1024 at most. Returns how many. */
int ksf_receive_many(ksf_socket *socket, int timeout_ms, ksf_message **messages, size_t max);
/* The message's bytes, valid until it is freed. */
const void *ksf_message_data(const ksf_message *message, size_t *bytes);
/* The connection it came from. */
uint64_t ksf_message_connection(const ksf_message *message);
/* Answers to the connection the message came from, and to no other. Never waits. EPIPE: it is gone. EAGAIN: its peer does
 * not read, and the replies that wait for it use up its budget; try again, or wait with ksf_send and KSF_TO. Messages of
 * such a connection are not received, so threads that answer each message before the next one do not meet it. */
int ksf_message_reply(ksf_message *message, const void *bytes, size_t count);
/* Done with a message. */
void ksf_message_free(ksf_message *message);

/* Stops (0) or starts (1) receiving. What waits for this socket goes to others. */
int ksf_set_receiving(ksf_socket *socket, int receiving);
/* A descriptor for poll or epoll (level-triggered): readable while ksf_receive(.., 0, ..) may have a message. It
 * belongs to the socket. */
int ksf_fd(ksf_socket *socket);

/* ksf_send: the message may be received twice, if its connection fails in the middle of it. */
#define KSF_REPEATABLE 1u
/* ksf_send: more follow at once; this one may wait some milliseconds for them. */
#define KSF_MORE 2u
/* ksf_send: to *connection, and to no other. */
#define KSF_TO 4u
/* ksf_send: to the next connection in turn: for clients whose connections lead to the same server. */
#define KSF_IN_TURN 8u

/* Sends a message. Without KSF_TO and KSF_IN_TURN it answers the message that this thread received last from this socket,
 * and goes to its connection. After ksf_receive_many messages are answered in the order received, one by one, and the
 * last of them as often as one likes. A thread that received nothing from this socket answers what another one received
 * last; where nothing was received, connections take turns. ksf_message_reply and ksf_send_to change nothing here.
 * Waits for room like ksf_receive for messages. connection may be NULL; it tells the one chosen, or, with KSF_TO, names
 * the only one to use. EAGAIN: no room in time, because peers do not read; ENOTCONN: no connection; ECONNRESET: the one
 * to be answered is gone, and the next ksf_send answers the next message; EPIPE: the one that was named is gone. */
int ksf_send(ksf_socket *socket, const void *bytes, size_t count, unsigned int flags, int timeout_ms,
	     uint64_t *connection);
/* Sends a message on this connection. Never waits. EPIPE: it is gone. EAGAIN: out_queue_bytes_max is queued for it. */
int ksf_send_to(ksf_socket *socket, uint64_t connection, const void *bytes, size_t count);

enum ksf_event_kind {
	KSF_EVENT_ENDED = 1,     /* brings no more messages; error says why, EPIPE: the peer's end */
	KSF_EVENT_UNCERTAIN = 2, /* so many messages of ksf_send (count) may have arrived or not */
	KSF_EVENT_DETACHED = 3,
	KSF_EVENT_LOST = 4,      /* so many older events (count) were not read in time */
};

struct ksf_event {
	size_t size; /* of this struct, set by the caller */
	uint32_t kind;
	int32_t error; /* positive error number */
	uint64_t connection;
	uint64_t count;
	char text[128];
};

/* The next event of a connection: returns 1, or 0 if there is none. Events are kept from the first call of this or
 * ksf_event_fd on. An ended connection stays attached until ksf_detach. */
int ksf_event_next(ksf_socket *socket, struct ksf_event *event);
/* A descriptor that is readable while there are events. It belongs to the multiplexor. */
int ksf_event_fd(ksf_socket *socket);

/* Counters of a multiplexor, under the names of AF_KCM (/proc/net/kcm_stats). */
struct ksf_stats {
	size_t size; /* of this struct, set by the caller */
	uint64_t rx_msgs, rx_bytes, tx_msgs, tx_bytes;
	uint64_t tx_retries, attach, unattach;
	uint64_t rx_aborts, rx_intr, rx_unrecov, rx_mem_fail, rx_need_more, rx_bad_len, rx_too_big, rx_timeout;
	uint64_t tx_aborts;
};

int ksf_stats_read(ksf_socket *socket, struct ksf_stats *stats);

/* What went wrong in the last call of this thread that failed, in words. Valid until the next one fails. */
const char *ksf_last_error(void);
/* "0.1.0" */
const char *ksf_version(void);

#ifdef __cplusplus
}
#endif

#endif
