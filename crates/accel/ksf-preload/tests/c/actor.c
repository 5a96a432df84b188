/* A server that does what it is told, line by line: "ACTOR COMMAND NUMBER..." on standard input, "ACTOR RESULT" on
 * standard output. Actor 0 is the main thread; others are threads and processes that it makes. Numbers are descriptors,
 * flags and the like as they are. A call that succeeds must leave errno alone: where it does not, the result says so. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <threads.h>
#include <unistd.h>
#include <wordexp.h>

#define ACTORS 64
#define UNTOUCHED 77
#define PATIENCE_MS 60000

static int commands[ACTORS];
static pthread_t threads[ACTORS];
static volatile sig_atomic_t caught;
static int handler_accepts = -1;
static volatile sig_atomic_t handler_took = -2;

static void answer(int actor, const char *format, ...)
{
	char line[4096];
	int length = snprintf(line, sizeof(line), "%d ", actor);
	va_list list;

	va_start(list, format);
	length += vsnprintf(line + length, sizeof(line) - length - 1, format, list);
	va_end(list);
	line[length++] = '\n';
	if (write(1, line, length) != length)
		_exit(9);
}

static void answer_call(int actor, long result, int error)
{
	if (result < 0)
		answer(actor, "failed %s", strerrorname_np(error));
	else if (error != UNTOUCHED)
		answer(actor, "%ld but errno is %s", result, strerrorname_np(error));
	else
		answer(actor, "%ld", result);
}

/* Makes the call with a known errno. */
#define CALL(call) \
	do { \
		long result_; \
		errno = UNTOUCHED; \
		result_ = (call); \
		answer_call(actor, result_, errno); \
	} while (0)

/* A copy of a descriptor that comes in a message. */
static int by_message(int fd)
{
	union {
		char bytes[CMSG_SPACE(sizeof(int))];
		struct cmsghdr header;
	} control = { .header = { .cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS } };
	char byte = 'f';
	struct iovec data = { .iov_base = &byte, .iov_len = 1 };
	struct msghdr message = { .msg_iov = &data, .msg_iovlen = 1, .msg_control = control.bytes,
				  .msg_controllen = sizeof(control.bytes) };
	int pair[2], copy = -1;

	memcpy(CMSG_DATA(&control.header), &fd, sizeof(fd));
	if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0 || sendmsg(pair[0], &message, 0) != 1)
		_exit(7);
	message.msg_controllen = sizeof(control.bytes);
	errno = UNTOUCHED;
	if (recvmsg(pair[1], &message, 0) == 1)
		memcpy(&copy, CMSG_DATA(&control.header), sizeof(copy));
	close(pair[0]);
	close(pair[1]);
	return copy;
}

/* What a client says with its first byte. */
static int first_byte(int fd)
{
	struct pollfd readable = { .fd = fd, .events = POLLIN };
	char byte = '?';

	poll(&readable, 1, PATIENCE_MS);
	if (recv(fd, &byte, 1, MSG_DONTWAIT) != 1)
		byte = '!';
	close(fd);
	return byte;
}

static void do_accept(int actor, int fd, int flags, int four)
{
	struct sockaddr_storage peer, own;
	socklen_t length = sizeof(peer), own_length = sizeof(own);
	int got, port, status, descriptor;

	memset(&peer, 0, sizeof(peer));
	errno = UNTOUCHED;
	got = four ? accept4(fd, (void *)&peer, &length, flags) : accept(fd, (void *)&peer, &length);
	if (got < 0) {
		answer_call(actor, got, errno);
		return;
	}
	if (errno != UNTOUCHED) {
		answer_call(actor, got, errno);
		return;
	}
	port = ntohs(peer.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&peer)->sin6_port :
						  ((struct sockaddr_in *)&peer)->sin_port);
	status = fcntl(got, F_GETFL) & O_NONBLOCK;
	descriptor = fcntl(got, F_GETFD);
	getsockname(got, (void *)&own, &own_length);
	answer(actor, "took %c family=%d length=%d peer=%d%s%s%s", first_byte(got), peer.ss_family, (int)length, port,
	       status ? " nonblock" : "", descriptor ? " cloexec" : "", own.ss_family == peer.ss_family ? "" : " odd");
}

static int make_socket(long family, long reuse, long port)
{
	int fd = socket(family, SOCK_STREAM, 0), one = 1;
	struct sockaddr_in four = { .sin_port = htons(port), .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	struct sockaddr_in6 six = { .sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT };
	struct sockaddr_un local = { .sun_family = AF_UNIX };

	if (reuse)
		setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &one, sizeof(one));
	if (family == AF_INET && bind(fd, (void *)&four, sizeof(four)) != 0)
		return -1;
	if (family == AF_INET6 && bind(fd, (void *)&six, sizeof(six)) != 0)
		return -1;
	if (family == AF_UNIX && bind(fd, (void *)&local, sizeof(sa_family_t)) != 0)
		return -1;
	return fd;
}

static long connect_to(long address, long port)
{
	struct sockaddr_in four = { .sin_port = htons(port), .sin_family = AF_INET, .sin_addr.s_addr = htonl(address) };
	int fd = socket(AF_INET, SOCK_STREAM, 0);

	errno = UNTOUCHED;
	return connect(fd, (void *)&four, sizeof(four)) == 0 ? fd : -1;
}

/* TCP and UDP sockets with a source address of the program's choice, connected to a port: under the numbers from first on. */
static long proxy(long port, long count, long first)
{
	struct sockaddr_in peer = { .sin_port = htons(port), .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	struct sockaddr_in own = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };

	for (int fd = first; fd < first + count; fd++) {
		int made = socket(AF_INET, fd % 2 ? SOCK_DGRAM : SOCK_STREAM, 0);

		if (dup2(made, fd) != fd || close(made) != 0)
			return -1;
		errno = UNTOUCHED;
		if (bind(fd, (void *)&own, sizeof(own)) != 0 || connect(fd, (void *)&peer, sizeof(peer)) != 0)
			return -1;
	}
	return 0;
}

static long port_of(int fd)
{
	struct sockaddr_storage own;
	socklen_t length = sizeof(own);

	if (getsockname(fd, (void *)&own, &length) != 0)
		return -1;
	return ntohs(own.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&own)->sin6_port :
						 ((struct sockaddr_in *)&own)->sin_port);
}

static void do_wait(int actor, int epoll, int timeout_ms, int kind)
{
	struct epoll_event events[16];
	struct timespec timeout = { timeout_ms / 1000, timeout_ms % 1000 * 1000000L };
	char line[1024] = "";
	int count, length = 0;

	errno = UNTOUCHED;
	if (kind == 0)
		count = epoll_wait(epoll, events, 16, timeout_ms);
	else if (kind == 1)
		count = epoll_pwait(epoll, events, 16, timeout_ms, NULL);
	else
		count = epoll_pwait2(epoll, events, 16, timeout_ms < 0 ? NULL : &timeout, NULL);
	if (count < 0 || errno != UNTOUCHED) {
		answer_call(actor, count, errno);
		return;
	}
	for (int i = 0; i < count; i++)
		length += snprintf(line + length, sizeof(line) - length, " %x:%lx", events[i].events, (long)events[i].data.u64);
	answer(actor, "events%s", line);
}

static void list_descriptors(int actor)
{
	char line[1024] = "";
	int length = 0;

	for (int fd = 3; fd < 65536 && length < 1000; fd++)
		if (syscall(SYS_fcntl, fd, F_GETFD) >= 0)
			length += snprintf(line + length, sizeof(line) - length, " %d", fd);
	answer(actor, "open%s", line);
}

static void handler(int number)
{
	(void)number;
	caught++;
	if (handler_accepts >= 0) {
		int error = errno;

		handler_took = accept(handler_accepts, NULL, NULL);
		close(dup(handler_accepts));
		errno = error;
	}
}

/* CPUs that the calling thread may run on. */
static int count_cpus(void *unused)
{
	cpu_set_t set;

	(void)unused;
	sched_getaffinity(0, sizeof(set), &set);
	return CPU_COUNT(&set);
}

/* The same of what libc starts. */
static int count_cpus_of(const char *way)
{
	int count = -1;

	if (strcmp(way, "system") == 0)
		return WEXITSTATUS(system("exit $(nproc)"));
	if (strcmp(way, "popen") == 0) {
		FILE *pipe = popen("nproc", "r");
		if (!pipe || fscanf(pipe, "%d", &count) != 1)
			count = -1;
		if (pipe)
			pclose(pipe);
	} else if (strcmp(way, "wordexp") == 0) {
		wordexp_t words;
		if (wordexp("$(nproc)", &words, 0) == 0) {
			count = atoi(words.we_wordv[0]);
			wordfree(&words);
		}
	} else {
		thrd_t thread;
		if (thrd_create(&thread, count_cpus, NULL) != thrd_success || thrd_join(thread, &count) != thrd_success)
			count = -1;
	}
	return count;
}

static void act(int actor);

static void *thread_main(void *argument)
{
	act((int)(long)argument);
	return NULL;
}

static void run(int actor, char *line)
{
	char name[32];
	long n[5] = { 0 };
	struct epoll_event event;
	int count = sscanf(line, "%31s %li %li %li %li %li", name, &n[0], &n[1], &n[2], &n[3], &n[4]);

	if (count < 1)
		return;
	event.events = n[2];
	event.data.u64 = n[3];
#define IS(word) (strcmp(name, word) == 0)
	if (IS("socket"))
		CALL(make_socket(n[0], n[1], n[2]));
	else if (IS("listen"))
		CALL(listen(n[0], n[1]));
	else if (IS("nonblock"))
		CALL(fcntl(n[0], F_SETFL, n[1] ? O_NONBLOCK : 0));
	else if (IS("connect")) {
		long fd = connect_to(n[0], n[1]);
		answer_call(actor, fd < 0 ? fd : port_of(fd), errno);
	} else if (IS("proxy"))
		CALL(proxy(n[0], n[1], n[2]));
	else if (IS("port"))
		CALL(port_of(n[0]));
	else if (IS("epoll"))
		CALL(epoll_create1(EPOLL_CLOEXEC));
	else if (IS("add"))
		CALL(epoll_ctl(n[0], EPOLL_CTL_ADD, n[1], &event));
	else if (IS("mod"))
		CALL(epoll_ctl(n[0], EPOLL_CTL_MOD, n[1], &event));
	else if (IS("del"))
		CALL(epoll_ctl(n[0], EPOLL_CTL_DEL, n[1], NULL));
	else if (IS("churn")) {
		event.events = EPOLLIN;
		for (long i = 0; i < n[2]; i++) {
			epoll_ctl(n[0], EPOLL_CTL_DEL, n[1], NULL);
			if (epoll_ctl(n[0], EPOLL_CTL_ADD, n[1], &event) != 0)
				_exit(6);
		}
		CALL(0);
	} else if (IS("wait"))
		do_wait(actor, n[0], n[1], n[2]);
	else if (IS("accept"))
		do_accept(actor, n[0], 0, 0);
	else if (IS("accept4"))
		do_accept(actor, n[0], n[1], 1);
	else if (IS("close"))
		CALL(close(n[0]));
	else if (IS("rawclose"))
		CALL(syscall(SYS_close, n[0]));
	else if (IS("fclose"))
		CALL(fclose(fdopen(n[0], "r")));
	else if (IS("dup"))
		CALL(dup(n[0]));
	else if (IS("rawdup"))
		CALL(syscall(SYS_dup, n[0]));
	else if (IS("message"))
		CALL(by_message(n[0]));
	else if (IS("dupfd"))
		CALL(fcntl(n[0], n[2], n[1]));
	else if (IS("dup2"))
		CALL(dup2(n[0], n[1]));
	else if (IS("dup3"))
		CALL(dup3(n[0], n[1], n[2]));
	else if (IS("close_range"))
		CALL(close_range(n[0], n[1], n[2]));
	else if (IS("closefrom"))
		CALL((closefrom(n[0]), 0));
	else if (IS("shutdown"))
		CALL(shutdown(n[0], n[1]));
	else if (IS("rcvtimeo")) {
		struct timeval timeout = { n[1] / 1000, n[1] % 1000 * 1000 };
		CALL(setsockopt(n[0], SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout)));
	} else if (IS("pid"))
		CALL(getpid());
	else if (IS("descriptors"))
		list_descriptors(actor);
	else if (IS("handler")) {
		struct sigaction action = { .sa_handler = handler };
		action.sa_flags = n[1] == 1 ? SA_RESTART : n[1] == 2 ? (int)SA_RESETHAND : 0;
		handler_accepts = n[2] ? n[2] : -1;
		CALL(sigaction(n[0], &action, NULL));
	} else if (IS("caught"))
		CALL(caught);
	else if (IS("took"))
		answer(actor, "took %c", first_byte(handler_took));
	else if (IS("kill"))
		CALL(pthread_kill(threads[n[0]], n[1]));
	else if (IS("cancel")) {
		CALL(-pthread_cancel(threads[n[0]]) | -pthread_join(threads[n[0]], NULL));
		threads[n[0]] = 0;
	} else if (IS("join"))
		CALL(-pthread_join(threads[n[0]], NULL));
	else if (IS("bind_cpu")) {
		cpu_set_t set;
		CPU_ZERO(&set);
		CPU_SET(n[0], &set);
		CALL(sched_setaffinity(0, sizeof(set), &set));
	} else if (IS("cpu")) {
		/* The one it may run on, or -2. */
		cpu_set_t set;
		int cpu = 0;
		sched_getaffinity(0, sizeof(set), &set);
		while (!CPU_ISSET(cpu, &set))
			cpu++;
		CALL(CPU_COUNT(&set) == 1 ? cpu : -2);
	} else if (IS("cpus")) {
		cpu_set_t set;
		CALL((sched_getaffinity(0, sizeof(set), &set), CPU_COUNT(&set)));
	} else if (IS("system") || IS("popen") || IS("wordexp") || IS("thrd_create")) {
		answer(actor, "%d", count_cpus_of(name));
	} else if (IS("thread") || IS("fork") || IS("clone")) {
		int ends[2], child = -1;
		if (pipe2(ends, O_CLOEXEC) != 0)
			_exit(8);
		/* Out of the way of the numbers that tests look at. */
		int reader = fcntl(ends[0], F_DUPFD_CLOEXEC, 900 + 2 * n[0]);
		commands[n[0]] = fcntl(ends[1], F_DUPFD_CLOEXEC, 800 + n[0]);
		syscall(SYS_close, ends[0]);
		syscall(SYS_close, ends[1]);
		if (IS("thread")) {
			commands[n[0] + ACTORS / 2] = reader;
			CALL(-pthread_create(&threads[n[0]], NULL, thread_main, (void *)n[0]));
			return;
		}
		errno = UNTOUCHED;
		child = IS("fork") ? fork() : syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL);
		if (child == 0) {
			commands[n[0] + ACTORS / 2] = reader;
			/* The main thread alone writes there, so that its end ends all. */
			for (int i = 0; i < ACTORS / 2; i++)
				if (commands[i])
					syscall(SYS_close, commands[i]);
			act(n[0]);
			_exit(0);
		}
		syscall(SYS_close, reader);
		answer_call(actor, child > 0 ? 0 : -1, errno);
	} else if (IS("reexec")) {
		char *arguments[] = { "actor", NULL };
		execv("/proc/self/exe", arguments);
		answer(actor, "failed %s", strerrorname_np(errno));
	} else if (IS("badexec")) {
		char *arguments[] = { "actor", NULL };
		CALL(execv("/nowhere/at/all", arguments));
	} else if (IS("orphan")) {
		/* A child goes on in this one's place. */
		errno = UNTOUCHED;
		if (fork() != 0)
			_exit(0);
		answer_call(actor, 0, errno);
	} else if (IS("end")) {
		/* The command's end of the pipe: the actor reads it to its end. */
		syscall(SYS_close, commands[n[0]]);
		CALL(0);
	} else if (IS("wait_child"))
		CALL(wait(NULL) > 0 ? 0 : -1);
	else if (IS("vfork_close")) {
		pid_t child = vfork();
		if (child == 0) {
			close(n[0]);
			close_range(3, ~0U, 0);
			_exit(0);
		}
		int status;
		waitpid(child, &status, 0);
		CALL(status);
	} else
		answer(actor, "what is %s?", name);
}

/* Reads commands for itself and, as the main thread, for all others. */
static void act(int actor)
{
	FILE *input = actor == 0 ? stdin : fdopen(commands[actor + ACTORS / 2], "r");
	char line[256];

	while (fgets(line, sizeof(line), input)) {
		char *rest;
		int to = strtol(line, &rest, 10);
		if (to == actor)
			run(actor, rest);
		else if (write(commands[to], line, strlen(line)) < 0)
			answer(to, "gone");
	}
}

int main(void)
{
	struct rlimit limit;

	/* The numbers of the library begin at 4096 where the limit allows. */
	getrlimit(RLIMIT_NOFILE, &limit);
	limit.rlim_cur = limit.rlim_max;
	setrlimit(RLIMIT_NOFILE, &limit);
	signal(SIGPIPE, SIG_IGN);
	answer(0, "started");
	act(0);
	return 0;
}
