# What people do on a file system, and what tests of file systems do: on NFS, also with a server that is killed, and on 9P a shorter list
# of the first with each of $CACHES, and the second with each of $TESTED. Two mounts change one tree, on NFS and on 9P.
# Each line that begins with "==" names the next step, and has the seconds since the machine was started.
step() {
    read -r uptime idle </proc/uptime
    echo "== $uptime $*"
}

# people SOURCES ENTRIES: here, with a source file for each word of SOURCES, and this many entries in a long folder.
people() {
    step "$PWD: a repository, its clone and a build"
    git init -q --template= source
    cd source
    for number in $1; do
        echo "int f$number(void) { return $number; }" >f$number.c
    done
    echo 'int f1(void); int main(void) { return f1() - 1; }' >main.c
    printf 'program: $(patsubst %%.c,%%.o,$(wildcard *.c))\n\tgcc -o $@ $^\n' >Makefile
    git add .
    git -c user.name=tests -c user.email=tests@example.org commit -q -m first
    cd ..
    git clone -q --template= source clone
    cd clone
    git fsck --strict --no-progress
    make -s CC=gcc
    ./program
    test -z "$(git status --porcelain --untracked-files=no)"
    cd ..

    step "$PWD: tar, find, diff and rm"
    tar cf all.tar source clone
    mkdir out
    tar xf all.tar -C out
    diff -r source out/source
    diff -r clone out/clone
    test "$(find source clone -type f | wc -l)" = "$(find out -type f | wc -l)"
    mkdir many
    cd many
    seq -f 'entry-with-a-longer-name-%g' "$2" | xargs touch
    test "$(ls | wc -l)" = "$2"
    find . -name '*7' -delete
    test "$(ls | wc -l)" = $(($2 - $2 / 10))
    cd ..
    rm -r out many
    test ! -e out
}

# tests STRESSORS: of file systems, here.
tests() {
    step "$PWD: fio"
    fio --name=cached --directory=. --size=1m --bs=4k --rw=randwrite --verify=crc32c --fallocate=none --thread --minimal >/dev/null
    fio --name=direct --directory=. --size=512k --bs=4k --rw=randwrite --direct=1 --verify=crc32c --fallocate=none --thread --minimal >/dev/null

    step "$PWD: postmark"
    printf "set location $PWD\nset number 50\nset transactions 50\nrun\nquit\n" >/tmp/postmark
    postmark /tmp/postmark | grep -A1 '^Deleting files'

    step "$PWD: dbench"
    dbench -t 2 -D . -c /load.txt 2 | grep '^Throughput'

    step "$PWD: stress-ng"
    chosen=$1
    set --
    for stressor in $chosen; do
        set -- "$@" --$stressor 1 --$stressor-ops 5
    done
    stress-ng --verify --temp-path . --timeout 5 "$@" 2>/dev/null
}
# killed: writes here while the server is killed and started, also that of the programs. Every step is one that a repeated request does
# not change: what is created is created exclusively, and the server knows the retry of that by its verifier.
killed() {
    step "$PWD: a server that is killed"
    file=0
    while [ $file -lt 24 ]; do
        seq $file $((file + 3000)) >/tmp/data
        (set -C && cat /tmp/data >"file$file")
        sync "file$file"
        cmp /tmp/data "file$file"
        echo "file $file."
        file=$((file + 1))
    done
}

# change NAME: one of two clients that change the tree at /NAME/twice at the same time. A folder is the lock, because mkdir is exclusive on
# NFS, and on 9P.
change() {
    cd "/$1/twice"
    : >"won-by-$1"
    until test -e won-by-one && test -e won-by-two; do :; done
    round=0
    while [ $round -lt "$ROUNDS" ]; do
        if mkdir lock 2>/dev/null; then
            read -r count <count
            echo $((count + 1)) >new
            mv new count
            echo "$1 $round" >>log
            rmdir lock
            round=$((round + 1))
        fi
        # Files of one folder that both make and remove, without a lock.
        if (set -C && echo "$1" >"race$round") 2>/dev/null; then
            echo "race$round" >>"won-by-$1"
        fi
    done
    tar cf "tree-$1.tar" -C /usr/include linux/if.h linux/bpf.h
    mkdir "tree-$1"
    tar xf "tree-$1.tar" -C "tree-$1"
}

# Both, and the end of their mounts.
change_both() {
    change one &
    one=$!
    change two &
    wait $one
    wait $!
    umount /one /two
}
stressors='access chmod chown copy-file dir dirdeep dirmany fstat getdent hdd iomix mknod open rename revio seek touch utime'
mapped='msync'

cd /mnt/tree
step "/mnt: a tree that was made on the server"
sha256sum --check --quiet ../sums
find . | LC_ALL=C sort | cmp - ../names
test "$(stat -c '%a %s' odd)" = '640 5'
test "$(readlink link)" = ../tree/odd
rm ../sums ../names

cd /mnt
step "/mnt: a user without rights"
user() { setpriv --reuid=1001 --regid=1002 --clear-groups "$@" 2>/tmp/said; }
refused() {
    if user "$@"; then exit 1; fi
    grep -q 'Permission denied' /tmp/said
}
echo secret >secret
chmod 600 secret
mkdir -m 711 closed
echo open >closed/open
# Both have been read here: the guest has them in memory.
cat secret closed/open
ls closed
refused cat secret
refused ls closed
refused rm secret
refused sh -c ': >>closed/open'
test "$(user cat closed/open)" = open
# The length of a file of another owner: open(2) with O_TRUNC, ftruncate(2).
echo text >shared
chmod 666 shared
user sh -c 'echo new >shared'
test "$(cat shared)" = new
user truncate -s 2 shared
test "$(stat -c %s shared)" = 2

step "/many: a cold directory"
options="vers=3,tcp,nolock,port=$PORT,mountport=$PORT,mountproto=tcp"
mkdir /many
mount.nfs "10.0.2.2:$MANY" /many -o "$options"
ls -U /many | LC_ALL=C sort | cmp - names-of-many
umount /many

people 1 1000

step /mnt: fsx
/fsx -N 1000 -S 7 -q -P /tmp /mnt/fsx

tests "$stressors $mapped"

step "/mnt/twice: two mounts on one tree"
mkdir twice /one /two
echo 0 >twice/count
for mount in /one /two; do
    mount.nfs "10.0.2.2:$EXPORT" $mount -o "$options,hard,noac,nosharecache"
done
change_both

# From here on the server may be killed at any time: only steps that a repeated request does not change.
mkdir killed
cd killed
killed
cd ..

step /mnt: sums
# This mount may still list the names of before the two mounts.
find . -path ./twice -prune -o -type f -print0 | sort -z | xargs -0 sha256sum >/tmp/sums
cp /tmp/sums /mnt/sums

printf '[weights]\nclose_open = 1\nfsync = 1\nfdatasync = 1\n' >/tmp/mapped
# Without a cache the client shares no mapping of a file that is open for writing.
(cat /tmp/mapped; printf 'mapread = 0\nmapwrite = 0\n') >/tmp/none
mkdir /9p
options="trans=tcp,port=$PORT_9P,version=9p2000.L,aname=$EXPORT_9P,msize=1048576,access=user"
for cache in none mmap loose; do
    mount -t 9p -o "$options,cache=$cache" 10.0.2.2 /9p
    mkdir /9p/$cache
    cd /9p/$cache
    case $CACHES in *$cache*) people 1 50 ;; esac
    config=/tmp/mapped more=$mapped
    test $cache != none || config=/tmp/none more=
    case $TESTED in *$cache*) tests "$stressors $more" ;; esac
    step "$PWD: fsx"
    /fsx -f $config -N 300 -S 7 -q -P /tmp fsx
    step "$PWD: sums"
    cd /9p
    find $cache -type f -print0 | sort -z | xargs -0 sha256sum >>/tmp/sums-9p
    cd /
    # With cache=loose, and of mapped files, data is written now.
    umount /9p
done
mount -t 9p -o "$options" 10.0.2.2 /9p
cp /tmp/sums-9p /9p/sums
umount /9p

step "/9p/twice: two mounts on one tree"
for mount in /one /two; do
    mount -t 9p -o "$options,cache=none" 10.0.2.2 $mount
done
mkdir /one/twice
echo 0 >/one/twice/count
change_both
step end
