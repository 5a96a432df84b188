/* The plain UDP server: one recvfrom and one sendto per datagram. */
#include "peer.h"

int main(int argc, char **argv)
{
	struct peer_options options = peer_parse(argc, argv);
	static uint8_t in[PEER_BUFFER_BYTES];
	uint8_t reply[RPC_REPLY_BYTES];
	int fd;

	peer_pin(options.cpu);
	fd = peer_bind(&options, SOCK_DGRAM);
	peer_ready(&options, fd, "udp");

	for (;;) {
		struct sockaddr_storage from;
		socklen_t from_bytes = sizeof(from);
		const uint8_t *out;
		size_t out_bytes;
		ssize_t got = recvfrom(fd, in, sizeof(in), 0, (struct sockaddr *)&from, &from_bytes);

		if (got < 0) {
			if (errno == EINTR || errno == ECONNREFUSED)
				continue;
			peer_die("recvfrom");
		}
		out_bytes = datagram_reply(options.mode, in, (size_t)got, reply, &out);
		if (options.mode == PEER_RPC && !out_bytes)
			continue; /* not a call */
		/* A reply that cannot be sent is lost, as datagrams may be. */
		(void)!sendto(fd, out, out_bytes, 0, (struct sockaddr *)&from, from_bytes);
	}
}
