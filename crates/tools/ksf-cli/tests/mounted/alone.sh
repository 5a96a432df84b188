# $EXPORT is mounted at /mnt, with $MORE as options.
mkdir -p /mnt
mount.nfs "10.0.2.2:$EXPORT" /mnt -o "vers=3,tcp,nolock,port=$PORT,mountport=$PORT,mountproto=tcp,$MORE"
