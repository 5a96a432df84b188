/*
 * The floor of a READ out of the page cache: for each request of 4 bytes a thread preads the block that it
 * names from a file and sends it over a plain TCP connection. The client keeps several requests in flight
 * and compares each byte.
 * Usage: pread_send FILE BLOCK_BYTES IN_FLIGHT COUNT [CLIENT_CPU SERVER_CPU]; prints one line of JSON,
 * times in us.
 */
#include "stream.h"

#include <fcntl.h>
#include <pthread.h>

#define IN_FLIGHT_MAX 64

struct server {
	int listener, file, cpu;
	size_t block_bytes;
};

static bool receive_all(int fd, void *data, size_t bytes)
{
	return recv(fd, data, bytes, MSG_WAITALL) == (ssize_t)bytes;
}

static void no_delay(int fd)
{
	int one = 1;

	if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)))
		peer_die("TCP_NODELAY");
}

static void *serve(void *argument)
{
	const struct server *server = argument;
	uint8_t *block = malloc(server->block_bytes);
	uint32_t number;
	int fd;

	peer_pin(server->cpu);
	fd = accept(server->listener, NULL, NULL);
	if (fd < 0 || !block)
		peer_die("accept");
	no_delay(fd);
	while (receive_all(fd, &number, sizeof(number))) {
		off_t at = (off_t)number * (off_t)server->block_bytes;

		if (pread(server->file, block, server->block_bytes, at) != (ssize_t)server->block_bytes)
			peer_die("pread");
		if (!send_all(fd, block, server->block_bytes))
			peer_die("send");
	}
	close(fd);
	free(block);
	return NULL;
}

static int compare(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return (x > y) - (x < y);
}

static void ask(int fd, long request, uint32_t blocks)
{
	uint32_t number = (uint32_t)(request % blocks);

	if (!send_all(fd, (const uint8_t *)&number, sizeof(number)))
		peer_die("send");
}

int main(int argc, char **argv)
{
	struct peer_options options = { .name = "pread_send" };
	uint64_t sent_ns[IN_FLIGHT_MAX], *rtt_ns, began_ns;
	struct sockaddr_in address;
	socklen_t length = sizeof(address);
	struct server server = { .cpu = -1 };
	uint8_t *expected, *got;
	long in_flight, count;
	pthread_t thread;
	uint32_t blocks;
	off_t bytes;
	int fd;

	if (argc != 5 && argc != 7) {
		fprintf(stderr, "usage: %s FILE BLOCK_BYTES IN_FLIGHT COUNT [CLIENT_CPU SERVER_CPU]\n", argv[0]);
		return 64;
	}
	server.block_bytes = (size_t)atol(argv[2]);
	in_flight = atol(argv[3]);
	count = atol(argv[4]);
	server.file = open(argv[1], O_RDONLY);
	bytes = server.file < 0 ? -1 : lseek(server.file, 0, SEEK_END);
	if (bytes < 0)
		peer_die(argv[1]);
	if (count < 1 || in_flight < 1 || in_flight > IN_FLIGHT_MAX || server.block_bytes < 1 ||
	    (size_t)bytes < server.block_bytes) {
		fprintf(stderr, "%s: COUNT at least 1, IN_FLIGHT 1 to %d, FILE at least a block\n", argv[0],
			IN_FLIGHT_MAX);
		return 64;
	}
	blocks = (uint32_t)((size_t)bytes / server.block_bytes);
	expected = malloc(blocks * server.block_bytes);
	got = malloc(server.block_bytes);
	rtt_ns = malloc((size_t)count * sizeof(*rtt_ns));
	if (!expected || !got || !rtt_ns)
		peer_die("malloc");
	if (pread(server.file, expected, blocks * server.block_bytes, 0) != (ssize_t)(blocks * server.block_bytes))
		peer_die("pread");
	if (argc == 7) {
		peer_pin(atoi(argv[5]));
		server.cpu = atoi(argv[6]);
	}
	options.listen.sin_family = AF_INET;
	options.listen.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	server.listener = peer_bind(&options, SOCK_STREAM);
	if (listen(server.listener, 1) || getsockname(server.listener, (struct sockaddr *)&address, &length))
		peer_die("listen");
	errno = pthread_create(&thread, NULL, serve, &server);
	if (errno)
		peer_die("pthread_create");
	fd = socket(AF_INET, SOCK_STREAM, 0);
	if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof(address)))
		peer_die("connect");
	no_delay(fd);
	began_ns = peer_now_ns();
	for (long i = 0; i < in_flight && i < count; i++) {
		sent_ns[i] = peer_now_ns();
		ask(fd, i, blocks);
	}
	for (long i = 0; i < count; i++) {
		if (!receive_all(fd, got, server.block_bytes))
			peer_die("recv");
		if (memcmp(got, expected + (size_t)(i % blocks) * server.block_bytes, server.block_bytes)) {
			fprintf(stderr, "%s: other bytes than the file has\n", argv[0]);
			return 1;
		}
		rtt_ns[i] = peer_now_ns() - sent_ns[i % in_flight];
		if (i + in_flight < count) {
			sent_ns[i % in_flight] = peer_now_ns();
			ask(fd, i + in_flight, blocks);
		}
	}
	began_ns = peer_now_ns() - began_ns;
	close(fd);
	pthread_join(thread, NULL);
	qsort(rtt_ns, (size_t)count, sizeof(*rtt_ns), compare);
	printf("{\"messages_per_s\":%.1f,\"p50_us\":%.3f,\"p99_us\":%.3f}\n",
	       (double)count * 1e9 / (double)began_ns, (double)rtt_ns[count / 2] / 1e3,
	       (double)rtt_ns[count - 1 - count / 100] / 1e3);
	return 0;
}
