//! Settings of a kernel half.

use crate::KernelError;

/// How a kernel half is loaded. `Default` suits a server with some thousand connections.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct KernelOptions {
    /// Reply bytes of a connection that may be unacknowledged when the kernel answers another segment. 0, the
    /// default, answers one segment at a time and leaves pipelined requests to user space, which batches better. More
    /// keeps a connection in the kernel for longer, at the price of one work item per segment.
    pub window_bytes: u32,
    /// Connections the kernel half can hold; each takes 128 bytes of shared memory and some hundred of map entries.
    /// Connections beyond it are served by user space alone.
    pub connections_max: u32,
    /// Threads that run the service's function from user space ([`crate::KernelService::caller`]); 48 KiB each.
    pub callers_max: u32,
    /// Shards that can be woken ([`ksf::assist::Assist::wake_fd`]).
    pub shards: u32,
    /// Bytes by which a parked connection's read position may lag behind, repaid at intervals; see
    /// `bpf/ksf_stream.h`. 0 sends every reply of another length through a hop.
    pub lag_bytes_max: u32,
    /// Send replies of another length than their request from the kernel. Without it those messages go to user space.
    pub hops: bool,
    /// ONC RPC programs whose NULL procedure is answered: program, lowest and highest version. Needs
    /// [`crate::Builtin::RpcNull`].
    pub rpc_programs: Vec<(u32, u32, u32)>,
}

impl Default for KernelOptions {
    fn default() -> Self {
        Self {
            window_bytes: 0,
            connections_max: 16_384,
            callers_max: 1,
            shards: 1,
            lag_bytes_max: 4096,
            hops: true,
            rpc_programs: Vec::new(),
        }
    }
}

impl KernelOptions {
    pub(crate) fn check(&self) -> Result<(), KernelError> {
        let bad = |option, problem: &str| Err(KernelError::BadOption { option, problem: problem.into() });
        if self.connections_max == 0 || self.connections_max > 1 << 22 {
            return bad("connections_max", "must be 1 to 4194304");
        }
        if self.callers_max == 0 || self.callers_max > 4096 {
            return bad("callers_max", "must be 1 to 4096");
        }
        if self.shards == 0 || self.shards > 4096 {
            return bad("shards", "must be 1 to 4096");
        }
        // SO_RCVLOWAT must be able to follow the lag, and the kernel caps it at half the receive buffer.
        if self.lag_bytes_max > 16_000 {
            return bad("lag_bytes_max", "must be 0 to 16000");
        }
        if self.window_bytes > 1 << 20 {
            return bad("window_bytes", "must be 0 to 1048576");
        }
        if let Some((_, low, high)) = self.rpc_programs.iter().find(|(_, low, high)| low > high) {
            return bad("rpc_programs", &format!("versions {low} to {high} are the wrong way round"));
        }
        Ok(())
    }
}
