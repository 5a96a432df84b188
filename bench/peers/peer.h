/*
 * What the small peers share: their command line, addresses, pinning, and the reply to a NULL call.
 *
 * The peers are the yardstick of `cargo xtask bench`: the shortest honest server of each kind, as a
 * C programmer would write it. They are fast on purpose and check only what is needed to answer.
 */
#ifndef KSF_PEER_H
#define KSF_PEER_H

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define PEER_BUFFER_BYTES (64 * 1024)

/* RFC 5531: xid, CALL, rpcvers, prog, vers, proc, and two opaque_auth of at least 8 bytes. */
#define RPC_CALL_BYTES_MIN 40
/* xid, REPLY, MSG_ACCEPTED, AUTH_NONE with no body, SUCCESS. */
#define RPC_REPLY_BYTES 24
/* Record mark of RFC 5531 section 11: highest bit set on the last fragment. */
#define RPC_MARK_BYTES 4
#define RPC_LAST_FRAGMENT 0x80000000u

enum peer_mode { PEER_ECHO, PEER_RPC, PEER_WORK, PEER_HTTP };

struct peer_options {
	const char *name;
	enum peer_mode mode;
	struct sockaddr_in listen;
	int cpu; /* or one of PEER_CPU_* */
	bool spin; /* look for PEER_SPIN_NS before every sleep */
};

/* Longer than a client on another CPU takes to ask again, shorter than a turn of the scheduler. */
#define PEER_SPIN_NS (100 * 1000)

#define PEER_CPU_ANY (-1)
/* threads.c only: each connection's thread runs where its client's packets arrive. */
#define PEER_CPU_INCOMING (-2)

static inline void peer_die(const char *what)
{
	fprintf(stderr, "%s: %s\n", what, strerror(errno));
	exit(1);
}

static inline void peer_usage(const char *name)
{
	fprintf(stderr, "usage: %s echo|rpc ADDRESS PORT [CPU|incoming [spin]]\n", name);
	exit(64);
}

static inline struct peer_options peer_parse(int argc, char **argv)
{
	struct peer_options options = { .name = argv[0], .cpu = PEER_CPU_ANY };

	if (argc < 4 || argc > 6 || (argc == 6 && strcmp(argv[5], "spin")))
		peer_usage(argv[0]);
	options.spin = argc == 6;
	if (!strcmp(argv[1], "echo"))
		options.mode = PEER_ECHO;
	else if (!strcmp(argv[1], "rpc"))
		options.mode = PEER_RPC;
	else
		peer_usage(argv[0]);
	options.listen.sin_family = AF_INET;
	options.listen.sin_port = htons((uint16_t)atoi(argv[3]));
	if (inet_pton(AF_INET, argv[2], &options.listen.sin_addr) != 1)
		peer_usage(argv[0]);
	if (argc >= 5)
		options.cpu = strcmp(argv[4], "incoming") ? atoi(argv[4]) : PEER_CPU_INCOMING;
	return options;
}

static inline uint64_t peer_now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Pins the calling thread; threads that it creates inherit the mask. */
static inline void peer_pin(int cpu)
{
	cpu_set_t set;

	if (cpu < 0)
		return;
	CPU_ZERO(&set);
	CPU_SET((size_t)cpu, &set);
	if (sched_setaffinity(0, sizeof(set), &set))
		peer_die("sched_setaffinity");
}

/* A bound socket. With port 0 the kernel chooses; peer_ready() prints which. */
static inline int peer_bind(const struct peer_options *options, int type)
{
	int one = 1, fd = socket(AF_INET, type, 0);

	if (fd < 0)
		peer_die("socket");
	/* Not for UDP, where it would let two servers share the port. */
	if (type == SOCK_STREAM && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)))
		peer_die("SO_REUSEADDR");
	if (bind(fd, (const struct sockaddr *)&options->listen, sizeof(options->listen)))
		peer_die("bind");
	return fd;
}

/* The same line as ksf prints, so that the bench waits for all servers alike. */
static inline void peer_ready(const struct peer_options *options, int fd, const char *transport)
{
	struct sockaddr_in address;
	socklen_t length = sizeof(address);
	static const char *const modes[] = { "echo", "rpc", "work", "http" };
	char text[INET_ADDRSTRLEN];

	if (getsockname(fd, (struct sockaddr *)&address, &length))
		peer_die("getsockname");
	inet_ntop(AF_INET, &address.sin_addr, text, sizeof(text));
	fprintf(stderr, "%s: %s %s %s:%u ready\n", options->name,
		modes[options->mode], transport, text,
		(unsigned)ntohs(address.sin_port));
}

/*
 * Writes the reply to `call` (without record mark). Returns its length, or 0 if this is no call.
 * Every procedure gets SUCCESS: the clients of the bench send NULL only.
 */
static inline size_t rpc_reply(const uint8_t *call, size_t call_bytes, uint8_t *reply)
{
	static const uint8_t call_type[4] = { 0, 0, 0, 0 };
	static const uint8_t success[RPC_REPLY_BYTES - 4] = { 0, 0, 0, 1 /* REPLY, then zeroes */ };

	if (call_bytes < RPC_CALL_BYTES_MIN || memcmp(call + 4, call_type, 4))
		return 0;
	memcpy(reply, call, 4);
	memcpy(reply + 4, success, sizeof(success));
	return RPC_REPLY_BYTES;
}

/* One datagram: its answer goes to `reply`, or the datagram itself is the answer. */
static inline size_t datagram_reply(enum peer_mode mode, const uint8_t *in, size_t in_bytes,
				    uint8_t *reply, const uint8_t **out)
{
	if (mode == PEER_ECHO) {
		*out = in;
		return in_bytes;
	}
	*out = reply;
	return rpc_reply(in, in_bytes, reply);
}

#endif
