# A soft mount says that its server is gone, and goes on when it is back.
cd /mnt
echo before >before
sync before
echo ready
until ! dd if=/dev/zero of=gone bs=4k count=1 conv=fsync 2>/tmp/said; do :; done
cat /tmp/said
echo refused
until test "$(cat before 2>/dev/null)" = before; do :; done
echo after >after
sync after
echo finished
