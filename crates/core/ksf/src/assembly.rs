//! A message that did not arrive in one piece, put together in a buffer of its connection.

use crate::env::Env;
use crate::error::CloseReason;
use crate::framing::Part;
use crate::limits::Time;

/// A message that has not arrived in full: bodies of finished parts, then the raw beginning of the current one.
#[derive(Default)]
pub(crate) struct Assembly {
    buffer: Vec<u8>,
    /// Bytes of `buffer` that belong to finished parts; what follows is raw, unless `part` is known.
    pub(crate) body_bytes: usize,
    /// The current part, once its header is cut.
    pub(crate) part: Option<Progress>,
    parts: u32,
    /// Raw bytes in which no delimiter was found.
    pub(crate) scanned: usize,
    active: bool,
    pub(crate) started: Time,
}

#[derive(Clone, Copy)]
pub(crate) struct Progress {
    pub(crate) body_left: usize,
    pub(crate) trailer_left: usize,
    pub(crate) last: bool,
}

impl Assembly {
    pub(crate) fn is_idle(&self) -> bool {
        !self.active
    }

    pub(crate) fn begin(&mut self, env: &mut Env) {
        self.buffer = env.spares.take();
        self.active = true;
        self.started = env.now;
    }

    /// Bytes kept.
    pub(crate) fn len(&self) -> usize {
        self.buffer.len()
    }

    /// What arrived since the last finished part, header included.
    pub(crate) fn raw(&self) -> &[u8] {
        &self.buffer[self.body_bytes..]
    }

    pub(crate) fn append(&mut self, bytes: &[u8], env: &mut Env) -> Result<(), CloseReason> {
        env.assembly_bytes += bytes.len();
        self.buffer.extend_from_slice(bytes);
        let alone_too_much = env.is_over_budget() && self.buffer.len() > env.limits.assembly_bytes_max;
        if alone_too_much { Err(CloseReason::MemoryLimit) } else { Ok(()) }
    }

    /// The header of the next part is consumed; its body is to come.
    pub(crate) fn start_part(&mut self, part: Part, env: &Env) -> Result<(), CloseReason> {
        self.parts += 1;
        if self.parts > env.limits.fragments_max {
            return Err(CloseReason::EndlessFragments);
        }
        self.part = Some(Progress { body_left: part.body_bytes, trailer_left: part.trailer_bytes, last: part.last });
        Ok(())
    }

    /// The header of the next part lies in the raw bytes: drops it and the surplus behind the part.
    pub(crate) fn cut_raw(&mut self, part: Part, surplus: usize, env: &mut Env) -> Result<(), CloseReason> {
        self.start_part(part, env)?;
        let raw_bytes = self.raw().len();
        let arrived = raw_bytes - surplus - part.header_bytes;
        let body = arrived.min(part.body_bytes);
        let trailer = arrived - body;
        self.buffer.drain(self.body_bytes..self.body_bytes + part.header_bytes);
        self.buffer.truncate(self.body_bytes + body);
        env.assembly_bytes -= raw_bytes - body;
        if let Some(progress) = &mut self.part {
            progress.body_left -= body;
            progress.trailer_left -= trailer;
        }
        Ok(())
    }

    pub(crate) fn finish_part(&mut self) {
        self.part = None;
        self.body_bytes = self.buffer.len();
        self.scanned = 0;
    }

    /// The whole message; the assembly is idle again.
    pub(crate) fn take(&mut self, env: &mut Env) -> Vec<u8> {
        env.assembly_bytes -= self.buffer.len();
        let bytes = std::mem::take(&mut self.buffer);
        *self = Self::default();
        bytes
    }

    pub(crate) fn reset(&mut self, env: &mut Env) {
        let buffer = self.take(env);
        env.spares.give(buffer);
    }
}
