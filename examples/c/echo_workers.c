/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * An echo server: any of several worker threads answers the next message of any connection.
 *
 *   cc -o echo_workers echo_workers.c $(pkg-config --cflags --libs libksf) -pthread
 *   ./echo_workers [WORKERS [PORT [MIB]]]   prints its port; ends with the end of its input
 *
 * MIB is the budget of all connections. A message is its length as 32 bits in network order, not counting themselves, and so many bytes.
 */
#include <arpa/inet.h>
#include <ksf.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static int must(int result, const char *what)
{
	if (result < 0) {
		fprintf(stderr, "%s: %s (%s)\n", what, strerror(-result), ksf_last_error());
		exit(1);
	}
	return result;
}

static void *work(void *argument)
{
	ksf_socket *socket = argument;
	ksf_message *message;

	while (must(ksf_receive(socket, -1, &message), "receive") > 0) {
		size_t bytes;
		const void *data = ksf_message_data(message, &bytes);

		/* EPIPE: the client has gone. Nothing else can be wrong with an answer. */
		ksf_message_reply(message, data, bytes);
		ksf_message_free(message);
	}
	return NULL;
}

static int listen_on(int port)
{
	struct sockaddr_in address = {
		.sin_family = AF_INET,
		.sin_port = htons(port),
		.sin_addr.s_addr = htonl(INADDR_LOOPBACK),
	};
	socklen_t length = sizeof(address);
	int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);

	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (listener < 0 || bind(listener, (struct sockaddr *)&address, length) || listen(listener, 128) ||
	    getsockname(listener, (struct sockaddr *)&address, &length)) {
		perror("listen");
		exit(1);
	}
	printf("%d\n", ntohs(address.sin_port));
	fflush(stdout);
	return listener;
}

int main(int argc, char **argv)
{
	int workers = argc > 1 ? atoi(argv[1]) : 4;
	struct ksf_options options;
	ksf_socket *first;

	must(ksf_options_init(&options, sizeof(options)), "options");
	if (argc > 3)
		options.mux_bytes_max = (uint64_t)atoi(argv[3]) << 20;
	must(ksf_open(&options, &first), "open");
	for (int i = 0; i < workers; i++) {
		ksf_socket *own;
		pthread_t thread;

		must(ksf_clone(first, &own), "clone");
		if (pthread_create(&thread, NULL, work, own))
			return 1;
		pthread_detach(thread);
	}
	/* This thread receives no messages: none may wait for it. */
	must(ksf_set_receiving(first, 0), "stop receiving");

	struct pollfd polled[] = {
		{ .fd = listen_on(argc > 2 ? atoi(argv[2]) : 0), .events = POLLIN },
		{ .fd = must(ksf_event_fd(first), "event fd"), .events = POLLIN },
		{ .fd = STDIN_FILENO, .events = POLLIN },
	};
	for (;;) {
		poll(polled, 3, -1);
		if (polled[0].revents) {
			int fd = accept(polled[0].fd, NULL, NULL);
			if (fd >= 0)
				must(ksf_attach(first, fd, NULL), "attach");
		}
		struct ksf_event event = { .size = sizeof(event) };
		while (polled[1].revents && ksf_event_next(first, &event) > 0)
			if (event.kind == KSF_EVENT_ENDED)
				ksf_detach(first, event.connection, NULL, NULL, NULL);
		char byte;
		if (polled[2].revents && read(STDIN_FILENO, &byte, 1) <= 0)
			return 0;
	}
}
