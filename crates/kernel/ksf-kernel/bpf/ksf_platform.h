/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * The ground the logic stands on, twice: in the kernel, and in a program of the host for tests (-DKSF_HOST, then
 * tests/host/simulator.h follows). The logic of ksf_framing.h, ksf_stream.h and ksf_datagram.h is the same in both.
 */
#pragma once

/* A field the other side writes. */
#define KSF_READ(field) (*(const volatile typeof(field) *)&(field))

#ifdef KSF_HOST
#include "simulator.h"
#else

#include "ksf_helpers.h"
#include "ksf_abi.h"

#define __always_inline inline __attribute__((always_inline))
#define KSF_GLOBAL __attribute__((noinline))
#define likely(condition) __builtin_expect(!!(condition), 1)
#define unlikely(condition) __builtin_expect(!!(condition), 0)

/* Keeps clang from reasoning about a value that the verifier must see checked. */
#define KSF_HIDE(value) asm volatile("" : "+r"(value))

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
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define KSF_BE16(value) __builtin_bswap16(value)
#define KSF_BE32(value) __builtin_bswap32(value)
#define KSF_BE64(value) __builtin_bswap64(value)
#define KSF_LE16(value) (value)
#define KSF_LE32(value) (value)
#define KSF_LE64(value) (value)
#else
#define KSF_BE16(value) (value)
#define KSF_BE32(value) (value)
#define KSF_BE64(value) (value)
#define KSF_LE16(value) __builtin_bswap16(value)
#define KSF_LE32(value) __builtin_bswap32(value)
#define KSF_LE64(value) __builtin_bswap64(value)
#endif
