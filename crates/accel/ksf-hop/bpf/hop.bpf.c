// SPDX-License-Identifier: GPL-2.0-only OR MIT
/*
 * The local hop: what one end of a TCP connection sends is put into the receive queue of the other end, if both are on
 * this machine. A direction of a connection is either on TCP or joined:
 *
 *	            the reader has read all that was sent by TCP
 *	   TCP  ------------------------------------------------->  joined
 *	        <-------------------------------------------------
 *	            more than the limit would wait unread; the end of the hop
 *
 * Two queues, one stream: the reader takes joined bytes first (tcp_bpf_recvmsg()). So bytes may follow joined ones by TCP at
 * any time, but joined ones may follow those of TCP only when these are read: copied_seq of the reader is write_seq of
 * the writer. Both are read here, under the writer's socket lock, so write_seq stands still; and copied_seq cannot pass
 * it.
 *
 * The kernel puts no limit on the joined queue, and readers have ways to read that do not see it. Both are looked after
 * here: see obstacle() and
 * guard.bpf.c.
 */
#include "maps.h"

enum {
	AF_INET = 2,
	AF_INET6 = 10,
	TCP_CLOSE = 7,
	SEND_SHUTDOWN = 2,
	O_NONBLOCK = 04000,
	LOOPBACK_IFINDEX = 1,
	/* A socket that more wait for than this is taken for one with edge-triggered readers. */
	WAITERS_MAX = 8,
	/* A quarter of the reader's SO_RCVBUF: joined bytes are charged to it, and TCP needs the rest for its window. */
	RCVBUF_SHARE = 4,
};

/* Not in the enum, whose values are of type int. */
#define EPOLLET (1U << 31)

static __always_inline int is_chosen(__u32 port)
{
	__u32 word = port / 32;
	__u32 *bits = bpf_map_lookup_elem(&ksf_hop_ports, &word);

	return bits && *bits >> port % 32 & 1;
}

/* The address in the last word; an IPv4 address that an IPv6 socket shows as a mapped one, too: its peer may be IPv4. */
static __always_inline void take_address(__u32 to[4], const __u32 from[4])
{
	to[0] = from[0];
	to[1] = from[1];
	to[2] = from[2] == KSF_BE32(0xffffU) && !from[0] && !from[1] ? 0 : from[2];
	to[3] = from[3];
}

static __always_inline void see_end(struct ksf_hop_end *end, const struct sock *sk)
{
	unsigned short family = 0;
	struct in6_addr six;
	__u16 port = 0;

	ksf_read(family, sk, __sk_common.skc_family);
	if (family == AF_INET6) {
		ksf_read(six, sk, __sk_common.skc_v6_rcv_saddr);
		take_address(end->local, six.in6_u.u6_addr32);
		ksf_read(six, sk, __sk_common.skc_v6_daddr);
		take_address(end->remote, six.in6_u.u6_addr32);
	} else {
		ksf_read(end->local[3], sk, __sk_common.skc_rcv_saddr);
		ksf_read(end->remote[3], sk, __sk_common.skc_daddr);
	}
	ksf_read(end->local_port, sk, __sk_common.skc_num);
	ksf_read(port, sk, __sk_common.skc_dport);
	end->remote_port = KSF_BE16(port);
}

/* The same connection as the other end sees it. */
static __always_inline void turn(struct ksf_hop_end *to, const struct ksf_hop_end *from)
{
	to->netns = from->netns;
	for (int word = 0; word < 4; word++) {
		to->local[word] = from->remote[word];
		to->remote[word] = from->local[word];
	}
	to->local_port = from->remote_port;
	to->remote_port = from->local_port;
}

/* Do its packets go out by lo? Then both ends are in this network namespace. */
static __always_inline int is_local(const struct sock *sk)
{
	struct dst_entry *route = 0;
	struct net_device *device = 0;
	int index = 0;

	ksf_read(route, sk, sk_dst_cache);
	if (route)
		ksf_read(device, route, dev);
	if (device)
		ksf_read(index, device, ifindex);
	return index == LOOPBACK_IFINDEX;
}

static __always_inline int is_itself(const struct ksf_hop_end *end)
{
	return end->local_port == end->remote_port && end->local[0] == end->remote[0] && end->local[1] == end->remote[1] &&
	       end->local[2] == end->remote[2] && end->local[3] == end->remote[3];
}

static __always_inline void watch(struct bpf_sock_ops *ops)
{
	struct ksf_hop_settings *set = settings();
	struct ksf_hop_end end = {};
	struct address address = {};
	struct bpf_sock *sk = ops->sk;
	struct address *known;
	struct writer *writer;
	struct tcp_sock *tp;
	_Bool is_mptcp = 0;

	if (!set || !sk || set->stopped || set->spliced)
		return;
	end.netns = bpf_get_netns_cookie(ops);
	if (end.netns != set->netns_cookie)
		return;
	tp = bpf_skc_to_tcp_sock(sk);
	if (!tp)
		return;
	see_end(&end, (const struct sock *)tp);
	if (!set->any_port && !is_chosen(end.local_port) && !is_chosen(end.remote_port))
		return;
	if (!is_local((const struct sock *)tp))
		return count(KSF_HOP_not_local, 1);
	if (ksf_has_field(tcp_sock, is_mptcp))
		ksf_read(is_mptcp, tp, is_mptcp);
	if (is_mptcp || is_itself(&end))
		return count(KSF_HOP_not_plain, 1);
	address.sock = (__u64)(unsigned long)sk;
	address.cookie = bpf_get_socket_cookie(ops);
	/* A cgroup and one above it may both be in the scope. */
	known = bpf_map_lookup_elem(&ksf_hop_addresses, &end);
	if (known && known->cookie == address.cookie)
		return;
	writer = bpf_sk_storage_get(&ksf_hop_writers, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (!writer)
		return count(KSF_HOP_not_taken, 1);
	turn(&writer->reader_end, &end);
	if (bpf_map_update_elem(&ksf_hop_addresses, &end, &address, BPF_ANY))
		return count(KSF_HOP_not_taken, 1);
	if (bpf_sock_hash_update(ops, &ksf_hop_sockets, &end, BPF_NOEXIST)) {
		bpf_map_delete_elem(&ksf_hop_addresses, &end);
		return count(KSF_HOP_not_taken, 1);
	}
	bpf_sock_ops_cb_flags_set(ops, ops->bpf_sock_ops_cb_flags | BPF_SOCK_OPS_STATE_CB_FLAG);
	count(KSF_HOP_watched, 1);
}

static __always_inline void forget(struct bpf_sock_ops *ops)
{
	struct ksf_hop_end end = {};
	struct bpf_sock *sk = ops->sk;
	struct tcp_sock *tp;

	if (!sk)
		return;
	tp = bpf_skc_to_tcp_sock(sk);
	if (!tp)
		return;
	end.netns = bpf_get_netns_cookie(ops);
	see_end(&end, (const struct sock *)tp);
	bpf_map_delete_elem(&ksf_hop_addresses, &end);
}

SEC("sockops") int ksf_hop_sockops(struct bpf_sock_ops *ops)
{
	switch (ops->op) {
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
	case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
		watch(ops);
		break;
	case BPF_SOCK_OPS_STATE_CB:
		if (ops->args[1] == TCP_CLOSE)
			forget(ops);
		break;
	}
	return 1;
}

/* What a message needs to know of the socket that is to read it. */
struct reader {
	__u32 waiting; /* joined bytes that are not read */
	__u32 limit;   /* of them */
};

static __always_inline int by_tcp(__u32 counter)
{
	count(counter, 1);
	return SK_PASS;
}

/* False: it is not, or not any more, there. */
static __always_inline int find_reader(struct writer *writer)
{
	struct address *address;
	__u64 cookie = 0;

	if (!writer->reader) {
		address = bpf_map_lookup_elem(&ksf_hop_addresses, &writer->reader_end);
		if (!address)
			return 0;
		writer->reader = address->sock;
		writer->reader_cookie = address->cookie;
	}
	/* Memory of sockets is used again for other sockets, which have another cookie. */
	ksf_read(cookie, (struct sock *)writer->reader, __sk_common.skc_cookie);
	return cookie && cookie == writer->reader_cookie;
}

static __always_inline int has_layer(const struct tcp_sock *tp)
{
	const struct tcp_ulp_ops *layer = 0;

	ksf_read(layer, tp, inet_conn.icsk_ulp_ops);
	return !!layer;
}

/* How much waits for the reader. False: somebody else's program reads it, or it cannot be told. */
static __always_inline int look_at(struct reader *reader, const struct sock *sk, const struct ksf_hop_settings *set)
{
	struct sk_psock_progs progs = {};
	struct sk_psock *psock;
	int rcvbuf = 0;

	psock = psock_of(sk);
	if (!psock)
		return 0;
	if (ksf_read(progs, psock, progs) || progs.stream_parser || progs.stream_verdict || progs.skb_verdict)
		return 0;
	if (ksf_read(reader->waiting, psock, msg_tot_len))
		return 0;
	ksf_read(rcvbuf, sk, sk_rcvbuf);
	reader->limit = (__u32)rcvbuf / RCVBUF_SHARE;
	if (reader->limit > set->limit_bytes)
		reader->limit = set->limit_bytes;
	return 1;
}

static __always_inline int blocks(const struct sock *sk)
{
	struct socket *socket = 0;
	struct file *file = 0;
	__u32 flags = 0;

	ksf_read(socket, sk, sk_socket);
	if (socket)
		ksf_read(file, socket, file);
	if (file)
		ksf_read(flags, file, f_flags);
	return !(flags & O_NONBLOCK);
}

/*
 * Who waits by EPOLLET may take a read that did not fill its buffer for the end of what is there, and wait for the next
 * event (epoll(7) says that it may). But a read ends where the joined bytes end, and the bytes that came by TCP behind them
 * had their event already. So the two must not lie behind one another for such a reader.
 *
 * The list is read without its lock: what is found must be an item of the socket's own file.
 */
static __always_inline int waits_by_edge(const struct sock *sk)
{
	struct socket *socket = 0;
	struct socket_wq *wq = 0;
	struct list_head *head, *at = 0;
	struct file *file = 0;

	if (!ksf_has_field(epitem, event.events) || !ksf_has_field(epitem, ffd.file) || !ksf_has_field(eppoll_entry, base))
		return 1;
	ksf_read(socket, sk, sk_socket);
	if (socket)
		ksf_read(file, socket, file);
	ksf_read(wq, sk, sk_wq);
	if (!file || !wq)
		return 1;
	head = (void *)wq + ksf_offset_of(socket_wq, wait.head);
	ksf_read(at, head, next);
	for (int waiter = 0; waiter < WAITERS_MAX; waiter++) {
		struct eppoll_entry *entry = (void *)at - ksf_offset_of(eppoll_entry, wait.entry);
		struct file *of = 0;
		struct epitem *item = 0;
		__u32 events = 0;

		if (at == head)
			return 0;
		ksf_read(item, entry, base);
		ksf_read(of, item, ffd.file);
		ksf_read(events, item, event.events);
		if (of == file && events & EPOLLET)
			return 1;
		ksf_read(at, at, next);
	}
	return at != head;
}

/* Why a direction stays on TCP for this message; KSF_HOP_COUNTER_COUNT if it may leave it. */
static __always_inline __u32 obstacle(struct writer *writer, const struct tcp_sock *tp, const struct ksf_hop_settings *set)
{
	const struct tcp_sock *reader = (const struct tcp_sock *)writer->reader;
	__u32 written = 0, read = 1;

	if (writer->by_tcp < set->warm_up) {
		writer->by_tcp++;
		return KSF_HOP_tcp_young;
	}
	ksf_read(written, tp, write_seq);
	ksf_read(read, reader, copied_seq);
	if (written != read)
		return KSF_HOP_tcp_unread;
	/*
	 * recv() on a blocking socket may end with EAGAIN while joined bytes are waited for: any wake-up ends the wait
	 * (tcp_bpf_recvmsg(), kernel 6.18), a signal too, and MSG_WAITALL does not wait for all.
	 */
	if (blocks((const struct sock *)reader))
		return KSF_HOP_tcp_blocking;
	if (bpf_map_lookup_elem(&ksf_hop_splicers, &writer->reader_cookie))
		return KSF_HOP_tcp_splice;
	if (has_layer(reader))
		return KSF_HOP_tcp_layered;
	if (waits_by_edge((const struct sock *)reader))
		return KSF_HOP_tcp_edge;
	return KSF_HOP_COUNTER_COUNT;
}

/*
 * What follows joined bytes by TCP is in order for everybody but one who takes splice(), which sees TCP's bytes only. A
 * writer's error (EACCES, from now on) is better than a torn stream.
 */
static __always_inline int leave(struct writer *writer, const struct reader *reader, __u32 counter)
{
	if (writer->joined && reader->waiting && bpf_map_lookup_elem(&ksf_hop_splicers, &writer->reader_cookie)) {
		count(KSF_HOP_refused, 1);
		return SK_DROP;
	}
	if (writer->joined)
		count(KSF_HOP_left, 1);
	writer->joined = 0;
	return by_tcp(counter);
}

SEC("sk_msg") int ksf_hop_message(struct sk_msg_md *msg)
{
	struct ksf_hop_settings *set = settings();
	struct bpf_sock *sk = msg->sk;
	struct reader reader = {};
	struct writer *writer;
	struct tcp_sock *tp;
	__u8 shut = 0;
	__u32 why;

	if (!set || !sk)
		return SK_PASS;
	writer = bpf_sk_storage_get(&ksf_hop_writers, sk, 0, 0);
	tp = bpf_skc_to_tcp_sock(sk);
	if (!writer || !tp)
		return SK_PASS;
	if (!ksf_has_field(sk_psock, msg_tot_len))
		return by_tcp(KSF_HOP_tcp_uncounted);
	/* TCP has the right answer: EPIPE. */
	ksf_read(shut, (struct sock *)tp, sk_shutdown);
	if (shut & SEND_SHUTDOWN)
		return by_tcp(KSF_HOP_tcp_ended);
	if (!find_reader(writer))
		return leave(writer, &reader, KSF_HOP_tcp_alone);
	if (has_layer(tp) || !look_at(&reader, (struct sock *)writer->reader, set))
		return leave(writer, &reader, KSF_HOP_tcp_layered);
	if (set->stopped || set->spliced)
		return leave(writer, &reader, KSF_HOP_tcp_stopped);
	if (msg->size > reader.limit)
		return leave(writer, &reader, KSF_HOP_tcp_large);
	if (reader.waiting + msg->size > reader.limit)
		return leave(writer, &reader, KSF_HOP_tcp_full);
	/* It was not so when the direction was joined. While bytes wait TCP would be behind them. */
	if (writer->joined && !reader.waiting && waits_by_edge((struct sock *)writer->reader))
		return leave(writer, &reader, KSF_HOP_tcp_edge);
	if (!writer->joined) {
		why = obstacle(writer, tp, set);
		if (why != KSF_HOP_COUNTER_COUNT)
			return by_tcp(why);
		writer->joined = 1;
		count(KSF_HOP_joined, 1);
	}
	/* It says SK_DROP if the socket is not in the map any more: TCP tells the writer in its own way. */
	if (bpf_msg_redirect_hash(msg, &ksf_hop_sockets, &writer->reader_end, BPF_F_INGRESS) != SK_PASS)
		return leave(writer, &reader, KSF_HOP_tcp_alone);
	count(KSF_HOP_messages, 1);
	count(KSF_HOP_bytes, msg->size);
	return SK_PASS;
}

char ksf_hop_license[] SEC("license") = "Dual MIT/GPL";
