/* A request-response server over several clients, on libksf: a thread for each of four sockets, which answers what it
 * receives without naming the connection. Ends with 0 if each client got its own answers.
 *
 * Usage: answers [many]
 * many: each thread receives several requests with a call.
 */
#include "../../../../lab/kcm/clients.h"
#include <ksf.h>

enum { SOCKETS = 4, SLOTS = 16 };

static size_t slots = 1;

static void *answer(void *argument)
{
	ksf_socket *socket = argument;
	ksf_message *messages[SLOTS];

	for (;;) {
		int count = ksf_receive_many(socket, -1, messages, slots);
		CHECK(count > 0);
		for (int i = 0; i < count; i++) {
			size_t bytes;
			const void *data = ksf_message_data(messages[i], &bytes);
			CHECK(ksf_send(socket, data, bytes, 0, -1, NULL) == 0);
			ksf_message_free(messages[i]);
		}
	}
}

int main(int argc, char **argv)
{
	struct ksf_options options;
	ksf_socket *sockets[SOCKETS];
	pthread_t thread;

	if (argc > 1 && !strcmp(argv[1], "many"))
		slots = SLOTS;
	ksf_options_init(&options, sizeof(options));
	options.length_adjust = 0; /* the length counts itself */
	CHECK(ksf_open(&options, &sockets[0]) == 0);
	for (int i = 0; i < CLIENTS; i++)
		CHECK(ksf_attach(sockets[0], connect_client(i), NULL) == 0);
	for (int i = 1; i < SOCKETS; i++)
		CHECK(ksf_clone(sockets[0], &sockets[i]) == 0);
	for (int i = 0; i < SOCKETS; i++)
		CHECK(pthread_create(&thread, NULL, answer, sockets[i]) == 0);
	ask_all();
	printf("%d answers\n", CLIENTS * REQUESTS);
	return 0;
}
