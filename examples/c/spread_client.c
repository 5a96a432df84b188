/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A client that spreads its requests over several connections to the same server, and takes the replies as they come.
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
#include <sys/socket.h>

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

int main(int argc, char **argv)
{
	int connections = argc > 2 ? atoi(argv[2]) : 4;
	uint32_t requests = argc > 3 ? atoi(argv[3]) : 1000;
	uint64_t ids[CONNECTIONS_MAX], counts[CONNECTIONS_MAX] = { 0 };
	uint32_t sent = 0, received = 0;
	ksf_socket *socket;

	if (argc < 2 || connections < 1 || connections > CONNECTIONS_MAX) {
		fprintf(stderr, "usage: spread_client PORT [CONNECTIONS [REQUESTS]]\n");
		return 64;
	}
	char *seen = calloc(requests, 1);
	must(ksf_open(NULL, &socket), "open");
	for (int i = 0; i < connections; i++)
		must(ksf_attach(socket, connect_to(atoi(argv[1])), &ids[i]), "attach");

	while (received < requests) {
		if (sent < requests && sent - received < WINDOW) {
			struct request request = { htonl(sizeof(uint32_t)), htonl(sent) };

			/* An echo does no harm when it is asked for twice. */
			must(ksf_send(socket, &request, sizeof(request), KSF_REPEATABLE, -1, NULL), "send");
			sent++;
			continue;
		}
		ksf_message *message;
		if (must(ksf_receive(socket, 10000, &message), "receive") == 0) {
			fprintf(stderr, "no reply within 10 s\n");
			return 1;
		}
		size_t bytes;
		struct request reply;
		const void *data = ksf_message_data(message, &bytes);
		if (bytes != sizeof(reply))
			return 1;
		memcpy(&reply, data, bytes);
		uint32_t number = ntohl(reply.number);
		if (number >= requests || seen[number]++) {
			fprintf(stderr, "reply %u is not asked for, or comes twice\n", number);
			return 1;
		}
		for (int i = 0; i < connections; i++)
			counts[i] += ids[i] == ksf_message_connection(message);
		ksf_message_free(message);
		received++;
	}
	printf("%u replies:", received);
	for (int i = 0; i < connections; i++)
		printf(" %llu", (unsigned long long)counts[i]);
	printf("\n");
	ksf_close(socket);
	free(seen);
	return 0;
}
