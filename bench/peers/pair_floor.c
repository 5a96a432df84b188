/*
 * The floor of the TCP or UDP stack: one thread plays both ends, so a round trip holds two sends,
 * two receives and loopback, but no wake-up and no context switch. No server behind the stack can
 * answer a blocking client in less.
 * Usage: pair_floor tcp|udp COUNT REQUEST_BYTES REPLY_BYTES [CPU]; prints one line of JSON, times
 * in us.
 */
#include "peer.h"

#include <time.h>

static uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void tcp_pair(int *client, int *server)
{
	struct peer_options options = { .name = "pair_floor" };
	struct sockaddr_in address;
	socklen_t length = sizeof(address);
	int one = 1, listener;

	options.listen.sin_family = AF_INET;
	options.listen.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	listener = peer_bind(&options, SOCK_STREAM);
	if (listen(listener, 1) || getsockname(listener, (struct sockaddr *)&address, &length))
		peer_die("listen");
	*client = socket(AF_INET, SOCK_STREAM, 0);
	if (*client < 0 || connect(*client, (struct sockaddr *)&address, sizeof(address)))
		peer_die("connect");
	*server = accept(listener, NULL, NULL);
	if (*server < 0)
		peer_die("accept");
	if (setsockopt(*client, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)) ||
	    setsockopt(*server, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)))
		peer_die("TCP_NODELAY");
	close(listener);
}

/* Two sockets, each connected to the other's address. */
static void udp_pair(int *client, int *server)
{
	struct peer_options options = { .name = "pair_floor" };
	int fds[2];

	options.listen.sin_family = AF_INET;
	options.listen.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	fds[0] = peer_bind(&options, SOCK_DGRAM);
	fds[1] = peer_bind(&options, SOCK_DGRAM);
	for (int i = 0; i < 2; i++) {
		struct sockaddr_in address;
		socklen_t length = sizeof(address);

		if (getsockname(fds[!i], (struct sockaddr *)&address, &length) ||
		    connect(fds[i], (struct sockaddr *)&address, sizeof(address)))
			peer_die("connect");
	}
	*client = fds[0];
	*server = fds[1];
}

static void transfer(int from, int to, uint8_t *data, size_t bytes)
{
	if (send(from, data, bytes, 0) != (ssize_t)bytes)
		peer_die("send");
	if (recv(to, data, bytes, MSG_WAITALL) != (ssize_t)bytes)
		peer_die("recv");
}

static int compare(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

	return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
	static uint8_t data[PEER_BUFFER_BYTES];
	size_t request_bytes, reply_bytes;
	long count, warm_up;
	uint32_t *rtt_ns;
	int client, server;
	bool udp;

	udp = argc > 1 && !strcmp(argv[1], "udp");
	if (argc < 5 || argc > 6 || (!udp && strcmp(argv[1], "tcp"))) {
		fprintf(stderr, "usage: %s tcp|udp COUNT REQUEST_BYTES REPLY_BYTES [CPU]\n", argv[0]);
		return 64;
	}
	count = atol(argv[2]);
	request_bytes = (size_t)atol(argv[3]);
	reply_bytes = (size_t)atol(argv[4]);
	if (count < 1 || request_bytes < 1 || request_bytes > sizeof(data) || reply_bytes < 1 ||
	    reply_bytes > sizeof(data)) {
		fprintf(stderr, "%s: COUNT at least 1, sizes 1 to %zu\n", argv[0], sizeof(data));
		return 64;
	}
	peer_pin(argc == 6 ? atoi(argv[5]) : -1);
	rtt_ns = malloc((size_t)count * sizeof(*rtt_ns));
	if (!rtt_ns)
		peer_die("malloc");
	if (udp)
		udp_pair(&client, &server);
	else
		tcp_pair(&client, &server);
	warm_up = count / 10;
	for (long i = -warm_up; i < count; i++) {
		uint64_t start = now_ns();

		transfer(client, server, data, request_bytes);
		transfer(server, client, data, reply_bytes);
		if (i >= 0)
			rtt_ns[i] = (uint32_t)(now_ns() - start);
	}
	qsort(rtt_ns, (size_t)count, sizeof(*rtt_ns), compare);
	printf("{\"round_trips\":%ld,\"p50_us\":%.3f,\"p99_us\":%.3f}\n", count,
	       rtt_ns[count / 2] / 1e3, rtt_ns[count - 1 - count / 100] / 1e3);
	return 0;
}
