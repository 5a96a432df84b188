/* A signal handler that calls what POSIX allows (signal-safety(7)) on descriptors, wherever it interrupts a program that
 * duplicates, closes and registers a message socket of AF_KCM. Ends with 0; a deadlock ends with SIGALRM.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/kcm.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define CHECK(condition) \
	do { \
		if (!(condition)) { \
			fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #condition, strerror(errno)); \
			exit(1); \
		} \
	} while (0)

/* A program that does not end in this time never will. */
#define PATIENCE_S 60
#define ROUNDS 20000

static int mux, ends[2];
static atomic_int handled, done;

static void handle(int signal)
{
	int before = errno;
	struct pollfd polled = { .fd = ends[0], .events = POLLIN };
	char byte = 0;

	(void)signal;
	/* _exit, not CHECK: standard output is not for handlers. */
	if (write(ends[1], &byte, 1) != 1 || poll(&polled, 1, 0) != 1 || read(ends[0], &byte, 1) != 1)
		_exit(2);
	int copy = dup(mux);
	if (copy < 0 || fcntl(copy, F_GETFL) < 0 || close(copy))
		_exit(3);
	copy = fcntl(mux, F_DUPFD_CLOEXEC, 50);
	if (copy < 50 || close(copy))
		_exit(4);
	handled++;
	errno = before;
}

static void *interrupt(void *thread)
{
	while (!done) {
		int before = handled;

		pthread_kill(*(pthread_t *)thread, SIGUSR1);
		while (handled == before && !done)
			sched_yield();
	}
	return NULL;
}

int main(void)
{
	struct sigaction action = { .sa_handler = handle, .sa_flags = SA_RESTART };
	struct epoll_event event = { .events = EPOLLIN };
	pthread_t self = pthread_self(), other;
	int set = epoll_create1(0);

	alarm(PATIENCE_S);
	CHECK((mux = socket(AF_KCM, SOCK_DGRAM, KCMPROTO_CONNECTED)) >= 0 && pipe(ends) == 0);
	CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
	CHECK(pthread_create(&other, NULL, interrupt, &self) == 0);
	for (int round = 0; round < ROUNDS || handled < ROUNDS / 10; round++) {
		int copy = dup(mux);

		CHECK(copy >= 0 && dup2(mux, 40) == 40);
		CHECK(epoll_ctl(set, EPOLL_CTL_ADD, copy, &event) == 0);
		CHECK(epoll_ctl(set, EPOLL_CTL_DEL, copy, NULL) == 0);
		CHECK(close(40) == 0 && close(copy) == 0);
	}
	done = 1;
	CHECK(pthread_join(other, NULL) == 0);
	return 0;
}
