/*
 * The TCP server without threads for its connections: a loop of epoll, or one for each CPU where connections come in on
 * several. As threads.c it takes up to 64 KiB with one recv and answers all complete records in it with one send.
 */
#include "stream.h"

#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>

#define EVENTS_MAX 64

struct connection {
	int fd;
	size_t held;
	uint8_t in[PEER_BUFFER_BYTES];
};

static struct peer_options options;
/* The loop of each CPU; the first is that of all connections where the server does not follow its clients. */
static int loops[CPU_SETSIZE];

/* One recv and the answers to it; false at the end. A peer that does not read stops its loop: the bench's always does. */
static bool turn(struct connection *connection)
{
	/* One for each loop, and not on its stack. A reply (28 bytes) is shorter than any call (44). */
	static __thread uint8_t out[PEER_BUFFER_BYTES];
	ssize_t used, got = recv(connection->fd, connection->in + connection->held,
				 sizeof(connection->in) - connection->held, 0);
	size_t out_bytes;

	if (got < 0 && errno == EINTR)
		return true;
	if (got <= 0)
		return false;
	if (options.mode == PEER_ECHO)
		return send_all(connection->fd, connection->in, (size_t)got);
	connection->held += (size_t)got;
	used = answer_records(connection->in, connection->held, out, &out_bytes);
	if (used < 0 || !send_all(connection->fd, out, out_bytes))
		return false;
	connection->held -= (size_t)used;
	memmove(connection->in, connection->in + used, connection->held);
	return true;
}

static void watch(int loop, int fd, struct connection *connection)
{
	struct epoll_event event = { .events = EPOLLIN, .data.ptr = connection };

	if (epoll_ctl(loop, EPOLL_CTL_ADD, fd, &event))
		peer_die("epoll_ctl");
}

static void *serve(void *argument);

/* The loop of a CPU, which is made when its first connection comes. */
static int loop_of(int cpu)
{
	pthread_t thread;

	if (options.cpu != PEER_CPU_INCOMING)
		return loops[0];
	if (cpu < 0 || cpu >= CPU_SETSIZE)
		peer_die("SO_INCOMING_CPU");
	if (!loops[cpu]) {
		loops[cpu] = epoll_create1(EPOLL_CLOEXEC);
		if (loops[cpu] < 0)
			peer_die("epoll_create1");
		errno = pthread_create(&thread, NULL, serve, &loops[cpu]);
		if (errno)
			peer_die("pthread_create");
	}
	return loops[cpu];
}

static void accept_one(int listener)
{
	struct connection *connection;
	int one = 1, fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);

	if (fd < 0) {
		if (errno == EINTR || errno == ECONNABORTED)
			return;
		peer_die("accept");
	}
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	connection = malloc(sizeof(*connection));
	if (!connection)
		peer_die("malloc");
	connection->fd = fd;
	connection->held = 0;
	watch(loop_of(incoming_cpu(fd)), fd, connection);
}

static void serve_ready(int loop, int listener)
{
	struct epoll_event events[EVENTS_MAX];
	int count = epoll_wait(loop, events, EVENTS_MAX, -1);

	if (count < 0 && errno != EINTR)
		peer_die("epoll_wait");
	for (int at = 0; at < count; at++) {
		struct connection *connection = events[at].data.ptr;

		if (!connection)
			accept_one(listener);
		else if (!turn(connection)) {
			/* Closing takes it out of the loop, too. */
			close(connection->fd);
			free(connection);
		}
	}
}

static void *serve(void *argument)
{
	const int *loop = argument;

	peer_pin((int)(loop - loops));
	for (;;)
		serve_ready(*loop, -1);
	return NULL;
}

int main(int argc, char **argv)
{
	int loop, listener;

	options = peer_parse(argc, argv);
	if (options.spin)
		peer_usage(argv[0]);
	signal(SIGPIPE, SIG_IGN);
	peer_pin(options.cpu);
	listener = peer_bind(&options, SOCK_STREAM);
	loop = epoll_create1(EPOLL_CLOEXEC);
	if (loop < 0)
		peer_die("epoll_create1");
	/* Where the loops follow their clients, this one only accepts. */
	if (options.cpu != PEER_CPU_INCOMING)
		loops[0] = loop;
	if (listen(listener, SOMAXCONN))
		peer_die("listen");
	watch(loop, listener, NULL);
	peer_ready(&options, listener, "tcp");
	for (;;)
		serve_ready(loop, listener);
}
