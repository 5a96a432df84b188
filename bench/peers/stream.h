/* What the TCP servers share: answers to all complete records that have come, and where a client is. */
#ifndef KSF_STREAM_H
#define KSF_STREAM_H

#include "peer.h"

static inline bool send_all(int fd, const uint8_t *data, size_t bytes)
{
	while (bytes) {
		ssize_t sent = send(fd, data, bytes, MSG_NOSIGNAL);

		if (sent < 0 && errno == EINTR)
			continue;
		if (sent <= 0)
			return false;
		data += sent;
		bytes -= (size_t)sent;
	}
	return true;
}

/*
 * Answers the complete records of `in`. Returns how many bytes they took, or -1 for a record that
 * this peer does not serve (several fragments, larger than the buffer, not a call).
 */
static inline ssize_t answer_records(const uint8_t *in, size_t in_bytes, uint8_t *out, size_t *out_bytes)
{
	size_t at = 0;

	*out_bytes = 0;
	while (in_bytes - at >= RPC_MARK_BYTES) {
		uint32_t mark;
		size_t record_bytes, reply_bytes;

		memcpy(&mark, in + at, sizeof(mark));
		mark = ntohl(mark);
		record_bytes = mark & ~RPC_LAST_FRAGMENT;
		if (!(mark & RPC_LAST_FRAGMENT) ||
		    record_bytes > PEER_BUFFER_BYTES - RPC_MARK_BYTES)
			return -1;
		if (in_bytes - at < RPC_MARK_BYTES + record_bytes)
			break;
		reply_bytes = rpc_reply(in + at + RPC_MARK_BYTES, record_bytes,
					out + *out_bytes + RPC_MARK_BYTES);
		if (!reply_bytes)
			return -1;
		mark = htonl(RPC_LAST_FRAGMENT | (uint32_t)reply_bytes);
		memcpy(out + *out_bytes, &mark, sizeof(mark));
		*out_bytes += RPC_MARK_BYTES + reply_bytes;
		at += RPC_MARK_BYTES + record_bytes;
	}
	return (ssize_t)at;
}

static inline int incoming_cpu(int fd)
{
	int cpu = PEER_CPU_ANY;
	socklen_t length = sizeof(cpu);

	if (getsockopt(fd, SOL_SOCKET, SO_INCOMING_CPU, &cpu, &length))
		peer_die("SO_INCOMING_CPU");
	return cpu;
}

#endif
