/*
 * The plain TCP server: one blocking thread per connection. It takes up to 64 KiB with one recv and
 * answers all complete records in it with one send, so under load it batches as well as anything.
 */
#include "stream.h"

#include <pthread.h>
#include <signal.h>

struct connection {
	int fd;
	const struct peer_options *options;
};

/* recv(), which looks for a while before it sleeps where it was told to spin. */
static ssize_t receive(const struct peer_options *options, int fd, uint8_t *data, size_t bytes)
{
	if (options->spin) {
		uint64_t end_ns = peer_now_ns() + PEER_SPIN_NS;

		do {
			ssize_t got = recv(fd, data, bytes, MSG_DONTWAIT);

			if (got >= 0 || errno != EAGAIN)
				return got;
		} while (peer_now_ns() < end_ns);
	}
	return recv(fd, data, bytes, 0);
}

static void serve_rpc(const struct peer_options *options, int fd)
{
	/* A reply (28 bytes) is shorter than any call (44), so the replies always fit. */
	uint8_t in[PEER_BUFFER_BYTES], out[PEER_BUFFER_BYTES];
	size_t held = 0;

	for (;;) {
		ssize_t got = receive(options, fd, in + held, sizeof(in) - held);
		size_t out_bytes;
		ssize_t used;

		if (got < 0 && errno == EINTR)
			continue;
		if (got <= 0)
			return;
		held += (size_t)got;
		used = answer_records(in, held, out, &out_bytes);
		if (used < 0 || !send_all(fd, out, out_bytes))
			return;
		held -= (size_t)used;
		memmove(in, in + used, held);
	}
}

static void serve_echo(const struct peer_options *options, int fd)
{
	uint8_t data[PEER_BUFFER_BYTES];

	for (;;) {
		ssize_t got = receive(options, fd, data, sizeof(data));

		if (got < 0 && errno == EINTR)
			continue;
		if (got <= 0 || !send_all(fd, data, (size_t)got))
			return;
	}
}

static void *serve(void *argument)
{
	struct connection connection = *(struct connection *)argument;

	free(argument);
	if (connection.options->cpu == PEER_CPU_INCOMING)
		peer_pin(incoming_cpu(connection.fd));
	if (connection.options->mode == PEER_ECHO)
		serve_echo(connection.options, connection.fd);
	else
		serve_rpc(connection.options, connection.fd);
	close(connection.fd);
	return NULL;
}

int main(int argc, char **argv)
{
	struct peer_options options = peer_parse(argc, argv);
	pthread_attr_t attributes;
	int one = 1, listener;

	signal(SIGPIPE, SIG_IGN);
	peer_pin(options.cpu);
	listener = peer_bind(&options, SOCK_STREAM);
	if (listen(listener, SOMAXCONN))
		peer_die("listen");
	pthread_attr_init(&attributes);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	/* Two buffers and some frames: small enough for 10,000 idle connections. */
	pthread_attr_setstacksize(&attributes, 256 * 1024);
	peer_ready(&options, listener, "tcp");

	for (;;) {
		struct connection *connection;
		pthread_t thread;
		int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);

		if (fd < 0) {
			if (errno == EINTR || errno == ECONNABORTED)
				continue;
			peer_die("accept");
		}
		setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
		connection = malloc(sizeof(*connection));
		if (!connection)
			peer_die("malloc");
		*connection = (struct connection){ .fd = fd, .options = &options };
		errno = pthread_create(&thread, &attributes, serve, connection);
		if (errno)
			peer_die("pthread_create");
	}
}
