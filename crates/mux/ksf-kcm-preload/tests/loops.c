/* Event loops, duplicates and modes of a message socket of AF_KCM. Ends with 0 if all is as it should be. */
#define _GNU_SOURCE
#include "programs.h"
#include <fcntl.h>
#include <linux/close_range.h>
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/select.h>

#define PATIENCE_MS 60000

static int program;

/* Attaches one end of a connection; returns the other. */
static int connection(int mux, int *near)
{
	int ends[2], one = 1;

	connect_pair(ends);
	setsockopt(ends[1], IPPROTO_TCP, 1 /* TCP_NODELAY */, &one, sizeof(one));
	*near = ends[0];
	attach_to(mux, ends[0], program);
	return ends[1];
}

static void modes_and_duplicates(void)
{
	char bytes[64];
	int mux = socket(AF_KCM, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), near, value = 0;
	int far = connection(mux, &near);
	socklen_t length = sizeof(value);

	CHECK(fcntl(mux, F_GETFD) == FD_CLOEXEC && fcntl(mux, F_GETFL) & O_NONBLOCK);
	CHECK(read(mux, bytes, sizeof(bytes)) == -1 && errno == EAGAIN);
	CHECK(getsockopt(mux, SOL_SOCKET, SO_TYPE, &value, &length) == 0 && value == SOCK_SEQPACKET);
	CHECK(getsockopt(mux, SOL_SOCKET, SO_DOMAIN, &value, &length) == 0 && value == AF_KCM);
	/* A number that a duplicate has keeps the socket open. */
	int copy = dup(mux), other = fcntl(mux, F_DUPFD, 100);
	CHECK(copy >= 0 && other >= 100);
	close(mux);
	CHECK(dup2(copy, 90) == 90);
	close(copy);
	CHECK(write(90, "\0\0\0\6ab", 6) == 6); /* ends a message, as on any such socket */
	CHECK(read(far, bytes, sizeof(bytes)) == 6);
	put(far, 20, 20);
	struct pollfd polled = { .fd = other, .events = POLLIN };
	CHECK(poll(&polled, 1, PATIENCE_MS) == 1 && polled.revents == POLLIN);
	CHECK(recv(90, bytes, 8, 0) == 8 && recv(other, bytes, 64, 0) == 12);
	CHECK(recv(other, bytes, 64, 0) == -1 && errno == EAGAIN);
	close(90);
	close(other);
	/* The number is anybody's again. */
	CHECK(recv(other, bytes, 64, 0) == -1 && errno == EBADF);
	close(near);
	close(far);
}

static void wait_for_messages_only(void)
{
	char bytes[64];
	int mux = socket(AF_KCM, SOCK_DGRAM, 0), near, far = connection(mux, &near);
	struct pollfd polled = { .fd = mux, .events = POLLIN | POLLOUT };
	struct epoll_event event = { .events = EPOLLIN, .data.u64 = 77 }, found[4];
	int loop = epoll_create1(0);
	fd_set set;
	struct timeval now = { 0 };
	struct timespec moment = { .tv_nsec = 1000000 };

	CHECK(epoll_ctl(loop, EPOLL_CTL_ADD, mux, &event) == 0);
	/* Half a message is none. */
	put(far, 20, 10);
	CHECK(epoll_pwait2(loop, found, 4, &moment, NULL) == 0);
	CHECK(poll(&polled, 1, 50) == 1 && polled.revents == POLLOUT);
	polled.events = POLLIN;
	CHECK(poll(&polled, 1, 50) == 0);
	CHECK(epoll_wait(loop, found, 4, 50) == 0);
	FD_ZERO(&set);
	FD_SET(mux, &set);
	CHECK(select(mux + 1, &set, NULL, NULL, &now) == 0 && !FD_ISSET(mux, &set));
	CHECK(write(far, bytes, 10) == 10);
	CHECK(epoll_wait(loop, found, 4, PATIENCE_MS) == 1 && found[0].data.u64 == 77 && found[0].events == EPOLLIN);
	FD_SET(mux, &set);
	CHECK(select(mux + 1, &set, NULL, NULL, NULL) == 1 && FD_ISSET(mux, &set));
	CHECK(recv(mux, bytes, 64, 0) == 20);
	CHECK(epoll_wait(loop, found, 4, 0) == 0);

	event.events = EPOLLIN | EPOLLOUT;
	CHECK(epoll_ctl(loop, EPOLL_CTL_MOD, mux, &event) == 0);
	CHECK(epoll_wait(loop, found, 4, PATIENCE_MS) == 1 && found[0].events == EPOLLOUT && found[0].data.u64 == 77);
	CHECK(epoll_ctl(loop, EPOLL_CTL_DEL, mux, NULL) == 0);
	put(far, 20, 20);
	CHECK(epoll_wait(loop, found, 4, 20) == 0);
	CHECK(epoll_ctl(loop, EPOLL_CTL_DEL, mux, NULL) == -1 && errno == ENOENT);

	/* Errors of a connection reach a loop that waits for nothing else. */
	event.events = 0;
	event.data.u64 = 88;
	CHECK(epoll_ctl(loop, EPOLL_CTL_ADD, near, &event) == 0);
	shutdown(far, SHUT_WR);
	CHECK(recv(mux, bytes, 64, 0) == 20);
	polled.fd = near;
	polled.events = 0;
	CHECK(poll(&polled, 1, PATIENCE_MS) == 1 && polled.revents & POLLERR);
	CHECK(epoll_wait(loop, found, 4, PATIENCE_MS) == 1 && found[0].data.u64 == 88 && found[0].events & EPOLLERR);
	int error = 0;
	socklen_t length = sizeof(error);
	CHECK(getsockopt(near, SOL_SOCKET, SO_ERROR, &error, &length) == 0 && error == EPIPE);
	CHECK(getsockopt(near, SOL_SOCKET, SO_ERROR, &error, &length) == 0 && error == 0);
	close(loop);
	close(mux);
	close(near);
	close(far);
}

static void unread_bytes(void)
{
	char bytes[64];
	int mux = socket(AF_KCM, SOCK_DGRAM, 0), near, far = connection(mux, &near);
	struct kcm_unattach unattach = { .fd = near };
	struct pollfd polled = { .fd = near, .events = POLLIN };

	/* A whole message and the start of one: both were read when the first is received. */
	memcpy(bytes, "\0\0\0\4\0\0\0\144start", 13);
	CHECK(write(far, bytes, 13) == 13);
	CHECK(recv(mux, bytes, 64, 0) == 4);
	CHECK(ioctl(mux, SIOCKCMUNATTACH, &unattach) == 0);
	CHECK(write(far, "rest", 4) == 4);
	CHECK(poll(&polled, 1, PATIENCE_MS) == 1 && polled.revents & POLLIN);
	CHECK(recv(near, bytes, 64, MSG_PEEK) == 9 && recv(near, bytes, 6, 0) == 6 && recv(near, bytes, 64, 0) == 3);
	CHECK(memcmp(bytes, "art", 3) == 0);
	CHECK(recv(near, bytes, 64, 0) == 4 && memcmp(bytes, "rest", 4) == 0);
	close(mux);
	close(near);
	close(far);
}

static void *worker(void *argument)
{
	int mux = *(int *)argument;
	long sum = 0;
	char bytes[256];

	for (;;) {
		ssize_t length = recv(mux, bytes, sizeof(bytes), 0);
		CHECK(length >= 4);
		if (length == 4)
			return (void *)sum;
		sum += length;
	}
}

static void workers(void)
{
	enum { WORKERS = 4, MESSAGES = 2000 };
	int sockets[WORKERS], near;
	pthread_t threads[WORKERS];
	long sum = 0, wanted = 0;

	sockets[0] = socket(AF_KCM, SOCK_DGRAM, 0);
	for (int i = 1; i < WORKERS; i++) {
		struct kcm_clone clone = { .fd = -1 };
		CHECK(ioctl(sockets[0], SIOCKCMCLONE, &clone) == 0);
		sockets[i] = clone.fd;
	}
	int far = connection(sockets[0], &near);
	for (int i = 0; i < WORKERS; i++)
		CHECK(pthread_create(&threads[i], NULL, worker, &sockets[i]) == 0);
	for (int i = 0; i < MESSAGES; i++) {
		put(far, 5 + i % 200, 5 + i % 200);
		wanted += 5 + i % 200;
	}
	for (int i = 0; i < WORKERS; i++)
		put(far, 4, 4);
	for (int i = 0; i < WORKERS; i++) {
		void *part;
		CHECK(pthread_join(threads[i], &part) == 0);
		sum += (long)part;
	}
	CHECK(sum == wanted);
	char line[256];
	FILE *file = fopen("/proc/net/kcm", "r");
	unsigned long messages = 0;
	while (file && fgets(line, sizeof(line), file))
		if (sscanf(line, "mux %lu", &messages) == 1 && messages == MESSAGES + WORKERS)
			break;
	CHECK(messages == MESSAGES + WORKERS);
	fclose(file);
	for (int i = 0; i < WORKERS; i++)
		close(sockets[i]);
	close(near);
	close(far);
}

/* A number that was closed with others is not a message socket any more. */
static void closed_ranges(void)
{
	for (int from = 0; from < 2; from++) {
		int mux = socket(AF_KCM, SOCK_DGRAM, 0), opened[64], count = 0;

		CHECK(mux >= 0 && close_range(mux, mux, CLOSE_RANGE_CLOEXEC) == 0);
		CHECK(recv(mux, &count, sizeof(count), MSG_DONTWAIT) == -1 && errno == EAGAIN);
		if (from)
			closefrom(mux);
		else
			CHECK(close_range(mux, mux, 0) == 0);
		CHECK(fcntl(mux, F_GETFD) == -1 && errno == EBADF);
		do
			CHECK(count < 64 && (opened[count] = open("/dev/null", O_RDWR)) >= 0);
		while (opened[count++] != mux);
		CHECK(write(mux, "", 1) == 1);
		while (count > 0)
			close(opened[--count]);
	}
}

int main(void)
{
	program = load_program();
	modes_and_duplicates();
	wait_for_messages_only();
	unread_bytes();
	workers();
	closed_ranges();
	return 0;
}
