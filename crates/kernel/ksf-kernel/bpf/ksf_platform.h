/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * The ground the logic stands on, twice: in the kernel, and in a program of the host for tests (-DKSF_HOST, then
 * tests/host/simulator.h follows). The logic of ksf_framing.h, ksf_stream.h and ksf_datagram.h is the same in both.
 */
#pragma once

#ifdef KSF_HOST
#include "simulator.h"
#else

#include "ksf_abi.h"

#define KSF_GLOBAL __noinline

/* Keeps clang from reasoning about a value that the verifier must see checked. */
#define KSF_HIDE(value) barrier_var(value)

/* The verifier allows unaligned access to map memory where the CPU does (CONFIG_HAVE_EFFICIENT_UNALIGNED_ACCESS). */
#define KSF_LOAD8(at) (*(const volatile __u8 *)(at))
#define KSF_LOAD16(at) (*(const volatile __u16 *)(at))
#define KSF_LOAD32(at) (*(const volatile __u32 *)(at))
#define KSF_LOAD64(at) (*(const volatile __u64 *)(at))
#define KSF_STORE8(at, value) (*(volatile __u8 *)(at) = (value))
#define KSF_STORE16(at, value) (*(volatile __u16 *)(at) = (value))
#define KSF_STORE32(at, value) (*(volatile __u32 *)(at) = (value))
#define KSF_STORE64(at, value) (*(volatile __u64 *)(at) = (value))

#define KSF_UNROLL _Pragma("unroll")

#include "ksf_maps.h"
#endif

#define KSF_SAME(value) (value)
