//! System calls that the kernel refuses to a thread, as a sandbox, an older kernel or another file system does.

use rustix::io::Errno;

/// Has the kernel refuse this system call to this thread and to those that it starts.
pub fn refuse_call(number: libc::c_long, errno: Errno) {
    refuse(errno, &[statement(JUMP_EQUAL, 0, 1, number as u32)]);
}

/// Has the kernel refuse to this thread every read that may wait.
pub fn refuse_waiting_reads() {
    let call = |number: libc::c_long, jt| statement(JUMP_EQUAL, jt, 0, number as u32);
    let filter = [
        call(libc::SYS_read, 6),
        call(libc::SYS_pread64, 5),
        call(libc::SYS_readv, 4),
        call(libc::SYS_preadv, 3),
        statement(JUMP_EQUAL, 0, 3, libc::SYS_preadv2 as u32),
        // The lower half of its sixth argument, the flags (struct seccomp_data).
        statement(LOAD, 0, 0, if cfg!(target_endian = "little") { 56 } else { 60 }),
        statement(libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K, 1, 0, libc::RWF_NOWAIT as u32),
    ];
    refuse(Errno::PERM, &filter);
}

const LOAD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
const JUMP_EQUAL: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;

fn statement(code: u32, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt, jf, k }
}

/// Installs a filter of system calls for this thread (seccomp(2)). `choice` finds the number loaded; behind it the call is
/// refused, and allowed one statement later.
fn refuse(errno: Errno, choice: &[libc::sock_filter]) {
    let refused = libc::SECCOMP_RET_ERRNO | errno.raw_os_error() as u32;
    let end = [refused, libc::SECCOMP_RET_ALLOW].map(|k| statement(libc::BPF_RET | libc::BPF_K, 0, 0, k));
    let filter = [&[statement(LOAD, 0, 0, 0)], choice, &end].concat();
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    // SAFETY: prctl copies the program, which lives until it returns, and writes nothing to it.
    let installed = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
    };
    assert!(installed, "{}", std::io::Error::last_os_error());
}
