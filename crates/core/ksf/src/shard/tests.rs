//! A shard without a thread of its own: the test takes its turns.

use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags, poll};

use super::*;
use crate::engine::{epoll::Epoll, tests::on_each_engine, uring::Uring};
use crate::limits::Limits;
use crate::pool::{Memory, Pool};

fn shard<E: Engine>() -> Shard<E> {
    let env = Env::new(Limits::default(), Pool::new(Memory::Anonymous, 4096, 256).unwrap()).unwrap();
    Shard::new(env, Vec::new(), Arc::default(), None).unwrap()
}

fn is_readable(fd: impl AsFd) -> bool {
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&Default::default())).unwrap() > 0
}

/// A shard that looked into its mailbox after a letter came and before its wake-up did.
#[test]
fn a_wake_up_for_mail_that_was_taken_already_is_taken_too() {
    on_each_engine(woken_for_nothing::<Epoll>, woken_for_nothing::<Uring>);
}

fn woken_for_nothing<E: Engine>() {
    let mut shard = shard::<E>();
    rustix::io::write(shard.env.mailbox.as_fd(), &1u64.to_ne_bytes()).unwrap();
    shard.turn().unwrap();
    assert!(!is_readable(&*shard.env.mailbox), "every further wait would end at once");
}
