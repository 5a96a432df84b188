//! Changes that are not on the medium yet.

use rustix::fs::fsync;

use crate::error::FsError;
use crate::handle::Handle;
use crate::lane::Lane;
use crate::layer::Fs;
use crate::ops::{OpenFile, changed_for_good, sync_opened};
use crate::uncommitted::Written;

/// Syncs that operations have left to their caller: [`Lane::owing`].
#[derive(Debug, Default)]
#[must_use = "results count when the syncs were made"]
pub struct Owed {
    /// Those that the result depends on, in their order.
    pub(crate) own: Vec<Debt>,
    /// Those of other files, which had to make room.
    pub(crate) others: Vec<Debt>,
    /// A write was not begun, because its connection has its share of files with uncommitted data.
    pub(crate) has_no_room: bool,
}

/// One sync.
#[derive(Debug)]
pub(crate) struct Debt {
    pub(crate) handle: Handle,
    pub(crate) what: What,
}

#[derive(Debug)]
pub(crate) enum What {
    /// The entries of a folder, or the attributes of a file.
    Names,
    /// The bytes of a file, whoever wrote them.
    Content,
    /// The bytes of a file as far as a write knows of them.
    Written(Written),
    /// What was written to an open file.
    Opened { file: OpenFile, data_only: bool },
}

impl Owed {
    /// What a commit of a file waits for: [`Fs::committed`] tells its result.
    pub fn commit(file: Handle) -> Self {
        Self { own: vec![Debt { handle: file, what: What::Content }], ..Self::default() }
    }

    /// True if the operation was a write that did not begin, since its connection has its share of files with uncommitted data. Its
    /// caller has [`Lane::leave`] do it again, on a thread that syncs it: there it begins.
    pub fn has_no_room(&self) -> bool {
        self.has_no_room
    }
}

impl Fs {
    /// Makes the syncs on this thread.
    ///
    /// # Errors
    ///
    /// The result of the operation that owed them: what it changed may be lost.
    pub fn settle_owed(&self, lane: &Lane, owed: &Owed) -> Result<(), FsError> {
        for debt in &owed.others {
            // Its verifier tells of a failure.
            self.pay(lane, debt).ok();
        }
        owed.own.iter().try_for_each(|debt| self.pay(lane, debt))
    }

    /// Makes a sync, or leaves it to the caller of the operation.
    pub(crate) fn owe(&self, lane: &mut Lane, handle: &Handle, what: What) -> Result<(), FsError> {
        let debt = Debt { handle: handle.clone(), what };
        match &mut lane.owed {
            Some(owed) => {
                owed.own.push(debt);
                Ok(())
            }
            None => self.pay(lane, &debt),
        }
    }

    /// Makes a sync of another file than that of the operation, or leaves it. Its verifier tells of a failure.
    pub(crate) fn owe_of_another(&self, lane: &mut Lane, debt: Debt) {
        match &mut lane.owed {
            Some(owed) => owed.others.push(debt),
            None => {
                self.pay(lane, &debt).ok();
            }
        }
    }

    pub(crate) fn pay(&self, lane: &Lane, debt: &Debt) -> Result<(), FsError> {
        match &debt.what {
            What::Names => self.settle(lane, &debt.handle),
            What::Content => self.bring(lane, &debt.handle),
            What::Opened { file, data_only } => sync_opened(file, *data_only),
            What::Written(written) => {
                let synced = self.uncommitted.sync_written(&debt.handle, written, |file| fsync(file));
                synced.map_err(|errno| changed_for_good(errno.into()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};

    use rustix::io::Errno;

    use super::*;
    use crate::common::{Served, root};
    use crate::lanes::{LaneOptions, Lanes};
    use crate::ops::OpenHow;
    use crate::pool::Length;

    /// Results of both syncs of an open file, on lanes to which the kernel refuses this system call.
    fn syncs_without(call: libc::c_long) -> [bool; 2] {
        let (served, mut lane) = (Served::open_to_all(), Lane::attach().unwrap());
        std::fs::write(served.path("file"), "text").unwrap();
        let found = served.find(&mut lane, "file");
        let (file, _) = served.fs.open(&mut lane, &root(), &found.handle, OpenHow::READ).unwrap();
        ksf_test::refuse_call(call, Errno::IO);
        let fs = Arc::new(served.fs);
        let lanes = Lanes::start(&LaneOptions { threads: 1 }, 1).unwrap();
        [false, true].map(|data_only| {
            let (sender, receiver) = mpsc::channel();
            let (fs, owed) = (Arc::clone(&fs), Owed::sync(file.clone(), data_only));
            lanes.submit(0, Length::Short, 0, move |lane| {
                lane.settle(&fs, owed, 0, move |_, settled| sender.send(settled.is_ok()).unwrap());
            });
            receiver.recv().unwrap()
        })
    }

    #[test]
    fn a_sync_of_an_open_file_is_one_of_the_kernel() {
        // The filter stays with its thread and those that it starts.
        for (call, synced) in [(libc::SYS_fsync, [false, true]), (libc::SYS_fdatasync, [true, false])] {
            assert_eq!(std::thread::spawn(move || syncs_without(call)).join().unwrap(), synced, "call {call}");
        }
    }
}
