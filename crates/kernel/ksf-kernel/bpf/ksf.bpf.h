/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * The SDK for services that run in the kernel. A service is one C file:
 *
 *     #include "ksf.bpf.h"
 *
 *     KSF_SERVICE(ping, KSF_DELIMITER("\r\n"))
 *     {
 *             if (ksf_len(m) != 4 || ksf_msg_u32(m, 0) != 0x50494e47)   // "PING"
 *                     return KSF_PASS;
 *             ksf_put_text(m, "PONG");
 *             return KSF_REPLY;
 *     }
 *
 *     clang -O2 -g -target bpf -mcpu=v3 -I SDK -c ping.bpf.c -o ping.bpf.o
 *
 * The function sees one whole message at a time (`m`, struct ksf_message *) and says KSF_REPLY, KSF_ECHO or KSF_PASS.
 * The SDK makes five programs of it: one for TCP segments, one that sends replies of another length, one that ends a
 * connection whose reply was lost on that way, one for UDP datagrams, and one through which user space has the same
 * function answer what the kernel passed. Framing, batches,
 * gates, counters and fallback come with them; what each does and why stands in the header named after it.
 *
 * ksf_message.h    reading messages, putting replies        ksf_framing.h   where a message ends
 * ksf_stream.h     TCP                                      ksf_datagram.h  UDP
 * ksf_call.h       called from user space                   ksf_abi.h       what user space shares
 *
 * Compiles with clang 14 and later, for kernels from 6.1 on with BTF.
 */
#pragma once

#include "ksf_stream.h"
#ifndef KSF_HOST /* works on packet memory: tested with BPF_PROG_RUN, tests/frames.rs */
#include "ksf_datagram.h"
#endif
#include "ksf_call.h"

/* The kernel asks for a licence that the GPL is compatible with; an author may define another before the include. */
#ifndef KSF_LICENSE
#define KSF_LICENSE "Dual MIT/GPL"
#endif

#ifdef KSF_HOST
/* A host test links several services and chooses one at run time. */
#define KSF_SERVICE(name, framing_)                                                                              \
	static const struct ksf_framing name##_framing = framing_;                                               \
	static int name(struct ksf_message *m)
#else
#define KSF_SERVICE(name, framing_)                                                                              \
	static __always_inline int name(struct ksf_message *m);                                                  \
	const volatile struct ksf_config ksf_config SEC(".rodata.ksf") = {                                       \
		.abi = KSF_ABI, .bytes = sizeof(struct ksf_config), .service = #name, .framing = framing_,        \
	};                                                                                                       \
	char ksf_license[] SEC("license") = KSF_LICENSE;                                                         \
	KSF_GLOBAL int ksf_answer(struct ksf_message *m)                                                         \
	{                                                                                                        \
		return m ? name(m) : KSF_PASS;                                                                   \
	}                                                                                                        \
	static __always_inline int name(struct ksf_message *m)

SEC("sk_skb/stream_verdict")
int ksf_stream(struct __sk_buff *skb)
{
	return ksf_stream_verdict(skb);
}

SEC("sk_skb/stream_verdict")
int ksf_hop(struct __sk_buff *skb)
{
	return ksf_hop_verdict(skb);
}

SEC("xdp")
int ksf_xdp(struct xdp_md *xdp)
{
	return ksf_datagram_verdict(xdp);
}

SEC("syscall")
int ksf_hop_failed(struct ksf_hop_failed_args *args)
{
	return ksf_hop_failed_verdict(args->slot, args->renewed);
}

SEC("syscall")
int ksf_call(struct ksf_call_args *args)
{
	return ksf_call_verdict(args->caller);
}
#endif
