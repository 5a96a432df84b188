/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Tests of the logic in bpf/, compiled for the host against the model of simulator.c: tables for each framing and gate,
 * and a property over random segments, delays and failures: the client gets every reply, whole, in order, once.
 *
 * tests/host.rs compiles this file as it is, where it must succeed, and once per mutant of bpf/, where it must not.
 */
#include "sim.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "echo.bpf.c"
#include "rpc_null.bpf.c"

/* A service whose first byte says what to do: replies of any length, and messages for user space. */
KSF_SERVICE(script, KSF_LENGTH_PREFIXED(2, KSF_BIG_ENDIAN))
{
	switch (ksf_msg_u8(m, 0)) {
	case 'e':
		return KSF_ECHO;
	case 's': /* shorter */
		ksf_put_u8(m, ksf_msg_u8(m, 1));
		return KSF_REPLY;
	case 'g': /* longer */
		ksf_copy(m, 0, ksf_len(m));
		ksf_copy(m, 0, ksf_len(m));
		return KSF_REPLY;
	case 'h': /* much longer */
		for (int i = 0; i < 40; i++)
			ksf_copy(m, 0, ksf_len(m));
		return KSF_REPLY;
	case 'b': /* reads behind the end */
		ksf_put_u32(m, ksf_msg_u32(m, ksf_len(m)));
		return KSF_REPLY;
	case 'o': /* writes too much */
		for (int i = 0; i < 100000; i++)
			ksf_put_u32(m, i);
		return KSF_REPLY;
	case 'n': /* no reply */
		return KSF_REPLY;
	default:
		return KSF_PASS;
	}
}

KSF_SERVICE(ping, KSF_DELIMITER("\r\n"))
{
	if (ksf_len(m) != 4 || ksf_msg_u32(m, 0) != 0x50494e47)
		return KSF_PASS;
	ksf_put_text(m, "PONG!");
	return KSF_REPLY;
}

/* As 9P frames: a little-endian length of everything at the front, seen by the function. */
KSF_SERVICE(sized, KSF_LENGTH_PREFIX(0, 4, KSF_LITTLE_ENDIAN, 0))
{
	ksf_put_u32_le(m, 6);
	ksf_put_u16_le(m, ksf_msg_u16_le(m, 4));
	return KSF_REPLY;
}

static int (*service)(struct ksf_message *m);

int ksf_answer(struct ksf_message *m)
{
	return m ? service(m) : KSF_PASS;
}

static void check(bool condition, const char *format, ...)
{
	char text[512];
	va_list args;

	if (condition)
		return;
	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	sim_fail(text);
}

static void start(const char *test, int (*function)(struct ksf_message *), const struct ksf_framing *framing)
{
	sim_end();
	sim_start(1, 1 << 20);
	sim.test = test;
	service = function;
	ksf_config.framing = *framing;
}

#define START(test, name) start(test, name, &name##_framing)

static void run_work(void)
{
	while (sim_work())
		;
}

/* Tables: a segment, and what becomes of it. */

struct row {
	const char *name;
	const char *segment;
	__u32 len;
	const char *reply; /* NULL: passes */
	__u32 reply_len;
	enum ksf_counter why;
};

#define BYTES(text) text, sizeof(text) - 1
#define PASSES NULL, 0

static void run_row(const struct row *row)
{
	sim_segment((const __u8 *)row->segment, row->len);
	run_work();
	if (row->reply) {
		check(sim.wire_len == row->reply_len && !memcmp(sim.wire, row->reply, row->reply_len),
		      "%s: other reply, %u bytes", row->name, sim.wire_len);
		check(sim.user_len == 0 && sim.conn.taken == row->len, "%s: not taken", row->name);
		check(sim.tcp.copied_seq == sim.tcp.rcv_nxt, "%s: %d bytes are counted wrong", row->name,
		      (int)(sim.tcp.rcv_nxt - sim.tcp.copied_seq));
	} else {
		check(sim.wire_len == 0, "%s: answered", row->name);
		check(sim.user_len == row->len && !memcmp(sim.user, row->segment, row->len), "%s: not passed whole",
		      row->name);
		check(sim.counters[row->why] == 1, "%s: passed for another reason", row->name);
		check(sim.conn.passed == row->len, "%s: passed bytes", row->name);
	}
}

#define NULL_CALL_BODY                                                                                           \
	"\0\0\0\7\0\0\0\0\0\0\0\2\0\1\x86\xa3\0\0\0\3\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"
#define NULL_CALL "\x80\0\0\x28" NULL_CALL_BODY
#define NULL_REPLY "\x80\0\0\x18\0\0\0\7\0\0\0\1\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"
#define CALL(version, program, number, procedure, credential)                                                    \
	"\0\0\0\7\0\0\0\0\0\0\0" version program "\0\0\0" number "\0\0\0" procedure credential
#define NO_CRED "\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"
/* stamp, "box", uid, gid, one gid: 28 bytes */
#define SYS_CRED "\0\0\0\1\0\0\0\x1c\0\0\0\0\0\0\0\3box\0\0\0\0\0\0\0\0\0\0\0\0\1\0\0\0\5\0\0\0\0\0\0\0\0"

static void test_rpc(void)
{
	static const struct row rows[] = {
		{ "NULL", BYTES(NULL_CALL), BYTES(NULL_REPLY), 0 },
		{ "two", BYTES(NULL_CALL NULL_CALL), BYTES(NULL_REPLY NULL_REPLY), 0 },
		{ "MOUNT version 1", BYTES("\x80\0\0\x28" CALL("\2", "\0\1\x86\xa5", "\1", "\0", NO_CRED)),
		  BYTES(NULL_REPLY), 0 },
		{ "AUTH_SYS", BYTES("\x80\0\0\x44" CALL("\2", "\0\1\x86\xa3", "\3", "\0", SYS_CRED)),
		  BYTES(NULL_REPLY), 0 },
		{ "RPC version 3", BYTES("\x80\0\0\x28" CALL("\3", "\0\1\x86\xa3", "\3", "\0", NO_CRED)), PASSES,
		  KSF_COUNT_passed_unanswerable },
		{ "other program", BYTES("\x80\0\0\x28" CALL("\2", "\0\1\x86\xa4", "\3", "\0", NO_CRED)), PASSES,
		  KSF_COUNT_passed_unanswerable },
		{ "other version", BYTES("\x80\0\0\x28" CALL("\2", "\0\1\x86\xa3", "\4", "\0", NO_CRED)), PASSES,
		  KSF_COUNT_passed_unanswerable },
		{ "other procedure", BYTES("\x80\0\0\x28" CALL("\2", "\0\1\x86\xa3", "\3", "\1", NO_CRED)), PASSES,
		  KSF_COUNT_passed_unanswerable },
		{ "credential of 3 bytes",
		  BYTES("\x80\0\0\x28" CALL("\2", "\0\1\x86\xa3", "\3", "\0", "\0\0\0\0\0\0\0\3\0\0\0\0\0\0\0\0")), PASSES,
		  KSF_COUNT_passed_unanswerable },
		{ "credential behind the end",
		  BYTES("\x80\0\0\x28" CALL("\2", "\0\1\x86\xa3", "\3", "\0", "\0\0\0\0\0\0\1\0\0\0\0\0\0\0\0\0")), PASSES,
		  KSF_COUNT_passed_unanswerable },
		{ "unknown flavor",
		  BYTES("\x80\0\0\x28" CALL("\2", "\0\1\x86\xa3", "\3", "\0", "\0\0\0\6\0\0\0\0\0\0\0\0\0\0\0\0")), PASSES,
		  KSF_COUNT_passed_unanswerable },
		{ "AUTH_SYS with a name behind its end",
		  BYTES("\x80\0\0\x44" CALL("\2", "\0\1\x86\xa3", "\3", "\0",
					    "\0\0\0\1\0\0\0\x1c\0\0\0\0\0\0\0\x20"
					    "box\0\0\0\0\0\0\0\0\0\0\0\0\1\0\0\0\5\0\0\0\0\0\0\0\0")),
		  PASSES, KSF_COUNT_passed_unanswerable },
		{ "arguments", BYTES("\x80\0\0\x2c" NULL_CALL_BODY "\0\0\0\1"), PASSES, KSF_COUNT_passed_unanswerable },
		{ "a reply", BYTES("\x80\0\0\x18\0\0\0\7\0\0\0\1\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"), PASSES,
		  KSF_COUNT_passed_unanswerable },
		{ "not the last fragment", BYTES("\0\0\0\x28" NULL_CALL_BODY), PASSES, KSF_COUNT_passed_partial },
		{ "three bytes of a mark", BYTES("\x80\0\0"), PASSES, KSF_COUNT_passed_partial },
		{ "half a call", BYTES("\x80\0\0\x28\0\0\0\7\0\0\0\0"), PASSES, KSF_COUNT_passed_partial },
		{ "a call and a half", BYTES(NULL_CALL "\x80\0\0\x28\0\0"), PASSES, KSF_COUNT_passed_partial },
		{ "an empty record", BYTES("\x80\0\0\0"), PASSES, KSF_COUNT_passed_unanswerable },
		{ "a huge record", BYTES("\xff\xff\xff\xff" NULL_CALL_BODY), PASSES, KSF_COUNT_passed_partial },
		{ "one of two is for user space",
		  BYTES(NULL_CALL "\x80\0\0\x28" CALL("\2", "\0\1\x86\xa3", "\3", "\1", NO_CRED)), PASSES,
		  KSF_COUNT_passed_unanswerable },
	};

	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
		START("RPC", rpc_null);
		run_row(&rows[i]);
	}
}

static void test_framings(void)
{
	static const struct row delimiter[] = {
		{ "one line", BYTES("PING\r\n"), BYTES("PONG!\r\n"), 0 },
		{ "two lines", BYTES("PING\r\nPING\r\n"), BYTES("PONG!\r\nPONG!\r\n"), 0 },
		{ "half a delimiter", BYTES("PING\r"), PASSES, KSF_COUNT_passed_partial },
		{ "no delimiter", BYTES("PING"), PASSES, KSF_COUNT_passed_partial },
		{ "something behind it", BYTES("PING\r\nP"), PASSES, KSF_COUNT_passed_partial },
		{ "an empty line", BYTES("\r\n"), PASSES, KSF_COUNT_passed_unanswerable },
		{ "a false start", BYTES("PING\r\r\n"), PASSES, KSF_COUNT_passed_unanswerable },
	};
	static const struct row prefix[] = {
		{ "one", BYTES("\0\2sX"), BYTES("\0\1X"), 0 },
		{ "two of different length", BYTES("\0\2sX\0\3gab"), BYTES("\0\1X\0\6gabgab"), 0 },
		{ "echo", BYTES("\0\4echo\0\1e"), BYTES("\0\4echo\0\1e"), 0 },
		{ "echo and reply", BYTES("\0\4echo\0\2sX"), PASSES, KSF_COUNT_passed_unanswerable },
		{ "empty", BYTES("\0\0"), PASSES, KSF_COUNT_passed_unanswerable },
		{ "half a length", BYTES("\0"), PASSES, KSF_COUNT_passed_partial },
		{ "half a body", BYTES("\0\4ec"), PASSES, KSF_COUNT_passed_partial },
		{ "reads behind the end", BYTES("\0\1b"), PASSES, KSF_COUNT_passed_unanswerable },
		{ "writes too much", BYTES("\0\1o"), PASSES, KSF_COUNT_passed_unanswerable },
		{ "no reply", BYTES("\0\1n"), BYTES("\0\0"), 0 },
	};
	static const struct row little[] = {
		{ "one", BYTES("\7\0\0\0\x34\x12\xff"), BYTES("\6\0\0\0\x34\x12"), 0 },
		{ "shorter than its header", BYTES("\3\0\0\0"), PASSES, KSF_COUNT_passed_partial },
		{ "longer than the segment", BYTES("\x8\0\0\0\x34\x12\xff"), PASSES, KSF_COUNT_passed_partial },
		{ "huge", BYTES("\xff\xff\xff\xff\x34\x12\xff"), PASSES, KSF_COUNT_passed_partial },
	};
	static const struct row raw[] = {
		{ "one byte", BYTES("x"), BYTES("x"), 0 },
		{ "some", BYTES("some bytes\r\n"), BYTES("some bytes\r\n"), 0 },
	};

	for (size_t i = 0; i < sizeof(delimiter) / sizeof(delimiter[0]); i++) {
		START("delimiter", ping);
		run_row(&delimiter[i]);
	}
	for (size_t i = 0; i < sizeof(prefix) / sizeof(prefix[0]); i++) {
		START("length prefix", script);
		run_row(&prefix[i]);
	}
	for (size_t i = 0; i < sizeof(little) / sizeof(little[0]); i++) {
		START("little-endian prefix", sized);
		run_row(&little[i]);
	}
	for (size_t i = 0; i < sizeof(raw) / sizeof(raw[0]); i++) {
		START("raw", echo);
		run_row(&raw[i]);
	}
}

static void send_text(const char *text, __u32 len)
{
	sim_segment((const __u8 *)text, len);
}

/* The rule that user space must owe nothing. */
static void test_settle(void)
{
	START("settle", script);
	send_text(BYTES("\0\1?"));
	send_text(BYTES("\0\2sX"));
	run_work();
	check(sim.wire_len == 0, "answered while user space owes an answer");
	check(sim.counters[KSF_COUNT_passed_unsettled] == 1, "not counted");
	sim.conn.settled = sim.conn.passed;
	send_text(BYTES("\0\2sY"));
	run_work();
	check(sim.wire_len == 3 && !memcmp(sim.wire, "\0\1Y", 3), "not answered when user space owes nothing");
	sim.conn.settled = ~0ull;
	send_text(BYTES("\0\2sZ"));
	run_work();
	check(sim.wire_len == 3, "answered on a connection that is not settled");
}

/* Unacknowledged replies, within and beyond the window. */
static void test_outstanding(void)
{
	for (__u32 window = 0; window <= 6; window += 3) {
		__u32 allowed = 1 + window / 3;

		START("outstanding", script);
		ksf_config.window_bytes = window;
		for (__u32 i = 0; i < 5; i++) {
			send_text(BYTES("\0\2sX"));
			run_work();
		}
		check(sim.wire_len == 3 * allowed, "window %u: %u bytes answered", window, sim.wire_len);
		check(sim.counters[KSF_COUNT_passed_outstanding] == 1, "window %u", window);
	}
	/* What waits in the work queue is outstanding, too, though TCP knows nothing of it. */
	START("outstanding in the work queue", script);
	send_text(BYTES("\0\2sX"));
	send_text(BYTES("\0\2sY"));
	run_work();
	check(sim.wire_len == 3, "answered behind a queued reply");
}

/* User space sends: the program must look at write_seq anew. */
static void test_epoch(void)
{
	START("epoch", script);
	send_text(BYTES("\0\2sX"));
	run_work();
	sim_client_read(3);
	send_text(BYTES("\0\1?"));
	/* Settled ahead of a send that happens in two parts. */
	sim.conn.sent = 6;
	sim.conn.epoch++;
	sim.conn.settled = sim.conn.passed;
	ksf_config.window_bytes = 100;
	sim_tcp_send((const __u8 *)"ans", 3);
	sim_client_read(3);
	send_text(BYTES("\0\2s1"));
	run_work();
	check(sim.wire_len == 6, "answered between two parts of user space's message");
	sim_tcp_send((const __u8 *)"wer", 3);
	ksf_config.window_bytes = 0;
	sim.conn.settled = sim.conn.passed;
	send_text(BYTES("\0\2sY"));
	run_work();
	check(sim.wire_len == 9, "answered while user space's bytes are not acknowledged");
	sim_client_read(6);
	sim.conn.settled = sim.conn.passed;
	send_text(BYTES("\0\2sZ"));
	run_work();
	check(sim.wire_len == 12, "not answered when all is acknowledged");
}

/* 32-bit sequence numbers against 64-bit counts. */
static void test_wrap(void)
{
	START("wrap", script);
	send_text(BYTES("\0\2sX"));
	run_work();
	sim_client_read(3);
	for (__u32 i = 0; i < 8; i++) {
		/* A gigabyte of echoes later. */
		sim.conn.replied += 1 << 30;
		sim.tcp.write_seq += 1 << 30;
		sim.tcp.snd_una += 1 << 30;
		send_text(BYTES("\0\2eX"));
		run_work();
		check(sim.counters[KSF_COUNT_segments_answered] == i + 2, "not answered after %u GiB", i + 1);
		sim_client_read(4);
	}
}

/* A reply that does not fit the send buffer is never queued. */
static void test_gate(void)
{
	__u8 message[402] = { 1, 144 };

	memset(message + 2, 'x', sizeof(message) - 2);
	message[2] = 'h';
	START("gate", script);
	sim.tcp.sndbuf = 17000;
	sim_segment(message, sizeof(message));
	run_work();
	check(!sim.lost, "a reply of 16,000 bytes was lost in a buffer of 17,000");
	check(sim.counters[KSF_COUNT_passed_sndbuf] + sim.counters[KSF_COUNT_passed_limit] +
			      sim.counters[KSF_COUNT_passed_unanswerable] == 1, "not passed");

	START("gate, smaller", script);
	message[0] = 0;
	message[1] = 200;
	sim.tcp.sndbuf = 8020;
	sim_segment(message, 202);
	run_work();
	check(!sim.lost, "a reply of 8,002 bytes was lost in a buffer of 8,020 that is counted in pages");
	check(sim.counters[KSF_COUNT_passed_sndbuf] == 1, "passed for another reason");
	START("gate, with room", script);
	sim.tcp.sndbuf = 32000;
	sim_segment(message, 202);
	run_work();
	check(sim.wire_len == 8002, "not answered though there is room");

	START("gate, echo", echo);
	sim.tcp.sndbuf = 6000;
	sim_segment(message, sizeof(message));
	run_work();
	check(sim.wire_len == sizeof(message), "not echoed though there is room");
	sim_client_read(sizeof(message));
	sim.tcp.wmem_queued = 5000; /* of buffers that TCP has not freed yet */
	sim_segment(message, sizeof(message));
	check(sim.counters[KSF_COUNT_passed_sndbuf] == 1, "queued behind a full buffer");
}

/* A failed resize leaves the segment as it was. */
static void test_resize(void)
{
	START("resize", script);
	sim.conn.parked = 1; /* direct */
	sim.conn.park_seq = 1;
	sim.resize_fails_percent = 100;
	send_text(BYTES("\0\4sXYZ"));
	run_work();
	check(sim.user_len == 6 && !memcmp(sim.user, "\0\4sXYZ", 6), "the passed segment was changed");
	check(sim.counters[KSF_COUNT_passed_resize] == 1 && !sim.dropped, "not counted");
	check(sim.wakes == 1, "parked user space was not woken");
	check(!sim.slots[0].busy, "the work area was not given back");
}

/* Replies of another length than their request: the count of consumed bytes stays right. */
static void test_lag(void)
{
	START("longer replies", script);
	for (__u32 i = 0; i < 50; i++) {
		send_text(BYTES("\0\5gabcd"));
		run_work();
		check(sim.wire_len == 12 * (i + 1), "stalled after %u replies", i);
		sim_client_read(12);
		check(!sim_user_polls_readable(), "polls readable");
	}
	START("shorter replies", script);
	for (__u32 i = 0; i < 50; i++) {
		send_text(BYTES("\0\4sabc"));
		run_work();
		sim_client_read(3);
		check(!sim_user_polls_readable(), "polls readable after %u replies", i);
	}
	START("shorter replies, parked", script);
	sim.conn.parked = 1;
	sim.conn.park_seq = 1;
	for (__u32 i = 0; i < 500; i++) {
		send_text(BYTES("\0\4sabc"));
		run_work();
		check(sim.wire_len == 3 * (i + 1), "stalled after %u replies", i);
		sim_client_read(3);
		check(sim.tcp.rcv_nxt - sim.tcp.copied_seq == sim.conn.lag, "the lag is counted wrong");
		check(sim.conn.lag <= ksf_config.lag_bytes_max, "the lag grows without bound");
	}
	check(sim.counters[KSF_COUNT_segments_hopped] > 0, "the lag was never repaid");
	check(sim.counters[KSF_COUNT_segments_hopped] < 20, "most went through a hop");
	/* An unknown way of counting is noticed. */
	START("accounting", script);
	send_text(BYTES("\0\2sX"));
	run_work();
	sim.client_len = sim.wire_len;
	sim.tcp.snd_una = sim.tcp.write_seq;
	sim.tcp.copied_seq += 1;
	send_text(BYTES("\0\2sX"));
	send_text(BYTES("\0\2sX"));
	run_work();
	check(sim.wire_len == 3 && sim.counters[KSF_COUNT_passed_accounting] > 0, "answered");
}

static void test_limits(void)
{
	__u8 big[SIM_SEGMENT_MAX];
	__u8 many[4 * (KSF_MESSAGES_MAX + 1)];

	memset(big, 'x', sizeof(big));
	START("longest segment", echo);
	sim_segment(big, sizeof(big));
	run_work();
	check(sim.wire_len == sizeof(big), "echo has no limit but the send buffer");
	START("segment beyond the limit", script);
	sim_segment(big, KSF_BYTES_MAX + 1);
	check(sim.counters[KSF_COUNT_passed_limit] == 1, "not passed");
	for (__u32 i = 0; i <= KSF_MESSAGES_MAX; i++)
		memcpy(many + 4 * i, "\0\2sX", 4);
	START("as many messages as allowed", script);
	sim_segment(many, 4 * KSF_MESSAGES_MAX);
	run_work();
	check(sim.wire_len == 3 * KSF_MESSAGES_MAX, "not answered");
	check(sim.counters[KSF_COUNT_messages_answered] == KSF_MESSAGES_MAX, "counted %llu",
	      sim.counters[KSF_COUNT_messages_answered]);
	START("one message more", script);
	sim_segment(many, sizeof(many));
	check(sim.counters[KSF_COUNT_passed_limit] == 1 && sim.user_len == sizeof(many), "not passed");
	START("no work area", script);
	for (__u32 i = 0; i < KSF_SLOTS_PER_CPU; i++)
		sim.slots[i].busy = 1;
	send_text(BYTES("\0\2sX"));
	check(sim.counters[KSF_COUNT_passed_busy] == 1 && sim.user_len == 4, "not passed");
	START("no hops", script);
	ksf_config.hops = 0;
	send_text(BYTES("\0\2sX"));
	check(sim.counters[KSF_COUNT_passed_busy] == 1 && !sim.slots[0].busy, "not passed");
	START("the peer has closed", script);
	sim.tcp.shutdown = 1;
	send_text(BYTES("\0\2sX"));
	check(sim.counters[KSF_COUNT_passed_closing] == 1, "not passed");
	START("end of stream", script);
	sim.conn.parked = 1;
	sim.conn.park_seq = 1;
	send_text("", 0);
	check(sim.wakes == 1, "user space was not woken");
	START("end of stream behind a queued reply", echo);
	send_text(BYTES("last"));
	send_text("", 0);
	run_work();
	check(!sim.broken && sim.wire_len == 4, "the end of the stream broke the connection");
}

/* One wake-up for each park, and one that found no room in the ring is sent again. */
static void test_wake(void)
{
	START("wake", script);
	sim.conn.parked = 1;
	sim.conn.park_seq = 1;
	sim.ring_full = true;
	send_text(BYTES("\0\1?"));
	check(sim.wakes == 0, "a full ring took a wake-up");
	sim.ring_full = false;
	send_text(BYTES("\0\1?"));
	check(sim.wakes == 1, "the wake-up that found no room was not sent again");
	send_text(BYTES("\0\1?"));
	check(sim.wakes == 1, "woken twice for one park");
	sim.conn.park_seq = 2;
	send_text(BYTES("\0\1?"));
	check(sim.wakes == 2, "not woken for the second park");
}

/* User space gets a turn at 256, 1024, 4096 messages, and then every 16384. */
static void test_trial(void)
{
	__u32 trials = 0;

	START("trial", script);
	sim.conn.trial_at = 256;
	for (__u32 i = 1; i <= 100000; i++) {
		sim.user_len = 0;
		send_text(BYTES("\0\4echo"));
		run_work();
		if (sim.user_len) {
			trials++;
			sim.conn.settled = sim.conn.passed;
			sim_tcp_send((const __u8 *)"\0\4echo", 6);
			sim.conn.sent += 6;
			sim.conn.epoch++;
			sim.tcp.copied_seq += 6;
		}
		sim_client_read(6);
		sim.wire_len = sim.client_len = 0;
	}
	check(trials == 3 + 100000 / 16384, "%u trials", trials);
	check(sim.counters[KSF_COUNT_passed_trial] == trials, "counted %llu", sim.counters[KSF_COUNT_passed_trial]);
	START("trial where the count wraps", script);
	sim.conn.trial_at = 0;
	send_text(BYTES("\0\1e"));
	check(sim.conn.trial_at == 256, "the next trial is at %u", sim.conn.trial_at);
}

/* A retransmission that TCP queued whole although its front had arrived before. */
static void test_repeated(void)
{
	__u8 big[SIM_SEGMENT_MAX];

	START("repeated, answered", script);
	send_text(BYTES("\0\2sX"));
	run_work();
	sim_client_read(3);
	sim_segment_repeating((const __u8 *)"\0\2sX\0\2sY", 8, 4);
	run_work();
	check(sim.wire_len == 6 && !memcmp(sim.wire, "\0\1X\0\1Y", 6), "answered %u bytes", sim.wire_len);
	check(sim.conn.taken == 8 && sim.tcp.copied_seq == sim.tcp.rcv_nxt, "counted wrong");
	START("repeated, passed", script);
	send_text(BYTES("\0\1?"));
	sim_segment_repeating((const __u8 *)"?\0\1!", 4, 1);
	check(sim.user_len == 6 && !memcmp(sim.user, "\0\1?\0\1!", 6), "user space got %u bytes", sim.user_len);
	check(sim.conn.passed == 6, "passed bytes");
	START("repeated in part after bytes seen", script);
	send_text(BYTES("\0\1?"));
	sim_segment_repeating((const __u8 *)"\0\1?", 3, 3);
	send_text(BYTES("\0\1!"));
	check(sim.user_len == 6 && !memcmp(sim.user, "\0\1?\0\1!", 6), "user space got %u bytes", sim.user_len);
	START("many pages repeated", script);
	memset(big, 'x', sizeof(big));
	memcpy(big, "\x40\0?", 3);
	sim_segment(big, 15000);
	sim_segment_repeating(big, 16000, 15000);
	check(sim.user_len == 16000 && !memcmp(sim.user, big, 16000), "user space got %u bytes", sim.user_len);
	check(sim.grown == 1, "memory was asked for %u times", sim.grown);
	START("read in part before the program came", script);
	sim.tcp.copied_seq += 2;
	sim.tcp.rcv_nxt += 2;
	sim_segment_repeating((const __u8 *)"\0\1?\0\2sX", 7, 2);
	check(sim.user_len == 5 && !memcmp(sim.user, "?\0\2sX", 5), "user space got %u bytes", sim.user_len);
	START("cannot be cut", script);
	sim.no_memory = true;
	sim.conn.parked = 1;
	sim.conn.park_seq = 1;
	send_text(BYTES("\0\2sX"));
	run_work();
	sim_segment_repeating((const __u8 *)"\0\2sX\0\2sY", 8, 4);
	check(sim.conn.broken && sim.wakes == 1, "user space does not learn of it");
	check(sim.counters[KSF_COUNT_replies_broken] == 1, "not counted");
	sim_client_read(3);
	send_text(BYTES("\0\2sZ"));
	run_work();
	check(sim.wire_len == 3, "a message behind the lost one was answered");
}

/* A connection that leaves the maps between a request and its reply. */
static void test_detach(void)
{
	START("detached before a direct reply", script);
	sim.detached = true;
	sim.conn.parked = 1;
	sim.conn.park_seq = 1;
	send_text(BYTES("\0\2sX"));
	check(sim.conn.broken && sim.dropped == 1 && sim.user_len == 0, "half a request went on");
	check(sim.wakes == 1, "user space was not woken");
	START("detached before the end of a hop", script);
	send_text(BYTES("\0\2sX"));
	sim.detached = true;
	run_work();
	check(sim.wire_len == 0 && sim.dropped == 1 && !sim.slots[0].busy, "the hop did not end");
}

/* The send into a hop fails for good: its connection ends, and the slot is free with new sockets only. */
static void test_hop_failure(void)
{
	for (int renewed = 0; renewed < 2; renewed++) {
		START("a hop that fails", script);
		check(!ksf_hop_failed_verdict(0, renewed), "a free slot has nothing to lose");
		send_text(BYTES("\0\2sX"));
		check(sim.slots[0].busy && !sim.conn.broken, "the request is not in the hop");
		check(ksf_hop_failed_verdict(0, renewed) == 1, "the slot was busy");
		check(sim.conn.broken && sim.slots[0].busy == !renewed, "the connection goes on, or the slot is lost");
		START("a hop that fails behind its connection", script);
		send_text(BYTES("\0\2sX"));
		sim.conn.cookie++;
		check(ksf_hop_failed_verdict(0, renewed) == 1 && !sim.conn.broken, "a later connection ends");
	}
	check(!ksf_hop_failed_verdict(~0u, 1), "no such slot");
}

static void test_call(void)
{
	START("call", script);
	memcpy(sim.call.in, "sX", 2);
	sim.call.len = 2;
	check(ksf_call_verdict(0) == KSF_REPLY && sim.call.out_len == 1 && sim.call.out[0] == 'X', "no reply");
	sim.call.len = 1;
	sim.call.in[0] = 'b';
	check(ksf_call_verdict(0) == KSF_PASS, "a message read behind its end was answered");
	sim.call.len = KSF_BYTES_MAX + 1;
	check(ksf_call_verdict(0) == -1, "too long a message was taken");
	check(ksf_call_verdict(1) == -1, "an area that is not there was used");
}

/* The property. */

#define MESSAGES 300

struct user {
	__u8 input[SIM_STREAM_MAX];
	__u32 input_len;
	__u8 output[SIM_STREAM_MAX];
	__u32 output_len;
	__u64 received, sent;
	bool parks, parked;
	__u32 wakes_seen;
};

static struct user user;
static __u8 requests[SIM_STREAM_MAX], expected[SIM_STREAM_MAX];
static __u32 requests_len, expected_len, ends[MESSAGES];

/* What a message of the script service is answered with, by whom ever. Written apart from the logic under test. */
static __u32 reference(const __u8 *message, __u32 len, __u8 *reply)
{
	__u32 body = 0, times = message[0] == 'g' ? 2 : message[0] == 'h' ? 40 : 1;

	if (message[0] == 's') {
		reply[2] = len > 1 ? message[1] : 0;
		body = 1;
	} else {
		for (__u32 i = 0; i < times; i++, body += len)
			memcpy(reply + 2 + body, message, len);
		if (message[0] == '?')
			reply[2] = '!'; /* only user space answers these */
	}
	reply[0] = body >> 8;
	reply[1] = body & 255;
	return body + 2;
}

static void make_requests(void)
{
	requests_len = expected_len = 0;
	for (__u32 i = 0; i < MESSAGES; i++) {
		__u32 kind = sim_random(100), len = 2 + sim_random(kind < 5 ? 300 : 40);
		__u8 *message = requests + requests_len + 2;

		message[-2] = len >> 8;
		message[-1] = len & 255;
		for (__u32 k = 0; k < len; k++)
			message[k] = 'A' + (i + k) % 26;
		message[0] = kind < 8 ? '?' : kind < 40 ? 's' : kind < 75 ? 'g' : kind < 78 ? 'h' : 'e';
		requests_len += len + 2;
		ends[i] = requests_len;
		expected_len += reference(message, len, expected + expected_len);
	}
}

static void user_unpark(void)
{
	sim.conn.parked = 0;
	user.parked = false;
	if (sim.conn.settled == sim.conn.passed) {
		if (sim.conn.lag == sim.conn.lag_floor)
			return;
		sim.conn.settled = ~0ull;
	}
	if (sim.conn.lag != sim.conn.lag_floor) {
		sim_set_rcvlowat(sim.conn.lag + 1);
		sim.conn.lag_floor = sim.conn.lag;
	}
}

static void user_publish(__u64 sent)
{
	if (sim.conn.sent != sent) {
		sim.conn.sent = sent;
		sim.conn.epoch++;
	}
	sim.conn.settled = user.received;
}

/* One turn of user space, as crates/kernel/ksf-kernel/src/assist.rs and an engine do it. True when something moved. */
static bool user_turn(void)
{
	bool moved = false;
	__u32 at = 0, got;

	if (user.parked) {
		if (sim.wakes == user.wakes_seen)
			return false;
		user_unpark();
		moved = true;
	}
	user.wakes_seen = sim.wakes;
	got = sim_user_read(user.input + user.input_len, 1 + sim_random(2000));
	user.input_len += got;
	user.received += got;
	moved |= got > 0;
	while (user.input_len - at >= 2) {
		__u32 len = user.input[at] << 8 | user.input[at + 1];

		if (user.input_len - at < len + 2)
			break;
		user.output_len += reference(user.input + at + 2, len, user.output + user.output_len);
		at += len + 2;
	}
	memmove(user.input, user.input + at, user.input_len -= at);
	/* Sends only when TCP has taken all that the program queued, and what fits. */
	if (user.output_len && sim.kernel_taken == sim.conn.replied) {
		if (!user.input_len && sim_random(2))
			user_publish(user.sent + user.output_len);
		__s32 room = sim.tcp.sndbuf - sim.tcp.wmem_queued;
		__u32 len = room < 0 ? 0 : user.output_len < (__u32)room ? user.output_len : (__u32)room;

		if (len > 1 && sim_random(4) == 0)
			len = 1 + sim_random(len);
		sim_tcp_send(user.output, len);
		memmove(user.output, user.output + len, user.output_len -= len);
		user.sent += len;
		moved |= len > 0;
	}
	if (!user.input_len && !user.output_len && sim.conn.settled != user.received) {
		user_publish(user.sent);
		moved = true;
	}
	if (user.parks && sim.conn.settled == sim.conn.passed && !sim.conn.broken && !user.input_len &&
	    !user.output_len && sim_random(2)) {
		sim.conn.park_seq++;
		sim.conn.parked = 1;
		user.parked = true;
		if (sim.conn.lag_floor) {
			sim_set_rcvlowat(1);
			sim.conn.lag_floor = 0;
		}
	}
	return moved;
}

static __u64 answered, passed;

static void run_property(__u64 seed)
{
	static char name[64];
	__u32 sent = 0, next = 0;

	snprintf(name, sizeof(name), "property, seed %llu", seed);
	start(name, script, &script_framing);
	sim.seed = seed * 0x9e3779b97f4a7c15ull + 1;
	memset(&user, 0, sizeof(user));
	user.parks = seed & 1;
	sim.tcp.sndbuf = seed & 2 ? 30000 : 7000;
	sim.resize_fails_percent = seed & 4 ? 10 : 0;
	ksf_config.window_bytes = seed & 8 ? 4000 : 0;
	sim.conn.trial_at = 10 + sim_random(50);
	make_requests();
	for (__u32 still = 0; sim.client_len < expected_len;) {
		bool moved = false;
		__u32 what = sim_random(6);

		if (what == 0 && sent < requests_len) {
			/* Mostly whole messages, as clients send them; sometimes pieces; sometimes several. */
			__u32 end;

			while (next + 1 < MESSAGES && ends[next] <= sent)
				next++;
			end = ends[next + sim_random(4) / 3 * sim_random(6) < MESSAGES ? next : MESSAGES - 1];
			if (sim_random(5) == 0)
				end = sent + 1 + sim_random(end - sent);
			if (sim_random(8) == 0 && end + 700 < requests_len)
				end += sim_random(700);
			/* A closed-loop client waits for its replies now and then. */
			if (sim.client_len == sim.wire_len || sim_random(3) == 0) {
				__u32 back = sim_random(8) ? 0 : sim_random(sent < 6000 ? sent : 6000);

				sim_segment_repeating(requests + sent - back, end - sent + back, back);
				sent = end;
				moved = true;
			}
		} else if (what <= 2) {
			moved = sim_work();
		} else if (what == 3) {
			moved = sim_client_read(1 + sim_random(3000)) > 0;
		} else {
			moved = user_turn();
		}
		still = moved ? 0 : still + 1;
		check(still < 2000, "stalled: %u of %u bytes sent, %u of %u received", sent, requests_len, sim.client_len,
		      expected_len);
		check(!sim.lost && !sim.dropped, "%u replies lost, %u segments dropped", sim.lost, sim.dropped);
		check(sim.wire_len <= expected_len && !memcmp(sim.wire, expected, sim.wire_len),
		      "a wrong reply, or one out of order, before byte %u", sim.wire_len);
	}
	/* At rest, and polled: nothing to read, and nothing announced. */
	if (user.parked)
		user_unpark();
	check(!sim_user_polls_readable(), "an idle connection polls readable");
	for (__u32 i = 0; i < KSF_SLOTS_PER_CPU; i++)
		check(!sim.slots[i].busy, "a work area was not given back");
	answered += sim.counters[KSF_COUNT_segments_answered];
	passed += sim.counters[KSF_COUNT_segments_passed];
}

int main(int argc, char **argv)
{
	__u32 seeds = argc > 1 ? (__u32)atoi(argv[1]) : 400;

	if (argc > 2) {
		run_property((__u64)atoi(argv[2]));
		return 0;
	}
	test_rpc();
	test_framings();
	test_settle();
	test_outstanding();
	test_epoch();
	test_wrap();
	test_gate();
	test_resize();
	test_wake();
	test_lag();
	test_limits();
	test_trial();
	test_repeated();
	test_detach();
	test_hop_failure();
	test_call();
	for (__u32 seed = 0; seed < seeds; seed++)
		run_property(seed);
	/* A property that never met both halves would prove nothing. */
	sim.test = "property";
	check(answered > 20 * seeds && passed > 20 * seeds, "%llu segments answered, %llu passed", answered, passed);
	printf("%u seeds: %llu segments answered in the kernel, %llu passed\n", seeds, answered, passed);
	sim_end();
	return 0;
}
