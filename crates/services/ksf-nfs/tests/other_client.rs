//! The crate `nfs3_client` understands each result of each procedure, whether it went well or not: it encodes the calls, and it refuses
//! replies that it has not read to their end. Each call that fails with each of its errors: `failures.rs`. (Debian's fio is built
//! without its engine `nfs`.)

use std::future::Future;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use nfs3_client::io::{AsyncRead, AsyncWrite};
use nfs3_client::nfs3_types::mount::{dirpath, mountres3, mountres3_ok, mountstat3};
use nfs3_client::nfs3_types::nfs3::*;
use nfs3_client::nfs3_types::rpc::{auth_flavor, auth_unix, opaque_auth};
use nfs3_client::nfs3_types::xdr_codec::{Opaque, Pack, Unpack, Void};
use nfs3_client::rpc::RpcClient;
use nfs3_client::{MountClient, MountError, Nfs3Client, RpcError};

use crate::common::{Client, Place};
use ksf_proto::oncrpc::{MOUNT_PROGRAM, NFS_PROGRAM};
use ksf_test::{root_or_skip, stream};

/// A connection that waits, so that no future ever does.
struct Waits(TcpStream);

impl AsyncRead for Waits {
    async fn async_read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.0.read(buf)
    }
}

impl AsyncWrite for Waits {
    async fn async_write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.0.write(buf)
    }
}

fn now<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => result,
        Poll::Pending => panic!("a future waits, and its connection does so itself"),
    }
}

/// The results of a procedure that went well.
#[track_caller]
fn done<T, E: std::fmt::Debug>(call: impl Future<Output = Result<Nfs3Result<T, E>, RpcError>>) -> T {
    now(call).expect("a reply that is one").unwrap()
}

/// The status of a procedure that failed, and what came with it.
#[track_caller]
fn failed<T, E>(call: impl Future<Output = Result<Nfs3Result<T, E>, RpcError>>) -> (nfsstat3, E) {
    match now(call).expect("a reply that is one") {
        Nfs3Result::Err(failed) => failed,
        Nfs3Result::Ok(_) => panic!("it went well"),
    }
}

fn file_handle(bytes: &[u8]) -> nfs_fh3 {
    nfs_fh3 { data: Opaque::owned(bytes.to_vec()) }
}

/// Arguments as they lie on the wire: the types of the crate cannot express all.
struct Raw<'a>(&'a [u8]);

impl Pack for Raw<'_> {
    fn packed_size(&self) -> usize {
        self.0.len()
    }

    fn pack(&self, out: &mut impl Write) -> nfs3_client::nfs3_types::xdr_codec::Result<usize> {
        out.write_all(self.0)?;
        Ok(self.0.len())
    }
}

/// A connection whose results the crate decodes.
pub(crate) struct OtherClient(RpcClient<Waits>);

impl OtherClient {
    /// Connects to the server of another client, as the same user.
    pub(crate) fn beside(client: &Client) -> Self {
        let stream = stream::connect(client.stream.peer_addr().unwrap());
        let body = Opaque::owned(client.credential.clone().expect("a user"));
        let credential = opaque_auth { flavor: auth_flavor::AUTH_UNIX, body };
        Self(RpcClient::new_with_auth(Waits(stream), credential, opaque_auth::default()))
    }

    /// Status of a call that fails, and the inode numbers of the attributes in its results, 0 for missing ones.
    #[track_caller]
    pub(crate) fn failure(&mut self, procedure: u32, args: &[u8]) -> (u32, Vec<u64>) {
        let call = (procedure, args);
        match procedure {
            1 => told(self.call::<GETATTR3res>(call), |Void| []),
            2 => told(self.call::<SETATTR3res>(call), |fail| [fail.obj_wcc.after]),
            3 => told(self.call::<LOOKUP3res>(call), |fail| [fail.dir_attributes]),
            4 => told(self.call::<ACCESS3res>(call), |fail| [fail.obj_attributes]),
            5 => told(self.call::<READLINK3res<'_>>(call), |fail| [fail.symlink_attributes]),
            6 => told(self.call::<READ3res<'_>>(call), |fail| [fail.file_attributes]),
            7 => told(self.call::<WRITE3res>(call), |fail| [fail.file_wcc.after]),
            8 => told(self.call::<CREATE3res>(call), |fail| [fail.dir_wcc.after]),
            9 => told(self.call::<MKDIR3res>(call), |fail| [fail.dir_wcc.after]),
            10 => told(self.call::<SYMLINK3res>(call), |fail| [fail.dir_wcc.after]),
            11 => told(self.call::<MKNOD3res>(call), |fail| [fail.dir_wcc.after]),
            12 => told(self.call::<REMOVE3res>(call), |fail| [fail.dir_wcc.after]),
            13 => told(self.call::<RMDIR3res>(call), |fail| [fail.dir_wcc.after]),
            14 => told(self.call::<RENAME3res>(call), |fail| [fail.fromdir_wcc.after, fail.todir_wcc.after]),
            15 => told(self.call::<LINK3res>(call), |fail| [fail.file_attributes, fail.linkdir_wcc.after]),
            16 => told(self.call::<READDIR3res<'_>>(call), |fail| [fail.dir_attributes]),
            17 => told(self.call::<READDIRPLUS3res<'_>>(call), |fail| [fail.dir_attributes]),
            18 => told(self.call::<FSSTAT3res>(call), |fail| [fail.obj_attributes]),
            19 => told(self.call::<FSINFO3res>(call), |fail| [fail.obj_attributes]),
            20 => told(self.call::<PATHCONF3res>(call), |fail| [fail.obj_attributes]),
            21 => told(self.call::<COMMIT3res>(call), |fail| [fail.file_wcc.after]),
            _ => panic!("procedure {procedure} is none that fails"),
        }
    }

    async fn call<R: Unpack>(&mut self, (procedure, args): (u32, &[u8])) -> Result<R, RpcError> {
        self.0.call(NFS_PROGRAM, 3, procedure, &Raw(args)).await
    }
}

/// Status of an MNT that fails, which both clients understand alike.
#[track_caller]
pub(crate) fn mount_failure(client: &mut Client, path: &Path) -> u32 {
    let status = client.mnt(path).expect_err("a refusal");
    let (mut other, args) = (OtherClient::beside(client), dirpath(Opaque::borrowed(path.as_os_str().as_bytes())));
    let results = now(other.0.call(MOUNT_PROGRAM, 3, 1, &args)).expect("a reply that is one");
    assert!(matches!(results, mountres3::Err(other) if other as u32 == status), "{status} and {results:?}");
    status
}

/// [`OtherClient::failure`], with `objects` in the results of its procedure.
#[track_caller]
fn told<T, E, const COUNT: usize>(
    call: impl Future<Output = Result<Nfs3Result<T, E>, RpcError>>,
    objects: impl FnOnce(E) -> [post_op_attr; COUNT],
) -> (u32, Vec<u64>) {
    let (status, fail) = failed(call);
    let fileid = |attr| if let Nfs3Option::Some(fattr3 { fileid, .. }) = attr { fileid } else { 0 };
    (status as u32, objects(fail).map(fileid).to_vec())
}

fn named<'a>(dir: &nfs_fh3, name: &'a str) -> diropargs3<'a> {
    diropargs3 { dir: dir.clone(), name: name.as_bytes().into() }
}

fn mode(mode: u32) -> sattr3 {
    sattr3 { mode: Nfs3Option::Some(mode), ..sattr3::default() }
}

#[test]
fn another_client_understands_each_result_of_each_procedure() {
    let (place, serving) = Place::served();
    let connect = || Waits(stream::connect(serving.address()));
    let auth = || opaque_auth::auth_unix(&auth_unix::default());

    let mut mount = MountClient::new_with_auth(connect(), auth(), opaque_auth::default());
    let path = place.path("");
    let path = || dirpath(Opaque::borrowed(path.as_os_str().as_encoded_bytes()));
    now(mount.null()).unwrap();
    let mountres3_ok { fhandle, .. } = now(mount.mnt(path())).unwrap();
    let refused = now(mount.mnt(dirpath(Opaque::borrowed(b"/nothing"))));
    assert!(matches!(refused, Err(MountError::Denied(mountstat3::MNT3ERR_NOENT))), "{refused:?}");
    assert_eq!(now(mount.dump()).unwrap().into_inner().len(), 1);
    assert_eq!(now(mount.export()).unwrap().into_inner().len(), 1);
    now(mount.umnt(path())).unwrap();
    now(mount.umntall()).unwrap();

    let root = nfs_fh3 { data: Opaque::owned(fhandle.0.to_vec()) };
    let mut client = Nfs3Client::new_with_auth(connect(), auth(), opaque_auth::default());
    now(client.null()).unwrap();

    // Those that make something, in a way that fails the second time.
    let create = |how| CREATE3args { where_: named(&root, "file"), how };
    let made = done(client.create(&create(createhow3::GUARDED(mode(0o640)))));
    assert_eq!(made.obj_attributes.unwrap().mode, 0o640);
    let file = made.obj.unwrap();
    let (status, fail) = failed(client.create(&create(createhow3::GUARDED(mode(0o640)))));
    assert_eq!((status, fail.dir_wcc.after.unwrap().type_), (nfsstat3::NFS3ERR_EXIST, ftype3::NF3DIR));
    done(client.create(&create(createhow3::UNCHECKED(sattr3::default()))));
    let exclusive = || CREATE3args {
        where_: named(&root, "exclusive"),
        how: createhow3::EXCLUSIVE(createverf3([0xff, 1, 2, 3, 4, 5, 6, 0xfe])),
    };
    let first = done(client.create(&exclusive())).obj.unwrap();
    assert_eq!(done(client.create(&exclusive())).obj.unwrap(), first, "a second try");
    let mkdir = MKDIR3args { where_: named(&root, "dir"), attributes: mode(0o755) };
    let dir = done(client.mkdir(&mkdir)).obj.unwrap();
    assert_eq!(failed(client.mkdir(&mkdir)).0, nfsstat3::NFS3ERR_EXIST);
    let symlink = SYMLINK3args {
        where_: named(&root, "link"),
        symlink: symlinkdata3 { symlink_attributes: sattr3::default(), symlink_data: b"to/there"[..].into() },
    };
    let link = done(client.symlink(&symlink)).obj.unwrap();
    assert_eq!(failed(client.symlink(&symlink)).0, nfsstat3::NFS3ERR_EXIST);
    let mknod = MKNOD3args { where_: named(&root, "fifo"), what: mknoddata3::NF3FIFO(mode(0o600)) };
    assert_eq!(done(client.mknod(&mknod)).obj_attributes.unwrap().type_, ftype3::NF3FIFO);
    assert_eq!(failed(client.mknod(&mknod)).0, nfsstat3::NFS3ERR_EXIST);
    let hard = LINK3args { file: file.clone(), link: named(&dir, "hard") };
    assert_eq!(done(client.link(&hard)).file_attributes.unwrap().nlink, 2);
    assert_eq!(failed(client.link(&hard)).0, nfsstat3::NFS3ERR_EXIST);

    // Data.
    let write = |file: &nfs_fh3, stable| WRITE3args {
        file: file.clone(),
        offset: 3,
        count: 5,
        stable,
        data: Opaque::borrowed(b"hello"),
    };
    let written = done(client.write(&write(&file, stable_how::UNSTABLE)));
    assert_eq!((written.count, written.file_wcc.after.unwrap().size), (5, 8));
    assert_eq!(done(client.write(&write(&file, stable_how::FILE_SYNC))).committed, stable_how::FILE_SYNC);
    assert!(failed(client.write(&write(&dir, stable_how::UNSTABLE))).1.file_wcc.after.is_some());
    let commit = |file: &nfs_fh3| COMMIT3args { file: file.clone(), offset: 0, count: 0 };
    assert_eq!(done(client.commit(&commit(&file))).verf, written.verf);
    let read = |file: &nfs_fh3| READ3args { file: file.clone(), offset: 0, count: 100 };
    let data = done(client.read(&read(&file)));
    assert_eq!((data.count, data.eof, data.data.as_ref()), (8, true, &b"\0\0\0hello"[..]));
    assert_eq!(failed(client.read(&read(&dir))).0, nfsstat3::NFS3ERR_ISDIR);
    let readlink = |symlink: &nfs_fh3| READLINK3args { symlink: symlink.clone() };
    assert_eq!(done(client.readlink(&readlink(&link))).data.as_ref(), b"to/there");
    assert!(failed(client.readlink(&readlink(&file))).1.symlink_attributes.is_some());

    // Attributes.
    let now_known = done(client.getattr(&file.clone().into())).obj_attributes;
    assert_eq!((now_known.size, now_known.nlink, now_known.type_), (8, 2, ftype3::NF3REG));
    let setattr = |guard| SETATTR3args {
        object: file.clone(),
        new_attributes: sattr3 {
            size: Nfs3Option::Some(4),
            mtime: set_mtime::SET_TO_CLIENT_TIME(nfstime3 { seconds: 7, nseconds: 9 }),
            ..mode(0o600)
        },
        guard,
    };
    let guard = Nfs3Option::Some(nfstime3 { seconds: 1, nseconds: 1 });
    assert_eq!(failed(client.setattr(&setattr(guard))).0, nfsstat3::NFS3ERR_NOT_SYNC);
    let set = done(client.setattr(&setattr(Nfs3Option::None))).obj_wcc.after.unwrap();
    assert_eq!((set.size, set.mode, set.mtime.seconds, set.mtime.nseconds), (4, 0o600, 7, 9));
    let access = |object: &nfs_fh3| ACCESS3args { object: object.clone(), access: 0x3f };
    assert_eq!(done(client.access(&access(&root))).access, 0x1f);

    // Names.
    let found = done(client.lookup(&LOOKUP3args { what: named(&dir, "hard") }));
    assert_eq!((found.object, found.dir_attributes.unwrap().type_), (file.clone(), ftype3::NF3DIR));
    let (status, fail) = failed(client.lookup(&LOOKUP3args { what: named(&dir, "nothing") }));
    assert_eq!((status, fail.dir_attributes.is_some()), (nfsstat3::NFS3ERR_NOENT, true));
    let verifier = cookieverf3::default;
    let readdir = |dir: &nfs_fh3| READDIR3args { dir: dir.clone(), cookie: 0, cookieverf: verifier(), count: 4096 };
    let listed = done(client.readdir(&readdir(&root))).reply;
    assert!(listed.eof);
    let mut names: Vec<Vec<u8>> =
        listed.entries.into_inner().iter().map(|entry| entry.name.as_ref().to_vec()).collect();
    names.sort();
    assert_eq!(names, [&b"."[..], b"..", b"dir", b"exclusive", b"fifo", b"file", b"link"]);
    assert_eq!(failed(client.readdir(&readdir(&file))).0, nfsstat3::NFS3ERR_NOTDIR);
    let readdirplus = |dir: &nfs_fh3| READDIRPLUS3args {
        dir: dir.clone(),
        cookie: 0,
        cookieverf: verifier(),
        dircount: 4096,
        maxcount: 8192,
    };
    let listed = done(client.readdirplus(&readdirplus(&root))).reply;
    let known = listed.entries.into_inner().into_iter().find(|entry| entry.name.as_ref() == b"file").unwrap();
    assert_eq!((known.name_handle.unwrap(), known.name_attributes.unwrap().size), (file.clone(), 4));
    assert_eq!(failed(client.readdirplus(&readdirplus(&file))).0, nfsstat3::NFS3ERR_NOTDIR);
    let rename = RENAME3args { from: named(&dir, "hard"), to: named(&root, "moved") };
    assert!(done(client.rename(&rename)).todir_wcc.after.is_some());
    let (status, fail) = failed(client.rename(&rename));
    assert_eq!((status, fail.fromdir_wcc.after.is_some()), (nfsstat3::NFS3ERR_NOENT, true));
    let remove = REMOVE3args { object: named(&root, "moved") };
    assert!(done(client.remove(&remove)).dir_wcc.after.is_some());
    assert_eq!(failed(client.remove(&remove)).0, nfsstat3::NFS3ERR_NOENT);
    let rmdir = RMDIR3args { object: named(&root, "dir") };
    assert!(done(client.rmdir(&rmdir)).dir_wcc.after.is_some());
    assert_eq!(failed(client.rmdir(&rmdir)).0, nfsstat3::NFS3ERR_NOENT);

    // The file system; and an object that is gone, for those that nothing else makes fail.
    assert!(done(client.fsstat(&root.clone().into())).tbytes > 0);
    assert_eq!(done(client.fsinfo(&root.clone().into())).rtmax, 1 << 20);
    assert_eq!(done(client.pathconf(&root.into())).name_max, 255);
    let stale = nfsstat3::NFS3ERR_STALE;
    assert_eq!(failed(client.getattr(&dir.clone().into())).0, stale);
    assert_eq!(failed(client.access(&access(&dir))).0, stale);
    assert_eq!(failed(client.commit(&commit(&dir))).0, stale);
    assert_eq!(failed(client.fsstat(&dir.clone().into())).0, stale);
    assert_eq!(failed(client.fsinfo(&dir.clone().into())).0, stale);
    assert_eq!(failed(client.pathconf(&dir.into())).0, stale);
    serving.stop();
}

#[test]
fn another_client_makes_each_type_of_node() {
    let Some(()) = root_or_skip("devices") else { return };
    let place = Place::new();
    let serving = place.serve();
    let root = file_handle(&serving.client().mnt(&place.path("")).unwrap());
    let mut client = Nfs3Client::new_with_auth(
        Waits(stream::connect(serving.address())),
        opaque_auth::auth_unix(&auth_unix::default()),
        opaque_auth::default(),
    );
    let device = || devicedata3 { dev_attributes: mode(0o640), spec: specdata3 { specdata1: 1, specdata2: 3 } };
    for (name, what, type_) in [
        ("char", mknoddata3::NF3CHR(device()), ftype3::NF3CHR),
        ("block", mknoddata3::NF3BLK(device()), ftype3::NF3BLK),
        ("fifo", mknoddata3::NF3FIFO(mode(0o640)), ftype3::NF3FIFO),
        ("socket", mknoddata3::NF3SOCK(mode(0o640)), ftype3::NF3SOCK),
    ] {
        let made = done(client.mknod(&MKNOD3args { where_: named(&root, name), what })).obj_attributes.unwrap();
        assert_eq!((made.type_, made.mode), (type_, 0o640), "{name}");
        let is_device = [ftype3::NF3CHR, ftype3::NF3BLK].contains(&type_);
        assert_eq!((made.rdev.specdata1, made.rdev.specdata2), if is_device { (1, 3) } else { (0, 0) }, "{name}");
    }
    serving.stop();
}
