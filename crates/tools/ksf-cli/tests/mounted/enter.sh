# Makes the folder /r a machine of its own whose /usr is that of the machine that tests, mounted from the server under test. So
# programs of any size run here, and each of them is read through the server. $EXPORT is mounted at /r/mnt, with $MORE as options.
options=vers=3,tcp,nolock,port=$PORT,mountport=$PORT,mountproto=tcp
mkdir -p /r/usr /r/proc /r/sys /r/dev /r/tmp /r/run /r/root /r/mnt
mount.nfs 10.0.2.2:/usr /r/usr -o "$options,ro,nocto,actimeo=3600" # it does not change meanwhile
ln -s usr/bin usr/sbin usr/lib usr/lib64 /r/
mount -t proc proc /r/proc
mount --bind /dev /r/dev
mount.nfs "10.0.2.2:$EXPORT" /r/mnt -o "$options,$MORE"
exec chroot /r /usr/bin/env PATH=/usr/sbin:/usr/bin HOME=/root /bin/sh -eu /work "$@"
