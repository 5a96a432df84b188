/* Servers of many styles, as they are found in the field: "server STYLE WORKERS [PORT]". The port is told on standard
 * output. A connection says something, hears "PID TID" and is closed; one that says "stall N" keeps its worker for N ms
 * first. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static int listener = -1;
static int reuseport;
static int begun[2];
static struct sockaddr_in6 address = { .sin6_family = AF_INET6 };

static void die(const char *what)
{
	perror(what);
	_exit(1);
}

static int make_listener(int blocking)
{
	int fd = socket(AF_INET6, SOCK_STREAM | (blocking ? 0 : SOCK_NONBLOCK), 0), one = 1;
	socklen_t length = sizeof(address);

	if (fd < 0)
		die("socket");
	setsockopt(fd, SOL_SOCKET, reuseport ? SO_REUSEPORT : SO_REUSEADDR, &one, sizeof(one));
	if (bind(fd, (void *)&address, sizeof(address)) != 0)
		die("bind");
	/* Others of this server listen on the same port. */
	getsockname(fd, (void *)&address, &length);
	return fd;
}

static void do_listen(int fd)
{
	if (listen(fd, 1024) != 0)
		die("listen");
}

/* Port and process group, when all workers have begun. */
static void tell(int workers)
{
	char line[32], byte;
	int length = snprintf(line, sizeof(line), "%d %d\n", ntohs(address.sin6_port), getpgrp());

	for (int i = 0; i < workers; i++)
		if (read(begun[0], &byte, 1) != 1)
			die("a worker");

	if (write(1, line, length) != length)
		_exit(1);
}

static void serve(int fd)
{
	char question[65] = "", line[64];
	int length, got = 0;

	/* A line may come in pieces. */
	do {
		length = recv(fd, question + got, sizeof(question) - 1 - got, 0);
		got += length > 0 ? length : 0;
	} while (length > 0 && !strchr(question, '\n'));
	if (got > 0) {
		if (strncmp(question, "stall ", 6) == 0)
			usleep(atoi(question + 6) * 1000);
		length = snprintf(line, sizeof(line), "%d %ld\n", getpid(), syscall(SYS_gettid));
		if (send(fd, line, length, MSG_NOSIGNAL) != length)
			perror("send");
	}
	close(fd);
}

/* Accepts what there is, as it must with a non-blocking listener. */
static void accept_all(int from)
{
	for (;;) {
		int fd = accept4(from, NULL, NULL, SOCK_CLOEXEC);

		if (fd >= 0)
			serve(fd);
		else if (errno == EAGAIN)
			return;
		else if (errno != ECONNABORTED && errno != EINTR)
			die("accept4");
	}
}

static void by_epoll(int own, int events)
{
	int epoll = epoll_create1(EPOLL_CLOEXEC);
	struct epoll_event event = { .events = EPOLLIN | events, .data.fd = own };

	if (epoll_ctl(epoll, EPOLL_CTL_ADD, own, &event) != 0)
		die("epoll_ctl");
	for (;;) {
		struct epoll_event got[8];
		int count = epoll_wait(epoll, got, 8, -1);

		for (int i = 0; i < count; i++) {
			accept_all(got[i].data.fd);
			if (events & EPOLLONESHOT && epoll_ctl(epoll, EPOLL_CTL_MOD, own, &event) != 0)
				die("EPOLL_CTL_MOD");
		}
		if (count < 0 && errno != EINTR)
			die("epoll_wait");
	}
}

/* As nginx with accept_mutex: who holds the lock watches the listener, the others wait for what they have. */
static void by_turns(int own)
{
	int epoll = epoll_create1(EPOLL_CLOEXEC), lock = open("/proc/self/exe", O_RDONLY | O_CLOEXEC), watches = 0;
	struct epoll_event event = { .events = EPOLLIN | EPOLLRDHUP, .data.fd = own };

	for (;;) {
		struct epoll_event got[8];
		int mine = fcntl(lock, F_OFD_SETLK, &(struct flock){ .l_type = F_RDLCK }) == 0 && rand() % 2, count;

		if (mine != watches) {
			if (epoll_ctl(epoll, mine ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, own, &event) != 0)
				die("epoll_ctl");
			watches = mine;
		}
		count = epoll_wait(epoll, got, 8, 5);
		for (int i = 0; i < count; i++)
			accept_all(got[i].data.fd);
	}
}

static void by_blocking(int own)
{
	for (;;) {
		int fd = accept(own, NULL, NULL);

		if (fd >= 0)
			serve(fd);
		else if (errno != ECONNABORTED)
			die("accept");
	}
}

static void by_poll(int own)
{
	struct pollfd set = { .fd = own, .events = POLLIN };

	for (;;)
		if (poll(&set, 1, -1) > 0)
			accept_all(own);
}

static void by_select(int own)
{
	for (;;) {
		fd_set set;

		FD_ZERO(&set);
		FD_SET(own, &set);
		if (select(own + 1, &set, NULL, NULL, NULL) > 0)
			accept_all(own);
	}
}

struct style {
	const char *name;
	int threads, blocking, reuseport, events;
	void (*plain)(int own);
};

static const struct style styles[] = {
	{ "prefork-epoll", .events = 0 },
	{ "prefork-exclusive", .events = EPOLLEXCLUSIVE },
	{ "prefork-edge", .events = EPOLLET },
	{ "prefork-oneshot", .events = EPOLLONESHOT },
	{ "prefork-turns", .plain = by_turns },
	{ "prefork-blocking", .blocking = 1, .plain = by_blocking },
	{ "prefork-poll", .plain = by_poll },
	{ "prefork-select", .plain = by_select },
	{ "prefork-reuseport", .reuseport = 1 },
	{ "threads-epoll", .threads = 1 },
	{ "threads-blocking", .threads = 1, .blocking = 1, .plain = by_blocking },
	{ "threads-reuseport", .threads = 1, .reuseport = 1 },
};
static const struct style *style;

static void *work(void *unused)
{
	int own = style->reuseport ? make_listener(style->blocking) : listener;

	(void)unused;
	if (style->reuseport)
		do_listen(own);
	if (write(begun[1], "", 1) != 1)
		_exit(1);
	srand(getpid());
	if (style->plain)
		style->plain(own);
	else
		by_epoll(own, style->events);
	return NULL;
}

/* As daemon(3) and many a server does it: two forks, and nothing stays open but the listener. */
static void become_daemon(const char *how)
{
	if (fork() != 0)
		_exit(0);
	setsid();
	if (fork() != 0)
		_exit(0);
	if (strcmp(how, "loop") == 0) {
		for (int fd = 3; fd < 65536; fd++)
			if (fd != listener)
				close(fd);
	} else if (strcmp(how, "range") == 0) {
		dup2(listener, 3);
		listener = 3;
		close_range(4, ~0U, 0);
	} else {
		dup2(listener, 3);
		listener = 3;
		closefrom(4);
	}
	if (chdir("/") != 0)
		_exit(1);
}

int main(int count, char **arguments)
{
	int workers = count > 2 ? atoi(arguments[2]) : 1;
	const char *name = count > 1 ? arguments[1] : "", *daemon = NULL;

	if (strncmp(name, "daemon-", 7) == 0) {
		daemon = name + 7;
		name = "prefork-epoll";
	}
	for (size_t i = 0; i < sizeof(styles) / sizeof(styles[0]); i++)
		if (strcmp(styles[i].name, name) == 0)
			style = &styles[i];
	if (!style)
		return 2;
	address.sin6_port = htons(count > 3 ? atoi(arguments[3]) : 0);
	reuseport = style->reuseport;
	listener = make_listener(style->blocking);
	/* Else it only keeps the port: a member of the group that nobody accepts from would swallow connections. */
	if (!reuseport)
		do_listen(listener);
	/* Gives up its rights, as a server on a low port does. */
	if (getenv("SERVER_UID") && setuid(atoi(getenv("SERVER_UID"))) != 0)
		die("setuid");
	if (daemon)
		become_daemon(daemon);
	if (pipe(begun) != 0)
		die("pipe");
	for (int i = 0; i < workers; i++) {
		pthread_t thread;

		if (style->threads)
			pthread_create(&thread, NULL, work, NULL);
		else if (fork() == 0)
			work(NULL);
	}
	tell(workers);
	if (reuseport)
		close(listener);
	for (;;) {
		/* A master that replaces its workers. */
		if (style->threads)
			pause();
		else if (wait(NULL) > 0 && fork() == 0)
			work(NULL);
	}
}
