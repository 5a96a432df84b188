/* The signal handlers of handlers.c: all calls of the library's that POSIX allows there (signal-safety(7)), and ioctl. */
#define _GNU_SOURCE
#include "handlers.h"
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/stat.h>

void report_and_exit(int line)
{
	char digits[] = "line 0000 of the handler\n";

	for (int at = 8; line; line /= 10)
		digits[at--] = '0' + line % 10;
	if (write(errors, digits, sizeof(digits) - 1) < 0)
		_exit(3);
	_exit(2);
}

static void use_pipe_and_copies(void)
{
	struct pollfd polled = { .fd = ends[0], .events = POLLIN };
	char byte = 0;

	CHECK_HERE(write(ends[1], &byte, 1) == 1 && poll(&polled, 1, 0) == 1 && read(ends[0], &byte, 1) == 1);
	int copy = dup(mux);
	CHECK_HERE(copy >= 0 && fcntl(copy, F_GETFL) >= 0 && close(copy) == 0);
	CHECK_HERE(dup2(mux, 841) == 841 && close(841) == 0);
	copy = fcntl(mux, F_DUPFD_CLOEXEC, 50);
	CHECK_HERE(copy >= 50 && close(copy) == 0);
	copy = fcntl64(mux, F_DUPFD, 50);
	CHECK_HERE(copy >= 50 && fcntl64(copy, F_GETFL) >= 0 && close(copy) == 0);
	CHECK_HERE(dup3(mux, 842, O_CLOEXEC) == 842 && close_range(842, 842, 0) == 0);
	CHECK_HERE(dup2(mux, 910) == 910);
	closefrom(910);
	CHECK_HERE(fcntl(910, F_GETFD) < 0 && errno == EBADF);
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
	CHECK_HERE(is_usual(__recv_chk(mux, bytes, sizeof(bytes), sizeof(bytes), MSG_DONTWAIT)));
	CHECK_HERE(is_usual(__recvfrom_chk(mux, bytes, sizeof(bytes), sizeof(bytes), MSG_DONTWAIT, NULL, NULL)));
	CHECK_HERE(flags >= 0 && fcntl(mux, F_SETFL, flags | O_NONBLOCK) == 0);
	CHECK_HERE(is_usual(read(mux, bytes, sizeof(bytes))));
	CHECK_HERE(is_usual(__read_chk(mux, bytes, sizeof(bytes), sizeof(bytes))));
	part.iov_len = sizeof(bytes);
	CHECK_HERE(is_usual(readv(mux, &part, 1)));
	frame(bytes, LONG);
	CHECK_HERE(is_usual(write(mux, bytes, sizeof(bytes))));
	CHECK_HERE(is_usual(writev(mux, &part, 1)));
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
	CHECK_HERE(is_usual(__poll_chk(&polled, 1, 0, sizeof(polled))));
	CHECK_HERE(is_usual(__ppoll_chk(&polled, 1, &none, NULL, sizeof(polled))));
	FD_ZERO(&readable);
	FD_SET(mux, &readable);
	CHECK_HERE(is_usual(select(mux + 1, &readable, NULL, NULL, &none_either)));
	FD_SET(mux, &readable);
	CHECK_HERE(is_usual(pselect(mux + 1, &readable, NULL, NULL, &none, NULL)));
}

static void use_options_and_the_rest(void)
{
	struct kcm_attach attach = { .fd = second[0], .bpf_fd = program };
	struct kcm_unattach unattach = { .fd = second[0] };
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
	/* Unless the program has attached it. */
	if (ioctl(mux, SIOCKCMATTACH, &attach) == 0)
		CHECK_HERE(ioctl(mux, SIOCKCMUNATTACH, &unattach) == 0);
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
	(void)!accept4(mux, NULL, NULL, SOCK_CLOEXEC);
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

static void open_files(void)
{
	int fds[] = { open(FILE_OF_KCM, O_RDONLY), open64(FILE_OF_KCM, O_RDONLY), openat(AT_FDCWD, FILE_OF_KCM, O_RDONLY),
		openat64(AT_FDCWD, FILE_OF_KCM "_stats", O_RDONLY) };
	char bytes[LONG];

	CHECK_HERE(access(FILE_OF_KCM, R_OK) == 0);
	for (size_t at = 0; at < sizeof(fds) / sizeof(fds[0]); at++)
		CHECK_HERE(fds[at] >= 0 && read(fds[at], bytes, sizeof(bytes)) > 0 && close(fds[at]) == 0);
}

static void install_handlers(void)
{
	struct sigaction action = { .sa_handler = handle };

	CHECK_HERE(sigaction(SIGUSR2, &action, NULL) == 0);
	CHECK_HERE(signal(SIGUSR2, handle) != SIG_ERR);
	CHECK_HERE(sigset(SIGUSR2, handle) != SIG_ERR);
}

void use_what_is_inherited(void)
{
	struct pollfd polled[] = { { .fd = mux, .events = POLLIN }, { .fd = ends[1], .events = POLLOUT } };
	struct kcm_clone clone;
	char bytes[SHORT];
	fd_set readable, writable;
	int number = 0, copy, null = open("/dev/null", O_WRONLY);
	socklen_t length = sizeof(number);

	/* It ends with a program that waits for it for ever. */
	CHECK_HERE(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0);
	CHECK_HERE(null >= 0 && dup2(null, STDERR_FILENO) == STDERR_FILENO && close(null) == 0);
	CHECK_HERE(recv(mux, bytes, sizeof(bytes), 0) < 0 && errno == EOPNOTSUPP);
	CHECK_HERE(read(mux, bytes, sizeof(bytes)) < 0 && errno == EOPNOTSUPP);
	frame(bytes, SHORT);
	CHECK_HERE(send(mux, bytes, SHORT, 0) < 0 && errno == EOPNOTSUPP);
	CHECK_HERE(write(mux, bytes, SHORT) < 0 && errno == EOPNOTSUPP);
	CHECK_HERE(ioctl(mux, SIOCKCMCLONE, &clone) < 0 && errno == EOPNOTSUPP);
	CHECK_HERE(getsockopt(mux, SOL_SOCKET, SO_TYPE, &number, &length) < 0 && errno == EOPNOTSUPP);
	CHECK_HERE(poll(polled, 1, -1) == 1 && polled[0].revents == POLLERR && polled[0].fd == mux);
	CHECK_HERE(poll(polled, 2, -1) == 2 && polled[0].revents == POLLERR && polled[1].revents == POLLOUT);
	FD_ZERO(&readable);
	FD_ZERO(&writable);
	FD_SET(mux, &readable);
	FD_SET(ends[1], &writable);
	CHECK_HERE(select(1024, &readable, &writable, NULL, NULL) == 2 && FD_ISSET(mux, &readable) && FD_ISSET(ends[1], &writable));
	CHECK_HERE(socket(AF_KCM, SOCK_DGRAM, KCMPROTO_CONNECTED) < 0 && errno == EAFNOSUPPORT);
	/* A connection that is attached is a socket as any other. */
	CHECK_HERE(is_usual(recv(first[0], bytes, sizeof(bytes), MSG_DONTWAIT | MSG_PEEK)));
	copy = dup(mux);
	CHECK_HERE(copy >= 0 && dup2(mux, 841) == 841 && close(copy) == 0 && close(841) == 0);
	(void)!access(FILE_OF_KCM, R_OK);
	if ((copy = open(FILE_OF_KCM, O_RDONLY)) >= 0)
		CHECK_HERE(close(copy) == 0);
	install_handlers();
	CHECK_HERE(close(mux) == 0 && close(first[0]) == 0);
}

void start_process(int executes)
{
	static char *const arguments[] = { "true", NULL };
	int status;
	pid_t child = _Fork();

	CHECK_HERE(child >= 0);
	if (!child) {
		use_what_is_inherited();
		if (executes)
			execve("/bin/true", arguments, environ);
		_exit(executes);
	}
	while (waitpid(child, &status, 0) < 0)
		CHECK_HERE(errno == EINTR);
	CHECK_HERE(status == 0);
}

void open_first(int signal)
{
	(void)signal;
	is_handling = 1;
	open_and_close_sockets();
	is_handling = 0;
	handled++;
}

void handle(int signal)
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
	open_files();
	install_handlers();
	if (handled % 16 == 0)
		start_process(handled % 64 == 0);
	is_handling = 0;
	handled++;
	errno = before;
}

