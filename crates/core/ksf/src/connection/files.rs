//! Files and a connection: parts of them that are read for replies, and the wait for room for operations on them.

use super::Connection;
use crate::buffers::Buffer;
use crate::env::Env;
use crate::error::CloseReason;
use crate::files::{FileError, FileRange};
use crate::limits::{SomeTime, Time};

impl Connection {
    /// What must be read of a file before more can be sent: at most a [window](crate::output::FILE_WINDOW_BYTES), while the
    /// one before is sent. [`Connection::file_read`] follows.
    pub fn file_to_read(&mut self, now: Time) -> Option<FileRange> {
        if !self.output.has_files() || self.reading_file.is_set() {
            return None;
        }
        let range = self.output.file_to_read(self.sending_bytes);
        self.reading_file = range.as_ref().map(|_| now).into();
        range
    }

    /// What [`file_to_read`](Self::file_to_read) asked for was refused, and will be asked for again.
    pub fn file_not_read(&mut self) {
        self.reading_file = SomeTime::NONE;
    }

    /// Takes what [`file_to_read`](Self::file_to_read) asked for, or a part of it from the front. False: the file ends too
    /// early or cannot be read, and the connection must be reset, because a part of the reply may have left.
    pub fn file_read(&mut self, range: &FileRange, read: Result<Buffer, FileError>, env: &mut Env) -> bool {
        self.reading_file = SomeTime::NONE;
        match read {
            // It is tried again, which tells of an error that stays.
            Err(FileError::Interrupted) => return true,
            Ok(bytes) if !bytes.is_empty() => {
                let placed = self.output.file_was_read(range, bytes, &mut env.spares);
                debug_assert!(placed || self.closing.is_some(), "replies are thrown away at an end alone");
            }
            _ => {
                self.closing = None;
                self.close(CloseReason::FileRange, env);
                return false;
            }
        }
        self.recount(env);
        true
    }

    /// True if what can be sent now ends in front of a range of a file.
    pub fn file_follows(&self) -> bool {
        !self.output.is_empty() && !self.output.is_ready()
    }

    /// Goes on after its messages were not handed over because operations on files would have been refused.
    pub(crate) fn files_have_room(&mut self, env: &mut Env) {
        self.waits_for_files = false;
        // Its peer could not send.
        self.last_activity = env.now;
        self.resume(true, env);
    }

    /// Goes on by itself when there is room for operations on files, if there is none and its service begins some.
    pub(crate) fn wait_for_files(&mut self, env: &Env) {
        if !self.waits_for_files && self.closing.is_none() && self.info.waits_for_files(env) {
            self.waits_for_files = true;
            env.files.wait(self.key);
        }
    }
}
