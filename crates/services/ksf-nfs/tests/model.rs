//! Random calls have the results, and leave the tree, that they have on a plain directory.

use crate::common::{Attr, Client, OK, Place, Serving, Wcc, handle, mode, named, read_args, write_args};
use ksf_proto::xdr::XdrReader;
use ksf_test::files::{Kind, Outcome, SLOTS, Server, Step, attributes, bytes, compare, listed};
use ksf_test::rpc::words;
use ksf_test::{Random, effort};

/// NF3FIFO.
const FIFO: u32 = 7;

/// Two connections, which send calls in turn, and the handles of the objects.
struct Calls<'a> {
    serving: &'a Serving,
    /// Procedure and status of the last call.
    last: (u32, u32),
    clients: [Client; 2],
    handles: [Vec<u8>; SLOTS],
}

impl Calls<'_> {
    fn call(&mut self, procedure: u32, args: &[u8]) -> Result<Vec<u8>, i32> {
        self.clients.swap(0, 1);
        let (status, results) = self.clients[0].nfs(procedure, args);
        self.last = (procedure, status);
        match status {
            OK => Ok(results),
            // The numbers that are not those of Linux.
            63 => Err(libc::ENAMETOOLONG),
            66 => Err(libc::ENOTEMPTY),
            70 => Err(libc::ESTALE),
            10_004 => Err(libc::EOPNOTSUPP),
            other => Err(other as i32),
        }
    }

    /// A procedure whose results say no more than that it is done.
    fn does(&mut self, procedure: u32, args: &[u8]) -> Outcome {
        self.call(procedure, args).map(|_| String::new())
    }

    /// A procedure that returns the handle for a slot.
    fn finds(&mut self, procedure: u32, args: &[u8], to: usize) -> Outcome {
        let results = self.call(procedure, args)?;
        // CREATE, MKDIR, SYMLINK and MKNOD have a flag before it.
        let results = if procedure == 3 { &results[..] } else { &results[4..] };
        self.handles[to] = XdrReader::new(results).opaque(64).unwrap().to_vec();
        Ok(String::new())
    }

    fn outcome(&mut self, step: Step) -> Outcome {
        let at = self.handles[step.object()].clone();
        let set = |values: &[u32]| [handle(&at), words(values), words(&[0])].concat();
        match step {
            Step::Find { name, to, .. } => self.finds(3, &named(&at, name), to),
            Step::Make { name, kind, mode: bits, to, .. } => {
                let (name, attributes) = (named(&at, name), mode(bits));
                match kind {
                    // GUARDED.
                    Kind::File => self.finds(8, &[name, words(&[1]), attributes].concat(), to),
                    Kind::Directory => self.finds(9, &[name, attributes].concat(), to),
                    Kind::Link(target) => {
                        self.finds(10, &[name, words(&[0; 6]), handle(target.as_bytes())].concat(), to)
                    }
                    Kind::Fifo => self.finds(11, &[name, words(&[FIFO]), attributes].concat(), to),
                }
            }
            Step::Read { offset, count, .. } => {
                let results = self.call(6, &read_args(&at, offset, count))?;
                let mut r = XdrReader::new(&results);
                Attr::read_option(&mut r);
                let (_count, _is_end) = (r.u32().unwrap(), r.bool().unwrap());
                Ok(bytes(r.opaque(count).unwrap()))
            }
            Step::Write { offset, data, .. } => {
                let results = self.call(7, &write_args(&at, offset, 0, data))?;
                let mut r = XdrReader::new(&results);
                Wcc::read(&mut r);
                Ok(r.u32().unwrap().to_string())
            }
            Step::SetSize { size, .. } => self.does(2, &set(&[0, 0, 0, 1, 0, size as u32, 0, 0])),
            Step::SetMode { mode, .. } => self.does(2, &set(&[1, mode, 0, 0, 0, 0, 0])),
            Step::SetOwner { uid, gid, .. } => self.does(2, &set(&[0, 1, uid, 1, gid, 0, 0, 0])),
            Step::Attributes { .. } => {
                let results = self.call(1, &handle(&at))?;
                let attr = Attr::read(&mut XdrReader::new(&results));
                let kind = [0, libc::S_IFREG, libc::S_IFDIR, 0, 0, libc::S_IFLNK, 0, libc::S_IFIFO];
                let mode = kind[attr.file_type as usize] | attr.mode;
                Ok(attributes(mode, attr.nlink.into(), (attr.uid, attr.gid), attr.size))
            }
            Step::Target { .. } => {
                let results = self.call(5, &handle(&at))?;
                let mut r = XdrReader::new(&results);
                Attr::read_option(&mut r);
                Ok(bytes(r.opaque(1000).unwrap()))
            }
            Step::List { .. } => {
                let results = self.call(16, &[handle(&at), words(&[0, 0, 0, 0, 8000])].concat())?;
                let mut r = XdrReader::new(&results);
                Attr::read_option(&mut r);
                let _verifier = r.u64().unwrap();
                let mut names = Vec::new();
                while r.bool().unwrap() {
                    let _fileid = r.u64().unwrap();
                    names.push(r.opaque(255).unwrap().to_vec());
                    let _cookie = r.u64().unwrap();
                }
                assert!(r.bool().unwrap(), "all entries fit");
                Ok(listed(names))
            }
            Step::Link { dir, name, .. } => self.does(15, &[handle(&at), named(&self.handles[dir], name)].concat()),
            Step::Rename { name, to, new, .. } => {
                self.does(14, &[named(&at, name), named(&self.handles[to], new)].concat())
            }
            Step::Remove { name, is_directory, .. } => self.does(if is_directory { 13 } else { 12 }, &named(&at, name)),
            Step::SetXattr { .. } | Step::Xattr { .. } => unreachable!("NFSv3 has no extended attributes"),
        }
    }
}

impl Server for Calls<'_> {
    fn run(&mut self, step: Step) -> Option<Outcome> {
        let is_known = !matches!(step, Step::SetXattr { .. } | Step::Xattr { .. });
        is_known.then(|| self.outcome(step))
    }

    fn state(&self) -> String {
        format!("procedure and status {:?}, {}", self.last, self.serving.counters())
    }
}

#[test]
fn calls_do_what_they_do_on_a_plain_directory() {
    for seed in 0..effort(25, 1000) {
        let (place, serving) = Place::served();
        let mut clients = [(); 2].map(|()| serving.client());
        // Two calls of one machine with one xid and the same arguments are tries of one.
        clients[1].xid = 1 << 31;
        let mut calls = Calls { serving: &serving, last: (0, 0), clients, handles: Default::default() };
        calls.handles[0] = calls.clients[0].mnt(&place.path("")).unwrap();
        compare(&mut Random::of_test(seed), &mut calls, &place.path(""), &place.beside("plain"));
        serving.stop();
    }
}
