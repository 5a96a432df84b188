/* What the programs of these tests share. A message begins with its length, 32 bits in network order, which counts them, too. */
#pragma once
#include <arpa/inet.h>
#include <errno.h>
#include <linux/bpf.h>
#include <linux/kcm.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define CHECK(condition) \
	do { \
		if (!(condition)) { \
			fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, strerror(errno)); \
			exit(1); \
		} \
	} while (0)

/* Loads the framing program. */
static inline int load_program(void)
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
	int loaded = syscall(SYS_bpf, BPF_PROG_LOAD, &attr, sizeof(attr));

	CHECK(loaded >= 0);
	return loaded;
}

/* A TCP connection: the accepted end and its peer. */
static inline void connect_pair(int pair[2])
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t length = sizeof(address);
	int listener = socket(AF_INET, SOCK_STREAM, 0);

	CHECK((pair[1] = socket(AF_INET, SOCK_STREAM, 0)) >= 0);
	CHECK(bind(listener, (void *)&address, length) == 0 && listen(listener, 1) == 0);
	CHECK(getsockname(listener, (void *)&address, &length) == 0);
	/* A handler may interrupt either. connect goes on without its caller then, and accept waits for it. */
	CHECK(connect(pair[1], (void *)&address, length) == 0 || errno == EINTR);
	while ((pair[0] = accept(listener, NULL, NULL)) < 0)
		CHECK(errno == EINTR);
	CHECK(close(listener) == 0);
}

static inline void attach_to(int mux, int fd, int program)
{
	struct kcm_attach attach = { .fd = fd, .bpf_fd = program };

	CHECK(ioctl(mux, SIOCKCMATTACH, &attach) == 0);
}

/* The first bytes of a message of this length. */
static inline void put(int fd, uint32_t length, uint32_t written)
{
	char bytes[256] = { 0 };
	uint32_t header = htonl(length);

	memcpy(bytes, &header, sizeof(header));
	CHECK(write(fd, bytes, written) == (ssize_t)written);
}
