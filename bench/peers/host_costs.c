/*
 * What the host takes for what a server cannot avoid: a system call, a context switch on one CPU,
 * and the wake-up of a thread that sleeps on another CPU. Virtual machines of the same kind differ
 * in these by a factor of two, and figures of servers with them.
 * Usage: host_costs COUNT CPU [OTHER_CPU]; prints one line of JSON, each cost as BATCHES means of
 * COUNT repetitions, in us.
 *
 * A switch is half of a round trip between two processes through pipes on one CPU, and so holds a
 * write and a read as well; a wake-up is half of one between two threads on two CPUs through
 * eventfds, in which both sleep until they are woken.
 */
#include "peer.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <signal.h>
#include <time.h>

#define BATCHES 15

static double now_us(void)
{
	struct timespec now;

	if (clock_gettime(CLOCK_MONOTONIC, &now))
		peer_die("clock_gettime");
	return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static void put(int fd)
{
	uint64_t one = 1;

	if (write(fd, &one, sizeof(one)) != sizeof(one))
		peer_die("write");
}

/* False: the other side has ended. */
static bool get(int fd)
{
	uint64_t value;
	ssize_t got = read(fd, &value, sizeof(value));

	if (got < 0)
		peer_die("read");
	return got == sizeof(value);
}

/* The means of all batches of `repeat`, each of which takes `parts` of what is measured. */
static void print_batches(const char *name, long count, int parts, void (*repeat)(const int *),
			  const int *fds)
{
	printf("\"%s\":[", name);
	for (int batch = -1; batch < BATCHES; batch++) {
		double start = now_us();

		for (long i = 0; i < count; i++)
			repeat(fds);
		/* The first warms up. */
		if (batch >= 0)
			printf("%s%.4f", batch ? "," : "",
			       (now_us() - start) / (double)(count * parts));
	}
	printf("]");
}

static void call(const int *fds)
{
	(void)fds;
	syscall(SYS_getpid); /* not getpid(): a libc may know it */
}

/* fds: where the other side reads, where this side does. */
static void round_trip(const int *fds)
{
	put(fds[0]);
	if (!get(fds[1]))
		peer_die("the other side has ended");
}

static void switches(long count)
{
	int there[2], back[2];
	pid_t child;

	if (pipe(there) || pipe(back))
		peer_die("pipe");
	fflush(stdout);
	child = fork();
	if (child < 0)
		peer_die("fork");
	if (!child) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		close(there[1]);
		while (get(there[0]))
			put(back[1]);
		_exit(0);
	}
	print_batches("context_switch_us", count, 2, round_trip, (int[]){ there[1], back[0] });
	close(there[1]);
	if (waitpid(child, NULL, 0) != child)
		peer_die("waitpid");
}

static int other_fds[2];
static int other_cpu;

static void *answer(void *argument)
{
	peer_pin(other_cpu);
	while (get(other_fds[0]))
		put(other_fds[1]);
	return argument;
}

static void wake_ups(long count)
{
	pthread_t thread;

	other_fds[0] = eventfd(0, 0);
	other_fds[1] = eventfd(0, 0);
	if (other_fds[0] < 0 || other_fds[1] < 0)
		peer_die("eventfd");
	errno = pthread_create(&thread, NULL, answer, NULL);
	if (errno)
		peer_die("pthread_create");
	printf(",");
	print_batches("wake_up_us", count, 2, round_trip, other_fds);
	/* The thread ends with the process. */
}

int main(int argc, char **argv)
{
	long count = argc > 1 ? atol(argv[1]) : 0;

	if (argc < 3 || argc > 4 || count < 1) {
		fprintf(stderr, "usage: %s COUNT CPU [OTHER_CPU]\n", argv[0]);
		return 64;
	}
	peer_pin(atoi(argv[2]));
	printf("{");
	print_batches("system_call_us", count, 1, call, NULL);
	printf(",");
	switches(count);
	if (argc == 4) {
		other_cpu = atoi(argv[3]);
		wake_ups(count);
	}
	printf("}\n");
	return 0;
}
