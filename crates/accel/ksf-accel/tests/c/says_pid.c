/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A server without libraries or SO_REUSEPORT, for the tests: says its process id to everybody. Ends with 7 at SIGTERM,
 * and with 3 if it cannot listen.
 *
 * says_pid PORT [6]
 */
#include <arpa/inet.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

static void end(int signal)
{
	(void)signal;
	_exit(7);
}

int main(int argc, char **argv)
{
	signal(SIGTERM, end);
	signal(SIGPIPE, SIG_IGN);
	int six = argc > 2;
	struct sockaddr_in6 v6 = { .sin6_family = AF_INET6, .sin6_addr = in6addr_loopback };
	struct sockaddr_in v4 = { .sin_family = AF_INET, .sin_addr = { htonl(INADDR_LOOPBACK) } };
	v4.sin_port = v6.sin6_port = htons(atoi(argv[1]));
	int listener = socket(six ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
	int on = 1;
	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	if (bind(listener, six ? (void *)&v6 : (void *)&v4, six ? sizeof(v6) : sizeof(v4)) || listen(listener, 128))
		return 3;
	int set = epoll_create1(0);
	struct epoll_event event = { .events = EPOLLIN };
	epoll_ctl(set, EPOLL_CTL_ADD, listener, &event);
	uint32_t pid = getpid();
	for (;;) {
		epoll_wait(set, &event, 1, -1);
		int connection;
		while ((connection = accept(listener, NULL, NULL)) >= 0) {
			if (write(connection, &pid, sizeof(pid)) < 0)
				return 4;
			close(connection);
		}
	}
}
