/* What the handler of handled.c shares with the program that it interrupts, handlers.c. */
#pragma once
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/kcm.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

/* In a handler: exit() and stdio are not allowed there. */
#define CHECK_HERE(condition) \
	do { \
		if (!(condition)) \
			report_and_exit(__LINE__); \
	} while (0)

#define SHORT 8
/* Longer than the blocks that malloc keeps for each thread without a lock. */
#define LONG 4096


#define FILE_OF_KCM "/proc/net/kcm"

/* The message socket; a pipe; the framing program; two connections and their peers. */
extern int mux, ends[2], program, first[2], second[2];
/* Full when a splice begins; the handler empties it. */
extern int full[2];
/* Standard error: children close theirs, where the library says that it refuses their calls. */
extern int errors;
/* Runs of the handler. */
extern atomic_int handled;
/* A handler runs in this thread. */
extern __thread volatile int is_handling;

/* sigset() is obsolete, but programs call it. */
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

void report_and_exit(int line);
/* The handlers. */
void handle(int signal);
void open_first(int signal);
/* A child of _Fork or vfork makes the calls on what it has inherited that POSIX allows there. */
void use_what_is_inherited(void);
/* A child of _Fork does so and ends, or executes a program. */
void start_process(int executes);

/* As programs compiled with _FORTIFY_SOURCE call them. */
ssize_t __read_chk(int fd, void *bytes, size_t count, size_t size);
ssize_t __recv_chk(int fd, void *bytes, size_t count, size_t size, int flags);
ssize_t __recvfrom_chk(int fd, void *bytes, size_t count, size_t size, int flags, struct sockaddr *from, socklen_t *length);
int __poll_chk(struct pollfd *set, nfds_t count, int timeout_ms, size_t size);
int __ppoll_chk(struct pollfd *set, nfds_t count, const struct timespec *timeout, const sigset_t *signals, size_t size);
/* Other names of signal(), without a declaration or with one that warns. */
sighandler_t bsd_signal(int signal, sighandler_t handler);
sighandler_t __sysv_signal(int signal, sighandler_t handler);

/* True if the call succeeded, or failed as calls may that do not wait, or on connections that come and go. */
static inline int is_usual(ssize_t result)
{
	return result >= 0 || errno == EAGAIN || errno == EINTR || errno == ENOTCONN || errno == ECONNRESET;
}

static inline void frame(char *message, uint32_t length)
{
	uint32_t header = htonl(length);

	memset(message, 'x', length);
	memcpy(message, &header, sizeof(header));
}
