/* Clients of a request-response server: requests cut at random bytes, every answer checked.
 *
 * A request is its length as 32 bits in network order, the client, its number, filling. The answer is the same. The
 * program ends at the first answer that is another client's.
 */
#ifndef CLIENTS_H
#define CLIENTS_H

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define CHECK(condition) \
	do { \
		if (!(condition)) { \
			fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #condition, strerror(errno)); \
			exit(1); \
		} \
	} while (0)

enum {
	CLIENTS = 8,
	REQUESTS = 20000, /* of each */
	WINDOW = 256, /* requests of a client without an answer so far */
	REQUEST_BYTES_MAX = 36,
};

struct client {
	int fd, name, answers;
	uint32_t random;
	size_t unread;
	char bytes[16384], answered[REQUESTS];
};

static struct client clients[CLIENTS];

static size_t request(char *at, int client, int number)
{
	size_t length = 12 + (client * 7 + number * 5) % 24;
	uint32_t words[] = { htonl(length), htonl(client), htonl(number) };

	memset(at, client, length);
	memcpy(at, words, sizeof(words));
	return length;
}

/* From 1 to max. */
static size_t random_up_to(struct client *client, size_t max)
{
	/* xorshift */
	client->random ^= client->random << 13;
	client->random ^= client->random >> 17;
	client->random ^= client->random << 5;
	return 1 + client->random % max;
}

static void read_answers(struct client *client, int flags)
{
	char wanted[REQUEST_BYTES_MAX];
	uint32_t words[3];
	size_t at = 0;
	ssize_t count = recv(client->fd, client->bytes + client->unread, sizeof(client->bytes) - client->unread, flags);

	CHECK(count > 0 || (count < 0 && errno == EAGAIN && flags));
	client->unread += count > 0 ? count : 0;
	for (; client->unread - at >= sizeof(words); at += ntohl(words[0])) {
		memcpy(words, client->bytes + at, sizeof(words));
		if (client->unread - at < ntohl(words[0]))
			break;
		uint32_t number = ntohl(words[2]);
		if (ntohl(words[1]) != (uint32_t)client->name) {
			fprintf(stderr, "client %d got an answer of client %u\n", client->name, ntohl(words[1]));
			exit(1);
		}
		CHECK(number < REQUESTS && !client->answered[number]);
		CHECK(request(wanted, client->name, number) == ntohl(words[0]));
		CHECK(memcmp(client->bytes + at, wanted, ntohl(words[0])) == 0);
		client->answered[number] = 1;
		client->answers++;
	}
	client->unread -= at;
	memmove(client->bytes, client->bytes + at, client->unread);
}

static void *ask(void *argument)
{
	struct client *client = argument;
	char bytes[32 * REQUEST_BYTES_MAX];

	for (int sent = 0; sent < REQUESTS;) {
		size_t length = 0, burst = random_up_to(client, 32);
		for (; burst > 0 && sent < REQUESTS; burst--)
			length += request(bytes + length, client->name, sent++);
		for (size_t at = 0; at < length;) {
			size_t piece = random_up_to(client, 200);
			ssize_t written = send(client->fd, bytes + at, piece < length - at ? piece : length - at, 0);
			CHECK(written > 0);
			at += written;
		}
		read_answers(client, MSG_DONTWAIT);
		while (sent - client->answers > WINDOW)
			read_answers(client, 0);
	}
	while (client->answers < REQUESTS)
		read_answers(client, 0);
	CHECK(client->unread == 0);
	return NULL;
}

/* Connects a client; returns the server's end. */
static int connect_client(int name)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t length = sizeof(address);
	int listener = socket(AF_INET, SOCK_STREAM, 0), near;
	struct client *client = &clients[name];

	CHECK(bind(listener, (void *)&address, length) == 0 && listen(listener, 1) == 0);
	CHECK(getsockname(listener, (void *)&address, &length) == 0);
	client->name = name;
	client->random = 0x51ce + name;
	client->fd = socket(AF_INET, SOCK_STREAM, 0);
	CHECK(connect(client->fd, (void *)&address, length) == 0);
	CHECK((near = accept(listener, NULL, NULL)) >= 0);
	close(listener);
	return near;
}

/* Asks on all connections at once, until every request is answered. */
static void ask_all(void)
{
	pthread_t threads[CLIENTS];

	for (int i = 0; i < CLIENTS; i++)
		CHECK(pthread_create(&threads[i], NULL, ask, &clients[i]) == 0);
	for (int i = 0; i < CLIENTS; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
}

#endif
