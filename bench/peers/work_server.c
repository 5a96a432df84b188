/*
 * The work service of ksf (crates/services/ksf-services/src/work.rs) as one would write it without a multiplexor:
 *
 *   threads   a blocking thread per connection
 *   epoll     event loops, one per thread; a connection stays with the loop it was given when it was accepted
 *   kcm       workers on AF_KCM, as Documentation/networking/kcm.rst shows them; as root, on Linux 5.16 to 6.x
 *
 * The first two take up to 64 KiB with one recv. The replies to what came with one recv leave with one send, but none
 * waits for work: what is ready is sent before a message that takes time. A worker on AF_KCM takes one message with one
 * recv, which is what AF_KCM offers, and answers it with one send.
 *
 * The loops are given as digits, dealt out in the order of accept: 01 is two loops in turn, 0001 gives three of four
 * connections to the first.
 */
#include "peer.h"

#include <linux/bpf.h>
#include <linux/kcm.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>

enum how { HOW_INLINE, HOW_SLEEP, HOW_COMPUTE, HOW_DISCARD };

#define LENGTH_BYTES 4
#define REQUEST_HEADER_BYTES 8
#define STATUS_BYTES 4
#define WORK_US_MAX (10u * 1000 * 1000)
#define LOOPS_MAX 10
#define EVENTS_MAX 64

/* With AF_KCM: one worker's side of it, whose fd is the worker's message socket. */
struct connection {
	int fd;
	size_t held, out_bytes;
	uint8_t in[PEER_BUFFER_BYTES];
	/* A reply is shorter than its request, so the replies to one buffer always fit. */
	uint8_t out[PEER_BUFFER_BYTES];
};

static uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void work(uint32_t how, uint32_t us)
{
	struct timespec left;
	uint64_t start;

	if (us > WORK_US_MAX)
		us = WORK_US_MAX;
	if (how == HOW_SLEEP) {
		left = (struct timespec){ .tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000 };
		while (nanosleep(&left, &left) && errno == EINTR)
			;
	} else if (how == HOW_COMPUTE) {
		start = now_ns();
		while (now_ns() - start < (uint64_t)us * 1000)
			;
	}
}

/* Sends all replies that are ready. A peer that does not read stops its thread or loop: the bench's always does. */
static bool flush(struct connection *connection)
{
	size_t at = 0;

	while (at < connection->out_bytes) {
		ssize_t sent = send(connection->fd, connection->out + at, connection->out_bytes - at, MSG_NOSIGNAL);

		if (sent < 0 && errno == EINTR)
			continue;
		if (sent <= 0)
			return false;
		at += (size_t)sent;
	}
	connection->out_bytes = 0;
	return true;
}

static uint32_t word(const uint8_t *bytes)
{
	uint32_t value;

	memcpy(&value, bytes, sizeof(value));
	return ntohl(value);
}

static void put_word(struct connection *connection, uint32_t value)
{
	value = htonl(value);
	memcpy(connection->out + connection->out_bytes, &value, sizeof(value));
	connection->out_bytes += sizeof(value);
}

/* Answers one message (without its length word); false for one that is not of the protocol. */
static bool answer(struct connection *connection, const uint8_t *message, size_t bytes)
{
	size_t payload_bytes;
	uint32_t how;

	if (bytes < REQUEST_HEADER_BYTES)
		return false;
	how = word(message);
	if (how > HOW_DISCARD)
		return false;
	if (how == HOW_SLEEP || how == HOW_COMPUTE) {
		if (!flush(connection))
			return false;
		work(how, word(message + 4));
	}
	payload_bytes = how == HOW_DISCARD ? 0 : bytes - REQUEST_HEADER_BYTES;
	put_word(connection, (uint32_t)(STATUS_BYTES + payload_bytes));
	put_word(connection, 0 /* done */);
	memcpy(connection->out + connection->out_bytes, message + REQUEST_HEADER_BYTES, payload_bytes);
	connection->out_bytes += payload_bytes;
	return true;
}

/* One recv and the answers to it; false at the end of the connection. */
static bool turn(struct connection *connection)
{
	ssize_t got = recv(connection->fd, connection->in + connection->held,
			   sizeof(connection->in) - connection->held, 0);
	size_t at = 0;

	if (got < 0 && errno == EINTR)
		return true;
	if (got <= 0)
		return false;
	connection->held += (size_t)got;
	while (connection->held - at >= LENGTH_BYTES) {
		size_t bytes = word(connection->in + at);

		if (bytes > sizeof(connection->in) - LENGTH_BYTES)
			return false;
		if (connection->held - at < LENGTH_BYTES + bytes)
			break;
		if (!answer(connection, connection->in + at + LENGTH_BYTES, bytes))
			return false;
		at += LENGTH_BYTES + bytes;
	}
	connection->held -= at;
	memmove(connection->in, connection->in + at, connection->held);
	return flush(connection);
}

static void end(struct connection *connection)
{
	/* Closing takes it out of its epoll set, too. */
	close(connection->fd);
	free(connection);
}

static void *serve_connection(void *argument)
{
	while (turn(argument))
		;
	end(argument);
	return NULL;
}

static void *serve_loop(void *argument)
{
	struct epoll_event events[EVENTS_MAX];
	int epoll = *(int *)argument;

	for (;;) {
		int count = epoll_wait(epoll, events, EVENTS_MAX, -1);

		if (count < 0 && errno != EINTR)
			peer_die("epoll_wait");
		for (int at = 0; at < count; at++) {
			if (!turn(events[at].data.ptr))
				end(events[at].data.ptr);
		}
	}
	return NULL;
}

/* Takes one message that the kernel has cut and given to this socket. */
static void answer_kcm(struct connection *connection)
{
	ssize_t got = recv(connection->fd, connection->in, sizeof(connection->in), MSG_DONTWAIT);

	if (got < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (got < LENGTH_BYTES || word(connection->in) != (size_t)got - LENGTH_BYTES)
		peer_die("a message was cut wrongly");
	/* The kernel drops the replies of a connection that has ended. */
	if (!answer(connection, connection->in + LENGTH_BYTES, (size_t)got - LENGTH_BYTES) || !flush(connection))
		connection->out_bytes = 0;
}

static void *serve_kcm(void *argument)
{
	struct epoll_event events[EVENTS_MAX];
	int epoll = *(int *)argument;

	for (;;) {
		int count = epoll_wait(epoll, events, EVENTS_MAX, -1);

		if (count < 0 && errno != EINTR)
			peer_die("epoll_wait");
		for (int at = 0; at < count; at++)
			answer_kcm(events[at].data.ptr);
	}
	return NULL;
}

/*
 * Returns the length of a message: its length word and what that says; 0 while the word is not whole. Where the message
 * starts in the segment, strparser keeps in the part of sk_buff.cb that a program may not read, so it is read as kernel
 * memory: sk_buff.cb is at 40 (x86-64, 4.20 to 6.x), sk_skb_cb.strp.strp.offset at 28 in it (5.16 to 6.x).
 */
static int load_framing(void)
{
	static char log[4096];
	const struct bpf_insn program[] = {
		{ .code = BPF_ALU64 | BPF_MOV | BPF_X, .dst_reg = BPF_REG_6, .src_reg = BPF_REG_1 },
		{ .code = BPF_ALU64 | BPF_MOV | BPF_X, .dst_reg = BPF_REG_3, .src_reg = BPF_REG_1 },
		{ .code = BPF_ALU64 | BPF_ADD | BPF_K, .dst_reg = BPF_REG_3, .imm = 40 + 28 },
		{ .code = BPF_ALU64 | BPF_MOV | BPF_X, .dst_reg = BPF_REG_1, .src_reg = BPF_REG_10 },
		{ .code = BPF_ALU64 | BPF_ADD | BPF_K, .dst_reg = BPF_REG_1, .imm = -8 },
		{ .code = BPF_ALU64 | BPF_MOV | BPF_K, .dst_reg = BPF_REG_2, .imm = 4 },
		{ .code = BPF_JMP | BPF_CALL, .imm = BPF_FUNC_probe_read_kernel },
		{ .code = BPF_LDX | BPF_MEM | BPF_W, .dst_reg = BPF_REG_2, .src_reg = BPF_REG_10, .off = -8 },
		{ .code = BPF_ALU64 | BPF_MOV | BPF_X, .dst_reg = BPF_REG_1, .src_reg = BPF_REG_6 },
		{ .code = BPF_ALU64 | BPF_MOV | BPF_X, .dst_reg = BPF_REG_3, .src_reg = BPF_REG_10 },
		{ .code = BPF_ALU64 | BPF_ADD | BPF_K, .dst_reg = BPF_REG_3, .imm = -4 },
		{ .code = BPF_ALU64 | BPF_MOV | BPF_K, .dst_reg = BPF_REG_4, .imm = LENGTH_BYTES },
		{ .code = BPF_JMP | BPF_CALL, .imm = BPF_FUNC_skb_load_bytes },
		{ .code = BPF_JMP | BPF_JEQ | BPF_K, .dst_reg = BPF_REG_0, .off = 2, .imm = 0 },
		{ .code = BPF_ALU64 | BPF_MOV | BPF_K, .dst_reg = BPF_REG_0, .imm = 0 },
		{ .code = BPF_JMP | BPF_EXIT },
		{ .code = BPF_LDX | BPF_MEM | BPF_W, .dst_reg = BPF_REG_0, .src_reg = BPF_REG_10, .off = -4 },
		{ .code = BPF_ALU | BPF_END | BPF_TO_BE, .dst_reg = BPF_REG_0, .imm = 32 },
		{ .code = BPF_ALU64 | BPF_ADD | BPF_K, .dst_reg = BPF_REG_0, .imm = LENGTH_BYTES },
		{ .code = BPF_JMP | BPF_EXIT },
	};
	union bpf_attr attr = {
		.prog_type = BPF_PROG_TYPE_SOCKET_FILTER,
		.insns = (uintptr_t)program,
		.insn_cnt = sizeof(program) / sizeof(*program),
		.license = (uintptr_t)"GPL",
		.log_buf = (uintptr_t)log,
		.log_size = sizeof(log),
		.log_level = 1,
	};
	int fd = (int)syscall(SYS_bpf, BPF_PROG_LOAD, &attr, sizeof(attr));

	if (fd < 0) {
		fprintf(stderr, "%s", log);
		peer_die("load the framing program");
	}
	return fd;
}

static struct connection *watched(int epoll, int fd)
{
	struct connection *connection = malloc(sizeof(*connection));
	struct epoll_event event = { .events = EPOLLIN, .data.ptr = connection };

	if (!connection)
		peer_die("malloc");
	connection->fd = fd;
	connection->held = connection->out_bytes = 0;
	if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event))
		peer_die("epoll_ctl");
	return connection;
}

/*
 * Gives a connection a multiplexor of its own, with a socket for each worker: AF_KCM does not say which connection of a
 * multiplexor a message came from, and a reply must go there. It tells no reader that the peer has left either, so what
 * belongs to a connection stays until the process ends.
 */
static void attach(int tcp, int framing, const int *epolls, int workers)
{
	struct kcm_attach attach = { .fd = tcp, .bpf_fd = framing };
	/* A datagram socket sends each send() as a message. */
	int mux = socket(AF_KCM, SOCK_DGRAM | SOCK_CLOEXEC, KCMPROTO_CONNECTED);

	if (mux < 0)
		peer_die("socket(AF_KCM)");
	watched(epolls[0], mux);
	for (int worker = 1; worker < workers; worker++) {
		struct kcm_clone clone;

		if (ioctl(mux, SIOCKCMCLONE, &clone))
			peer_die("SIOCKCMCLONE");
		watched(epolls[worker], clone.fd);
	}
	/* When all workers are there: what comes is given out at once. */
	if (ioctl(mux, SIOCKCMATTACH, &attach))
		peer_die("SIOCKCMATTACH");
}

static void start(pthread_t *thread, void *(*run)(void *), void *argument)
{
	errno = pthread_create(thread, NULL, run, argument);
	if (errno)
		peer_die("pthread_create");
	pthread_detach(*thread);
}

static void usage(const char *name)
{
	fprintf(stderr, "usage: %s threads ADDRESS PORT\n       %s epoll ADDRESS PORT LOOPS\n"
			"       %s kcm ADDRESS PORT WORKERS\n", name, name, name);
	exit(64);
}

int main(int argc, char **argv)
{
	struct peer_options options = { .name = argv[0], .mode = PEER_WORK, .cpu = PEER_CPU_ANY };
	const char *loops = NULL;
	int epolls[LOOPS_MAX], one = 1, listener, workers = 0, framing = -1;
	size_t accepted = 0;
	pthread_t thread;

	if (argc == 5 && !strcmp(argv[1], "epoll"))
		loops = argv[4];
	else if (argc == 5 && !strcmp(argv[1], "kcm")) {
		workers = atoi(argv[4]);
		if (workers < 1 || workers > LOOPS_MAX)
			usage(argv[0]);
	} else if (argc != 4 || strcmp(argv[1], "threads"))
		usage(argv[0]);
	if (loops && (!*loops || strspn(loops, "0123456789") != strlen(loops)))
		usage(argv[0]);
	options.listen.sin_family = AF_INET;
	options.listen.sin_port = htons((uint16_t)atoi(argv[3]));
	if (inet_pton(AF_INET, argv[2], &options.listen.sin_addr) != 1)
		usage(argv[0]);

	signal(SIGPIPE, SIG_IGN);
	if (workers) {
		struct rlimit files;

		framing = load_framing();
		if (getrlimit(RLIMIT_NOFILE, &files))
			peer_die("getrlimit");
		files.rlim_cur = files.rlim_max;
		if (setrlimit(RLIMIT_NOFILE, &files))
			peer_die("setrlimit");
	}
	for (int loop = 0; loop < LOOPS_MAX; loop++) {
		if (workers ? loop >= workers : !loops || !strchr(loops, '0' + loop))
			continue;
		epolls[loop] = epoll_create1(EPOLL_CLOEXEC);
		if (epolls[loop] < 0)
			peer_die("epoll_create1");
		start(&thread, workers ? serve_kcm : serve_loop, &epolls[loop]);
	}
	listener = peer_bind(&options, SOCK_STREAM);
	if (listen(listener, SOMAXCONN))
		peer_die("listen");
	peer_ready(&options, listener, "tcp");

	for (;;) {
		struct connection *connection;
		int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);

		if (fd < 0) {
			if (errno == EINTR || errno == ECONNABORTED)
				continue;
			peer_die("accept");
		}
		setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
		if (workers) {
			attach(fd, framing, epolls, workers);
			continue;
		}
		connection = malloc(sizeof(*connection));
		if (!connection)
			peer_die("malloc");
		connection->fd = fd;
		connection->held = connection->out_bytes = 0;
		if (loops) {
			struct epoll_event event = { .events = EPOLLIN, .data.ptr = connection };
			int loop = loops[accepted++ % strlen(loops)] - '0';

			if (epoll_ctl(epolls[loop], EPOLL_CTL_ADD, fd, &event))
				peer_die("epoll_ctl");
		} else {
			start(&thread, serve_connection, connection);
		}
	}
}
