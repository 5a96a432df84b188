/* A signal handler makes the calls on descriptors that POSIX allows there (signal-safety(7)), wherever it interrupts calls
 * of the main thread on the same message socket of AF_KCM, or malloc. Ends with 0; a deadlock ends with SIGALRM, an
 * entry of malloc by a handler with 2.
 *
 * Usage: handlers WORK HANDLER ROUNDS. WORK names the calls of the main thread: descriptors, messages, waits, splice,
 * sockets, events or memory. The work "first" opens the first message socket of the process in a handler; "limit" opens
 * it where no thread can be started.
 * HANDLER: restart installs the handler with SA_RESTART, end without.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/bpf.h>
#include <linux/kcm.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(condition) \
	do { \
		if (!(condition)) { \
			fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #condition, strerror(errno)); \
			exit(1); \
		} \
	} while (0)

/* In a handler: exit() and stdio are not allowed there. */
#define CHECK_HERE(condition) \
	do { \
		if (!(condition)) \
			report_and_exit(__LINE__); \
	} while (0)

#ifndef PATIENCE_S
/* A program that does not end in this time never will. */
#define PATIENCE_S 300
#endif
#define SHORT 8
/* Longer than the blocks that malloc keeps for each thread without a lock. */
#define LONG 4096

static int mux, ends[2], program, rounds;
static int first[2], second[2];
/* Full when a splice begins; the handler empties it. */
static int full[2];
static atomic_int handled, done;
/* The peer sends only after a handler has run. */
static int is_slow;

static void report_and_exit(int line)
{
	char digits[] = "line 0000 of the handler\n";

	for (int at = 8; line; line /= 10)
		digits[at--] = '0' + line % 10;
	if (write(STDERR_FILENO, digits, sizeof(digits) - 1) < 0)
		_exit(3);
	_exit(2);
}

/* A handler runs in this thread. */
static __thread volatile int is_handling;
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

/* True if the call succeeded, or failed as calls may that do not wait, or on connections that come and go. */
static int is_usual(ssize_t result)
{
	return result >= 0 || errno == EAGAIN || errno == EINTR || errno == ENOTCONN || errno == ECONNRESET;
}

static void frame(char *message, uint32_t length)
{
	uint32_t header = htonl(length);

	memset(message, 'x', length);
	memcpy(message, &header, sizeof(header));
}

static void use_pipe_and_copies(void)
{
	struct pollfd polled = { .fd = ends[0], .events = POLLIN };
	char byte = 0;

	CHECK_HERE(write(ends[1], &byte, 1) == 1 && poll(&polled, 1, 0) == 1 && read(ends[0], &byte, 1) == 1);
	int copy = dup(mux);
	CHECK_HERE(copy >= 0 && fcntl(copy, F_GETFL) >= 0 && close(copy) == 0);
	CHECK_HERE(dup2(mux, 41) == 41 && close(41) == 0);
	copy = fcntl(mux, F_DUPFD_CLOEXEC, 50);
	CHECK_HERE(copy >= 50 && close(copy) == 0);
}

static void exchange_messages(void)
{
	char bytes[LONG];
	struct iovec part = { .iov_base = bytes, .iov_len = sizeof(bytes) };
	struct msghdr header = { .msg_iov = &part, .msg_iovlen = 1 };
	int flags = fcntl(mux, F_GETFL);

	CHECK_HERE(is_usual(recv(mux, bytes, sizeof(bytes), MSG_DONTWAIT)));
	CHECK_HERE(is_usual(recvfrom(mux, bytes, sizeof(bytes), MSG_DONTWAIT | MSG_PEEK, NULL, NULL)));
	CHECK_HERE(is_usual(recvmsg(mux, &header, MSG_DONTWAIT)));
	CHECK_HERE(flags >= 0 && fcntl(mux, F_SETFL, flags | O_NONBLOCK) == 0);
	CHECK_HERE(is_usual(read(mux, bytes, sizeof(bytes))));
	frame(bytes, LONG);
	CHECK_HERE(is_usual(write(mux, bytes, sizeof(bytes))));
	CHECK_HERE(fcntl(mux, F_SETFL, flags) == 0);
	CHECK_HERE(is_usual(sendmsg(mux, &header, MSG_DONTWAIT)));
	frame(bytes, SHORT);
	CHECK_HERE(is_usual(send(mux, bytes, SHORT, MSG_DONTWAIT)));
	CHECK_HERE(is_usual(sendto(mux, bytes, SHORT, MSG_DONTWAIT, NULL, 0)));
}

static void wait_for_nothing(void)
{
	struct pollfd polled = { .fd = mux, .events = POLLIN | POLLOUT };
	struct timespec none = { 0 };
	struct timeval none_either = { 0 };
	fd_set readable;

	CHECK_HERE(is_usual(poll(&polled, 1, 0)));
	CHECK_HERE(is_usual(ppoll(&polled, 1, &none, NULL)));
	FD_ZERO(&readable);
	FD_SET(mux, &readable);
	CHECK_HERE(is_usual(select(mux + 1, &readable, NULL, NULL, &none_either)));
	FD_SET(mux, &readable);
	CHECK_HERE(is_usual(pselect(mux + 1, &readable, NULL, NULL, &none, NULL)));
}

static void use_options_and_the_rest(void)
{
	struct kcm_clone clone;
	struct sockaddr_storage address;
	struct stat status;
	struct timeval forever = { 0 };
	socklen_t length = sizeof(forever);
	int on = 0;

	CHECK_HERE(getsockopt(mux, SOL_SOCKET, SO_RCVTIMEO, &forever, &length) == 0);
	CHECK_HERE(setsockopt(mux, SOL_SOCKET, SO_RCVTIMEO, &forever, sizeof(forever)) == 0);
	CHECK_HERE(setsockopt(mux, SOL_KCM, KCM_RECV_DISABLE, &on, sizeof(on)) == 0);
	CHECK_HERE(ioctl(mux, SIOCKCMCLONE, &clone) == 0 && close(clone.fd) == 0);
	CHECK_HERE(fstat(mux, &status) == 0);
	/* No message socket has these: only that they return counts. */
	length = sizeof(address);
	(void)!lseek(mux, 0, SEEK_CUR);
	(void)!getsockname(mux, (void *)&address, &length);
	(void)!getpeername(mux, (void *)&address, &length);
	(void)!bind(mux, (void *)&address, 0);
	(void)!connect(mux, (void *)&address, 0);
	(void)!listen(mux, 1);
	(void)!accept(mux, NULL, NULL);
	(void)!shutdown(mux, SHUT_RD);
	/* A connection that is attached: what it has belongs to the multiplexor. */
	(void)!recv(first[0], &address, 1, MSG_DONTWAIT | MSG_PEEK);
}

/* Two multiplexors begin and end. */
static void open_and_close_sockets(void)
{
	int own = socket(AF_KCM, SOCK_DGRAM, KCMPROTO_CONNECTED), other = socket(AF_KCM, SOCK_SEQPACKET, KCMPROTO_CONNECTED);

	CHECK_HERE(own >= 0 && other >= 0 && close(own) == 0 && close(other) == 0);
}

static void open_first(int signal)
{
	(void)signal;
	is_handling = 1;
	open_and_close_sockets();
	is_handling = 0;
	handled++;
}

static void handle(int signal)
{
	int before = errno;
	char bytes[LONG];

	(void)signal;
	is_handling = 1;
	while (read(full[0], bytes, sizeof(bytes)) > 0)
		;
	use_pipe_and_copies();
	exchange_messages();
	wait_for_nothing();
	use_options_and_the_rest();
	open_and_close_sockets();
	is_handling = 0;
	handled++;
	errno = before;
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

static void load(void)
{
	/* The length of a message is its first word. */
	static const struct bpf_insn code[] = {
		{ .code = BPF_ALU64 | BPF_MOV | BPF_X, .dst_reg = 6, .src_reg = 1 },
		{ .code = BPF_LD | BPF_ABS | BPF_W },
		{ .code = BPF_JMP | BPF_EXIT },
	};
	union bpf_attr attr = {
		.prog_type = BPF_PROG_TYPE_SOCKET_FILTER,
		.insns = (uintptr_t)code,
		.insn_cnt = sizeof(code) / sizeof(code[0]),
		.license = (uintptr_t)"GPL",
	};

	CHECK((program = syscall(SYS_bpf, BPF_PROG_LOAD, &attr, sizeof(attr))) >= 0);
}

static void connect_pair(int pair[2])
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t length = sizeof(address);
	int listener = socket(AF_INET, SOCK_STREAM, 0);

	CHECK((pair[1] = socket(AF_INET, SOCK_STREAM, 0)) >= 0);
	CHECK(bind(listener, (void *)&address, length) == 0 && listen(listener, 1) == 0);
	CHECK(getsockname(listener, (void *)&address, &length) == 0);
	CHECK(connect(pair[1], (void *)&address, length) == 0);
	CHECK((pair[0] = accept(listener, NULL, NULL)) >= 0);
	CHECK(close(listener) == 0);
}

static void attach(int fd)
{
	struct kcm_attach attach = { .fd = fd, .bpf_fd = program };

	CHECK(ioctl(mux, SIOCKCMATTACH, &attach) == 0);
}

static void work_on_descriptors(void)
{
	static int set = -1;
	struct epoll_event event = { .events = EPOLLIN };
	int copy = dup(mux);

	if (set < 0)
		CHECK((set = epoll_create1(0)) >= 0);
	CHECK(copy >= 0 && dup2(mux, 40) == 40);
	CHECK(epoll_ctl(set, EPOLL_CTL_ADD, copy, &event) == 0);
	CHECK(epoll_ctl(set, EPOLL_CTL_DEL, copy, NULL) == 0);
	CHECK(close(40) == 0 && close(copy) == 0);
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
	attach(second[0]);
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
	FD_ZERO(&readable);
	FD_SET(mux, &readable);
	CHECK(is_usual(select(mux + 1, &readable, NULL, NULL, NULL)));
	FD_ZERO(&readable);
	FD_SET(mux, &readable);
	CHECK(is_usual(pselect(mux + 1, &readable, NULL, NULL, NULL, NULL)));
	CHECK(epoll_ctl(set, EPOLL_CTL_MOD, mux, &event) == 0);
	CHECK(is_usual(epoll_wait(set, found, 4, 10)));
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
		{ "memory", work_on_memory },
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
	load();
	connect_pair(first);
	connect_pair(second);
	attach(first[0]);
	CHECK(pthread_create(&peer, NULL, serve_peer, NULL) == 0);
	CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
	CHECK(pthread_create(&other, NULL, interrupt, &self) == 0);
	for (int round = 0; round < rounds || handled < rounds; round++)
		work();
	done = 1;
	CHECK(pthread_join(other, NULL) == 0 && pthread_join(peer, NULL) == 0);
	return 0;
}
