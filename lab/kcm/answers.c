/* A request-response server over several clients, written as Documentation/networking/kcm.rst shows: a message socket,
 * clones of it, a thread for each, which answers what it receives. Ends with 0 if each client got its own answers.
 *
 * Usage: answers [many]
 * many: each thread receives several requests with a call (recvmmsg), and answers them with one (sendmmsg).
 */
#define _GNU_SOURCE
#include "clients.h"
#include <linux/bpf.h>
#include <linux/kcm.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>

enum { CLONES = 4, SLOTS = 16 };

static int load(void)
{
	static const struct bpf_insn code[] = {
		{ .code = BPF_ALU64 | BPF_MOV | BPF_X, .dst_reg = 6, .src_reg = 1 },
		{ .code = BPF_LD | BPF_ABS | BPF_W },
		{ .code = BPF_JMP | BPF_EXIT },
	};
	union bpf_attr attr = {
		.prog_type = BPF_PROG_TYPE_SOCKET_FILTER,
		.insns = (uintptr_t)code,
		.insn_cnt = sizeof(code) / sizeof(code[0]),
		.license = (uintptr_t)"GPL",
	};
	int program = syscall(SYS_bpf, BPF_PROG_LOAD, &attr, sizeof(attr));

	CHECK(program >= 0);
	return program;
}

static void *answer_each(void *argument)
{
	int kcm = *(int *)argument;
	char bytes[REQUEST_BYTES_MAX];

	for (;;) {
		ssize_t length = recv(kcm, bytes, sizeof(bytes), 0);
		CHECK(length > 0 && send(kcm, bytes, length, 0) == length);
	}
}

static void *answer_many(void *argument)
{
	int kcm = *(int *)argument;
	char bytes[SLOTS][REQUEST_BYTES_MAX];
	struct iovec parts[SLOTS];
	struct mmsghdr headers[SLOTS];

	for (;;) {
		memset(headers, 0, sizeof(headers));
		for (int i = 0; i < SLOTS; i++) {
			parts[i] = (struct iovec){ bytes[i], sizeof(bytes[i]) };
			headers[i].msg_hdr.msg_iov = &parts[i];
			headers[i].msg_hdr.msg_iovlen = 1;
		}
		int count = recvmmsg(kcm, headers, SLOTS, MSG_WAITFORONE, NULL);
		CHECK(count > 0);
		for (int i = 0; i < count; i++)
			parts[i].iov_len = headers[i].msg_len;
		for (int sent = 0; sent < count;) {
			int now = sendmmsg(kcm, headers + sent, count - sent, 0);
			CHECK(now > 0);
			sent += now;
		}
	}
}

int main(int argc, char **argv)
{
	void *(*answer)(void *) = argc > 1 && !strcmp(argv[1], "many") ? answer_many : answer_each;
	int kcms[CLONES], program = load();
	pthread_t thread;

	CHECK((kcms[0] = socket(AF_KCM, SOCK_DGRAM, KCMPROTO_CONNECTED)) >= 0);
	for (int i = 0; i < CLIENTS; i++) {
		struct kcm_attach attach = { .fd = connect_client(i), .bpf_fd = program };
		CHECK(ioctl(kcms[0], SIOCKCMATTACH, &attach) == 0);
	}
	for (int i = 1; i < CLONES; i++) {
		struct kcm_clone clone = { .fd = -1 };
		CHECK(ioctl(kcms[0], SIOCKCMCLONE, &clone) == 0);
		kcms[i] = clone.fd;
	}
	for (int i = 0; i < CLONES; i++)
		CHECK(pthread_create(&thread, NULL, answer, &kcms[i]) == 0);
	ask_all();
	printf("%d answers\n", CLIENTS * REQUESTS);
	return 0;
}
