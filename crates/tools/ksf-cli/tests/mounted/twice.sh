# One of two machines that change one tree at the same time. A folder is the lock, because mkdir is exclusive on NFS.
cd /mnt
: >"won-by-$NAME"
echo here
until test -e begin; do :; done
round=0
while [ $round -lt "$ROUNDS" ]; do
    if mkdir lock 2>/dev/null; then
        read -r count <count
        echo $((count + 1)) >new
        mv new count
        echo "$NAME $round" >>log
        rmdir lock
        round=$((round + 1))
    fi
    # Files of one folder that both make and remove, without a lock.
    if (set -C && echo "$NAME" >"race$round") 2>/dev/null; then
        echo "race$round" >>"won-by-$NAME"
    fi
done
tar cf "tree-$NAME.tar" -C /usr/include linux/if.h linux/bpf.h
mkdir "tree-$NAME"
tar xf "tree-$NAME.tar" -C "tree-$NAME"
echo "$NAME is done"
