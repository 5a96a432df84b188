/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A client that spreads its requests over several connections to the same server, and takes the replies as they come,
 * in an event loop.
 *
 *   cc -o spread_client spread_client.c $(pkg-config --cflags --libs libksf)
 *   ./spread_client PORT [CONNECTIONS [REQUESTS]]
 */
#include <arpa/inet.h>
#include <ksf.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define CONNECTIONS_MAX 64
#define WINDOW 100 /* requests without a reply */

/* As on the wire: the length of what follows it, and a number by which the reply is known. */
struct request {
	uint32_t length, number;
};

static int must(int result, const char *what)
{
	if (result < 0) {
		fprintf(stderr, "%s: %s (%s)\n", what, strerror(-result), ksf_last_error());
		exit(1);
	}
	return result;
}

static int connect_to(int port)
{
	struct sockaddr_in address = {
		.sin_family = AF_INET,
		.sin_port = htons(port),
		.sin_addr.s_addr = htonl(INADDR_LOOPBACK),
	};
	int fd = socket(AF_INET, SOCK_STREAM, 0);

	if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof(address))) {
		perror("connect");
		exit(1);
	}
	return fd;
}

struct client {
	ksf_socket *socket;
	uint64_t ids[CONNECTIONS_MAX], counts[CONNECTIONS_MAX];
	int connections;
	uint32_t requests, sent, received;
	char *seen;
};

static void send_requests(struct client *client)
{
	while (client->sent < client->requests && client->sent - client->received < WINDOW) {
		struct request request = { htonl(sizeof(uint32_t)), htonl(client->sent) };

		/* An echo does no harm when it is asked for twice. */
		must(ksf_send(client->socket, &request, sizeof(request), KSF_IN_TURN | KSF_REPEATABLE, -1, NULL), "send");
		client->sent++;
	}
}

static void take(struct client *client, ksf_message *message)
{
	size_t bytes;
	struct request reply;
	const void *data = ksf_message_data(message, &bytes);

	if (bytes != sizeof(reply)) {
		fprintf(stderr, "a reply of %zu bytes\n", bytes);
		exit(1);
	}
	memcpy(&reply, data, bytes);
	uint32_t number = ntohl(reply.number);
	if (number >= client->requests || client->seen[number]++) {
		fprintf(stderr, "reply %u is not asked for, or comes twice\n", number);
		exit(1);
	}
	for (int i = 0; i < client->connections; i++)
		client->counts[i] += client->ids[i] == ksf_message_connection(message);
	ksf_message_free(message);
	client->received++;
}

int main(int argc, char **argv)
{
	struct client client = {
		.connections = argc > 2 ? atoi(argv[2]) : 4,
		.requests = argc > 3 ? atoi(argv[3]) : 1000,
	};
	struct ksf_options options;
	struct epoll_event ready[2], messages = { .events = EPOLLIN, .data.u32 = 0 },
				     events = { .events = EPOLLIN, .data.u32 = 1 };
	int loop = epoll_create1(EPOLL_CLOEXEC);

	if (argc < 2 || client.connections < 1 || client.connections > CONNECTIONS_MAX) {
		fprintf(stderr, "usage: spread_client PORT [CONNECTIONS [REQUESTS]]\n");
		return 64;
	}
	client.seen = calloc(client.requests, 1);
	must(ksf_options_init(&options, sizeof(options)), "options");
	must(ksf_open(&options, &client.socket), "open");
	for (int i = 0; i < client.connections; i++)
		must(ksf_attach(client.socket, connect_to(atoi(argv[1])), &client.ids[i]), "attach");
	if (epoll_ctl(loop, EPOLL_CTL_ADD, must(ksf_fd(client.socket), "fd"), &messages) ||
	    epoll_ctl(loop, EPOLL_CTL_ADD, must(ksf_event_fd(client.socket), "event fd"), &events)) {
		perror("epoll_ctl");
		return 1;
	}

	send_requests(&client);
	while (client.received < client.requests) {
		int count = epoll_wait(loop, ready, 2, 10000);

		if (count == 0) {
			fprintf(stderr, "no reply within 10 s\n");
			return 1;
		}
		for (int i = 0; i < count; i++) {
			struct ksf_event event = { .size = sizeof(event) };
			ksf_message *message;

			/* The server has gone, or a connection failed: its replies do not come. */
			if (ready[i].data.u32 == 1 && ksf_event_next(client.socket, &event) > 0) {
				fprintf(stderr, "connection lost: %s\n", event.text);
				return 1;
			}
			/* All that is there: the descriptor may be readable without a message, too. */
			while (ready[i].data.u32 == 0 && must(ksf_receive(client.socket, 0, &message), "receive") > 0)
				take(&client, message);
		}
		send_requests(&client);
	}
	printf("%u replies:", client.received);
	for (int i = 0; i < client.connections; i++)
		printf(" %llu", (unsigned long long)client.counts[i]);
	printf("\n");
	ksf_close(client.socket);
	close(loop);
	free(client.seen);
	return 0;
}
