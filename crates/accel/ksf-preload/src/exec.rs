//! `exec` and `posix_spawn`: the library's variables stay with the program, the thread's CPU does not.

use std::ffi::{c_char, c_int};

use crate::environment::Target;
use crate::real::Strings;
use crate::{environment, pin, process, worker};

unsafe extern "C" {
    static environ: Strings;
}

/// The process's own environment.
pub(crate) fn own_environment() -> Strings {
    // SAFETY: libc's variable. A program that changes it in another thread meanwhile does so to libc's exec as well.
    unsafe { environ }
}

/// Replaces the program by `run`, which gets the environment. Returns if that fails.
///
/// # Safety
///
/// `strings` is null or a list of strings that ends with null; the target's path or name is a string.
pub(crate) unsafe fn exec(target: Target, strings: Strings, run: impl FnOnce(Strings) -> c_int) -> c_int {
    // Queues are closed by exec: nothing shall be sent to them. Not in a `vfork()` child, whose parent they serve.
    let own = process::process().is_some_and(|process| process.is_own());
    if own {
        worker::pause_all(true);
    }
    // SAFETY: handed on from the caller.
    let result = pin::unbound(|| unsafe { environment::restored(target, strings, run) });
    if own {
        worker::pause_all(false);
    }
    result
}

/// Arguments of `execl` and its like that are put into a list.
const ARGUMENTS_MAX: usize = 1024;

/// Calls `run` with a list of the arguments that a variadic call was given, and with what comes after their end.
///
/// # Safety
///
/// `registers` leads to `count` arguments from registers, `stack` to the further ones; among them is a null.
unsafe fn collected(
    registers: Strings,
    count: usize,
    stack: Strings,
    run: impl FnOnce(Strings, Strings) -> c_int,
) -> c_int {
    // SAFETY: handed on from the caller: nothing is read beyond the null, but the one argument after it.
    let argument =
        |index: usize| unsafe { if index < count { *registers.add(index) } else { *stack.add(index - count) } };
    let mut list = [std::ptr::null(); ARGUMENTS_MAX];
    for index in 0..ARGUMENTS_MAX {
        list[index] = argument(index);
        if list[index].is_null() {
            // Of execle this is the environment; the others have no such argument, and do not look.
            return run(list.as_ptr(), argument(index + 1).cast());
        }
    }
    ksf_interpose::errno::fail(libc::E2BIG)
}

/// `execl`, with its arguments found by the entry below: the path is the first of the registers.
unsafe extern "C-unwind" fn execl_body(registers: Strings, count: usize, stack: Strings) -> c_int {
    // SAFETY: the entry below passes what it was given.
    unsafe {
        let path: *const c_char = *registers;
        collected(registers.add(1), count - 1, stack, |list, _| crate::hooks::execve(path, list, own_environment()))
    }
}

unsafe extern "C-unwind" fn execlp_body(registers: Strings, count: usize, stack: Strings) -> c_int {
    // SAFETY: as above.
    unsafe {
        let file: *const c_char = *registers;
        collected(registers.add(1), count - 1, stack, |list, _| crate::hooks::execvpe(file, list, own_environment()))
    }
}

unsafe extern "C-unwind" fn execle_body(registers: Strings, count: usize, stack: Strings) -> c_int {
    // SAFETY: as above.
    unsafe {
        let path: *const c_char = *registers;
        collected(registers.add(1), count - 1, stack, |list, strings| crate::hooks::execve(path, list, strings.cast()))
    }
}

/// Entries of variadic functions, which stable Rust cannot define: they put the arguments that came in registers into
/// memory and pass where those and the further ones are.
macro_rules! variadic {
    ($($(#[$meta:meta])* $name:ident => $body:ident;)*) => { $(
        $(#[$meta])*
        ///
        /// # Safety
        ///
        /// As its manual page demands.
        #[cfg(target_arch = "x86_64")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C-unwind" fn $name() -> c_int {
            // System V ABI, 3.2.3: six registers; further arguments lie above the return address.
            std::arch::naked_asm!(
                ".cfi_startproc",
                "sub rsp, 56",
                ".cfi_adjust_cfa_offset 56",
                "mov [rsp], rdi",
                "mov [rsp + 8], rsi",
                "mov [rsp + 16], rdx",
                "mov [rsp + 24], rcx",
                "mov [rsp + 32], r8",
                "mov [rsp + 40], r9",
                "mov rdi, rsp",
                "mov esi, 6",
                "lea rdx, [rsp + 64]",
                "call {body}",
                "add rsp, 56",
                ".cfi_adjust_cfa_offset -56",
                "ret",
                ".cfi_endproc",
                body = sym $body,
            )
        }

        $(#[$meta])*
        ///
        /// # Safety
        ///
        /// As its manual page demands.
        #[cfg(target_arch = "aarch64")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C-unwind" fn $name() -> c_int {
            // AAPCS64, 6.8: eight registers; further arguments lie at the stack pointer.
            std::arch::naked_asm!(
                ".cfi_startproc",
                "sub sp, sp, 80",
                ".cfi_adjust_cfa_offset 80",
                "str x30, [sp, 64]",
                ".cfi_rel_offset x30, 64",
                "stp x0, x1, [sp]",
                "stp x2, x3, [sp, 16]",
                "stp x4, x5, [sp, 32]",
                "stp x6, x7, [sp, 48]",
                "mov x0, sp",
                "mov x1, 8",
                "add x2, sp, 80",
                "bl {body}",
                "ldr x30, [sp, 64]",
                "add sp, sp, 80",
                ".cfi_adjust_cfa_offset -80",
                "ret",
                ".cfi_endproc",
                body = sym $body,
            )
        }
    )* };
}

variadic! {
    /// execl(3)
    execl => execl_body;
    /// execlp(3)
    execlp => execlp_body;
    /// execle(3)
    execle => execle_body;
}
