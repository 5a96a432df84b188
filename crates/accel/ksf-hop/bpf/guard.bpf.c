// SPDX-License-Identifier: GPL-2.0-only OR MIT
/*
 * Who reads a socket by splice()? That sees TCP's queue only (tcp_splice_read()), and of a joined direction nothing, or
 * what came later. A socket that is read so once stays on TCP. If it was joined already, bytes wait that its reader does
 * not see: that cannot be healed, so nothing more is joined.
 *
 * An object of its own, because a kernel or a policy may refuse programs of this type.
 */
#include "maps.h"

SEC("fentry/tcp_splice_read") int ksf_hop_spliced(__u64 *arguments)
{
	struct socket *socket = (struct socket *)arguments[0];
	struct ksf_hop_settings *set = settings();
	struct sock *sk = socket->sk;
	__u32 waiting = 0, one = 1;
	struct sk_psock *psock;
	__u64 cookie;

	if (!sk || !set || !bpf_sk_storage_get(&ksf_hop_writers, sk, 0, 0))
		return 0;
	cookie = bpf_get_socket_cookie(sk);
	if (!bpf_map_update_elem(&ksf_hop_splicers, &cookie, &one, BPF_NOEXIST))
		count(KSF_HOP_spliced, 1);
	psock = psock_of(sk);
	if (psock && ksf_has_field(sk_psock, msg_tot_len))
		ksf_read(waiting, psock, msg_tot_len);
	if (waiting) {
		set->spliced = 1;
		count(KSF_HOP_stuck, 1);
	}
	return 0;
}

char ksf_hop_license[] SEC("license") = "Dual MIT/GPL";
