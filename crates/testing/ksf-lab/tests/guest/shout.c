/* Answers one connection on the port of its first argument with what it gets, in capitals. */
#include <arpa/inet.h>
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	struct sockaddr_in address = { .sin_family = AF_INET };
	int listener = socket(AF_INET, SOCK_STREAM, 0);
	char buffer[256];
	ssize_t length;

	if (argc != 2)
		return 2;
	address.sin_port = htons(atoi(argv[1]));
	if (bind(listener, (void *)&address, sizeof(address)) || listen(listener, 1)) {
		perror("listen");
		return 1;
	}
	puts("listening");
	fflush(stdout);
	int peer = accept(listener, NULL, NULL);
	while ((length = read(peer, buffer, sizeof(buffer))) > 0) {
		for (ssize_t i = 0; i < length; i++)
			buffer[i] = toupper((unsigned char)buffer[i]);
		if (write(peer, buffer, length) != length)
			return 1;
	}
	return close(peer) ? 1 : 0;
}
