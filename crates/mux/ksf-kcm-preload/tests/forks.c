/* A process that forks all the time while its threads receive: neither side may hang, lose or repeat anything. Ends with
 * 0 if all is as it should be. */
#define _GNU_SOURCE
#include "programs.h"
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/wait.h>

enum { WORKERS = 4, CONNECTIONS = 8, CHILDREN = 60, PATIENCE_S = 120 };

static int program, sockets[WORKERS], near[CONNECTIONS], far[CONNECTIONS];
static atomic_long sent_bytes, received_bytes;
static atomic_int stop;

static void connection(int mux, int *near_end, int *far_end)
{
	int ends[2];

	connect_pair(ends);
	*near_end = ends[0];
	*far_end = ends[1];
	attach_to(mux, ends[0], program);
}

static void *work(void *argument)
{
	char bytes[256];

	for (;;) {
		ssize_t length = recv(*(int *)argument, bytes, sizeof(bytes), 0);
		CHECK(length >= 4);
		if (length == 4)
			return NULL;
		received_bytes += length;
	}
}

static void *feed(void *argument)
{
	for (int i = 0; !stop; i++) {
		int length = 5 + i % 200;
		put(far[i % CONNECTIONS], length, length);
		sent_bytes += length;
	}
	return argument;
}

static void child(int number)
{
	struct pollfd polled = { .fd = sockets[0], .events = POLLIN };
	char bytes[64];

	/* Not the parent's, and it says so: it does not hang. */
	CHECK(poll(&polled, 1, -1) == 1 && polled.revents == POLLERR);
	CHECK(recv(sockets[1], bytes, sizeof(bytes), 0) == -1 && errno == EOPNOTSUPP);
	CHECK(dup2(sockets[0], 200) == 200 && write(200, "\0\0\0\5x", 5) == -1 && errno == EOPNOTSUPP);
	for (int i = 0; i < WORKERS; i++)
		close(sockets[i]);
	for (int i = 0; i < CONNECTIONS; i++) {
		close(near[i]);
		close(far[i]);
	}
	if (number % 4 == 0) {
		/* Its own are. */
		int own = socket(AF_KCM, SOCK_DGRAM, 0), near_end, far_end;
		CHECK(own >= 0);
		connection(own, &near_end, &far_end);
		put(far_end, 20, 20);
		CHECK(recv(own, bytes, sizeof(bytes), 0) == 20);
		CHECK(send(own, "\0\0\0\5x", 5, 0) == 5 && read(far_end, bytes, sizeof(bytes)) == 5);
		close(own);
	}
	if (number % 4 == 1)
		execl("/bin/true", "true", NULL);
	/* The numbers are anybody's again. */
	int ends[2];
	CHECK(pipe(ends) == 0 && write(ends[1], "x", 1) == 1 && read(ends[0], bytes, 1) == 1);
	_exit(0);
}

int main(void)
{
	pthread_t workers[WORKERS], feeder;

	alarm(PATIENCE_S);
	program = load_program();
	CHECK((sockets[0] = socket(AF_KCM, SOCK_DGRAM, 0)) >= 0);
	for (int i = 1; i < WORKERS; i++) {
		struct kcm_clone clone = { .fd = -1 };
		CHECK(ioctl(sockets[0], SIOCKCMCLONE, &clone) == 0);
		sockets[i] = clone.fd;
	}
	for (int i = 0; i < CONNECTIONS; i++)
		connection(sockets[0], &near[i], &far[i]);
	for (int i = 0; i < WORKERS; i++)
		CHECK(pthread_create(&workers[i], NULL, work, &sockets[i]) == 0);
	CHECK(pthread_create(&feeder, NULL, feed, NULL) == 0);

	for (int i = 0; i < CHILDREN; i++) {
		/* Sockets come and go meanwhile: every lock may be held. */
		int other = socket(AF_KCM, SOCK_DGRAM, 0), near_end, far_end, status;
		connection(other, &near_end, &far_end);
		pid_t pid = fork();
		CHECK(pid >= 0);
		if (!pid)
			child(i);
		close(other);
		close(near_end);
		close(far_end);
		CHECK(waitpid(pid, &status, 0) == pid && status == 0);
	}
	stop = 1;
	pthread_join(feeder, NULL);
	/* Messages of a connection may overtake each other, so the last ones are sent when the others have come. */
	while (received_bytes < sent_bytes)
		sched_yield();
	for (int i = 0; i < WORKERS; i++)
		put(far[0], 4, 4);
	for (int i = 0; i < WORKERS; i++)
		pthread_join(workers[i], NULL);
	CHECK(received_bytes == sent_bytes && sent_bytes > 0);
	return 0;
}
