/* A signal handler makes the calls on descriptors that POSIX allows there (signal-safety(7)), wherever it interrupts calls
 * of the main thread on the same message socket of AF_KCM, or malloc. Ends with 0; a deadlock ends with SIGALRM, an
 * entry of malloc by a handler with 2.
 *
 * Usage: handlers WORK HANDLER ROUNDS. WORK names the calls of the main thread, as in the list of main(). The work "first"
 * opens the first message socket of the process in a handler; "limit" opens it where no thread can be started.
 * HANDLER: restart installs the handler with SA_RESTART, end without.
 */
#define _GNU_SOURCE
#include "handlers.h"
#include "programs.h"
#include <dlfcn.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/prctl.h>

#ifndef PATIENCE_S
/* A program that does not end in this time never will. */
#define PATIENCE_S 300
#endif

int mux, ends[2], program, first[2], second[2], full[2], errors;
atomic_int handled;
__thread volatile int is_handling;
static int rounds, third[2];
static atomic_int done;
/* The peer sends only after a handler has run. */
static int is_slow;

/* This program has started this thread. */
static __thread int is_own;
/* The next entry of malloc raises a signal. */
static volatile int raises;
static volatile int refuses_threads;

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void __libc_free(void *);

static void enter_malloc(void)
{
	CHECK_HERE(!is_handling);
	/* No thread of the library's waits for a lock of malloc: a handler may wait for that thread. */
	CHECK_HERE(is_own || gettid() == getpid());
	if (raises) {
		raises = 0;
		raise(SIGUSR1);
	}
}

/* libc and all libraries call these. */
void *malloc(size_t size)
{
	enter_malloc();
	return __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
	enter_malloc();
	return __libc_calloc(count, size);
}

void *realloc(void *block, size_t size)
{
	enter_malloc();
	return __libc_realloc(block, size);
}

void free(void *block)
{
	enter_malloc();
	__libc_free(block);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument)
{
	int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) = dlsym(RTLD_NEXT, "pthread_create");

	CHECK_HERE(!is_handling);
	return refuses_threads ? EAGAIN : real(thread, attributes, start, argument);
}

static void *interrupt(void *thread)
{
	is_own = 1;
	while (!done) {
		int before = handled;

		pthread_kill(*(pthread_t *)thread, SIGUSR1);
		while (handled == before && !done)
			sched_yield();
	}
	return NULL;
}

/* The peer: sends messages as long as they are taken, and reads all that comes; a slow one goes on after a run of the handler.
 */
static void *serve_peer(void *unused)
{
	char message[SHORT], bytes[1 << 16];
	size_t sent = 0;
	int before = 0;

	is_own = 1;
	frame(message, SHORT);
	while (!done) {
		struct pollfd polled = { .fd = first[1], .events = POLLIN | POLLOUT };

		if (is_slow && handled == before && !sent) {
			sched_yield();
			continue;
		}
		before = handled;
		CHECK(poll(&polled, 1, 100) >= 0);
		if (polled.revents & POLLIN)
			CHECK(recv(first[1], bytes, sizeof(bytes), MSG_DONTWAIT) > 0);
		if (polled.revents & POLLOUT) {
			ssize_t count = send(first[1], message + sent, SHORT - sent, MSG_DONTWAIT);

			if (count > 0)
				sent = (sent + count) % SHORT;
		}
	}
	return unused;
}

static void work_on_descriptors(void)
{
	static int set = -1;
	struct epoll_event event = { .events = EPOLLIN };
	int copy = dup(mux);

	if (set < 0)
		CHECK((set = epoll_create1(0)) >= 0);
	CHECK(copy >= 0 && dup2(mux, 840) == 840 && dup3(mux, 843, O_CLOEXEC) == 843 && close(843) == 0);
	CHECK(epoll_ctl(set, EPOLL_CTL_ADD, copy, &event) == 0);
	CHECK(epoll_ctl(set, EPOLL_CTL_DEL, copy, NULL) == 0);
	CHECK(close(840) == 0 && close(copy) == 0);
	CHECK(fcntl(mux, F_DUPFD_CLOEXEC, 900) == 900 && fcntl64(mux, F_DUPFD, 900) == 901);
	CHECK(close_range(900, 901, 0) == 0 && dup2(mux, 900) == 900);
	closefrom(900);
	CHECK(fcntl(900, F_GETFD) < 0 && errno == EBADF);
}

static void work_on_messages(void)
{
	static int lent[2] = { -1, -1 };
	char sent[SHORT], received[3][LONG];
	struct iovec parts[3], sent_part = { .iov_base = sent, .iov_len = SHORT };
	struct mmsghdr headers[3] = { 0 };

	frame(sent, SHORT);
	if (lent[0] < 0)
		CHECK(pipe(lent) == 0);
	CHECK(is_usual(send(mux, sent, SHORT, 0)));
	ssize_t count = recv(mux, received[0], LONG, 0);
	CHECK(is_usual(count) && (count < 0 || (count == SHORT && !memcmp(received[0], sent, SHORT))));
	CHECK(is_usual(recv(mux, received[0], LONG, MSG_DONTWAIT)));
	for (int at = 0; at < 3; at++)
		headers[at].msg_hdr = (struct msghdr){ .msg_iov = &sent_part, .msg_iovlen = 1 };
	CHECK(is_usual(sendmmsg(mux, headers, 3, 0)));
	for (int at = 0; at < 3; at++) {
		parts[at] = (struct iovec){ .iov_base = received[at], .iov_len = LONG };
		headers[at].msg_hdr = (struct msghdr){ .msg_iov = &parts[at], .msg_iovlen = 1 };
	}
	count = recvmmsg(mux, headers, 3, 0, NULL);
	CHECK(is_usual(count));
	for (int at = 0; at < count; at++)
		CHECK(headers[at].msg_len == SHORT && !memcmp(received[at], sent, SHORT));
	count = splice(mux, NULL, lent[1], NULL, LONG, 0);
	CHECK(is_usual(count) && (count < 0 || read(lent[0], received[0], LONG) == SHORT));
}

static void work_on_other_names(void)
{
	char sent[SHORT], received[LONG];
	struct iovec part = { .iov_base = received, .iov_len = LONG }, sent_part = { .iov_base = sent, .iov_len = SHORT };
	struct msghdr header = { .msg_iov = &part, .msg_iovlen = 1 }, sent_header = { .msg_iov = &sent_part, .msg_iovlen = 1 };

	frame(sent, SHORT);
	CHECK(is_usual(write(mux, sent, SHORT)) && is_usual(writev(mux, &sent_part, 1)));
	CHECK(is_usual(sendto(mux, sent, SHORT, 0, NULL, 0)) && is_usual(sendmsg(mux, &sent_header, 0)));
	CHECK(is_usual(read(mux, received, LONG)) && is_usual(readv(mux, &part, 1)));
	CHECK(is_usual(recvfrom(mux, received, LONG, 0, NULL, NULL)) && is_usual(recvmsg(mux, &header, 0)));
	CHECK(is_usual(__read_chk(mux, received, LONG, LONG)) && is_usual(__recv_chk(mux, received, LONG, LONG, 0)));
	CHECK(is_usual(__recvfrom_chk(mux, received, LONG, LONG, 0, NULL, NULL)));
}

static void work_on_refusals(void)
{
	struct sockaddr_storage address;
	socklen_t length = sizeof(address);

	CHECK(bind(mux, (void *)&address, 0) < 0 && errno == EOPNOTSUPP);
	CHECK(connect(mux, (void *)&address, 0) < 0 && errno == EOPNOTSUPP);
	CHECK(listen(mux, 1) < 0 && errno == EOPNOTSUPP);
	CHECK(accept(mux, NULL, NULL) < 0 && errno == EOPNOTSUPP);
	CHECK(accept4(mux, NULL, NULL, 0) < 0 && errno == EOPNOTSUPP);
	CHECK(shutdown(mux, SHUT_RD) < 0 && errno == EOPNOTSUPP);
	CHECK(getsockname(mux, (void *)&address, &length) < 0 && errno == EOPNOTSUPP);
	CHECK(getpeername(mux, (void *)&address, &length) < 0 && errno == EOPNOTSUPP);
}

static void work_on_files(void)
{
	int fds[] = { open(FILE_OF_KCM, O_RDONLY), open64(FILE_OF_KCM "_stats", O_RDONLY),
		openat(AT_FDCWD, FILE_OF_KCM, O_RDONLY), openat64(AT_FDCWD, FILE_OF_KCM, O_RDONLY) };
	FILE *streams[] = { fopen(FILE_OF_KCM, "r"), fopen64(FILE_OF_KCM "_stats", "r") };
	char bytes[LONG];

	CHECK(access(FILE_OF_KCM, R_OK) == 0);
	for (size_t at = 0; at < sizeof(fds) / sizeof(fds[0]); at++)
		CHECK(fds[at] >= 0 && read(fds[at], bytes, LONG) > 0 && close(fds[at]) == 0);
	for (size_t at = 0; at < sizeof(streams) / sizeof(streams[0]); at++)
		CHECK(streams[at] && fgets(bytes, LONG, streams[at]) && fclose(streams[at]) == 0);
}

static void work_on_programs(void)
{
	CHECK(close(load_program()) == 0);
}

static void work_on_handlers(void)
{
	sighandler_t (*const all[])(int, sighandler_t) = { signal, bsd_signal, ssignal, sysv_signal, __sysv_signal, sigset };
	struct sigaction action = { .sa_handler = handle };

	for (size_t at = 0; at < sizeof(all) / sizeof(all[0]); at++)
		CHECK(all[at](SIGUSR2, handle) != SIG_ERR);
	CHECK(sigaction(SIGUSR2, &action, NULL) == 0);
}

/* Takes the locks of the library's, so that children come while they are held. */
static void *contend(void *unused)
{
	struct kcm_unattach unattach = { .fd = third[0] };
	char bytes[LONG];

	is_own = 1;
	while (!done) {
		int own = socket(AF_KCM, SOCK_DGRAM, KCMPROTO_CONNECTED), loaded = load_program(), copy = dup(loaded);

		CHECK(own >= 0 && copy >= 0);
		attach_to(own, third[0], loaded);
		CHECK(ioctl(own, SIOCKCMUNATTACH, &unattach) == 0 && close(copy) == 0 && close(loaded) == 0);
		(void)!recv(own, bytes, LONG, MSG_DONTWAIT);
		CHECK(close(own) == 0);
	}
	return unused;
}

static void wait_for_child(pid_t child)
{
	int status;

	CHECK(child > 0);
	while (waitpid(child, &status, 0) < 0)
		CHECK(errno == EINTR);
	CHECK(status == 0);
}

static void work_on_processes(void)
{
	static pthread_t other;
	pid_t child;

	if (!other) {
		connect_pair(third);
		CHECK(pthread_create(&other, NULL, contend, NULL) == 0);
	}
	if ((child = fork()) == 0) {
		char bytes[SHORT];
		int pair[2], own = socket(AF_KCM, SOCK_DGRAM, KCMPROTO_CONNECTED);

		CHECK(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0);
		connect_pair(pair);
		attach_to(own, pair[0], load_program());
		frame(bytes, SHORT);
		CHECK(send(pair[1], bytes, SHORT, 0) == SHORT && recv(own, bytes, SHORT, 0) == SHORT && close(own) == 0);
		_exit(0);
	}
	wait_for_child(child);
	start_process(0);
	if ((child = vfork()) == 0) {
		use_what_is_inherited();
		_exit(0);
	}
	wait_for_child(child);
}

static void work_on_waits(void)
{
	char sent[LONG], received[LONG];

	frame(sent, LONG);
	for (int at = 0; at < 8; at++)
		CHECK(is_usual(send(mux, sent, LONG, 0)));
	CHECK(is_usual(recv(mux, received, LONG, 0)));
}

/* Ends only if the handler runs while it waits for room in the pipe. */
static void work_on_splice(void)
{
	char bytes[LONG] = { 0 };
	ssize_t count;

	CHECK(fcntl(full[1], F_SETFL, O_NONBLOCK) == 0);
	while (write(full[1], bytes, LONG) > 0)
		;
	CHECK(errno == EAGAIN && fcntl(full[1], F_SETFL, 0) == 0);
	count = splice(mux, NULL, full[1], NULL, LONG, 0);
	CHECK(count == SHORT || (count < 0 && errno == EINTR));
}

static void work_on_sockets(void)
{
	struct kcm_unattach unattach = { .fd = second[0] };
	struct kcm_clone clone;
	struct timeval forever = { 0 };
	socklen_t length = sizeof(forever);
	char bytes[LONG];

	CHECK(ioctl(mux, SIOCKCMCLONE, &clone) == 0 && close(clone.fd) == 0);
	attach_to(mux, second[0], program);
	CHECK(getsockopt(mux, SOL_SOCKET, SO_SNDTIMEO, &forever, &length) == 0);
	CHECK(setsockopt(mux, SOL_SOCKET, SO_SNDTIMEO, &forever, length) == 0);
	CHECK(ioctl(mux, SIOCKCMUNATTACH, &unattach) == 0);
	while (recv(second[1], bytes, sizeof(bytes), MSG_DONTWAIT) > 0)
		;
}

static void work_on_events(void)
{
	static int set = -1;
	struct epoll_event event = { .events = EPOLLIN }, found[4];
	struct pollfd polled = { .fd = mux, .events = POLLIN };
	fd_set readable;

	if (set < 0) {
		CHECK((set = epoll_create1(0)) >= 0);
		CHECK(epoll_ctl(set, EPOLL_CTL_ADD, mux, &event) == 0);
	}
	CHECK(is_usual(poll(&polled, 1, 10)));
	CHECK(is_usual(ppoll(&polled, 1, NULL, NULL)));
	CHECK(is_usual(__poll_chk(&polled, 1, 10, sizeof(polled))));
	CHECK(is_usual(__ppoll_chk(&polled, 1, NULL, NULL, sizeof(polled))));
	FD_ZERO(&readable);
	FD_SET(mux, &readable);
	CHECK(is_usual(select(mux + 1, &readable, NULL, NULL, NULL)));
	FD_ZERO(&readable);
	FD_SET(mux, &readable);
	CHECK(is_usual(pselect(mux + 1, &readable, NULL, NULL, NULL, NULL)));
	CHECK(epoll_ctl(set, EPOLL_CTL_MOD, mux, &event) == 0);
	CHECK(is_usual(epoll_wait(set, found, 4, 10)));
	CHECK(is_usual(epoll_pwait(set, found, 4, 10, NULL)));
	CHECK(is_usual(epoll_pwait2(set, found, 4, NULL, NULL)));
}

static void work_on_memory(void)
{
	/* The first block shows malloc that such blocks come and go: they come from its arena then. */
	char *volatile blocks[4];

	for (int at = 0; at < 4; at++) {
		CHECK((blocks[at] = malloc(200000 + at * 1000)));
		blocks[at][0] = 'x';
	}
	for (int at = 0; at < 4; at++)
		free(blocks[at]);
}

static void interrupt_malloc(void)
{
	int before = handled;
	char *volatile block;

	raises = 1;
	CHECK((block = malloc(1)));
	free(block);
	CHECK(handled == before + 1);
}

/* No call on message sockets comes before those of the handler: in this process, and in a child. */
static void open_first_in_handlers(const struct sigaction *action)
{
	int status;

	if (action->sa_flags & SA_RESTART)
		CHECK(signal(SIGUSR1, action->sa_handler) == SIG_DFL);
	else
		CHECK(sigaction(SIGUSR1, action, NULL) == 0);
	interrupt_malloc();
	pid_t child = fork();
	CHECK(child >= 0);
	if (!child) {
		interrupt_malloc();
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	interrupt_malloc();
}

static void try_to_open(int error)
{
	int fd = socket(AF_KCM, SOCK_DGRAM, KCMPROTO_CONNECTED);

	CHECK(error ? fd < 0 && errno == error : fd >= 0 && close(fd) == 0);
}

/* A call reports that no thread could be started, whether or not there are handlers. */
static void open_without_threads(const struct sigaction *action)
{
	refuses_threads = 1;
	try_to_open(EAGAIN);
	CHECK(sigaction(SIGUSR1, action, NULL) == 0);
	try_to_open(EAGAIN);
	refuses_threads = 0;
	CHECK(sigaction(SIGUSR1, action, NULL) == 0);
	interrupt_malloc();
	try_to_open(0);
}

int main(int count, char **arguments)
{
	static const struct {
		const char *name;
		void (*work)(void);
	} all[] = {
		{ "descriptors", work_on_descriptors }, { "messages", work_on_messages }, { "waits", work_on_waits },
		{ "splice", work_on_splice }, { "sockets", work_on_sockets }, { "events", work_on_events },
		{ "memory", work_on_memory }, { "names", work_on_other_names }, { "refusals", work_on_refusals },
		{ "files", work_on_files }, { "programs", work_on_programs }, { "handlers", work_on_handlers },
		{ "processes", work_on_processes },
	};
	struct sigaction action = { .sa_handler = handle };
	pthread_t self = pthread_self(), other, peer;
	void (*work)(void) = NULL;

	CHECK(count == 4);
	rounds = atoi(arguments[3]);
	for (size_t at = 0; at < sizeof(all) / sizeof(all[0]); at++)
		if (!strcmp(all[at].name, arguments[1]))
			work = all[at].work;
	CHECK(!strcmp(arguments[2], "restart") || !strcmp(arguments[2], "end"));
	action.sa_flags = arguments[2][0] == 'r' ? SA_RESTART : 0;
	alarm(PATIENCE_S);
	CHECK((errors = dup(STDERR_FILENO)) >= 0);
	if (!work) {
		int is_first = !strcmp(arguments[1], "first");

		CHECK(is_first || !strcmp(arguments[1], "limit"));
		action.sa_handler = open_first;
		(is_first ? open_first_in_handlers : open_without_threads)(&action);
		return 0;
	}
	is_slow = work == work_on_waits;
	CHECK((mux = socket(AF_KCM, SOCK_DGRAM, KCMPROTO_CONNECTED)) >= 0 && pipe(ends) == 0);
	CHECK(pipe(full) == 0 && fcntl(full[0], F_SETFL, O_NONBLOCK) == 0);
	program = load_program();
	connect_pair(first);
	connect_pair(second);
	attach_to(mux, first[0], program);
	CHECK(pthread_create(&peer, NULL, serve_peer, NULL) == 0);
	CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
	CHECK(pthread_create(&other, NULL, interrupt, &self) == 0);
	for (int round = 0; round < rounds || handled < rounds; round++)
		work();
	done = 1;
	CHECK(pthread_join(other, NULL) == 0 && pthread_join(peer, NULL) == 0);
	return 0;
}
