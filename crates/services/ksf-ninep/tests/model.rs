//! Random requests have the results, and leave the tree, that they have on a plain directory.

use std::collections::HashMap;

use crate::common::{Client, Place, ROOT, Serving};
use ksf_proto::p9::{Data, DirEntry, Reply, Request, SetStat, UNLINK_DIRECTORY, open_flag, set_bit};
use ksf_test::files::{Kind, Outcome, SLOTS, Server, Step, attributes, bytes, compare, listed};
use ksf_test::{Random, effort};

/// A fid for one request, or for a few.
const SCRATCH: u32 = 60;

/// A connection, and its open fid of a file for each fid that has one.
struct Connection {
    client: Client,
    open: HashMap<u32, u32>,
}

/// Two connections, which send requests in turn and have the same fids of objects.
struct Requests<'a> {
    serving: &'a Serving,
    connections: [Connection; 2],
    fids: [u32; SLOTS],
    /// A fid that is not in use.
    next: u32,
}

fn ask<T>(client: &mut Client, request: Request<'_>, look: impl FnOnce(Reply<'_>) -> Option<T>) -> Result<T, i32> {
    client.ask(request, |reply| look(reply).unwrap_or_else(|| panic!("another reply to {request:?}")))
}

impl Connection {
    /// Runs requests on another fid of the object, which is clunked then.
    fn with_scratch<T>(
        &mut self,
        (fid, path): (u32, &str),
        run: impl FnOnce(&mut Client) -> Result<T, i32>,
    ) -> Result<T, i32> {
        self.client.walk(fid, SCRATCH, path)?;
        let result = run(&mut self.client);
        self.client.clunk(SCRATCH)?;
        result
    }

    /// An open fid of the file, which stays open as long as the fid is in use.
    fn opened(&mut self, fid: u32) -> Result<u32, i32> {
        if let Some(open) = self.open.get(&fid) {
            return Ok(*open);
        }
        let open = fid + SCRATCH;
        self.client.walk(fid, open, "")?;
        self.client.does(Request::Lopen { fid: open, flags: open_flag::READ_WRITE }).inspect_err(|_| {
            self.client.clunk(open).unwrap();
        })?;
        self.open.insert(fid, open);
        Ok(open)
    }

    fn clunk(&mut self, fid: u32) {
        for fid in self.open.remove(&fid).into_iter().chain([fid]) {
            self.client.clunk(fid).unwrap();
        }
    }
}

impl Requests<'_> {
    /// Gives a slot the fids of a name.
    fn find(&mut self, dir: u32, name: &str, to: usize) -> Outcome {
        for connection in &mut self.connections {
            connection.client.walk(dir, self.next, name)?;
            if self.fids[to] != ROOT {
                connection.clunk(self.fids[to]);
            }
        }
        self.next = std::mem::replace(&mut self.fids[to], self.next);
        if self.next == ROOT {
            self.next = SLOTS as u32 + to as u32;
        }
        Ok(String::new())
    }

    fn outcome(&mut self, step: Step) -> Outcome {
        let fid = self.fids[step.object()];
        let gid = rustix::process::getegid().as_raw();
        self.connections.swap(0, 1);
        let connection = &mut self.connections[0];
        let client = &mut connection.client;
        // Every other time by the message that names the object and not its directory.
        let is_by_object = self.next.is_multiple_of(2);
        let set = |to: SetStat| Request::Setattr { fid, to };
        let does = |client: &mut Client, request| client.does(request).map(|()| String::new());
        match step {
            Step::Find { name, to, .. } => self.find(fid, name, to),
            Step::Make { name: text, kind, mode, to, .. } => {
                let name = text.as_bytes();
                match kind {
                    Kind::File => connection.with_scratch((fid, ""), |client| {
                        let flags = open_flag::READ_WRITE | open_flag::EXCLUSIVE;
                        client.does(Request::Lcreate { fid: SCRATCH, name, flags, mode, gid })
                    }),
                    Kind::Directory => client.does(Request::Mkdir { dfid: fid, name, mode, gid }),
                    Kind::Link(target) => {
                        client.does(Request::Symlink { dfid: fid, name, target: target.as_bytes(), gid })
                    }
                    Kind::Fifo => {
                        let mode = libc::S_IFIFO | mode;
                        client.does(Request::Mknod { dfid: fid, name, mode, major: 0, minor: 0, gid })
                    }
                }?;
                self.find(fid, text, to)
            }
            Step::Read { offset, count, .. } => {
                let fid = connection.opened(fid)?;
                ask(&mut connection.client, Request::Read { fid, offset, count }, |reply| match reply {
                    Reply::Read { data } => Some(bytes(data.0)),
                    _ => None,
                })
            }
            Step::Write { offset, data, .. } => {
                let fid = connection.opened(fid)?;
                ask(&mut connection.client, Request::Write { fid, offset, data: Data(data) }, |reply| match reply {
                    Reply::Write { count } => Some(count.to_string()),
                    _ => None,
                })
            }
            Step::SetSize { size, .. } => {
                does(client, set(SetStat { valid: set_bit::SIZE, size, ..SetStat::default() }))
            }
            Step::SetMode { mode, .. } => {
                does(client, set(SetStat { valid: set_bit::MODE, mode, ..SetStat::default() }))
            }
            Step::SetOwner { uid, gid, .. } => {
                let valid = set_bit::UID | set_bit::GID;
                does(client, set(SetStat { valid, uid, gid, ..SetStat::default() }))
            }
            Step::Attributes { .. } => {
                let stat = client.stat(fid)?;
                Ok(attributes(stat.mode, stat.nlink, (stat.uid, stat.gid), stat.size))
            }
            Step::Target { .. } => ask(client, Request::Readlink { fid }, |reply| match reply {
                Reply::Readlink { target } => Some(bytes(target)),
                _ => None,
            }),
            Step::List { .. } => connection.with_scratch((fid, ""), |client| {
                client.does(Request::Lopen { fid: SCRATCH, flags: 0 })?;
                ask(client, Request::Readdir { fid: SCRATCH, offset: 0, count: 8000 }, |reply| match reply {
                    Reply::Readdir { data } => {
                        let names = DirEntry::all(data.0).map(|entry| entry.expect("no entry is cut").name.to_vec());
                        Some(listed(names.collect()))
                    }
                    _ => None,
                })
            }),
            Step::Link { dir, name, .. } => {
                does(client, Request::Link { dfid: self.fids[dir], fid, name: name.as_bytes() })
            }
            Step::Rename { name, to, new, .. } => {
                let (newdirfid, newname) = (self.fids[to], new.as_bytes());
                if is_by_object {
                    let moved = Request::Rename { fid: SCRATCH, dfid: newdirfid, name: newname };
                    return connection.with_scratch((fid, name), |client| does(client, moved));
                }
                let oldname = name.as_bytes();
                does(client, Request::Renameat { olddirfid: fid, oldname, newdirfid, newname })
            }
            Step::Remove { name, is_directory, .. } => {
                let flags = if is_directory { UNLINK_DIRECTORY } else { 0 };
                does(client, Request::Unlinkat { dirfid: fid, name: name.as_bytes(), flags })
            }
            Step::SetXattr { name, value, .. } => {
                client.walk(fid, SCRATCH, "")?;
                let (name, size) = (name.as_bytes(), value.len() as u64);
                let begun = client.does(Request::Xattrcreate { fid: SCRATCH, name, size, flags: 0 });
                let written =
                    begun.and_then(|()| client.does(Request::Write { fid: SCRATCH, offset: 0, data: Data(value) }));
                // The value is set by Tclunk.
                let ended = client.clunk(SCRATCH);
                written.and(ended).map(|()| String::new())
            }
            Step::Xattr { name, .. } => {
                let walk = Request::Xattrwalk { fid, newfid: SCRATCH, name: name.as_bytes() };
                client.does(walk)?;
                let value = client.read(SCRATCH, 0, 100)?;
                client.clunk(SCRATCH)?;
                Ok(bytes(&value))
            }
        }
    }
}

impl Server for Requests<'_> {
    fn run(&mut self, step: Step) -> Option<Outcome> {
        Some(self.outcome(step))
    }

    fn state(&self) -> String {
        format!("{:?}, {}", self.connections[0].client.1, self.serving.counters())
    }
}

#[test]
fn requests_do_what_they_do_on_a_plain_directory() {
    for seed in 0..effort(25, 1000) {
        let place = Place::new();
        let serving = place.serve();
        let connection = || Connection { client: serving.client(), open: HashMap::new() };
        let connections = [connection(), connection()];
        let mut requests = Requests { serving: &serving, connections, fids: [ROOT; SLOTS], next: SLOTS as u32 };
        compare(&mut Random::of_test(seed), &mut requests, &place.path(""), &place.beside("plain"));
        serving.stop();
    }
}
