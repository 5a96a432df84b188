/*
 * Loads redis or memcached with a new connection for each request: connect, ask for a value and for
 * the end, and receive until the server closes. So the server is the one with TIME_WAIT, and ports
 * last. Every byte is compared; whatever is not as it must be ends the run with status 1.
 * Usage: text_load redis|memcached PORT CONNECTIONS PID COUNT|SECONDSs CPU,...
 * A thread for each CPU of the list, which may be "any".
 * Prints what is read of the JSON of ksf load http (times in us; CPU time of process PID, all threads).
 */
#include "peer.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <time.h>

#define VALUE_BYTES 64
#define VALUE "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
#define THREADS_MAX 64
#define SLOTS_MAX 1024
/* Nothing at all happens for so long: the server hangs. */
#define STALL_MS 10000

/* What is said on a connection, and all that must come back on it before it ends. */
struct protocol {
	const char *name;
	const char *store, *stored;
	const char *ask, *answer;
};

static const struct protocol protocols[] = {
	{ "redis", "SET key " VALUE "\r\nQUIT\r\n", "+OK\r\n+OK\r\n", "GET key\r\nQUIT\r\n",
	  "$64\r\n" VALUE "\r\n+OK\r\n" },
	{ "memcached", "set key 0 0 64\r\n" VALUE "\r\nquit\r\n", "STORED\r\n",
	  "get key\r\nquit\r\n", "VALUE key 0 64\r\n" VALUE "\r\nEND\r\n" },
};

/* One connection at a time. */
struct slot {
	int fd;
	bool asked;
	size_t received;
	uint64_t start_ns;
};

struct thread {
	pthread_t thread;
	int cpu;
	size_t slots;
	/* Connections that it may open; UINT64_MAX: until the end. */
	uint64_t count;
	uint64_t opened, answered, room;
	uint32_t *times_ns;
};

_Static_assert(sizeof(VALUE) == VALUE_BYTES + 1, "");
static const struct protocol *protocol;
static struct sockaddr_in server;
static uint64_t end_ns;

static uint64_t time_ns(clockid_t clock)
{
	struct timespec now;

	if (clock_gettime(clock, &now))
		peer_die("clock_gettime");
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void wrong(const char *what)
{
	fprintf(stderr, "text_load: %s: %s\n", protocol->name, what);
	exit(1);
}

static int open_connection(int flags)
{
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | flags, 0);

	if (fd < 0)
		peer_die("socket");
	if (connect(fd, (const struct sockaddr *)&server, sizeof(server)) && errno != EINPROGRESS)
		peer_die("connect");
	return fd;
}

/* Receives what there is. True: the server has closed, and all was right. */
static bool receive(int fd, const char *expected, size_t *received)
{
	size_t all = strlen(expected);
	char data[4096];

	for (;;) {
		ssize_t got = recv(fd, data, sizeof(data), 0);

		if (got < 0 && errno == EAGAIN)
			return false;
		if (got < 0)
			peer_die("recv");
		if (!got) {
			if (*received < all)
				wrong("closed before the answer was whole");
			return true;
		}
		if ((size_t)got > all - *received ||
		    memcmp(data, expected + *received, (size_t)got))
			wrong("not the answer");
		*received += (size_t)got;
	}
}

/* The value that all others ask for. */
static void store(void)
{
	size_t received = 0, bytes = strlen(protocol->store);
	int fd = open_connection(0);

	if (send(fd, protocol->store, bytes, MSG_NOSIGNAL) != (ssize_t)bytes)
		peer_die("send");
	if (!receive(fd, protocol->stored, &received))
		wrong("not stored");
	close(fd);
}

static bool may_open(const struct thread *thread, uint64_t now_ns)
{
	return thread->opened < thread->count && now_ns < end_ns;
}

static void begin(struct thread *thread, struct slot *slot, int epoll, uint64_t now_ns)
{
	struct epoll_event event = { .events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET,
				     .data.ptr = slot };

	thread->opened++;
	*slot = (struct slot){ .start_ns = now_ns, .fd = open_connection(SOCK_NONBLOCK) };
	if (epoll_ctl(epoll, EPOLL_CTL_ADD, slot->fd, &event))
		peer_die("epoll_ctl");
}

static void finish(struct thread *thread, struct slot *slot, uint64_t now_ns)
{
	close(slot->fd);
	if (thread->answered == thread->room) {
		thread->room = thread->room ? 2 * thread->room : 4096;
		thread->times_ns = realloc(thread->times_ns, thread->room * sizeof(uint32_t));
		if (!thread->times_ns)
			peer_die("realloc");
	}
	thread->times_ns[thread->answered++] = (uint32_t)(now_ns - slot->start_ns);
}

/* True: the connection has ended as it must. */
static bool go_on(struct slot *slot)
{
	size_t bytes = strlen(protocol->ask);

	if (!slot->asked) {
		ssize_t sent = send(slot->fd, protocol->ask, bytes, MSG_NOSIGNAL);

		if (sent < 0 && errno == EAGAIN)
			return false;
		/* A new connection has room for more than this. */
		if (sent != (ssize_t)bytes)
			peer_die("send");
		slot->asked = true;
	}
	return receive(slot->fd, protocol->answer, &slot->received);
}

static void *run(void *argument)
{
	struct thread *thread = argument;
	struct slot slots[SLOTS_MAX];
	struct epoll_event events[64];
	size_t under_way = 0;
	uint64_t now_ns;
	int epoll;

	peer_pin(thread->cpu);
	epoll = epoll_create1(EPOLL_CLOEXEC);
	if (epoll < 0)
		peer_die("epoll_create1");
	now_ns = time_ns(CLOCK_MONOTONIC);
	for (; under_way < thread->slots && may_open(thread, now_ns); under_way++)
		begin(thread, &slots[under_way], epoll, now_ns);
	while (under_way) {
		int ready = epoll_wait(epoll, events, 64, STALL_MS);

		if (!ready)
			wrong("nothing comes any more");
		if (ready < 0 && errno != EINTR)
			peer_die("epoll_wait");
		for (int i = 0; i < ready; i++) {
			struct slot *slot = events[i].data.ptr;

			if (!go_on(slot))
				continue;
			now_ns = time_ns(CLOCK_MONOTONIC);
			finish(thread, slot, now_ns);
			if (may_open(thread, now_ns))
				begin(thread, slot, epoll, now_ns);
			else
				under_way--;
		}
	}
	close(epoll);
	return NULL;
}

static int compare(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

	return (x > y) - (x < y);
}

/* Smallest first; returns how many. */
static uint64_t merge(struct thread *threads, size_t count, uint32_t **times_ns)
{
	uint64_t all = 0;

	for (size_t i = 0; i < count; i++)
		all += threads[i].answered;
	*times_ns = malloc(all * sizeof(uint32_t) + 1);
	if (!*times_ns)
		peer_die("malloc");
	all = 0;
	for (size_t i = 0; i < count; i++) {
		memcpy(*times_ns + all, threads[i].times_ns, threads[i].answered * sizeof(uint32_t));
		all += threads[i].answered;
	}
	qsort(*times_ns, all, sizeof(uint32_t), compare);
	return all;
}

static void print(struct thread *threads, size_t count, uint64_t took_ns, uint64_t server_ns)
{
	static const struct { const char *percent; uint64_t beyond; } quantiles[] = {
		{ "50.0", 2 }, { "99.0", 100 }, { "99.9", 1000 }
	};
	uint32_t *times_ns;
	uint64_t all = merge(threads, count, &times_ns);

	if (!all)
		wrong("no connection");
	printf("{\"warnings\":[],\"run\":{\"requests\":{\"answered\":%llu,\"unanswered\":0,"
	       "\"rate_per_s\":%.3f},\"connections\":{\"surplus\":0},\"response\":{\"max_us\":%.3f,"
	       "\"quantiles\":[", (unsigned long long)all, (double)all * 1e9 / (double)took_ns,
	       times_ns[all - 1] / 1e3);
	for (size_t i = 0; i < 3; i++)
		printf("%s{\"percent\":%s,\"us\":%.3f}", i ? "," : "", quantiles[i].percent,
		       times_ns[all - 1 - all / quantiles[i].beyond] / 1e3);
	printf("]},\"failures\":{},\"tally\":null,\"server\":{\"cpu_us\":%.3f},\"cpu_s\":%.9f,"
	       "\"threads\":[", (double)server_ns / 1e3,
	       (double)time_ns(CLOCK_PROCESS_CPUTIME_ID) / 1e9);
	for (size_t i = 0; i < count; i++)
		printf(threads[i].cpu < 0 ? "%s{\"cpu\":null}" : "%s{\"cpu\":%d}", i ? "," : "",
		       threads[i].cpu);
	printf("]}}\n");
	free(times_ns);
}

/* "0,1": a thread on each; "any,any": two where the scheduler puts them. Returns how many. */
static size_t place(struct thread *threads, char *list)
{
	size_t count = 0;

	for (char *word = strtok(list, ","); word && count < THREADS_MAX; word = strtok(NULL, ","))
		threads[count++].cpu = strcmp(word, "any") ? atoi(word) : PEER_CPU_ANY;
	return count;
}

int main(int argc, char **argv)
{
	static struct thread threads[THREADS_MAX];
	uint64_t start_ns, server_ns, limit = UINT64_MAX;
	size_t count, slots;
	clockid_t clock;
	char *unit;
	double length;

	if (argc == 7)
		for (size_t i = 0; i < sizeof(protocols) / sizeof(*protocols); i++)
			if (!strcmp(argv[1], protocols[i].name))
				protocol = &protocols[i];
	count = protocol ? place(threads, argv[6]) : 0;
	slots = protocol ? (size_t)atol(argv[3]) : 0;
	length = protocol ? strtod(argv[5], &unit) : 0;
	if (!count || slots < count || slots > SLOTS_MAX || length <= 0) {
		fprintf(stderr, "usage: %s redis|memcached PORT CONNECTIONS PID COUNT|SECONDSs CPU,...\n",
			argv[0]);
		return 64;
	}
	server.sin_family = AF_INET;
	server.sin_port = htons((uint16_t)atoi(argv[2]));
	server.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	errno = clock_getcpuclockid((pid_t)atol(argv[4]), &clock);
	if (errno)
		peer_die("clock_getcpuclockid");
	store();

	server_ns = time_ns(clock);
	start_ns = time_ns(CLOCK_MONOTONIC);
	end_ns = UINT64_MAX;
	if (*unit == 's')
		end_ns = start_ns + (uint64_t)(length * 1e9);
	else
		limit = (uint64_t)length;
	for (size_t i = 0; i < count; i++) {
		/* The first ones take what does not divide. */
		threads[i].slots = slots / count + (i < slots % count);
		threads[i].count = limit == UINT64_MAX ? limit : limit / count + (i < limit % count);
		errno = pthread_create(&threads[i].thread, NULL, run, &threads[i]);
		if (errno)
			peer_die("pthread_create");
	}
	for (size_t i = 0; i < count; i++)
		pthread_join(threads[i].thread, NULL);
	print(threads, count, time_ns(CLOCK_MONOTONIC) - start_ns, time_ns(clock) - server_ns);
	return 0;
}
