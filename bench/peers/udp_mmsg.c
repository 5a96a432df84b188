/*
 * The batching UDP server: recvmmsg takes what has arrived, up to BATCH datagrams, one sendmmsg
 * answers it. It waits for the first datagram only (MSG_WAITFORONE), so a lone one is not delayed.
 */
#include "peer.h"

#define BATCH 64
#define DATAGRAM_BYTES 2048

static uint8_t in[BATCH][DATAGRAM_BYTES];
static uint8_t reply[BATCH][RPC_REPLY_BYTES];
static struct sockaddr_storage from[BATCH];
static struct iovec in_vectors[BATCH], out_vectors[BATCH];
static struct mmsghdr in_messages[BATCH], out_messages[BATCH];

static int receive(const struct peer_options *options, int fd)
{
	uint64_t end_ns = options->spin ? peer_now_ns() + PEER_SPIN_NS : 0;

	for (int i = 0; i < BATCH; i++) {
		in_vectors[i] = (struct iovec){ .iov_base = in[i], .iov_len = DATAGRAM_BYTES };
		in_messages[i].msg_hdr = (struct msghdr){
			.msg_name = &from[i],
			.msg_namelen = sizeof(from[i]),
			.msg_iov = &in_vectors[i],
			.msg_iovlen = 1,
		};
	}
	for (;;) {
		bool spin = end_ns && peer_now_ns() < end_ns;
		int count = recvmmsg(fd, in_messages, BATCH,
				     spin ? MSG_DONTWAIT : MSG_WAITFORONE, NULL);

		if (count >= 0)
			return count;
		if (spin && errno == EAGAIN)
			continue;
		if (errno != EINTR && errno != ECONNREFUSED)
			peer_die("recvmmsg");
	}
}

static unsigned answer(enum peer_mode mode, int count)
{
	unsigned answers = 0;

	for (int i = 0; i < count; i++) {
		const uint8_t *out;
		size_t out_bytes =
			datagram_reply(mode, in[i], in_messages[i].msg_len, reply[i], &out);

		/* A cut datagram cannot be echoed, a datagram that is no call not be answered. */
		if ((in_messages[i].msg_hdr.msg_flags & MSG_TRUNC) ||
		    (mode == PEER_RPC && !out_bytes))
			continue;
		out_vectors[answers] =
			(struct iovec){ .iov_base = (void *)out, .iov_len = out_bytes };
		out_messages[answers].msg_hdr = (struct msghdr){
			.msg_name = &from[i],
			.msg_namelen = in_messages[i].msg_hdr.msg_namelen,
			.msg_iov = &out_vectors[answers],
			.msg_iovlen = 1,
		};
		answers++;
	}
	return answers;
}

static void send_answers(int fd, unsigned answers)
{
	unsigned done = 0;

	while (done < answers) {
		int sent = sendmmsg(fd, out_messages + done, answers - done, 0);

		if (sent < 0 && errno == EINTR)
			continue;
		/* A reply that cannot be sent is lost, as datagrams may be. */
		done += sent > 0 ? (unsigned)sent : 1;
	}
}

int main(int argc, char **argv)
{
	struct peer_options options = peer_parse(argc, argv);
	int fd;

	peer_pin(options.cpu);
	fd = peer_bind(&options, SOCK_DGRAM);
	peer_ready(&options, fd, "udp");
	for (;;)
		send_answers(fd, answer(options.mode, receive(&options, fd)));
}
