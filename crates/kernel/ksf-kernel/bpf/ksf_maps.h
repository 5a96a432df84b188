/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * The maps every object has, under the names the loader knows, and the few operations the logic does on them. The host
 * simulator has the same operations.
 *
 * Sizes that depend on the machine (connections, CPUs, shards) are set by the loader before it loads the object.
 */
#pragma once

extern const volatile struct ksf_config ksf_config;

/* Sockets by cookie. A cookie is never used twice, so a reply cannot reach a connection it was not made for. */
struct {
	__uint(type, BPF_MAP_TYPE_SOCKHASH);
	__uint(max_entries, 16384);
	__type(key, __u64);
	__type(value, __u64);
} ksf_socks SEC(".maps");

/* Cookie to index in ksf_conns. sk_skb programs cannot read socket-local storage (Linux 6.18). */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, __u64);
	__type(value, __u32);
} ksf_index SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 16384);
	__type(key, __u32);
	__type(value, struct ksf_conn);
} ksf_conns SEC(".maps");

/* Work areas. An array and not a per-CPU map, whose values end at 32 KiB (PCPU_MIN_UNIT_SIZE). */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, KSF_SLOTS_PER_CPU);
	__type(key, __u32);
	__type(value, struct ksf_slot);
} ksf_slots SEC(".maps");

/* The two ends of the hop of each slot: ksf_stream.h. */
struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__uint(max_entries, KSF_SLOTS_PER_CPU);
	__type(key, __u32);
	__type(value, __u32);
} ksf_hop_in SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__uint(max_entries, KSF_SLOTS_PER_CPU);
	__type(key, __u32);
	__type(value, __u32);
} ksf_hop_out SEC(".maps");

/* Cookie of either end of a hop to its slot. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 2 * KSF_SLOTS_PER_CPU);
	__type(key, __u64);
	__type(value, __u32);
} ksf_hop_slot SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, KSF_COUNTER_COUNT);
	__type(key, __u32);
	__type(value, __u64);
} ksf_counters SEC(".maps");

/* Wake-ups of parked connections: one ring of cookies per shard. */
struct ksf_wake_ring {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 65536);
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 1);
	__type(key, __u32);
	__array(values, struct ksf_wake_ring);
} ksf_wakes SEC(".maps");

/* Local addresses and ports whose datagrams are answered. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, struct ksf_port);
	__type(value, __u32);
} ksf_ports SEC(".maps");

/* By interface index: the program of the next service, for datagrams that are not for this one. */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, KSF_INTERFACES_MAX);
	__type(key, __u32);
	__type(value, __u32);
} ksf_xdp_next SEC(".maps");

/* Areas through which user space has the service function run on a message. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct ksf_message);
} ksf_calls SEC(".maps");

static __always_inline void ksf_count(__u32 counter, __u64 add)
{
	__u64 *value = bpf_map_lookup_elem(&ksf_counters, &counter);

	/* Atomic because a softirq can come between: the same CPU, the same value. */
	if (value)
		__sync_fetch_and_add(value, add);
}

static __always_inline struct ksf_conn *ksf_conn_at(__u32 index)
{
	return bpf_map_lookup_elem(&ksf_conns, &index);
}

static __always_inline struct ksf_conn *ksf_conn_of(__u64 cookie, __u32 *index)
{
	__u32 *found = bpf_map_lookup_elem(&ksf_index, &cookie);
	struct ksf_conn *conn;

	if (!found)
		return 0;
	*index = KSF_READ(*found);
	conn = ksf_conn_at(*index);
	/* An element of a hash map is used again at once when its key is deleted, so between the two lookups `found` can
	 * have become another connection's. */
	return conn && KSF_READ(conn->cookie) == cookie ? conn : 0;
}

static __always_inline struct ksf_slot *ksf_slot_at(__u32 index)
{
	return bpf_map_lookup_elem(&ksf_slots, &index);
}

static __always_inline struct ksf_slot *ksf_slot_of_hop(__u64 cookie)
{
	__u32 *found = bpf_map_lookup_elem(&ksf_hop_slot, &cookie);

	return found ? ksf_slot_at(*found) : 0;
}

/* A free work area of this CPU; its index goes to `index`. */
static __always_inline struct ksf_slot *ksf_slot_take(__u32 *index)
{
	__u32 cpu = bpf_get_smp_processor_id();

	if (cpu >= ksf_config.cpus)
		return 0;
	/* One of each CPU first: the low indices, which have a hop, are shared out evenly. */
	for (__u32 i = 0; i < KSF_SLOTS_PER_CPU; i++) {
		__u32 at = i * ksf_config.cpus + cpu;
		struct ksf_slot *slot = ksf_slot_at(at);

		if (slot && !__sync_lock_test_and_set(&slot->busy, 1)) {
			*index = at;
			return slot;
		}
	}
	return 0;
}

static __always_inline void ksf_slot_give(struct ksf_slot *slot)
{
	/* An exchange and not a store: BPF has no release store, and the next owner may be another CPU's worker. */
	__sync_lock_test_and_set(&slot->busy, 0);
}

/* A full barrier: BPF's only one is an atomic operation that returns a value. */
static __always_inline void ksf_barrier(struct ksf_conn *conn)
{
	__u64 seen = __sync_fetch_and_add(&conn->passed, 0);

	KSF_HIDE(seen);
}

/* False: the ring has no room. */
static __always_inline _Bool ksf_wake(__u32 shard, __u64 cookie)
{
	void *ring = bpf_map_lookup_elem(&ksf_wakes, &shard);

	/* Every time, also when the reader is not yet through with what came before: wake-ups are rare, one per park, and
	 * a lost one would be the last. */
	if (!ring || bpf_ringbuf_output(ring, &cookie, sizeof(cookie), BPF_RB_FORCE_WAKEUP)) {
		ksf_count(KSF_COUNT_wakes_lost, 1);
		return 0;
	}
	ksf_count(KSF_COUNT_wakes_sent, 1);
	return 1;
}

static __always_inline long ksf_redirect_to(struct __sk_buff *skb, __u64 cookie)
{
	return bpf_sk_redirect_hash(skb, &ksf_socks, &cookie, 0);
}

static __always_inline long ksf_redirect_hop(struct __sk_buff *skb, __u32 slot)
{
	return bpf_sk_redirect_map(skb, &ksf_hop_in, slot, 0);
}

static __always_inline _Bool ksf_port_served(struct ksf_port *port)
{
	return bpf_map_lookup_elem(&ksf_ports, port) != 0;
}

static __always_inline struct ksf_message *ksf_call_at(__u32 index)
{
	return bpf_map_lookup_elem(&ksf_calls, &index);
}

#define ksf_memcpy(to, from, len) bpf_probe_read_kernel(to, len, from)
#define ksf_loop(count, function, context) bpf_loop(count, function, context, 0)

/* What the gates need of the connection's TCP state. */
struct ksf_tcp {
	__u32 write_seq;
	__u32 snd_una;
	__u32 rcv_nxt;
	__u32 copied_seq;
	__s32 wmem_queued;
	__s32 sndbuf;
	__u32 shutdown;
	__u32 first_seq; /* of the first byte ever sent */
};

static __always_inline _Bool ksf_tcp_read(struct __sk_buff *skb, struct ksf_tcp *tcp)
{
	struct bpf_sock *sk = skb->sk;
	struct tcp_sock *tp;

	if (!sk)
		return 0;
	tp = bpf_skc_to_tcp_sock(sk);
	if (!tp)
		return 0;
	tcp->write_seq = tp->write_seq;
	tcp->snd_una = tp->snd_una;
	tcp->rcv_nxt = tp->rcv_nxt;
	tcp->copied_seq = tp->copied_seq;
	tcp->wmem_queued = tp->inet_conn.icsk_inet.sk.sk_wmem_queued;
	tcp->sndbuf = tp->inet_conn.icsk_inet.sk.sk_sndbuf;
	tcp->shutdown = tp->inet_conn.icsk_inet.sk.sk_shutdown;
	/* Each byte up to snd_una was acknowledged once. How often one was sent TCP does not say: src/tcp.rs. */
	tcp->first_seq = tp->snd_una - (__u32)tp->bytes_acked;
	return 1;
}
