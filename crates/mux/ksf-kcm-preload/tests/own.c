/* A program that closes and replaces descriptors which it does not know: those of the library must survive, or leave the
 * program's alone. Ends with 0 if all is as it should be. */
#define _GNU_SOURCE
#include "programs.h"
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

enum { CONNECTIONS = 2, FILES = 60, PATIENCE_MS = 60000, NUMBERS = 8192, FIRST = 4096, ROUNDS = 300 };

static int program, mux, loop, near[CONNECTIONS], far[CONNECTIONS], files[FILES];
static char known[NUMBERS];

static int know(int fd)
{
	CHECK(fd >= 0 && fd < NUMBERS);
	known[fd] = 1;
	return fd;
}

static void pair(int ends[2])
{
	connect_pair(ends);
	know(ends[0]);
	know(ends[1]);
}

static void connection(int at)
{
	struct epoll_event event = { .events = 0 };
	int ends[2];

	pair(ends);
	near[at] = ends[0];
	far[at] = ends[1];
	attach_to(mux, near[at], program);
	CHECK(epoll_ctl(loop, EPOLL_CTL_ADD, near[at], &event) == 0);
}

/* A message from each peer, and one to a peer, as long as this. */
static void exchange(uint32_t length)
{
	char bytes[256];
	struct pollfd polled = { .fd = mux, .events = POLLIN };

	for (int i = 0; i < CONNECTIONS; i++) {
		put(far[i], length, length);
		CHECK(poll(&polled, 1, PATIENCE_MS) == 1 && polled.revents == POLLIN);
		CHECK(recv(mux, bytes, sizeof(bytes), 0) == (ssize_t)length);
		CHECK(send(mux, bytes, length, 0) == (ssize_t)length);
		CHECK(recv(far[i], bytes, length, MSG_WAITALL) == (ssize_t)length);
	}
}

/* All numbers that the program does not know. */
static void take_away(const char *way)
{
	int null = know(open("/dev/null", O_RDWR)), highest = NUMBERS - 1;

	while (!known[highest])
		highest--;
	for (int fd = 3; fd < NUMBERS; fd++) {
		int is_open = fcntl(fd, F_GETFD) >= 0;

		if (known[fd])
			continue;
		if (!strcmp(way, "close"))
			CHECK(close(fd) == -1 && errno == EBADF);
		else if (!strcmp(way, "close_range"))
			CHECK(close_range(fd, fd, 0) == 0);
		else if (is_open && !strcmp(way, "dup2"))
			CHECK(dup2(null, fd) == -1 && errno == EBUSY);
		else if (is_open && !strcmp(way, "dup3"))
			CHECK(dup3(null, fd, O_CLOEXEC) == -1 && errno == EBUSY);
	}
	if (!strcmp(way, "close_range"))
		CHECK(close_range(highest + 1, ~0U, 0) == 0);
	if (!strcmp(way, "closefrom"))
		closefrom(highest + 1);
	known[null] = 0;
	close(null);
}

static void open_files(void)
{
	for (int i = 0; i < FILES; i++)
		files[i] = know(memfd_create("file", 0));
}

/* True if they are as they were opened. */
static int are_untouched(void)
{
	for (int i = 0; i < FILES; i++)
		if (lseek(files[i], 0, SEEK_END) != 0) {
			fprintf(stderr, "descriptor %d: %s\n", files[i], strerror(errno));
			return 0;
		}
	return 1;
}

static int none_is_open(void)
{
	for (int fd = 3; fd < NUMBERS; fd++)
		if (fcntl(fd, F_GETFD) >= 0) {
			fprintf(stderr, "descriptor %d is open\n", fd);
			return 0;
		}
	return 1;
}

static void ends_well(pid_t child)
{
	int status = -1;

	CHECK(child > 0 && waitpid(child, &status, 0) == child);
	CHECK(status == 0);
}

/* The child has none of the library's, and all of the program's. */
static void children(char *self)
{
	posix_spawn_file_actions_t actions;
	char *arguments[] = { self, "spawned", NULL };
	pid_t child = fork();

	if (child == 0) {
		for (int fd = 3; fd < NUMBERS; fd++)
			if ((fcntl(fd, F_GETFD) >= 0) != known[fd]) {
				fprintf(stderr, "descriptor %d in the child\n", fd);
				_exit(1);
			}
		if (!are_untouched())
			_exit(1);
		closefrom(3);
		_exit(!none_is_open());
	}
	ends_well(child);
	CHECK(posix_spawn_file_actions_init(&actions) == 0);
	for (int fd = 4000; fd < 4200; fd++)
		CHECK(posix_spawn_file_actions_adddup2(&actions, 1, fd) == 0);
	CHECK(posix_spawn_file_actions_addclosefrom_np(&actions, 3) == 0);
	CHECK(posix_spawn(&child, self, &actions, NULL, arguments, environ) == 0);
	posix_spawn_file_actions_destroy(&actions);
	ends_well(child);
}

static void survive(const char *way, char *self)
{
	struct epoll_event found;

	mux = know(socket(AF_KCM, SOCK_DGRAM, 0));
	loop = know(epoll_create1(EPOLL_CLOEXEC));
	for (int i = 0; i < CONNECTIONS; i++)
		connection(i);
	exchange(20);
	take_away(way);
	open_files();
	exchange(30);
	children(self);
	exchange(40);
	/* What ends a connection closes none of them. */
	shutdown(far[0], SHUT_WR);
	CHECK(epoll_wait(loop, &found, 1, PATIENCE_MS) == 1 && found.events & EPOLLERR);
	for (int i = 0; i < CONNECTIONS; i++) {
		known[near[i]] = known[far[i]] = 0;
		close(near[i]);
		close(far[i]);
	}
	known[mux] = known[loop] = 0;
	close(mux);
	close(loop);
	CHECK(are_untouched());
	for (int i = 0; i < FILES; i++) {
		known[files[i]] = 0;
		close(files[i]);
	}
}

/* A connection that has two numbers is the parent's by both. */
static void fork_after_dup(void)
{
	mux = know(socket(AF_KCM, SOCK_DGRAM, 0));
	loop = know(epoll_create1(EPOLL_CLOEXEC));
	for (int i = 0; i < CONNECTIONS; i++)
		connection(i);
	know(dup(near[0]));
	know(dup(near[1]));
	open_files();
	pid_t child = fork();
	if (child == 0)
		_exit(!are_untouched());
	ends_well(child);
	exchange(20);
	CHECK(are_untouched());
}

static atomic_int ended;

/* A program that closes a range of numbers one by one: to it, none of them is open. */
static void *close_high_numbers(void *unused)
{
	while (!ended)
		for (int fd = FIRST; fd < FIRST + 64; fd++)
			CHECK(close(fd) == -1 && errno == EBADF);
	return unused;
}

static void attach_while_numbers_are_closed(void)
{
	pthread_t closer;

	mux = know(socket(AF_KCM, SOCK_DGRAM, 0));
	loop = know(epoll_create1(EPOLL_CLOEXEC));
	CHECK(pthread_create(&closer, NULL, close_high_numbers, NULL) == 0);
	for (int round = 0; round < ROUNDS; round++) {
		for (int i = 0; i < CONNECTIONS; i++)
			connection(i);
		exchange(20);
		for (int i = 0; i < CONNECTIONS; i++) {
			close(near[i]);
			close(far[i]);
		}
	}
	ended = 1;
	CHECK(pthread_join(closer, NULL) == 0);
}

static int lingering, peer;
static pthread_t closer;

static void *close_lingering(void *way)
{
	if (!strcmp(way, "long dup2"))
		CHECK(dup2(program, lingering) == lingering);
	else if (!strcmp(way, "long close"))
		CHECK(close(lingering) == 0);
	else
		CHECK(close_range(lingering, lingering, 0) == 0);
	return NULL;
}

/* Another thread closes a number from this one on. Returns when the kernel waits in that call: it has freed or replaced the
 * number, and waits until the peer has got all bytes. */
static void begin_long_close(char *way, int first)
{
	struct linger linger = { .l_onoff = 1, .l_linger = 3600 };
	struct stat before, now;
	char bytes[4096] = { 0 };
	int ends[2];

	pair(ends);
	CHECK(setsockopt(ends[0], SOL_SOCKET, SO_LINGER, &linger, sizeof(linger)) == 0);
	while (send(ends[0], bytes, sizeof(bytes), MSG_DONTWAIT) > 0)
		;
	lingering = know(fcntl(ends[0], F_DUPFD, first));
	known[ends[0]] = 0;
	close(ends[0]);
	peer = ends[1];
	CHECK(fstat(lingering, &before) == 0);
	CHECK(pthread_create(&closer, NULL, close_lingering, way) == 0);
	while (fstat(lingering, &now) == 0 && now.st_ino == before.st_ino)
		sched_yield();
}

static void end_long_close(void)
{
	char bytes[4096];

	while (recv(peer, bytes, sizeof(bytes), 0) > 0)
		;
	CHECK(pthread_join(closer, NULL) == 0);
}

/* Others attach during a call that closes no range of numbers among those of the library. */
static void attach_during_a_long_close(char *way)
{
	mux = know(socket(AF_KCM, SOCK_DGRAM, 0));
	loop = know(epoll_create1(EPOLL_CLOEXEC));
	begin_long_close(way, strcmp(way, "long close_range") ? FIRST + 1000 : 3);
	for (int i = 0; i < CONNECTIONS; i++)
		connection(i);
	exchange(20);
	end_long_close();
}

static atomic_int receiver;

static void ignore(int signal)
{
	(void)signal;
}

static void *receive(void *unused)
{
	char bytes[256];

	receiver = gettid();
	CHECK(recv(mux, bytes, sizeof(bytes), 0) == 20);
	return unused;
}

static int sleeps(int thread)
{
	char path[64], state;

	snprintf(path, sizeof(path), "/proc/self/task/%d/stat", thread);
	FILE *file = fopen(path, "r");
	CHECK(file && fscanf(file, "%*d (%*[^)]) %c", &state) == 1);
	fclose(file);
	return state == 'S';
}

/* Another thread waits for a message, with a signal whose handler does not end that. */
static void receive_in_a_thread(void)
{
	struct sigaction action = { .sa_handler = ignore, .sa_flags = SA_RESTART };
	pthread_t thread;

	CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
	CHECK(pthread_create(&thread, NULL, receive, NULL) == 0);
	while (!receiver || !sleeps(receiver))
		sched_yield();
	put(far[1], 20, 20);
	CHECK(pthread_join(thread, NULL) == 0);
}

/* Other threads wait for no call that closes a range of numbers among those of the library. */
static void go_on_during_a_long_close_range(void)
{
	mux = know(socket(AF_KCM, SOCK_DGRAM, 0));
	loop = know(epoll_create1(EPOLL_CLOEXEC));
	for (int i = 0; i < CONNECTIONS; i++)
		connection(i);
	begin_long_close("long close_range", FIRST + 1000);
	CHECK(dup2(program, FIRST + 2000) == FIRST + 2000);
	CHECK(dup2(loop, FIRST + 2000) == FIRST + 2000);
	CHECK(close(FIRST + 2000) == 0);
	CHECK(close(FIRST + 2000) == -1 && errno == EBADF);
	CHECK(close_range(FIRST + 2000, FIRST + 2000, 0) == 0);
	/* The library closes its own. */
	close(near[0]);
	close(far[0]);
	receive_in_a_thread();
	pid_t child = fork();
	if (child == 0)
		_exit(socket(AF_KCM, SOCK_DGRAM, 0) < 0);
	ends_well(child);
	end_long_close();
	connection(0);
	exchange(20);
}

int main(int count, char **arguments)
{
	if (count == 2 && !strcmp(arguments[1], "spawned"))
		return !none_is_open();
	CHECK(count == 2);
	closefrom(3);
	program = know(load_program());
	if (!strcmp(arguments[1], "dup"))
		fork_after_dup();
	else if (!strcmp(arguments[1], "loop"))
		attach_while_numbers_are_closed();
	else if (!strcmp(arguments[1], "range"))
		go_on_during_a_long_close_range();
	else if (!strncmp(arguments[1], "long ", 5))
		attach_during_a_long_close(arguments[1]);
	else
		survive(arguments[1], arguments[0]);
	return 0;
}
