// SPDX-License-Identifier: GPL-2.0-only OR MIT
/*
 * The NULL procedure of ONC RPC programs (RFC 5531): the call every RPC client starts with and every RPC benchmark
 * counts. Answered are well-formed calls of procedure 0 of a registered program and version, with AUTH_NONE or
 * AUTH_SYS. All else passes: the refusals of the RFC are user space's, which has room to say them right.
 */
#include "ksf.bpf.h"

#define RPC_CALL 0
#define RPC_REPLY 1
#define RPC_VERSION 2
#define AUTH_NONE 0
#define AUTH_SYS 1
#define AUTH_BODY_BYTES_MAX 400 /* RFC 5531, section 8.2 */
#define MACHINE_NAME_BYTES_MAX 255
#define GIDS_MAX 16

/* Programs whose NULL procedure is answered here, filled by the loader. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 256);
	__type(key, __u32);
	__type(value, struct ksf_rpc_versions);
} ksf_rpc_programs SEC(".maps");

/* authsys_parms (RFC 5531, appendix A): stamp, machine name, uid, gid, up to 16 gids; nothing behind them. */
static __always_inline _Bool auth_sys_is_sane(struct ksf_message *m, __u32 at, __u32 len)
{
	__u32 name = ksf_msg_u32(m, at + 4), gids_at, gids;

	if (len < 20 || name > MACHINE_NAME_BYTES_MAX)
		return 0;
	gids_at = 8 + ((name + 3) & ~3u) + 8;
	if (gids_at + 4 > len)
		return 0;
	gids = ksf_msg_u32(m, at + gids_at);
	return gids <= GIDS_MAX && gids_at + 4 + 4 * gids == len;
}

KSF_SERVICE(rpc_null, KSF_RECORD_MARK)
{
	__u32 program, version, flavor, body, verifier;
	struct ksf_rpc_versions *versions;

	/* xid, type, RPC version, program, version, procedure, credential, verifier */
	if (ksf_len(m) < 40 || ksf_msg_u32(m, 4) != RPC_CALL || ksf_msg_u32(m, 8) != RPC_VERSION)
		return KSF_PASS;
	if (ksf_msg_u32(m, 20) != 0)
		return KSF_PASS;
	flavor = ksf_msg_u32(m, 24);
	body = ksf_msg_u32(m, 28);
	if (body > AUTH_BODY_BYTES_MAX || body & 3)
		return KSF_PASS;
	verifier = 32 + body;
	/* The NULL procedure has no arguments: the message ends behind the verifier, which is AUTH_NONE and empty. */
	if (ksf_len(m) != verifier + 8)
		return KSF_PASS;
	if (ksf_msg_u32(m, verifier) != AUTH_NONE || ksf_msg_u32(m, verifier + 4) != 0)
		return KSF_PASS;
	if (flavor == AUTH_SYS ? !auth_sys_is_sane(m, 32, body) : flavor != AUTH_NONE || body)
		return KSF_PASS;

	program = ksf_msg_u32(m, 12);
	version = ksf_msg_u32(m, 16);
	versions = bpf_map_lookup_elem(&ksf_rpc_programs, &program);
	if (!versions || version < versions->low || version > versions->high)
		return KSF_PASS;

	ksf_put_u32(m, ksf_msg_u32(m, 0)); /* xid */
	ksf_put_u32(m, RPC_REPLY);
	ksf_put_u32(m, 0); /* MSG_ACCEPTED */
	ksf_put_u32(m, AUTH_NONE);
	ksf_put_u32(m, 0);
	ksf_put_u32(m, 0); /* SUCCESS */
	return KSF_REPLY;
}
