/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * The memory that threads, steering and holder share: the twin of crates/accel/ksf-accel-proto/src/state.rs, which says
 * what each field means and who writes it. layout.h is made from the Rust types; where the twins differ it does not
 * compile.
 */
#pragma once

#include "ksf_kernel.h"

#define KSF_LISTENERS_MAX 64
#define KSF_WORKERS_MAX 256
#define KSF_CPUS_MAX 1024
#define KSF_HOME_MAX 15

struct ksf_control {
	__u32 version;
	__u32 on;
	__u32 workers_end;
	__u32 pad;
	__u64 busy_limit_ns;
	__u64 pad2;
	__u64 rescue_pending;
	__u64 pad3[3];
};

struct ksf_home {
	__u8 len;
	__u8 worker[KSF_HOME_MAX];
};

struct ksf_worker {
	__u64 ready;
	__u64 busy_since_ns;
	__u32 generation;
	__s32 cpu;
	__u32 pid;
	__u32 stalled;
	__u64 pad[4];

	__u64 accepted_own;
	__u64 accepted_fallback;
	__u64 accepted_stolen;
	__u64 steered_local;
	__u64 steered_remote;
	__u64 pad2[3];
} __attribute__((aligned(128)));

struct ksf_state {
	struct ksf_control control;
	struct ksf_home homes[KSF_CPUS_MAX];
	struct ksf_worker workers[KSF_WORKERS_MAX];
};

#include "layout.h"
