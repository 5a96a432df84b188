/*
 * PASTE's baseline: requests of HTTP in a loop of epoll, with a read, a write and, where wanted, a flush for each of them.
 *
 *   none        the body is thrown away
 *   append      the body is written to a file, behind the one before
 *   fdatasync   the same, and it is on the disk before the answer leaves
 *
 * A request is that of PASTE's phttpd: POST, and the first 8 bytes of the body are the key. As there, the file has all of
 * its bytes from the start, written with zeros, so that no later write changes metadata; at its end it is begun anew.
 */
#include "stream.h"

#include <fcntl.h>
#include <signal.h>
#include <strings.h>
#include <sys/epoll.h>

#define EVENTS_MAX 64
#define KEY_BYTES 8

enum how { HOW_NONE, HOW_APPEND, HOW_FDATASYNC };

static const char *const hows[] = { "none", "append", "fdatasync" };

struct connection {
	int fd;
	size_t held;
	uint8_t in[PEER_BUFFER_BYTES];
};

static enum how how;
static int file = -1;
static size_t file_bytes, file_at;

/* 64 bytes. */
#define ANSWER_HEAD "HTTP/1.1 204 No Content\r\nDate: "
#define DATE "Thu, 01 Jan 1970 00:00:00 GMT"
static char answer[] = ANSWER_HEAD DATE "\r\n\r\n";

/* An answer tells the time as it was when its turn of the loop began. */
static void tell_time(void)
{
	static time_t told;
	time_t now = time(NULL);
	char date[sizeof(DATE)];
	struct tm utc;

	if (now == told)
		return;
	told = now;
	if (!gmtime_r(&now, &utc) || strftime(date, sizeof(date), "%a, %d %b %Y %H:%M:%S GMT", &utc) != sizeof(DATE) - 1)
		peer_die("strftime");
	memcpy(answer + sizeof(ANSWER_HEAD) - 1, date, sizeof(DATE) - 1);
}

/*
 * Returns how many bytes the request at the front of `in` has, 0 while it is not whole, or -1 for one that this peer does
 * not serve (another method, no length, no key, longer than the buffer). Its body begins at `body_at`.
 */
static ssize_t request_bytes(const uint8_t *in, size_t held, size_t *body_at)
{
	static const char method[] = "POST ", length[] = "Content-Length:";
	const char *text = (const char *)in, *line;
	const char *end = memmem(text, held, "\r\n\r\n", 4);
	size_t body_bytes = 0;

	if (!end)
		return held < PEER_BUFFER_BYTES ? 0 : -1;
	if (strncmp(text, method, sizeof(method) - 1))
		return -1;
	*body_at = (size_t)(end - text) + 4;
	/* From line feed to line feed; there is one right behind `end`. */
	for (line = memchr(text, '\n', held); line < end;
	     line = memchr(line + 1, '\n', held - (size_t)(line + 1 - text))) {
		if (!strncasecmp(line + 1, length, sizeof(length) - 1))
			body_bytes = strtoul(line + sizeof(length), NULL, 10);
	}
	if (body_bytes < KEY_BYTES || body_bytes > PEER_BUFFER_BYTES - *body_at)
		return -1;
	return held < *body_at + body_bytes ? 0 : (ssize_t)(*body_at + body_bytes);
}

/* Nothing is answered of what could not be written. */
static void write_all(const uint8_t *data, size_t bytes, size_t at)
{
	while (bytes) {
		ssize_t written = pwrite(file, data, bytes, (off_t)at);

		if (written < 0 && errno == EINTR)
			continue;
		if (written <= 0)
			peer_die("pwrite");
		data += written;
		at += (size_t)written;
		bytes -= (size_t)written;
	}
}

static void keep(const uint8_t *body, size_t bytes)
{
	if (how == HOW_NONE)
		return;
	if (file_at + bytes > file_bytes)
		file_at = 0;
	write_all(body, bytes, file_at);
	file_at += bytes;
	if (how == HOW_FDATASYNC && fdatasync(file))
		peer_die("fdatasync");
}

/* One read, and an answer to each request that is whole; false at the end of the connection. */
static bool turn(struct connection *connection)
{
	ssize_t bytes, got = read(connection->fd, connection->in + connection->held,
				  sizeof(connection->in) - connection->held);
	size_t at = 0, body_at = 0;

	if (got < 0 && errno == EINTR)
		return true;
	if (got <= 0)
		return false;
	connection->held += (size_t)got;
	while ((bytes = request_bytes(connection->in + at, connection->held - at, &body_at))) {
		if (bytes < 0)
			return false;
		keep(connection->in + at + body_at, (size_t)bytes - body_at);
		if (!send_all(connection->fd, (const uint8_t *)answer, sizeof(answer) - 1))
			return false;
		at += (size_t)bytes;
	}
	connection->held -= at;
	memmove(connection->in, connection->in + at, connection->held);
	return true;
}

static void accept_one(int loop, int listener)
{
	struct connection *connection;
	struct epoll_event event = { .events = EPOLLIN };
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
	event.data.ptr = connection;
	if (epoll_ctl(loop, EPOLL_CTL_ADD, fd, &event))
		peer_die("epoll_ctl");
}

static void usage(const char *name)
{
	fprintf(stderr, "usage: %s none|append|fdatasync ADDRESS PORT CPU [FILE BYTES]\n"
			"CPU -1: any. FILE is made anew, with so many bytes; none has no file.\n", name);
	exit(64);
}

/* A page at a time: what is written at once may become one folio of the page cache, which a flush writes whole. */
static void make_file(const char *path)
{
	static const uint8_t zeros[4096];

	file = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	if (file < 0)
		peer_die(path);
	for (size_t at = 0; at < file_bytes; at += sizeof(zeros))
		write_all(zeros, file_bytes - at < sizeof(zeros) ? file_bytes - at : sizeof(zeros), at);
	if (fsync(file))
		peer_die("fsync");
}

int main(int argc, char **argv)
{
	struct peer_options options = { .name = argv[0], .mode = PEER_HTTP };
	struct epoll_event event = { .events = EPOLLIN }, events[EVENTS_MAX];
	int loop, listener;

	if (argc < 5)
		usage(argv[0]);
	while (how <= HOW_FDATASYNC && strcmp(argv[1], hows[how]))
		how++;
	if (how > HOW_FDATASYNC || argc != (how == HOW_NONE ? 5 : 7))
		usage(argv[0]);
	options.listen.sin_family = AF_INET;
	options.listen.sin_port = htons((uint16_t)atoi(argv[3]));
	if (inet_pton(AF_INET, argv[2], &options.listen.sin_addr) != 1)
		usage(argv[0]);
	options.cpu = atoi(argv[4]);
	if (how != HOW_NONE) {
		file_bytes = strtoul(argv[6], NULL, 10);
		/* The longest body has room. */
		if (file_bytes < PEER_BUFFER_BYTES)
			usage(argv[0]);
		make_file(argv[5]);
	}
	signal(SIGPIPE, SIG_IGN);
	peer_pin(options.cpu);
	loop = epoll_create1(EPOLL_CLOEXEC);
	if (loop < 0)
		peer_die("epoll_create1");
	listener = peer_bind(&options, SOCK_STREAM);
	if (listen(listener, SOMAXCONN))
		peer_die("listen");
	if (epoll_ctl(loop, EPOLL_CTL_ADD, listener, &event))
		peer_die("epoll_ctl");
	peer_ready(&options, listener, "tcp");
	for (;;) {
		int count = epoll_wait(loop, events, EVENTS_MAX, -1);

		if (count < 0 && errno != EINTR)
			peer_die("epoll_wait");
		tell_time();
		for (int at = 0; at < count; at++) {
			struct connection *connection = events[at].data.ptr;

			if (!connection) {
				accept_one(loop, listener);
			} else if (!turn(connection)) {
				/* Closing takes it out of the loop, too. */
				close(connection->fd);
				free(connection);
			}
		}
	}
}
