/* Observes what a message socket of the family AF_KCM does: one line per row of the contract, "row: what happened".
 *
 * Nothing here says what is right. The lines of the kernel's own AF_KCM are in af_kcm.txt next to this file; another
 * implementation of the same calls is put beside it by running this program against it.
 *
 * A message is its length, header included, as 32 bits in network order, then bytes that are all the same letter.
 * Needs root, for the framing program. Connections are on loopback.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/bpf.h>
#include <linux/kcm.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef AF_KCM
#define AF_KCM 41
#endif
#define SOL_KCM 281
#define HEADER_BYTES 4
#define COMES_MS 5000 /* longer than anything takes that comes */
#define QUIET_MS 100 /* after that, nothing will */
#define SENT_MS 500 /* the same for what another thread sends after a millisecond */

/* The framing program of kcm.rst, and one that knows where in the segment the message starts. */
static int documented, framing;

struct tcp {
	int near, far; /* near is attached; far is the peer's end */
};

/* --- plumbing ------------------------------------------------------------------------------------------- */

static void die(const char *what)
{
	printf("cannot %s: %s\n", what, strerrorname_np(errno));
	exit(1);
}

static int must(int result, const char *what)
{
	if (result < 0)
		die(what);
	return result;
}

/* A string that lives until sixteen more have been made. */
static char *text(const char *format, ...)
{
	static char ring[16][256];
	static unsigned int next;
	char *line = ring[next++ % 16];
	va_list args;

	va_start(args, format);
	vsnprintf(line, sizeof(ring[0]), format, args);
	va_end(args);
	return line;
}

static const char *outcome(int result)
{
	return result < 0 ? strerrorname_np(errno) : "ok";
}

static void row(const char *name, const char *format, ...)
{
	va_list args;

	printf("%s: ", name);
	va_start(args, format);
	vprintf(format, args);
	va_end(args);
	printf("\n");
	fflush(stdout);
}

static int load(const struct bpf_insn *program, size_t count)
{
	static char log[65536];
	union bpf_attr attr = {
		.prog_type = BPF_PROG_TYPE_SOCKET_FILTER,
		.insns = (uintptr_t)program,
		.insn_cnt = count,
		.license = (uintptr_t)"GPL",
		.log_buf = (uintptr_t)log,
		.log_size = sizeof(log),
		.log_level = 1,
	};
	int fd = syscall(SYS_bpf, BPF_PROG_LOAD, &attr, sizeof(attr));

	if (fd < 0)
		printf("%s", log);
	return must(fd, "load the framing program");
}

#define LOAD(program) load(program, sizeof(program) / sizeof(*(program)))
#define MOVE(to, from) { .code = BPF_ALU64 | BPF_MOV | BPF_X, .dst_reg = (to), .src_reg = (from) }
#define SET(to, value) { .code = BPF_ALU64 | BPF_MOV | BPF_K, .dst_reg = (to), .imm = (value) }
#define ADD(to, value) { .code = BPF_ALU64 | BPF_ADD | BPF_K, .dst_reg = (to), .imm = (value) }
#define CALL(helper) { .code = BPF_JMP | BPF_CALL, .imm = (helper) }
#define LOAD_WORD(to, from, at) \
	{ .code = BPF_LDX | BPF_MEM | BPF_W, .dst_reg = (to), .src_reg = (from), .off = (at) }
#define EXIT { .code = BPF_JMP | BPF_EXIT }

/* r0 = the word at the start of the segment, or 0 if there are less than four bytes. */
static int load_documented(void)
{
	const struct bpf_insn program[] = {
		MOVE(BPF_REG_6, BPF_REG_1),
		{ .code = BPF_LD | BPF_ABS | BPF_W },
		EXIT,
	};
	return LOAD(program);
}

/* The same at the start of the message. strparser keeps it in the part of sk_buff.cb that a program may not read, so
 * it is read as kernel memory: sk_buff.cb is at 40 (x86-64, 4.20 to 6.x), sk_skb_cb.strp.strp.offset at 28 in it (5.16
 * and its stable kernels). */
static int load_framing(void)
{
	const struct bpf_insn program[] = {
		MOVE(BPF_REG_6, BPF_REG_1),
		MOVE(BPF_REG_3, BPF_REG_1),
		ADD(BPF_REG_3, 40 + 28),
		MOVE(BPF_REG_1, BPF_REG_10),
		ADD(BPF_REG_1, -8),
		SET(BPF_REG_2, 4),
		CALL(BPF_FUNC_probe_read_kernel),
		LOAD_WORD(BPF_REG_2, BPF_REG_10, -8),
		MOVE(BPF_REG_1, BPF_REG_6),
		MOVE(BPF_REG_3, BPF_REG_10),
		ADD(BPF_REG_3, -4),
		SET(BPF_REG_4, 4),
		CALL(BPF_FUNC_skb_load_bytes),
		{ .code = BPF_JMP | BPF_JEQ | BPF_K, .dst_reg = BPF_REG_0, .off = 2, .imm = 0 },
		SET(BPF_REG_0, 0), /* the header is not whole: need more */
		EXIT,
		LOAD_WORD(BPF_REG_0, BPF_REG_10, -4),
		{ .code = BPF_ALU | BPF_END | BPF_TO_BE, .dst_reg = BPF_REG_0, .imm = 32 },
		EXIT,
	};
	return LOAD(program);
}

static int load_constant(int value)
{
	const struct bpf_insn program[] = { SET(BPF_REG_0, value), EXIT };
	return LOAD(program);
}

static int kcm(int type)
{
	return must(socket(AF_KCM, type, KCMPROTO_CONNECTED), "open an AF_KCM socket");
}

/* rcvbuf: SO_RCVBUF of the attached end, 0 to leave it alone. */
static struct tcp connection(int rcvbuf)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t length = sizeof(address);
	int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
	struct tcp tcp;

	if (rcvbuf)
		setsockopt(listener, SOL_SOCKET, SO_RCVBUF, &rcvbuf, sizeof(rcvbuf));
	if (bind(listener, (void *)&address, length) || listen(listener, 1) ||
	    getsockname(listener, (void *)&address, &length))
		die("listen");
	tcp.far = socket(AF_INET, SOCK_STREAM, 0);
	must(connect(tcp.far, (void *)&address, length), "connect");
	tcp.near = must(accept(listener, NULL, NULL), "accept");
	setsockopt(tcp.far, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	close(listener);
	return tcp;
}

static int attach_with(int mux, int tcp, int program)
{
	struct kcm_attach request = { .fd = tcp, .bpf_fd = program };
	return ioctl(mux, SIOCKCMATTACH, &request);
}

static int unattach(int mux, int tcp)
{
	struct kcm_unattach request = { .fd = tcp };
	return ioctl(mux, SIOCKCMUNATTACH, &request);
}

/* A connection that is attached. */
static struct tcp attached_with(int mux, int program, int rcvbuf)
{
	struct tcp tcp = connection(rcvbuf);
	must(attach_with(mux, tcp.near, program), "attach");
	return tcp;
}

static struct tcp attached(int mux)
{
	return attached_with(mux, framing, 0);
}

static int clone_of(int mux)
{
	struct kcm_clone request = { .fd = -1 };
	must(ioctl(mux, SIOCKCMCLONE, &request), "clone");
	return request.fd;
}

static void hang_up(int mux, struct tcp tcp)
{
	unattach(mux, tcp.near);
	close(tcp.near);
	close(tcp.far);
}

/* Puts a message into a buffer; returns its length. */
static size_t message(char *at, size_t length, char letter)
{
	uint32_t header = htonl(length);

	memset(at, letter, length);
	memcpy(at, &header, HEADER_BYTES);
	return length;
}

static void put(int fd, size_t length, char letter)
{
	char *bytes = malloc(length);

	message(bytes, length, letter);
	if (write(fd, bytes, length) != (ssize_t)length)
		die("write to a connection");
	free(bytes);
}

static int events(int fd, int wanted, int timeout_ms)
{
	struct pollfd entry = { .fd = fd, .events = wanted };
	return poll(&entry, 1, timeout_ms) > 0 ? entry.revents : 0;
}

static const char *flags_of(int flags)
{
	return text("%s%s%s", flags & MSG_TRUNC ? " TRUNC" : "", flags & MSG_EOR ? " EOR" : "",
		    flags & ~(MSG_TRUNC | MSG_EOR) ? " and others" : "");
}

/* Receives once with a buffer of this size: how many bytes, the letter of the last, the flags. */
static const char *receive_for(int fd, size_t size, int flags, int timeout_ms)
{
	static char buffer[1 << 20];
	struct iovec part = { .iov_base = buffer, .iov_len = size };
	struct msghdr header = { .msg_iov = &part, .msg_iovlen = 1 };

	if (!(events(fd, POLLIN, timeout_ms) & POLLIN))
		return "nothing";
	ssize_t length = recvmsg(fd, &header, flags | MSG_DONTWAIT);
	if (length <= 0)
		return length ? strerrorname_np(errno) : "end";
	/* A header alone ends in no letter. */
	char last = buffer[length - 1] < ' ' ? '-' : buffer[length - 1];
	return text("%zd %c%s", length, last, flags_of(header.msg_flags));
}

static const char *receive(int fd)
{
	return receive_for(fd, 1 << 20, 0, COMES_MS);
}

static const char *receive_into(int fd, size_t size)
{
	return receive_for(fd, size, 0, COMES_MS);
}

static const char *receive_late(int fd)
{
	return receive_for(fd, 1 << 20, 0, QUIET_MS);
}

static int drain(int fd)
{
	int count = 0;

	while (strcmp(receive_late(fd), "nothing"))
		count++;
	return count;
}

/* The error of a TCP socket, once it has one. */
static const char *error_of(int fd, int timeout_ms)
{
	int error = 0;
	socklen_t length = sizeof(error);

	if (!(events(fd, 0, timeout_ms) & POLLERR))
		return "none";
	getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
	return error ? strerrorname_np(error) : "none";
}

static int send_message(int fd, size_t length, char letter, int flags)
{
	char bytes[4096];
	return send(fd, bytes, message(bytes, length, letter), flags | MSG_DONTWAIT | MSG_NOSIGNAL);
}

static void sleep_ms(int ms)
{
	struct timespec time = { ms / 1000, ms % 1000 * 1000000L };
	nanosleep(&time, NULL);
}

static void limit_assembly(int fd, int seconds)
{
	struct timeval limit = { .tv_sec = seconds };
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
}

/* --- objects -------------------------------------------------------------------------------------------- */

static void open_sockets(void)
{
	row("socket(SOCK_DGRAM)", "%s", outcome(socket(AF_KCM, SOCK_DGRAM, 0)));
	row("socket(SOCK_SEQPACKET)", "%s", outcome(socket(AF_KCM, SOCK_SEQPACKET, 0)));
	row("socket(SOCK_STREAM)", "%s", outcome(socket(AF_KCM, SOCK_STREAM, 0)));
	row("socket(protocol 1)", "%s", outcome(socket(AF_KCM, SOCK_DGRAM, 1)));
}

static void attach_rules(void)
{
	int mux = kcm(SOCK_DGRAM), other = kcm(SOCK_DGRAM);
	struct tcp tcp = connection(0);
	int listener = socket(AF_INET, SOCK_STREAM, 0);

	listen(listener, 1);
	row("attach a listening socket", "%s", outcome(attach_with(mux, listener, framing)));
	row("attach an unconnected socket", "%s", outcome(attach_with(mux, socket(AF_INET, SOCK_STREAM, 0), framing)));
	row("attach a UDP socket", "%s", outcome(attach_with(mux, socket(AF_INET, SOCK_DGRAM, 0), framing)));
	row("attach a closed descriptor", "%s", outcome(attach_with(mux, 999, framing)));
	row("attach with a closed program", "%s", outcome(attach_with(mux, tcp.near, 999)));
	row("attach", "%s", outcome(attach_with(mux, tcp.near, framing)));
	row("attach again", "%s", outcome(attach_with(mux, tcp.near, framing)));
	row("attach to another mux", "%s", outcome(attach_with(other, tcp.near, framing)));
	row("unattach from another mux", "%s", outcome(unattach(other, tcp.near)));
	row("unattach", "%s", outcome(unattach(mux, tcp.near)));
	row("unattach again", "%s", outcome(unattach(mux, tcp.near)));
	row("attach after unattach", "%s", outcome(attach_with(mux, tcp.near, framing)));
	hang_up(mux, tcp);
	close(listener);
	close(mux);
	close(other);
}

static void calls_without_meaning(void)
{
	int mux = kcm(SOCK_DGRAM), count;
	struct tcp tcp = attached(mux);
	struct sockaddr_in address = { .sin_family = AF_INET };
	socklen_t length = sizeof(address);

	row("bind", "%s", outcome(bind(mux, (void *)&address, length)));
	row("connect", "%s", outcome(connect(mux, (void *)&address, length)));
	row("listen", "%s", outcome(listen(mux, 1)));
	row("accept", "%s", outcome(accept(mux, NULL, NULL)));
	row("shutdown", "%s", outcome(shutdown(mux, SHUT_RDWR)));
	row("getpeername", "%s", outcome(getpeername(mux, (void *)&address, &length)));
	row("FIONREAD", "%s", outcome(ioctl(mux, FIONREAD, &count)));
	hang_up(mux, tcp);
	close(mux);
}

/* --- receiving ------------------------------------------------------------------------------------------ */

static void receive_whole(int type, const char *name)
{
	int mux = kcm(type);
	struct tcp tcp = attached(mux);
	char bytes[64];

	row(text("%s, nothing there, MSG_DONTWAIT", name), "%s", outcome(recv(mux, bytes, 64, MSG_DONTWAIT)));
	put(tcp.far, 10, 'a');
	put(tcp.far, 20, 'b');
	const char *first = receive(mux);
	const char *second = receive(mux);
	row(text("%s, two messages", name), "%s, %s, %s", first, second, receive_late(mux));

	put(tcp.far, 50, 'a');
	put(tcp.far, 30, 'b');
	first = receive_into(mux, 20);
	second = receive(mux);
	row(text("%s, 20 of 50 bytes, then the rest", name), "%s, %s, %s", first, second, receive_late(mux));

	put(tcp.far, 50, 'a');
	first = receive_for(mux, 20, MSG_PEEK, COMES_MS);
	second = receive_for(mux, 20, MSG_TRUNC, COMES_MS);
	row(text("%s, MSG_PEEK, then MSG_TRUNC, of 20 of 50 bytes", name), "%s, %s", first, second);
	drain(mux);

	/* A header in two pieces, and a body in two. */
	size_t length = message(bytes, 30, 'p');
	for (size_t at = 0; at < length; at += 3) {
		must(write(tcp.far, bytes + at, 3), "write");
		sleep_ms(2);
	}
	row(text("%s, 30 bytes, three at a time", name), "%s", receive(mux));
	hang_up(mux, tcp);
	close(mux);
}

static void receive_by_splice(void)
{
	int mux = kcm(SOCK_SEQPACKET), ends[2];
	struct tcp tcp = attached(mux);

	must(pipe(ends), "make a pipe");
	put(tcp.far, 60, 'a');
	put(tcp.far, 30, 'b');
	const char *spliced = splice(mux, NULL, ends[1], NULL, 10, 0) == 10 ? "10" : strerrorname_np(errno);
	const char *rest = receive(mux);
	row("SEQPACKET, splice 10 of 60 bytes, then the rest", "%s, %s, %s", spliced, rest, receive_late(mux));
	close(ends[0]);
	close(ends[1]);
	hang_up(mux, tcp);
	close(mux);
}

static void receive_in_time(void)
{
	int mux = kcm(SOCK_DGRAM);
	struct timeval limit = { .tv_usec = 50000 };
	char bytes[64];

	setsockopt(mux, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
	row("blocking receive, SO_RCVTIMEO of the message socket", "%s", outcome(recv(mux, bytes, sizeof(bytes), 0)));
	close(mux);
}

static void receive_many(void)
{
	int mux = kcm(SOCK_SEQPACKET);
	struct tcp tcp = attached(mux);
	char buffers[8][64];
	struct iovec parts[8];
	struct mmsghdr headers[8] = { 0 };

	for (int i = 0; i < 8; i++) {
		parts[i] = (struct iovec){ buffers[i], sizeof(buffers[i]) };
		headers[i].msg_hdr.msg_iov = &parts[i];
		headers[i].msg_hdr.msg_iovlen = 1;
	}
	for (int i = 0; i < 5; i++)
		put(tcp.far, 10 + i, 'a' + i);
	sleep_ms(QUIET_MS);
	int count = recvmmsg(mux, headers, 8, MSG_DONTWAIT, NULL);
	row("recvmmsg of 8, five there", "%d, the last of %u bytes", count, count > 0 ? headers[count - 1].msg_len : 0);
	hang_up(mux, tcp);
	close(mux);
}

/* Six messages of different lengths in one write, so in one segment. */
static void receive_aggregated(int program, const char *name)
{
	int mux = kcm(SOCK_DGRAM);
	struct tcp tcp = attached_with(mux, program, 0);
	char bytes[512], lengths[256] = "";
	size_t length = 0;

	for (int i = 0; i < 6; i++)
		length += message(bytes + length, 10 + 5 * i, 'a' + i);
	must(write(tcp.far, bytes, length), "write");
	for (;;) {
		const char *got = receive_late(mux);
		if (!strcmp(got, "nothing"))
			break;
		strcat(lengths, text(" %ld", strtol(got, NULL, 10)));
	}
	row(text("10 15 20 25 30 35 in one segment, %s program", name), "%s; error %s", lengths + 1,
	    error_of(tcp.near, QUIET_MS));
	hang_up(mux, tcp);
	close(mux);
}

/* --- several sockets ------------------------------------------------------------------------------------ */

static void clones(void)
{
	int sockets[4], counts[4], type = 0;
	socklen_t length = sizeof(type);

	sockets[0] = kcm(SOCK_SEQPACKET);
	for (int i = 1; i < 4; i++)
		sockets[i] = clone_of(sockets[0]);
	getsockopt(sockets[1], SOL_SOCKET, SO_TYPE, &type, &length);
	row("type of a clone of SOCK_SEQPACKET", "%s", type == SOCK_SEQPACKET ? "SOCK_SEQPACKET" : text("%d", type));
	row("close-on-exec of a clone", "%s", fcntl(sockets[1], F_GETFD) & FD_CLOEXEC ? "on" : "off");

	struct tcp tcp = attached(sockets[0]);
	for (int i = 0; i < 40; i++) {
		put(tcp.far, 10, 'a');
		sleep_ms(5); /* one segment each */
	}
	for (int i = 0; i < 4; i++)
		counts[i] = drain(sockets[i]);
	row("40 messages for four sockets, nobody reading", "%d %d %d %d", counts[0], counts[1], counts[2], counts[3]);
	hang_up(sockets[0], tcp);
	for (int i = 0; i < 4; i++)
		close(sockets[i]);
}

static void receive_disable(void)
{
	int mux = kcm(SOCK_DGRAM), other = clone_of(mux), on = 1, off = 0, value = -1;
	socklen_t length = sizeof(value);
	struct tcp tcp = attached(mux);

	row("KCM_RECV_DISABLE", "%s", outcome(setsockopt(mux, SOL_KCM, KCM_RECV_DISABLE, &on, sizeof(on))));
	getsockopt(mux, SOL_KCM, KCM_RECV_DISABLE, &value, &length);
	row("KCM_RECV_DISABLE, read back", "%d", value);
	for (int i = 0; i < 4; i++)
		put(tcp.far, 10, 'a');
	int here = drain(mux);
	row("four messages, this socket disabled, the other not", "%d %d", here, drain(other));

	/* Disabled with messages in its queue: both get some, then one stops. */
	setsockopt(mux, SOL_KCM, KCM_RECV_DISABLE, &off, sizeof(off));
	for (int i = 0; i < 4; i++) {
		put(tcp.far, 10, 'a');
		sleep_ms(5);
	}
	setsockopt(mux, SOL_KCM, KCM_RECV_DISABLE, &on, sizeof(on));
	here = drain(mux);
	row("four messages, then this socket disabled", "%d %d", here, drain(other));

	/* Nobody left: the messages wait. */
	setsockopt(other, SOL_KCM, KCM_RECV_DISABLE, &on, sizeof(on));
	put(tcp.far, 10, 'a');
	put(tcp.far, 11, 'b');
	here = drain(mux) + drain(other);
	setsockopt(other, SOL_KCM, KCM_RECV_DISABLE, &off, sizeof(off));
	row("two messages, all sockets disabled, then one enabled", "%d, %d", here, drain(other));

	close(other);
	put(tcp.far, 10, 'a');
	here = drain(mux);
	setsockopt(mux, SOL_KCM, KCM_RECV_DISABLE, &off, sizeof(off));
	row("the other socket closed, this one disabled, then enabled", "%d, %d", here, drain(mux));
	hang_up(mux, tcp);
	close(mux);
}

/* --- sending -------------------------------------------------------------------------------------------- */

static const char *received_by_peer(int fd)
{
	char bytes[4096];

	if (!(events(fd, POLLIN, SENT_MS) & POLLIN))
		return "nothing";
	ssize_t length = recv(fd, bytes, sizeof(bytes), MSG_DONTWAIT);
	return length < 0 ? strerrorname_np(errno) : text("%zd", length);
}

/* Waits until the peers of so many connections have so many bytes to read, all together. */
static void wait_for_bytes(const struct tcp *tcp, int count, int bytes)
{
	for (int ms = 0; ms < COMES_MS; ms++) {
		int all = 0;

		for (int i = 0; i < count; i++) {
			int there = 0;

			ioctl(tcp[i].far, FIONREAD, &there);
			all += there;
		}
		if (all >= bytes)
			return;
		sleep_ms(1);
	}
}

static void send_rules(int type, const char *name)
{
	int mux = kcm(type);
	struct tcp tcp = attached(mux);
	const char *before;

	send_message(mux, 10, 'a', 0);
	before = received_by_peer(tcp.far);
	send_message(mux, 10, 'b', MSG_EOR);
	row(text("%s, send 10, then 10 with MSG_EOR", name), "%s, %s", before, received_by_peer(tcp.far));

	send_message(mux, 10, 'a', MSG_MORE);
	before = received_by_peer(tcp.far);
	send_message(mux, 10, 'b', MSG_EOR);
	row(text("%s, send 10 with MSG_MORE, then 10 with MSG_EOR", name), "%s, %s", before, received_by_peer(tcp.far));

	send_message(mux, 10, 'a', MSG_BATCH | MSG_EOR);
	before = received_by_peer(tcp.far);
	send_message(mux, 10, 'b', MSG_EOR);
	row(text("%s, send 10 with MSG_BATCH, then 10", name), "%s, %s", before, received_by_peer(tcp.far));
	row(text("%s, send nothing", name), "%s", outcome(send(mux, "", 0, MSG_EOR)));
	hang_up(mux, tcp);
	close(mux);
}

static void send_many(void)
{
	int mux = kcm(SOCK_SEQPACKET);
	struct tcp tcp[2] = { attached(mux), attached(mux) };
	char bytes[2][64];
	struct iovec parts[2];
	struct mmsghdr headers[2] = { 0 };

	for (int i = 0; i < 2; i++) {
		parts[i] = (struct iovec){ bytes[i], message(bytes[i], 10 + i, 'a' + i) };
		headers[i].msg_hdr = (struct msghdr){ .msg_iov = &parts[i], .msg_iovlen = 1, .msg_flags = MSG_EOR };
	}
	int sent = sendmmsg(mux, headers, 2, MSG_DONTWAIT);
	wait_for_bytes(tcp, 2, 21);
	const char *first = received_by_peer(tcp[0].far);
	row("SEQPACKET, sendmmsg of 10 and 11 with MSG_EOR in each", "%d sent; connections: %s, %s", sent, first,
	    received_by_peer(tcp[1].far));
	hang_up(mux, tcp[0]);
	hang_up(mux, tcp[1]);
	close(mux);
}

static void send_steering(int flags, const char *name)
{
	int mux = kcm(SOCK_DGRAM), counts[4];
	struct tcp tcp[4];
	char bytes[4096];

	for (int i = 0; i < 4; i++)
		tcp[i] = attached(mux);
	for (int i = 0; i < 16; i++) {
		send_message(mux, 10, 'a', i < 15 ? flags : 0);
		sleep_ms(5);
	}
	wait_for_bytes(tcp, 4, 160);
	for (int i = 0; i < 4; i++)
		counts[i] = recv(tcp[i].far, bytes, sizeof(bytes), MSG_DONTWAIT) / 10;
	row(text("16 messages over four connections, %s", name), "%d %d %d %d", counts[0], counts[1], counts[2], counts[3]);
	for (int i = 0; i < 4; i++)
		hang_up(mux, tcp[i]);
	close(mux);
}

/* What the last byte is that each of four connections got. */
static const char *answers_of(const struct tcp *tcp)
{
	char bytes[4][64] = { 0 };

	for (int i = 0; i < 4; i++) {
		ssize_t length = events(tcp[i].far, POLLIN, QUIET_MS) ? recv(tcp[i].far, bytes[i], 64, MSG_DONTWAIT) : 0;
		bytes[i][0] = length > 0 ? bytes[i][length - 1] : '-';
	}
	return text("%c %c %c %c", bytes[0][0], bytes[1][0], bytes[2][0], bytes[3][0]);
}

/* Which connections get the answers of a server that answers what it received. */
static void send_answers(void)
{
	int mux = kcm(SOCK_DGRAM);
	struct tcp tcp[4];

	for (int i = 0; i < 4; i++)
		tcp[i] = attached(mux);
	for (int i = 3; i >= 0; i--) {
		put(tcp[i].far, 10, 'a' + i);
		send_message(mux, 10, receive(mux)[3], 0);
	}
	row("four connections ask, 4 3 2 1, each is answered at once", "%s", answers_of(tcp));
	for (int i = 0; i < 4; i++)
		hang_up(mux, tcp[i]);
	close(mux);

	char buffers[4][64];
	struct iovec parts[4];
	struct mmsghdr headers[4] = { 0 };
	mux = kcm(SOCK_DGRAM);
	for (int i = 0; i < 4; i++) {
		tcp[i] = attached(mux);
		parts[i] = (struct iovec){ buffers[i], sizeof(buffers[i]) };
		headers[i].msg_hdr.msg_iov = &parts[i];
		headers[i].msg_hdr.msg_iovlen = 1;
	}
	for (int i = 3; i >= 0; i--) {
		put(tcp[i].far, 10, 'a' + i);
		sleep_ms(QUIET_MS);
	}
	int count = recvmmsg(mux, headers, 4, MSG_DONTWAIT, NULL);
	for (int i = 0; i < count; i++)
		send_message(mux, 10, buffers[i][9], 0);
	row("the same, received with one call, then answered", "%s", answers_of(tcp));
	for (int i = 0; i < 4; i++)
		hang_up(mux, tcp[i]);
	close(mux);

	mux = kcm(SOCK_DGRAM);
	tcp[0] = attached(mux);
	put(tcp[0].far, 10, 'a');
	receive(mux);
	hang_up(mux, tcp[0]);
	tcp[1] = attached(mux);
	row("a client asks and is unattached, then its answer", "%s", outcome(send_message(mux, 10, 'a', 0)));
	row("and another client gets", "%s", received_by_peer(tcp[1].far));
	hang_up(mux, tcp[1]);
	close(mux);
}

/* --- errors --------------------------------------------------------------------------------------------- */

static void program_results(void)
{
	int mux = kcm(SOCK_DGRAM);
	struct tcp tcp = attached_with(mux, load_constant(-EBADMSG), 0);

	put(tcp.far, 10, 'a');
	const char *error = error_of(tcp.near, COMES_MS);
	row("program returns -EBADMSG", "%s on the connection; reader %s", error,
	    events(mux, POLLIN | POLLERR, QUIET_MS) ? "woken" : "not woken");
	hang_up(mux, tcp);

	/* The length of a message must lie beyond what was seen of it. */
	tcp = attached_with(mux, framing, 0);
	uint32_t header = htonl(3);
	must(write(tcp.far, &header, sizeof(header)), "write");
	error = error_of(tcp.near, QUIET_MS);
	row("length 3, header of 4", "%s on the connection; reader: %s", error, receive_late(mux));
	hang_up(mux, tcp);
	close(mux);
}

static void too_long(void)
{
	int mux = kcm(SOCK_DGRAM);
	struct tcp tcp = attached_with(mux, framing, 8192);

	put(tcp.far, 20000, 'a');
	const char *error = error_of(tcp.near, COMES_MS);
	unattach(mux, tcp.near);
	row("message longer than SO_RCVBUF", "%s on the connection; %s", error,
	    events(tcp.near, POLLIN, QUIET_MS) & POLLIN ? "its bytes can be read after unattach" : "its bytes are gone");
	hang_up(mux, tcp);
	close(mux);
}

/* Bytes that a peer can make the kernel keep while the program asks for more; stops at 4 MiB. */
static void endless_header(void)
{
	enum { STEP = 65536, ENOUGH = 64 * STEP };
	static char zeros[STEP];
	int mux = kcm(SOCK_DGRAM), kept = 0;
	struct tcp tcp = attached_with(mux, load_constant(0), 16384);

	while (kept < ENOUGH && events(tcp.far, POLLOUT, 1000) & POLLOUT) {
		ssize_t sent = send(tcp.far, zeros, STEP, MSG_DONTWAIT | MSG_NOSIGNAL);
		if (sent < 0)
			break;
		kept += sent;
	}
	row("a header that never ends, SO_RCVBUF 16384", "%s; error %s",
	    kept >= ENOUGH ? "4 MiB taken" : "stopped before 4 MiB", error_of(tcp.near, QUIET_MS));
	hang_up(mux, tcp);
	close(mux);
}

static void assembly_timeout(void)
{
	int mux = kcm(SOCK_DGRAM);
	struct tcp tcp = connection(0);
	char bytes[64];

	limit_assembly(tcp.near, 1);
	must(attach_with(mux, tcp.near, framing), "attach");
	message(bytes, 64, 'a');
	must(write(tcp.far, bytes, 20), "write");
	row("20 of 64 bytes, SO_RCVTIMEO 1 s", "%s on the connection", error_of(tcp.near, COMES_MS));
	hang_up(mux, tcp);

	tcp = connection(0);
	limit_assembly(tcp.near, 1);
	must(attach_with(mux, tcp.near, framing), "attach");
	const char *error = "none";
	int sent = 0;
	for (; sent < 60 && !strcmp(error, "none"); sent += 6) {
		must(write(tcp.far, bytes + sent, 6), "write");
		error = error_of(tcp.near, 300);
	}
	row("6 bytes of 64 every 300 ms, SO_RCVTIMEO 1 s", "%s, %s", error,
	    sent < 60 ? "while bytes still came" : "all bytes came");
	hang_up(mux, tcp);
	close(mux);
}

static void end_of_stream(void)
{
	int mux = kcm(SOCK_DGRAM);
	struct tcp tcp = attached(mux);
	char bytes[64];

	put(tcp.far, 10, 'a');
	message(bytes, 64, 'b');
	must(write(tcp.far, bytes, 20), "write");
	shutdown(tcp.far, SHUT_WR);
	int hung_up = events(tcp.near, POLLRDHUP, COMES_MS) & POLLRDHUP;
	const char *error = error_of(tcp.near, QUIET_MS);
	const char *first = receive(mux);
	row("a message, half of one, FIN", "%s on the connection%s; reader: %s, %s", error,
	    hung_up ? ", POLLRDHUP" : "", first, receive_late(mux));
	hang_up(mux, tcp);
	close(mux);
}

static void unattach_with_bytes(void)
{
	int mux = kcm(SOCK_DGRAM);
	struct tcp tcp = attached(mux);
	char bytes[64];

	message(bytes, 60, 'a');
	must(write(tcp.far, bytes, 25), "write");
	sleep_ms(QUIET_MS);
	unattach(mux, tcp.near);
	must(write(tcp.far, bytes + 25, 35), "write");
	/* Those that were there before say nothing of these. */
	for (int there = 0, ms = 0; there <= 25 && ms < COMES_MS && !ioctl(tcp.near, FIONREAD, &there); ms++)
		sleep_ms(1);
	row("25 of 60 bytes, unattach, 35 more, left to read", "%s", received_by_peer(tcp.near));
	close(tcp.near);
	close(tcp.far);
	close(mux);
}

/* Replies to a client that is gone. */
static void reply_after_unattach(void)
{
	int mux = kcm(SOCK_DGRAM);
	struct tcp first = attached(mux);

	hang_up(mux, first);
	row("send without a connection", "%s", outcome(send_message(mux, 40, 'a', 0)));
	struct tcp second = attached(mux);
	row("then another client attached gets", "%s", received_by_peer(second.far));
	hang_up(mux, second);
	close(mux);
}

static void close_attached(void)
{
	int mux = kcm(SOCK_DGRAM);
	struct tcp tcp = attached(mux);

	close(tcp.near);
	put(tcp.far, 10, 'a');
	row("connection closed without unattach, then a message", "%s", receive(mux));
	close(tcp.far);
	close(mux);
}

static void statistics(void)
{
	char line[256] = "";
	FILE *file = fopen("/proc/net/kcm_stats", "r");

	row("/proc/net/kcm", "%s", outcome(access("/proc/net/kcm", R_OK)));
	if (file && fgets(line, sizeof(line), file))
		line[strcspn(line, " ")] = 0;
	row("/proc/net/kcm_stats", "%s", file ? "ok" : strerrorname_np(errno));
}

int main(int count, char **words)
{
	documented = load_documented();
	framing = load_framing();

	/* "contract answers": their rows alone. */
	if (count > 1 && !strcmp(words[1], "answers")) {
		send_answers();
		return 0;
	}
	open_sockets();
	attach_rules();
	calls_without_meaning();
	receive_whole(SOCK_DGRAM, "DGRAM");
	receive_whole(SOCK_SEQPACKET, "SEQPACKET");
	receive_by_splice();
	receive_in_time();
	receive_many();
	receive_aggregated(documented, "documented");
	receive_aggregated(framing, "offset-aware");
	clones();
	receive_disable();
	send_rules(SOCK_DGRAM, "DGRAM");
	send_rules(SOCK_SEQPACKET, "SEQPACKET");
	send_many();
	send_steering(0, "each pushed");
	send_steering(MSG_BATCH, "all but the last with MSG_BATCH");
	send_answers();
	program_results();
	too_long();
	endless_header();
	assembly_timeout();
	end_of_stream();
	unattach_with_bytes();
	reply_after_unattach();
	close_attached();
	statistics();
	return 0;
}
