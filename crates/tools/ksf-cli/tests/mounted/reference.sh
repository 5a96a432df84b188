# The same calls on an export of ksf, at /mnt, and on one of the kernel's own server, which serves a tmpfs of this machine.
mkdir -p /var/lib/nfs /reference /srv/reference
mount -t tmpfs tmpfs /srv/reference
chmod 755 /srv/reference
mount -t nfsd nfsd /proc/fs/nfsd
echo '/srv/reference *(rw,no_root_squash,insecure,no_subtree_check,fsid=7)' >/etc/exports
touch /var/lib/nfs/etab /var/lib/nfs/rmtab
rpcbind
rpc.mountd --no-nfs-version 4
exportfs -ra
rpc.nfsd --no-nfs-version 4 --nfs-version 3 2
mount.nfs 127.0.0.1:/srv/reference /reference -o vers=3,tcp,nolock,noac
for place in /reference /mnt; do
    (cd $place && sh -u /calls) >/tmp/calls"${place#/}" 2>&1 </dev/null
done
echo "lines: $(wc -l </tmp/callsmnt)"
grep -q '^the last line$' /tmp/callsmnt
diff /tmp/callsreference /tmp/callsmnt
echo "no difference"
