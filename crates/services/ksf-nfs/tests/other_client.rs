//! The crate `nfs3_client` understands each result of each procedure, whether it went well or not: it encodes the calls, and it refuses
//! replies that it has not read to their end. (Debian's fio is built without its engine `nfs`.)

use std::fs;
use std::future::Future;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use nfs3_client::io::{AsyncRead, AsyncWrite};
use nfs3_client::nfs3_types::mount::{dirpath, mountres3_ok};
use nfs3_client::nfs3_types::nfs3::*;
use nfs3_client::nfs3_types::rpc::{auth_unix, opaque_auth};
use nfs3_client::nfs3_types::xdr_codec::{Opaque, Pack};
use nfs3_client::rpc::RpcClient;
use nfs3_client::{MountClient, Nfs3Client, RpcError};

use crate::common::Place;
use ksf::engine::EngineKind;
use ksf_fs::{ExportOptions, Squash};
use ksf_nfs::ExportSettings;
use ksf_proto::oncrpc::NFS_PROGRAM;
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

/// A client of this user.
fn client(address: SocketAddr, uid: u32, gid: u32) -> Nfs3Client<Waits> {
    Nfs3Client::new_with_auth(Waits(stream::connect(address)), credential(uid, gid), opaque_auth::default())
}

fn credential(uid: u32, gid: u32) -> opaque_auth<'static> {
    opaque_auth::auth_unix(&auth_unix { uid, gid, ..auth_unix::default() })
}

fn file_handle(bytes: &[u8]) -> nfs_fh3 {
    nfs_fh3 { data: Opaque::owned(bytes.to_vec()) }
}

/// Status of an MKDIR that fails, as this client reads it.
#[track_caller]
pub(crate) fn failed_mkdir(address: SocketAddr, dir: &[u8], name: &str) -> u32 {
    let mkdir = MKDIR3args { where_: named(&file_handle(dir), name), attributes: mode(0o755) };
    let (status, fail) = failed(client(address, 0, 0).mkdir(&mkdir));
    assert!(fail.dir_wcc.after.is_some());
    status as u32
}

/// Status of a LINK that fails.
#[track_caller]
pub(crate) fn failed_link(address: SocketAddr, file: &[u8], dir: &[u8], name: &str) -> u32 {
    let link = LINK3args { file: file_handle(file), link: named(&file_handle(dir), name) };
    let (status, fail) = failed(client(address, 0, 0).link(&link));
    assert!(fail.file_attributes.is_some() && fail.linkdir_wcc.after.is_some());
    status as u32
}

/// Status of a READ that fails.
#[track_caller]
pub(crate) fn failed_read(address: SocketAddr, file: &[u8], offset: u64) -> u32 {
    let (status, fail) = failed(client(address, 0, 0).read(&READ3args { file: file_handle(file), offset, count: 100 }));
    assert!(fail.file_attributes.is_some());
    status as u32
}

/// Arguments of MKNOD with a type that the crate does not encode.
struct NodeOf<'a>(diropargs3<'a>, ftype3);

impl Pack for NodeOf<'_> {
    fn packed_size(&self) -> usize {
        self.0.packed_size() + self.1.packed_size()
    }

    fn pack(&self, out: &mut impl Write) -> nfs3_client::nfs3_types::xdr_codec::Result<usize> {
        Ok(self.0.pack(out)? + self.1.pack(out)?)
    }
}

fn named<'a>(dir: &nfs_fh3, name: &'a str) -> diropargs3<'a> {
    diropargs3 { dir: dir.clone(), name: name.as_bytes().into() }
}

fn mode(mode: u32) -> sattr3 {
    sattr3 { mode: Nfs3Option::Some(mode), ..sattr3::default() }
}

#[test]
fn another_client_understands_each_result_of_each_procedure() {
    let place = Place::new();
    let serving = place.serve();
    let connect = || Waits(stream::connect(serving.address()));
    let auth = || opaque_auth::auth_unix(&auth_unix::default());

    let mut mount = MountClient::new_with_auth(connect(), auth(), opaque_auth::default());
    let path = place.path("");
    let path = || dirpath(Opaque::borrowed(path.as_os_str().as_encoded_bytes()));
    now(mount.null()).unwrap();
    let mountres3_ok { fhandle, .. } = now(mount.mnt(path())).unwrap();
    assert!(now(mount.mnt(dirpath(Opaque::borrowed(b"/nothing")))).is_err());
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
fn another_client_understands_errors_of_limits() {
    let place = Place::new();
    let other = place.beside("other");
    let exports = vec![place.export(), ExportSettings { path: other.clone(), ..place.export() }];
    let serving = place.serve_all(EngineKind::Epoll, exports);
    let connect = || Waits(stream::connect(serving.address()));
    let auth = || opaque_auth::auth_unix(&auth_unix::default());
    let mut mount = MountClient::new_with_auth(connect(), auth(), opaque_auth::default());
    let [root, other] = [place.path(""), other].map(|path| {
        let mounted = now(mount.mnt(dirpath(Opaque::borrowed(path.as_os_str().as_encoded_bytes())))).unwrap();
        nfs_fh3 { data: Opaque::owned(mounted.fhandle.0.to_vec()) }
    });
    let mut client = Nfs3Client::new_with_auth(connect(), auth(), opaque_auth::default());
    let how = createhow3::GUARDED(mode(0o640));
    let file = done(client.create(&CREATE3args { where_: named(&root, "file"), how })).obj.unwrap();

    let rename = RENAME3args { from: named(&root, "file"), to: named(&other, "file") };
    let (status, fail) = failed(client.rename(&rename));
    let told = (fail.fromdir_wcc.after.is_some(), fail.todir_wcc.after.is_some());
    assert_eq!((status, told), (nfsstat3::NFS3ERR_XDEV, (true, false)));
    let link = LINK3args { file: file.clone(), link: named(&other, "file") };
    let (status, fail) = failed(client.link(&link));
    let told = (fail.file_attributes.is_some(), fail.linkdir_wcc.after.is_some());
    assert_eq!((status, told), (nfsstat3::NFS3ERR_XDEV, (true, false)));

    let offset = done(client.fsinfo(&root.clone().into())).maxfilesize;
    let (stable, data) = (stable_how::UNSTABLE, Opaque::borrowed(b"x"));
    let write = WRITE3args { file: file.clone(), offset, count: 1, stable, data };
    let (status, fail) = failed(client.write(&write));
    assert_eq!((status, fail.file_wcc.after.unwrap().size), (nfsstat3::NFS3ERR_FBIG, 0));

    let (cookieverf, dircount) = (cookieverf3([0xff; 8]), 4096);
    let readdir = |cookie, count| READDIR3args { dir: root.clone(), cookie, cookieverf, count };
    let (status, fail) = failed(client.readdir(&readdir(1 << 40, 4096)));
    assert_eq!((status, fail.dir_attributes.is_some()), (nfsstat3::NFS3ERR_BAD_COOKIE, true));
    assert_eq!(failed(client.readdir(&readdir(0, 8))).0, nfsstat3::NFS3ERR_TOOSMALL);
    let listing = |cookie, maxcount| READDIRPLUS3args { dir: root.clone(), cookie, cookieverf, dircount, maxcount };
    assert_eq!(failed(client.readdirplus(&listing(1 << 40, 8192))).0, nfsstat3::NFS3ERR_BAD_COOKIE);
    assert_eq!(failed(client.readdirplus(&listing(0, 8))).0, nfsstat3::NFS3ERR_TOOSMALL);

    let long = "n".repeat(256);
    let (status, fail) = failed(client.lookup(&LOOKUP3args { what: named(&root, &long) }));
    assert_eq!((status, fail.dir_attributes.is_some()), (nfsstat3::NFS3ERR_NAMETOOLONG, true));
    let mkdir = MKDIR3args { where_: named(&root, &long), attributes: mode(0o755) };
    assert_eq!(failed(client.mkdir(&mkdir)).0, nfsstat3::NFS3ERR_NAMETOOLONG);
    serving.stop();
}

#[test]
fn another_client_understands_errors_of_rights_and_types() {
    let Some(()) = root_or_skip("files of several users") else { return };
    const USER: u32 = 61_234;
    let place = Place::new();
    let other = place.beside("other");
    let read_only = ExportOptions { read_only: true, squash: Squash::None, ..ExportOptions::default() };
    let exports = vec![place.export(), ExportSettings { path: other.clone(), options: read_only, ..place.export() }];
    fs::write(other.join("file"), "").unwrap();
    let serving = place.serve_all(EngineKind::Epoll, exports);
    let mut mounting = serving.client();
    let [root, other] = [place.path(""), other].map(|path| file_handle(&mounting.mnt(&path).unwrap()));
    let (mut client, mut user) = (client(serving.address(), 0, 0), client(serving.address(), USER, USER));
    let how = createhow3::GUARDED(mode(0o600));
    let file = done(client.create(&CREATE3args { where_: named(&root, "file"), how })).obj.unwrap();
    let mkdir = MKDIR3args { where_: named(&root, "dir"), attributes: mode(0o755) };
    let dir = done(client.mkdir(&mkdir)).obj.unwrap();

    // Devices of root, and of nobody else.
    let device = || devicedata3 { dev_attributes: mode(0o640), spec: specdata3 { specdata1: 1, specdata2: 3 } };
    let mknod = |dir: &nfs_fh3, name, what| MKNOD3args { where_: named(dir, name), what };
    for (name, what, type_) in [
        ("char", mknoddata3::NF3CHR(device()), ftype3::NF3CHR),
        ("block", mknoddata3::NF3BLK(device()), ftype3::NF3BLK),
        ("fifo", mknoddata3::NF3FIFO(mode(0o640)), ftype3::NF3FIFO),
        ("socket", mknoddata3::NF3SOCK(mode(0o640)), ftype3::NF3SOCK),
    ] {
        let made = done(client.mknod(&mknod(&dir, name, what))).obj_attributes.unwrap();
        assert_eq!((made.type_, made.mode), (type_, 0o640), "{name}");
        let is_device = [ftype3::NF3CHR, ftype3::NF3BLK].contains(&type_);
        assert_eq!((made.rdev.specdata1, made.rdev.specdata2), if is_device { (1, 3) } else { (0, 0) }, "{name}");
    }
    fs::set_permissions(place.path(""), fs::Permissions::from_mode(0o777)).unwrap();
    let (status, fail) = failed(user.mknod(&mknod(&root, "char", mknoddata3::NF3CHR(device()))));
    assert_eq!((status, fail.dir_wcc.after.is_some()), (nfsstat3::NFS3ERR_PERM, true));
    let mut rpc =
        RpcClient::new_with_auth(Waits(stream::connect(serving.address())), credential(0, 0), opaque_auth::default());
    for type_ in [ftype3::NF3REG, ftype3::NF3DIR, ftype3::NF3LNK] {
        let args = NodeOf(named(&root, "none"), type_);
        let call = rpc.call::<_, MKNOD3res>(NFS_PROGRAM, 3, 11, &args);
        assert_eq!(failed(call).0, nfsstat3::NFS3ERR_BADTYPE);
    }

    // Rights.
    let read = READ3args { file: file.clone(), offset: 0, count: 1 };
    let (status, fail) = failed(user.read(&read));
    assert_eq!((status, fail.file_attributes.is_some()), (nfsstat3::NFS3ERR_ACCES, true));
    let (status, fail) = failed(user.remove(&REMOVE3args { object: named(&dir, "fifo") }));
    assert_eq!((status, fail.dir_wcc.after.is_some()), (nfsstat3::NFS3ERR_ACCES, true));
    let setattr = SETATTR3args { object: file.clone(), new_attributes: mode(0o666), guard: Nfs3Option::None };
    let (status, fail) = failed(user.setattr(&setattr));
    assert_eq!((status, fail.obj_wcc.after.unwrap().mode), (nfsstat3::NFS3ERR_PERM, 0o600));
    let (status, fail) = failed(client.mkdir(&MKDIR3args { where_: named(&other, "dir"), attributes: mode(0o755) }));
    assert_eq!((status, fail.dir_wcc.after.is_some()), (nfsstat3::NFS3ERR_ROFS, true));

    // Types and names.
    let (status, fail) = failed(client.rmdir(&RMDIR3args { object: named(&root, "dir") }));
    assert_eq!((status, fail.dir_wcc.after.is_some()), (nfsstat3::NFS3ERR_NOTEMPTY, true));
    let symlink = SYMLINK3args {
        where_: named(&root, "link"),
        symlink: symlinkdata3 { symlink_attributes: sattr3::default(), symlink_data: b"to"[..].into() },
    };
    let object = done(client.symlink(&symlink)).obj.unwrap();
    let (status, fail) =
        failed(client.setattr(&SETATTR3args { object, new_attributes: mode(0o600), guard: Nfs3Option::None }));
    assert_eq!((status, fail.obj_wcc.after.unwrap().type_), (nfsstat3::NFS3ERR_NOTSUPP, ftype3::NF3LNK));
    let (status, _) = failed(client.remove(&REMOVE3args { object: named(&root, "dir") }));
    assert_eq!(status, nfsstat3::NFS3ERR_ISDIR);

    // Handles that the server has not made.
    let mut forged = file.data.as_ref().to_vec();
    *forged.last_mut().unwrap() ^= 1;
    for bytes in [&forged[..], &forged[..forged.len() - 1], &[7; 64], &[]] {
        let status = failed(client.getattr(&file_handle(bytes).into())).0;
        assert_eq!(status, nfsstat3::NFS3ERR_BADHANDLE, "{} bytes", bytes.len());
    }
    serving.stop();
}
