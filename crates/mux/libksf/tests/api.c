/* Every call of libksf, and what it does with wrong arguments. Ends with 0 if all is as ksf.h says. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ksf.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define CHECK(condition) \
	do { \
		if (!(condition)) { \
			fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #condition, ksf_last_error()); \
			exit(1); \
		} \
	} while (0)

#define PATIENCE_MS 60000

static const char hello[] = "\0\0\0\5hello", other[] = "\0\0\0\3you";
#define HELLO 9
#define OTHER 7

static int open_socket(ksf_socket **socket)
{
	struct ksf_options options;

	CHECK(ksf_options_init(&options, sizeof(options)) == 0);
	return ksf_open(&options, socket);
}

/* Both ends of a connection. */
static void make_pair(int pair[2])
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t length = sizeof(address);
	int listener = socket(AF_INET, SOCK_STREAM, 0);

	CHECK(bind(listener, (struct sockaddr *)&address, length) == 0 && listen(listener, 1) == 0);
	CHECK(getsockname(listener, (struct sockaddr *)&address, &length) == 0);
	pair[1] = socket(AF_INET, SOCK_STREAM, 0);
	CHECK(connect(pair[1], (struct sockaddr *)&address, length) == 0);
	pair[0] = accept(listener, NULL, NULL);
	CHECK(pair[0] >= 0);
	close(listener);
}

static uint64_t attach_pair(ksf_socket *socket, int *peer)
{
	uint64_t connection;
	int pair[2];

	make_pair(pair);
	CHECK(ksf_attach(socket, pair[0], &connection) == 0);
	*peer = pair[1];
	return connection;
}

static void wrong_arguments(void)
{
	struct ksf_options options;
	struct ksf_event event = { .size = 3 };
	struct ksf_stats stats = { .size = 3 };
	ksf_socket *socket;
	int pair[2];

	CHECK(ksf_options_init(NULL, sizeof(options)) == -EINVAL);
	CHECK(ksf_options_init(&options, 8) == -EINVAL);
	CHECK(ksf_options_init(&options, sizeof(options)) == 0 && options.size == sizeof(options));
	CHECK(ksf_open(NULL, NULL) == -EINVAL && strstr(ksf_last_error(), "NULL"));
	options.framing = 77;
	CHECK(ksf_open(&options, &socket) == -EINVAL);
	options.framing = KSF_FRAMING_LENGTH;
	options.length_width = 3;
	CHECK(ksf_open(&options, &socket) == -EINVAL);
	options.framing = KSF_FRAMING_PROGRAM;
	options.program_path = "/does/not/exist.o";
	CHECK(ksf_open(&options, &socket) == -ENOENT && strstr(ksf_last_error(), "/does/not/exist.o"));
	options.program_path = NULL;
	options.instructions = "garbage";
	options.instructions_bytes = 7;
	CHECK(ksf_open(&options, &socket) == -EINVAL);
	options.size = 1;
	CHECK(ksf_open(&options, &socket) == -EINVAL);

	CHECK(open_socket(&socket) == 0);
	CHECK(ksf_attach(NULL, 0, NULL) == -EINVAL);
	CHECK(ksf_attach(socket, -1, NULL) == -EBADF);
	CHECK(ksf_attach(socket, 999, NULL) == -EBADF);
	CHECK(socketpair(AF_UNIX, SOCK_DGRAM, 0, pair) == 0);
	CHECK(ksf_attach(socket, pair[0], NULL) == -EOPNOTSUPP);
	CHECK(write(pair[0], "x", 1) == 1); /* still the caller's */
	CHECK(ksf_detach(socket, 12345, NULL, NULL, NULL) == -ENOENT);
	CHECK(ksf_receive(socket, 0, NULL) == -EINVAL);
	CHECK(ksf_send(socket, hello, HELLO, 0, 0, NULL) == -ENOTCONN);
	CHECK(ksf_send(socket, NULL, HELLO, 0, 0, NULL) == -EINVAL);
	CHECK(ksf_send(socket, hello, HELLO, 1u << 31, 0, NULL) == -EINVAL);
	CHECK(ksf_send_to(socket, 12345, hello, HELLO) == -EPIPE);
	CHECK(ksf_event_next(socket, NULL) == -EINVAL && ksf_event_next(socket, &event) == -EINVAL);
	CHECK(ksf_stats_read(socket, &stats) == -EINVAL);
	CHECK(ksf_message_data(NULL, NULL) == NULL);
	CHECK(ksf_message_reply(NULL, hello, HELLO) == -EINVAL);
	ksf_message_free(NULL);
	ksf_close(NULL);
	ksf_free(NULL);
	ksf_close(socket);
}

/* A struct of a newer header, with fields this library does not know. */
static void newer_header(void)
{
	struct {
		struct ksf_options options;
		uint64_t newer;
	} options;
	ksf_socket *socket;

	memset(&options, 0xff, sizeof(options));
	CHECK(ksf_options_init(&options.options, sizeof(options)) == 0);
	CHECK(options.newer == 0 && options.options.size == sizeof(options));
	CHECK(ksf_open(&options.options, &socket) == 0);
	ksf_close(socket);
}

static void messages(void)
{
	ksf_socket *first, *second;
	ksf_message *message, *many[8];
	uint64_t connection, chosen;
	char buffer[64];
	size_t bytes;
	int peer;

	CHECK(open_socket(&first) == 0 && ksf_clone(first, &second) == 0);
	CHECK(ksf_receive(first, 0, &message) == 0 && ksf_receive(first, 10, &message) == 0);
	connection = attach_pair(first, &peer);
	CHECK(ksf_connections(second) == 1);
	CHECK(ksf_set_receiving(first, 0) == 0);

	CHECK(write(peer, hello, HELLO) == HELLO);
	CHECK(ksf_receive(second, PATIENCE_MS, &message) == 1);
	const void *data = ksf_message_data(message, &bytes);
	CHECK(bytes == HELLO && memcmp(data, hello, HELLO) == 0);
	CHECK(ksf_message_connection(message) == connection);
	CHECK(ksf_message_reply(message, other, OTHER) == 0);
	CHECK(read(peer, buffer, sizeof(buffer)) == OTHER && memcmp(buffer, other, OTHER) == 0);
	ksf_message_free(message);

	CHECK(ksf_send(first, hello, HELLO, 0, 0, &chosen) == 0 && chosen == connection);
	CHECK(read(peer, buffer, sizeof(buffer)) == HELLO);
	CHECK(ksf_send_to(second, connection, other, OTHER) == 0);
	CHECK(read(peer, buffer, sizeof(buffer)) == OTHER);

	CHECK(ksf_set_receiving(second, 0) == 0 && ksf_set_receiving(first, 1) == 0);
	for (int i = 0; i < 3; i++)
		CHECK(write(peer, hello, HELLO) == HELLO);
	int got = 0;
	while (got < 3) {
		int count = ksf_receive_many(first, PATIENCE_MS, many, 8);
		CHECK(count > 0);
		got += count;
		for (int i = 0; i < count; i++)
			ksf_message_free(many[i]);
	}
	CHECK(got == 3);

	struct ksf_stats stats = { .size = sizeof(stats) };
	CHECK(ksf_stats_read(first, &stats) == 0);
	CHECK(stats.size == sizeof(stats) && stats.rx_msgs == 4 && stats.rx_bytes == 4 * HELLO);
	CHECK(stats.tx_msgs == 3 && stats.attach == 1 && stats.unattach == 0);

	/* A message outlives its socket. */
	CHECK(write(peer, hello, HELLO) == HELLO);
	CHECK(ksf_set_receiving(first, 0) == 0 && ksf_set_receiving(first, 1) == 0);
	CHECK(ksf_receive(first, PATIENCE_MS, &message) == 1);
	ksf_close(first);
	ksf_close(second);
	CHECK(memcmp(ksf_message_data(message, NULL), hello, HELLO) == 0);
	CHECK(ksf_message_reply(message, other, OTHER) == -EPIPE);
	ksf_message_free(message);
	close(peer);
}

/* A peer that reads so many bytes. */
struct peer {
	int fd;
	uint64_t bytes;
};

/* Without a name a message answers the one received last. */
static void answers(void)
{
	ksf_socket *socket;
	ksf_message *message;
	uint64_t ids[2], chosen = 1;
	int peers[2];

	CHECK(open_socket(&socket) == 0);
	for (int i = 0; i < 2; i++)
		ids[i] = attach_pair(socket, &peers[i]);
	CHECK(ksf_send(socket, hello, HELLO, KSF_TO | KSF_IN_TURN, 0, &chosen) == -EINVAL);
	for (int i = 1; i >= 0; i--) {
		CHECK(write(peers[i], hello, HELLO) == HELLO);
		CHECK(ksf_receive(socket, PATIENCE_MS, &message) == 1);
		ksf_message_free(message);
		for (int again = 0; again < 2; again++)
			CHECK(ksf_send(socket, other, OTHER, 0, 0, &chosen) == 0 && chosen == ids[i]);
	}
	/* An answer to one that is gone goes to nobody else, but where that is asked for. */
	CHECK(ksf_detach(socket, ids[0], NULL, NULL, NULL) >= 0);
	CHECK(ksf_send(socket, other, OTHER, 0, 0, &chosen) == -ECONNRESET && strstr(ksf_last_error(), "gone"));
	CHECK(ksf_send(socket, other, OTHER, KSF_IN_TURN, 0, &chosen) == 0 && chosen == ids[1]);
	close(peers[0]);
	close(peers[1]);
	ksf_close(socket);
}

static void *read_bytes(void *argument)
{
	static char bytes[65536];
	const struct peer *peer = argument;

	for (uint64_t got = 0; got < peer->bytes;) {
		ssize_t count = read(peer->fd, bytes, sizeof(bytes));
		CHECK(count > 0);
		got += count;
	}
	return NULL;
}

/* A peer that does not read: what is queued for it is bounded, and said. */
static void back_pressure(void)
{
	static char body[100000];
	const uint32_t length = htonl(sizeof(body) - sizeof(length));
	struct ksf_options options;
	ksf_socket *socket;
	ksf_message *message;
	uint64_t connection, sent = 0;
	int peer, result;

	memcpy(body, &length, sizeof(length));
	CHECK(ksf_options_init(&options, sizeof(options)) == 0);
	options.out_queue_bytes_max = 1 << 20;
	options.connection_bytes_max = 2 << 20;
	CHECK(ksf_open(&options, &socket) == 0);
	connection = attach_pair(socket, &peer);
	CHECK(write(peer, hello, HELLO) == HELLO && ksf_receive(socket, PATIENCE_MS, &message) == 1);
	while (!(result = ksf_send_to(socket, connection, body, sizeof(body))))
		sent++;
	CHECK(result == -EAGAIN && strstr(ksf_last_error(), "does not take"));
	/* The kernel may have taken more meanwhile. */
	while (!(result = ksf_send(socket, body, sizeof(body), KSF_TO, 10, &connection)))
		sent++;
	CHECK(result == -EAGAIN);
	/* The message can be answered still, up to the budget. */
	uint64_t before = sent;
	while (!(result = ksf_message_reply(message, body, sizeof(body))))
		sent++;
	CHECK(result == -EAGAIN && sent > before && sent < before + 12);
	ksf_message_free(message);
	/* When the peer reads there is room again. */
	struct peer reader = { .fd = peer, .bytes = (sent + 1) * sizeof(body) };
	pthread_t thread;
	CHECK(pthread_create(&thread, NULL, read_bytes, &reader) == 0);
	CHECK(ksf_send(socket, body, sizeof(body), KSF_TO, PATIENCE_MS, &connection) == 0);
	CHECK(pthread_join(thread, NULL) == 0);
	CHECK(ksf_detach(socket, connection, NULL, NULL, NULL) == 0);
	CHECK(ksf_send(socket, body, sizeof(body), KSF_TO, PATIENCE_MS, &connection) == -EPIPE);
	CHECK(ksf_send(socket, body, sizeof(body), KSF_TO, 0, NULL) == -EINVAL);
	ksf_close(socket);
	close(peer);
}

static void event_loop(void)
{
	struct epoll_event ready, wanted = { .events = EPOLLIN };
	int loop = epoll_create1(0), peer, got = 0;
	struct ksf_event event = { .size = sizeof(event) };
	ksf_socket *socket;
	ksf_message *message;

	CHECK(open_socket(&socket) == 0);
	CHECK(epoll_ctl(loop, EPOLL_CTL_ADD, ksf_fd(socket), &wanted) == 0);
	wanted.data.u32 = 1;
	CHECK(epoll_ctl(loop, EPOLL_CTL_ADD, ksf_event_fd(socket), &wanted) == 0);
	uint64_t connection = attach_pair(socket, &peer);
	for (int i = 0; i < 10; i++)
		CHECK(write(peer, hello, HELLO) == HELLO);
	shutdown(peer, SHUT_WR);
	for (int ended = 0; got < 10 || !ended;) {
		CHECK(epoll_wait(loop, &ready, 1, PATIENCE_MS) == 1);
		if (ready.data.u32) {
			while (ksf_event_next(socket, &event) > 0) {
				CHECK(event.kind == KSF_EVENT_ENDED && event.connection == connection);
				CHECK(event.error == EPIPE && strlen(event.text) > 0);
				ended = 1;
			}
		} else if (ksf_receive(socket, 0, &message) > 0) {
			ksf_message_free(message);
			got++;
		}
	}
	CHECK(got == 10 && ksf_connections(socket) == 1);
	CHECK(ksf_detach(socket, connection, NULL, NULL, NULL) == 0 && ksf_connections(socket) == 0);
	ksf_close(socket);
	close(peer);
	close(loop);
}

static void detach(void)
{
	struct pollfd polled = { .events = POLLIN };
	ksf_socket *socket;
	ksf_message *message;
	void *unread;
	size_t bytes;
	char buffer[64];
	int peer, fd;

	CHECK(open_socket(&socket) == 0);
	uint64_t connection = attach_pair(socket, &peer);
	CHECK(ksf_attach(socket, dup(peer), NULL) == 0);
	/* A whole message and the half of one: when the first is received, the second was read. */
	memcpy(buffer, hello, HELLO);
	memcpy(buffer + HELLO, hello, 6);
	CHECK(write(peer, buffer, HELLO + 6) == HELLO + 6);
	CHECK(ksf_receive(socket, PATIENCE_MS, &message) == 1);
	ksf_message_free(message);
	CHECK(ksf_detach(socket, connection, &fd, &unread, &bytes) == 0);
	CHECK(bytes == 6 && memcmp(unread, hello, 6) == 0);
	ksf_free(unread);
	CHECK(write(peer, "llo", 3) == 3);
	polled.fd = fd;
	CHECK(poll(&polled, 1, PATIENCE_MS) == 1 && read(fd, buffer, sizeof(buffer)) == 3);
	CHECK(ksf_detach(socket, connection, &fd, &unread, &bytes) == -ENOENT);
	/* It can be attached again, and has another name. */
	uint64_t again;
	CHECK(ksf_attach(socket, fd, &again) == 0 && again != connection);
	CHECK(fcntl(fd, F_GETFD) == -1 && errno == EBADF);
	ksf_close(socket);
	close(peer);
}

/* Messages of one length, which is the context, are of class 0. */
static int class_of(const void *bytes, size_t count, void *context)
{
	CHECK(((const char *)bytes)[3] == (char)(count - 4));
	return count == *(size_t *)context ? 0 : -1;
}

/* Long work leaves sockets for the rest. */
static void classes(void)
{
	static size_t context = HELLO;
	static const uint32_t one = 1, none = 0;
	struct ksf_options options;
	ksf_socket *first, *second;
	ksf_message *held, *message;
	size_t bytes;
	int peer;

	CHECK(ksf_options_init(&options, sizeof(options)) == 0 && !options.classify);
	options.class_caps = &one;
	options.class_count = 1;
	CHECK(ksf_open(&options, &first) == -EINVAL && strstr(ksf_last_error(), "classify"));
	options.classify = class_of;
	options.classify_context = &context;
	options.class_caps = &none;
	CHECK(ksf_open(&options, &first) == -EINVAL && strstr(ksf_last_error(), "0"));
	options.class_caps = &one;
	CHECK(ksf_open(&options, &first) == 0 && ksf_clone(first, &second) == 0);
	attach_pair(first, &peer);
	CHECK(write(peer, hello, HELLO) == HELLO && write(peer, hello, HELLO) == HELLO);
	CHECK(write(peer, other, OTHER) == OTHER);
	CHECK(ksf_receive(first, PATIENCE_MS, &held) == 1);
	ksf_message_data(held, &bytes);
	CHECK(bytes == HELLO);
	/* One of them is worked on: the next that is received is none of them, and then there is none. */
	CHECK(ksf_receive(second, PATIENCE_MS, &message) == 1);
	ksf_message_data(message, &bytes);
	CHECK(bytes == OTHER);
	ksf_message_free(message);
	CHECK(ksf_receive(second, 0, &message) == 0);
	ksf_message_free(held);
	CHECK(ksf_receive(second, PATIENCE_MS, &message) == 1);
	ksf_message_data(message, &bytes);
	CHECK(bytes == HELLO);
	ksf_message_free(message);
	ksf_close(first);
	ksf_close(second);
	close(peer);
}

int main(void)
{
	CHECK(strcmp(ksf_version(), "0.1.0") == 0);
	wrong_arguments();
	newer_header();
	messages();
	answers();
	back_pressure();
	event_loop();
	detach();
	classes();
	return 0;
}
