/* Observes what message sockets of the family AF_KCM do among processes, signals and programs loaded elsewhere: one line
 * per row, "row: what happened", as contract.c next to this file, which also says what messages look like.
 *
 * Nothing here says what is right: the lines of the kernel's own AF_KCM are in af_kcm_processes.txt, those of ksf in
 * ours_processes.txt.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/bpf.h>
#include <linux/kcm.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef AF_KCM
#define AF_KCM 41
#endif
#define COMES_MS 5000 /* longer than anything takes that comes */
#define QUIET_MS 100 /* after that, nothing will */

static const char self[] = "/proc/self/exe"; /* this program */
static int framing; /* the framing program of kcm.rst */

struct tcp {
	int near, far; /* near is attached; far is the peer's end */
};

/* --- plumbing ------------------------------------------------------------------------------------------- */

static void die(const char *what)
{
	printf("cannot %s: %s\n", what, strerrorname_np(errno));
	exit(1);
}

static int must(int result, const char *what)
{
	if (result < 0)
		die(what);
	return result;
}

/* Errors may have numbers that no header knows: the kernel's own, which it should have kept to itself. */
static const char *name_of(int error)
{
	static char text[32];
	const char *name = strerrorname_np(error);

	if (name)
		return name;
	snprintf(text, sizeof(text), "error %d", error);
	return text;
}

static const char *outcome(int result)
{
	return result < 0 ? name_of(errno) : "ok";
}

static void row(const char *name, const char *format, ...)
{
	va_list args;

	printf("%s: ", name);
	va_start(args, format);
	vprintf(format, args);
	va_end(args);
	printf("\n");
	fflush(stdout);
}

/* Loads the framing program. direct: without a function of libc, as a program in another language may. */
static int load(int direct)
{
	static const struct bpf_insn code[] = {
		{ .code = BPF_ALU64 | BPF_MOV | BPF_X, .dst_reg = BPF_REG_6, .src_reg = BPF_REG_1 },
		{ .code = BPF_LD | BPF_ABS | BPF_W },
		{ .code = BPF_JMP | BPF_EXIT },
	};
	union bpf_attr attr = {
		.prog_type = BPF_PROG_TYPE_SOCKET_FILTER,
		.insns = (uintptr_t)code,
		.insn_cnt = sizeof(code) / sizeof(code[0]),
		.license = (uintptr_t)"GPL",
	};
	long fd = -1;

	if (!direct)
		return must(syscall(SYS_bpf, BPF_PROG_LOAD, &attr, sizeof(attr)), "load the framing program");
#ifdef __x86_64__
	__asm__ volatile("syscall"
			 : "=a"(fd)
			 : "a"(SYS_bpf), "D"(BPF_PROG_LOAD), "S"(&attr), "d"(sizeof(attr))
			 : "rcx", "r11", "memory");
#endif
	return must(fd, "load the framing program");
}

static int kcm(int type)
{
	return must(socket(AF_KCM, type, KCMPROTO_CONNECTED), "open an AF_KCM socket");
}

static struct tcp connection(void)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t length = sizeof(address);
	int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
	struct tcp tcp;

	if (bind(listener, (void *)&address, length) || listen(listener, 1) ||
	    getsockname(listener, (void *)&address, &length))
		die("listen");
	tcp.far = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	must(connect(tcp.far, (void *)&address, length), "connect");
	tcp.near = must(accept(listener, NULL, NULL), "accept");
	setsockopt(tcp.far, IPPROTO_TCP, 1 /* TCP_NODELAY */, &one, sizeof(one));
	close(listener);
	return tcp;
}

static int attach(int mux, int tcp, int program)
{
	struct kcm_attach request = { .fd = tcp, .bpf_fd = program };
	return ioctl(mux, SIOCKCMATTACH, &request);
}

static struct tcp attached(int mux)
{
	struct tcp tcp = connection();
	must(attach(mux, tcp.near, framing), "attach");
	return tcp;
}

/* With buffers that do not grow. */
static struct tcp attached_small(int mux)
{
	struct tcp tcp = connection();
	int bytes = 8192;

	setsockopt(tcp.far, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof(bytes));
	setsockopt(tcp.near, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
	must(attach(mux, tcp.near, framing), "attach");
	return tcp;
}

static void hang_up(int mux, struct tcp tcp)
{
	struct kcm_unattach request = { .fd = tcp.near };

	ioctl(mux, SIOCKCMUNATTACH, &request);
	close(tcp.near);
	close(tcp.far);
}

/* A message of this length, of this letter. */
static void put(int fd, size_t length, char letter)
{
	char bytes[4096];
	uint32_t header = htonl(length);

	memset(bytes, letter, length);
	memcpy(bytes, &header, sizeof(header));
	if (write(fd, bytes, length) != (ssize_t)length)
		die("write to a connection");
}

/* Receives: how many bytes, the letter of the last. */
static const char *receive_for(int fd, int timeout_ms)
{
	static char texts[4][64], bytes[4096];
	static int next;
	char *text = texts[next++ % 4];
	struct pollfd entry = { .fd = fd, .events = POLLIN };

	if (poll(&entry, 1, timeout_ms) <= 0)
		return "nothing";
	ssize_t length = recv(fd, bytes, sizeof(bytes), MSG_DONTWAIT);
	if (length <= 0)
		return length ? name_of(errno) : "end";
	snprintf(text, sizeof(texts[0]), "%zd %c", length, bytes[length - 1]);
	return text;
}

static const char *receive(int fd)
{
	return receive_for(fd, COMES_MS);
}

static const char *receive_late(int fd)
{
	return receive_for(fd, QUIET_MS);
}

static int send_message(int fd, size_t length, char letter)
{
	char bytes[4096];
	uint32_t header = htonl(length);

	memset(bytes, letter, length);
	memcpy(bytes, &header, sizeof(header));
	return send(fd, bytes, length, MSG_NOSIGNAL);
}

static void *shared(size_t bytes)
{
	void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	if (memory == MAP_FAILED)
		die("share memory");
	return memory;
}

static void wait_for(pid_t child)
{
	int status;

	if (waitpid(child, &status, 0) != child || status)
		printf("the child ended with status %d\n", status);
}

static void sleep_ms(int ms)
{
	struct timespec time = { ms / 1000, ms % 1000 * 1000000L };
	while (nanosleep(&time, &time) && errno == EINTR)
		;
}

/* --- processes ------------------------------------------------------------------------------------------ */

static void fork_with_sockets(void)
{
	char *heard = shared(256);
	int mux = kcm(SOCK_DGRAM);
	struct tcp tcp = attached(mux), other = attached(mux);

	put(tcp.far, 10, 'a');
	pid_t child = fork();
	if (!child) {
		struct kcm_clone clone = { .fd = -1 };
		const char *got = receive(mux);
		int sent = send_message(mux, 20, 's');
		const char *answer = sent < 0 ? name_of(errno) : "ok";
		snprintf(heard, 256, "receive %s, send %s, clone %s", got, answer,
			 outcome(ioctl(mux, SIOCKCMCLONE, &clone)));
		_exit(0);
	}
	wait_for(child);
	row("fork, then in the child", "%s", heard);
	/* What the child sent went to one of the two, or nowhere. */
	int count = 0;
	for (int i = 0; i < 2; i++)
		count += !strcmp(receive_late(i ? other.far : tcp.far), "20 s");
	const char *first = receive_late(mux);
	put(other.far, 30, 'b');
	row("and connections got of the child's message", "%d", count);
	row("and the parent receives", "%s, then %s", first, receive(mux));
	hang_up(mux, tcp);
	hang_up(mux, other);
	close(mux);
}

/* The child does as well-behaved children do, and the parent must not notice. */
static void fork_and_close(void)
{
	int mux = kcm(SOCK_DGRAM), ends[2];
	struct tcp tcp = attached(mux);

	must(pipe(ends), "make a pipe");
	pid_t child = fork();
	if (!child) {
		char byte;
		close(mux);
		close(tcp.near);
		close(tcp.far);
		close(ends[1]);
		_exit(read(ends[0], &byte, 1) ? 1 : 0); /* lives until the parent is done */
	}
	put(tcp.far, 10, 'a');
	const char *got = receive(mux);
	int sent = send_message(mux, 20, 's');
	row("fork, the child closes all, then in the parent", "receive %s, send %s, the peer receives %s", got,
	    sent < 0 ? name_of(errno) : "ok", receive(tcp.far));
	struct kcm_unattach request = { .fd = tcp.near };
	must(ioctl(mux, SIOCKCMUNATTACH, &request), "unattach");
	close(tcp.near);
	row("the parent closes the connection while the child lives, the peer receives", "%s", receive(tcp.far));
	close(ends[1]);
	wait_for(child);
	close(ends[0]);
	close(tcp.far);
	close(mux);
}

/* An error of a connection while a child lives that has inherited it. */
static void fork_and_fail(void)
{
	int mux = kcm(SOCK_DGRAM), loop = epoll_create1(0), ends[2];
	struct tcp tcp = attached(mux);
	struct epoll_event event = { .events = 0 };

	must(epoll_ctl(loop, EPOLL_CTL_ADD, tcp.near, &event), "watch a connection");
	must(pipe(ends), "make a pipe");
	pid_t child = fork();
	if (!child) {
		char byte;
		close(ends[1]);
		_exit(read(ends[0], &byte, 1) ? 1 : 0);
	}
	shutdown(tcp.far, SHUT_WR);
	int count = epoll_wait(loop, &event, 1, COMES_MS);
	row("fork, the peer ends its stream, then epoll in the parent", "%s",
	    count == 1 && event.events & EPOLLERR ? "EPOLLERR" : "nothing");
	close(ends[1]);
	wait_for(child);
	close(ends[0]);
	close(loop);
	hang_up(mux, tcp);
	close(mux);
}

static void fork_and_open(void)
{
	char *heard = shared(256);
	int mux = kcm(SOCK_DGRAM);
	struct tcp tcp = attached(mux);
	pid_t child = fork();

	if (!child) {
		int own = kcm(SOCK_DGRAM);
		struct tcp mine = attached(own);
		put(mine.far, 10, 'c');
		const char *got = receive(own);
		int sent = send_message(own, 20, 's');
		snprintf(heard, 256, "receive %s, send %s, the peer receives %s", got,
			 sent < 0 ? name_of(errno) : "ok", receive(mine.far));
		_exit(0);
	}
	wait_for(child);
	row("fork, the child opens its own and attaches with a program of the parent", "%s", heard);
	hang_up(mux, tcp);
	close(mux);
}

static void vfork_and_close(void)
{
	int mux = kcm(SOCK_DGRAM);
	struct tcp tcp = attached(mux);
	pid_t child = vfork();

	if (!child) {
		close(mux);
		close(tcp.near);
		_exit(0);
	}
	wait_for(child);
	put(tcp.far, 10, 'a');
	row("vfork, the child closes all, then the parent receives", "%s", receive(mux));
	hang_up(mux, tcp);
	close(mux);
}

/* --- programs ------------------------------------------------------------------------------------------- */

/* What `self exec FD` does with its message socket. */
static int after_exec(int mux)
{
	struct pollfd entry = { .fd = mux, .events = POLLIN };
	char bytes[64];
	int ready = poll(&entry, 1, COMES_MS);
	ssize_t got = recv(mux, bytes, sizeof(bytes), MSG_DONTWAIT);
	const char *received = got < 0 ? name_of(errno) : "ok";
	int sent = send_message(mux, 20, 's');

	row("fork and exec, then in the new program", "poll %s, receive %s, send %s",
	    ready > 0 ? entry.revents & POLLERR ? "POLLERR" : "ready" : "nothing", received,
	    sent < 0 ? name_of(errno) : "ok");
	return 0;
}

static void exec_with_sockets(void)
{
	int mux = kcm(SOCK_DGRAM);
	struct tcp tcp = attached(mux);
	char number[16];

	put(tcp.far, 10, 'a');
	snprintf(number, sizeof(number), "%d", mux);
	pid_t child = fork();
	if (!child) {
		execl(self, self, "exec", number, NULL);
		_exit(1);
	}
	wait_for(child);
	const char *got = receive_late(mux);
	put(tcp.far, 12, 'b');
	row("and the parent receives after it", "%s, then %s", got, receive(mux));

	must(fcntl(mux, F_SETFD, FD_CLOEXEC), "set close-on-exec");
	child = fork();
	if (!child) {
		execl(self, self, "closed", number, NULL);
		_exit(1);
	}
	wait_for(child);
	hang_up(mux, tcp);
	close(mux);
}

static int pass(int over, int fd)
{
	char byte = 0, control[CMSG_SPACE(sizeof(int))] = { 0 };
	struct iovec part = { &byte, 1 };
	struct msghdr header = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = control };

	header.msg_controllen = sizeof(control);
	struct cmsghdr *first = CMSG_FIRSTHDR(&header);
	first->cmsg_level = SOL_SOCKET;
	first->cmsg_type = SCM_RIGHTS;
	first->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(first), &fd, sizeof(int));
	return sendmsg(over, &header, 0);
}

static int passed(int over)
{
	char byte, control[CMSG_SPACE(sizeof(int))];
	struct iovec part = { &byte, 1 };
	struct msghdr header = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = control };
	int fd;

	header.msg_controllen = sizeof(control);
	must(recvmsg(over, &header, 0), "receive a descriptor");
	memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&header)), sizeof(int));
	return fd;
}

/* Whoever gets a message socket this way has not inherited it. */
static void pass_sockets(void)
{
	char *heard = shared(256);
	int mux = kcm(SOCK_DGRAM), ends[2];
	struct tcp tcp = attached(mux);

	must(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends), "make a pair");
	must(pass(ends[0], mux), "pass a descriptor");
	int again = passed(ends[1]);
	put(tcp.far, 10, 'a');
	const char *got = receive(again);
	int sent = send_message(again, 20, 's');
	row("a message socket that came back to its process over a Unix socket",
	    "receive %s, send %s, the peer receives %s", got, sent < 0 ? name_of(errno) : "ok", receive(tcp.far));
	close(again);

	put(tcp.far, 10, 'a');
	pid_t child = fork();
	if (!child) {
		close(mux);
		close(tcp.near);
		int theirs = passed(ends[1]);
		got = receive(theirs);
		sent = send_message(theirs, 20, 's');
		snprintf(heard, 256, "receive %s, send %s", got, sent < 0 ? name_of(errno) : "ok");
		_exit(0);
	}
	must(pass(ends[0], mux), "pass a descriptor");
	wait_for(child);
	row("a message socket passed to another process over a Unix socket, there", "%s", heard);
	got = receive_late(mux);
	put(tcp.far, 12, 'b');
	row("and the process that opened it receives", "%s, then %s", got, receive(mux));
	hang_up(mux, tcp);
	close(mux);
	close(ends[0]);
	close(ends[1]);
}

static void attach_with_program(const char *name, int program)
{
	int mux = kcm(SOCK_DGRAM);
	struct tcp tcp = connection();
	int result = attach(mux, tcp.near, program);

	if (result < 0) {
		row(name, "%s", outcome(result));
	} else {
		put(tcp.far, 10, 'a');
		row(name, "ok, receive %s", receive(mux));
	}
	hang_up(mux, tcp);
	close(mux);
}

static void programs_from_elsewhere(void)
{
	int ends[2];

	must(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends), "make a pair");
	must(pass(ends[0], framing), "pass a descriptor");
	int own = passed(ends[1]);
	attach_with_program("attach with a program of this process, received over a Unix socket", own);
	close(own);

	pid_t child = fork();
	if (!child) {
		must(pass(ends[0], load(0)), "pass a descriptor");
		_exit(0);
	}
	int theirs = passed(ends[1]);
	wait_for(child);
	attach_with_program("attach with a program of another process, received over a Unix socket", theirs);
	close(theirs);

	int direct = load(1);
	attach_with_program("attach with a program loaded by a bare system call", direct);
	close(direct);
	attach_with_program("attach with a descriptor that is no program", ends[0]);
	close(ends[0]);
	close(ends[1]);
}

/* --- signals -------------------------------------------------------------------------------------------- */

static volatile sig_atomic_t handled;
static volatile long calls; /* of the thread that waits, that have returned */

static void handler(int signal)
{
	(void)signal;
	handled++;
}

static void handle(int signal, int flags)
{
	struct sigaction action = { .sa_handler = handler, .sa_flags = flags };
	sigaction(signal, &action, NULL);
}

/* One call that waits, on a thread of its own. */
struct waiter {
	int fd;
	ssize_t (*call)(int fd);
	volatile pid_t thread;
	volatile int done, error, handled;
	volatile ssize_t result;
};

static void *wait_in_call(void *argument)
{
	struct waiter *waiter = argument;

	waiter->thread = syscall(SYS_gettid);
	waiter->result = waiter->call(waiter->fd);
	waiter->error = errno;
	waiter->handled = handled;
	waiter->done = 1;
	return NULL;
}

/* Waits until a thread sleeps in the kernel, and no call of it returns. */
static void until_it_sleeps(const struct waiter *waiter)
{
	char path[64], state;
	long before = 0;

	snprintf(path, sizeof(path), "/proc/self/task/%d/stat", waiter->thread);
	for (int i = 0; i < QUIET_MS / 2;) {
		if (waiter->done) {
			errno = waiter->error;
			die("have the call wait: it returned");
		}
		FILE *file = fopen(path, "r");
		if (!file || fscanf(file, "%*d (%*[^)]) %c", &state) != 1)
			die("look at a thread");
		fclose(file);
		i = state == 'S' && calls == before ? i + 1 : 0;
		before = calls;
		sleep_ms(2);
	}
}

#define FLOOD_BYTES 2000

/* Sends until there is no room, then waits for some. */
static ssize_t send_waiting(int fd)
{
	for (;;) {
		int sent = send_message(fd, FLOOD_BYTES, 'f');
		calls++;
		if (sent < 0)
			return -1;
		if (handled)
			return sent;
	}
}

static void read_all(int far);

/* Starts the call, sends the signal to its thread, or to the process and no thread can take it but that one, and lets
 * `then` end what goes on. */
static const char *interrupt_by(int whole_process, int fd, ssize_t (*call)(int), int signal, void (*then)(int),
				int argument)
{
	static char text[96];
	struct waiter waiter = { .fd = fd, .call = call };
	pthread_t thread;

	handled = 0;
	pthread_create(&thread, NULL, wait_in_call, &waiter);
	while (!waiter.thread)
		sleep_ms(1);
	until_it_sleeps(&waiter);
	sigset_t set, before;
	sigemptyset(&set);
	sigaddset(&set, signal);
	pthread_sigmask(SIG_BLOCK, &set, &before);
	if (whole_process)
		kill(getpid(), signal);
	else
		syscall(SYS_tgkill, getpid(), waiter.thread, signal);
	while (!handled)
		sleep_ms(1);
	for (int i = 0; i < QUIET_MS && !waiter.done; i++)
		sleep_ms(1);
	/* TCP finds room now and then where there seemed to be none: a send may succeed at any time. */
	int interrupted = waiter.done && call != send_waiting;
	/* On a slow machine a peer that reads until nothing comes reads too early once. */
	do {
		if (!waiter.done)
			then(argument);
	} while (then == read_all && !waiter.done);
	pthread_join(thread, NULL);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (waiter.result < 0)
		snprintf(text, sizeof(text), "%s", name_of(waiter.error));
	else
		snprintf(text, sizeof(text), "%s, %zd", interrupted ? "returns" : "goes on", waiter.result);
	return text;
}

static const char *interrupt(int fd, ssize_t (*call)(int), int signal, void (*then)(int), int argument)
{
	return interrupt_by(0, fd, call, signal, then, argument);
}

static ssize_t receive_waiting(int fd)
{
	char bytes[64];
	return recv(fd, bytes, sizeof(bytes), 0);
}

static ssize_t receive_two_waiting(int fd)
{
	static char buffers[2][64];
	struct iovec parts[2] = { { buffers[0], 64 }, { buffers[1], 64 } };
	struct mmsghdr headers[2] = { { .msg_hdr = { .msg_iov = &parts[0], .msg_iovlen = 1 } },
				      { .msg_hdr = { .msg_iov = &parts[1], .msg_iovlen = 1 } } };
	return recvmmsg(fd, headers, 2, 0, NULL);
}

static ssize_t poll_waiting(int fd)
{
	struct pollfd entry = { .fd = fd, .events = POLLIN };
	return poll(&entry, 1, -1);
}

static ssize_t epoll_waiting(int fd)
{
	struct epoll_event event = { .events = EPOLLIN };
	int set = epoll_create1(0);

	epoll_ctl(set, EPOLL_CTL_ADD, fd, &event);
	ssize_t result = epoll_wait(set, &event, 1, -1);
	int error = errno;
	close(set);
	errno = error;
	return result;
}

static void send_ten(int far)
{
	put(far, 10, 'a');
}

static void read_all(int far)
{
	static char bytes[1 << 16];
	struct pollfd entry = { .fd = far, .events = POLLIN };

	while (poll(&entry, 1, QUIET_MS) > 0 && read(far, bytes, sizeof(bytes)) > 0)
		;
}

static void signals(void)
{
	int mux = kcm(SOCK_DGRAM);
	struct tcp tcp = attached(mux);
	struct timeval limit = { .tv_sec = 60 }, none = { 0 };

	/* Both are there at the same time: which one it was decides. */
	handle(SIGUSR1, 0);
	handle(SIGUSR2, SA_RESTART);
	row("recv, a handler without SA_RESTART runs", "%s", interrupt(mux, receive_waiting, SIGUSR1, send_ten, tcp.far));
	row("the same, of a signal to the process", "%s",
	    interrupt_by(1, mux, receive_waiting, SIGUSR1, send_ten, tcp.far));
	row("recv, a handler with SA_RESTART runs", "%s", interrupt(mux, receive_waiting, SIGUSR2, send_ten, tcp.far));
	setsockopt(mux, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
	row("the same, with SO_RCVTIMEO", "%s", interrupt(mux, receive_waiting, SIGUSR2, send_ten, tcp.far));
	setsockopt(mux, SOL_SOCKET, SO_RCVTIMEO, &none, sizeof(none));
	row("poll, a handler with SA_RESTART runs", "%s", interrupt(mux, poll_waiting, SIGUSR2, send_ten, tcp.far));
	row("epoll_wait, a handler with SA_RESTART runs", "%s",
	    interrupt(mux, epoll_waiting, SIGUSR2, send_ten, tcp.far));
	put(tcp.far, 10, 'a');
	row("recvmmsg of 2, one there, a handler without SA_RESTART runs", "%s",
	    interrupt(mux, receive_two_waiting, SIGUSR1, send_ten, tcp.far));
	row("and the next recv", "%s", receive_late(mux));
	signal(SIGUSR1, SIG_IGN);
	handle(SIGUSR2, SA_RESTART);
	row("recv, all handlers with SA_RESTART", "%s", interrupt(mux, receive_waiting, SIGUSR2, send_ten, tcp.far));
	hang_up(mux, tcp);
	close(mux);

	/* Another one: what is sent here answers nobody. */
	mux = kcm(SOCK_DGRAM);
	tcp = attached_small(mux);
	handle(SIGUSR1, 0);
	row("send without room, a handler without SA_RESTART runs", "%s",
	    interrupt(mux, send_waiting, SIGUSR1, read_all, tcp.far));
	hang_up(mux, tcp);
	tcp = attached_small(mux);
	row("send without room, a handler with SA_RESTART runs", "%s",
	    interrupt(mux, send_waiting, SIGUSR2, read_all, tcp.far));
	hang_up(mux, tcp);
	close(mux);
}

int main(int argc, char **argv)
{
	if (argc == 3 && !strcmp(argv[1], "exec"))
		return after_exec(atoi(argv[2]));
	if (argc == 3) {
		row("close-on-exec, fork and exec, then in the new program", "%s",
		    outcome(fcntl(atoi(argv[2]), F_GETFD)));
		return 0;
	}
	alarm(120); /* whatever hangs */
	framing = load(0);
	fork_with_sockets();
	fork_and_close();
	fork_and_fail();
	fork_and_open();
	vfork_and_close();
	exec_with_sockets();
	pass_sockets();
	programs_from_elsewhere();
	signals();
	return 0;
}
