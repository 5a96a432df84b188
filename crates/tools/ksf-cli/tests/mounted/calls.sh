# Calls whose results are compared between servers: what is printed holds no time of today, no inode number, no size of a folder.
try() { "$@" 2>&1 || echo "status $? of: $*"; }
as() { # USER GROUPS COMMAND...
    user=$1 groups=$2
    shift 2
    try setpriv --reuid="$user" --regid="$user" --groups="$groups" "$@"
}
look() { for name; do try stat -c '%n %F %a %u:%g' "$name"; done; }
size() { try stat -c '%n %s %h' "$@"; }
title() { echo "== $*"; }
umask 022

title names
name=$(printf '%0255d' 7)
try touch "$name"
try touch "${name}8"
try touch 'with a space ' "$(printf 'line\nbreak')" "$(printf 'bytes\377\200')" ... ..a '*' '\'
try mkdir "$name.d" 2>&1 | cut -c1-20
ls -A | od -c | head -40
rm -- * ...

title create and exclusive create
try sh -c 'set -C; echo one >file'
try sh -c 'set -C; echo two >file'
cat file
look file
try mkdir file
try mkdir folder
try mkdir folder
try mkdir none/folder
try touch none/file file/file
look folder
try mkdir -m 1751 sticky
try mkdir -m 2770 inherits
look sticky inherits

title remove
try rmdir file
try unlink folder
touch folder/inside
try rmdir folder
try rm none
try unlink folder/inside
try rmdir folder
try rmdir folder

title rename
mkdir a b full
touch full/file
echo x >x
echo y >y
try mv -T x y
cat y
try mv -T a y
try mv -T y a
try mv -T a full
try mv -T full b
ls b
try mv -T b b/c
try mv none here
try mv y b
try mv -T b/y b/file
ls b
cat b/file
rm -r a b

title links
echo content >one
try ln one two
size one two
try mv one two
size one two
rm one
size two
mkdir folder
try ln folder other
try ln none other
try ln -s "$(printf '%0400d' 1)" long
readlink long | wc -c
try ln -s loop loop
try cat loop
try ln -s folder link
touch folder/file
ls link/
try rm link/
try rmdir link
try rm link
try ln -s two two
rm -rf folder long loop two

title times
touch file
for when in '2001-02-03 04:05:06.123456789Z' '2040-01-01 00:00:00Z' '1970-01-01 00:00:00Z'; do
    try touch -d "$when" file
    TZ=UTC stat -c '%x %y' file
done
chown 1001:1001 file
chmod 666 file
as 1002 1002 touch file
as 1002 1002 touch -d 2001-01-01 file
as 1001 1001 touch -d 2002-01-01 file
TZ=UTC stat -c %y file
chmod 600 file
as 1002 1002 touch file
rm file

title sizes
printf 0123456789 >file
try truncate -s 5 file
cat file
echo
try truncate -s 10 file
od -c file
try dd if=/dev/zero of=file bs=1 count=1 seek=5G conv=notrunc status=none
size file
try dd if=file bs=1 skip=5368709119 count=5 status=none | od -c
try truncate -s 0 file
size file
printf a >>file
printf b >>file
cat file
echo
: >file
size file
try cat /mnt/none
rm file

title permissions
echo secret >file
chown 1001:2001 file
for mode in 400 040 004 200 020 600 000 777; do
    chmod $mode file
    for who in '1001 1001' '1002 2001' '1002 1002' '0 0'; do
        # shellcheck disable=SC2086
        as $who sh -c 'for kind in r w x; do test -$kind file && printf $kind || printf -- -; done; read -r line <file; echo "$line"'
    done
    echo "mode $mode"
done
chmod 640 file
as 1002 3001,3002,3003,3004,3005,3006,3007,3008,3009,3010,3011,3012,3013,3014,3015,2001 cat file
as 1002 3001,3002,3003,3004,3005,3006,3007,3008,3009,3010,3011,3012,3013,3014,3015,3016,3017,4001 cat file
mkdir -m 700 closed
echo inside >closed/file
as 1001 1001 cat closed/file
as 1001 1001 ls closed
chmod 711 closed
as 1001 1001 cat closed/file
as 1001 1001 ls closed
chmod 744 closed
as 1001 1001 ls closed
as 1001 1001 touch closed/new
as 1001 1001 rm -f closed/file
rm -r closed file

title owners
touch file
chown 1001:1001 file
as 1002 1002 chmod 777 file
as 1002 1002 chown 1002 file
as 1001 1001 chown 1002 file
as 1001 1001,2001 chgrp 2001 file
look file
as 1001 1001 chgrp 3001 file
look file
chmod 6755 file
as 1001 1001,2001 chgrp 1001 file
look file
chmod 6777 file
as 1002 1002 sh -c 'echo x >>file'
look file
chmod 6777 file
chown 1002 file
look file
rm file

title setgid and sticky folders
mkdir -m 2777 team
chgrp 2001 team
as 1001 1001 touch team/file
as 1001 1001 mkdir team/folder
look team team/file team/folder
as 1001 1001 chmod 2644 team/file
look team/file
mkdir -m 1777 drop
as 1001 1001 touch drop/file drop/other
as 1002 1002 rm -f drop/file
as 1002 1002 mv drop/file drop/mine
as 1001 1001 rm drop/file
as 0 0 rm drop/other
ls drop
rm -r team drop

title files that are open
echo content >file
exec 3<file
rm file
cat <&3
exec 3<&-
ls -A
echo old >file
exec 3<file
echo new >other
mv other file
cat <&3
cat file
exec 3<&-
chown 1001 file
as 1001 1001 sh -c 'exec 3>>file; chmod 000 file; echo more >&3; echo "wrote $?"; chmod 600 file; cat file'
mkdir gone
(cd gone && rmdir ../gone && touch file; ls) 2>&1
rm file

title special files
try mkfifo pipe
try mknod null c 1 3
try mknod block b 7 0
as 1001 1001 mknod other c 1 3
look pipe null block
stat -c '%t %T' null block
rm pipe null block

title entries of more than one reply
mkdir many
long=$(printf '%0200d' 7)
seq -f "$long-%g" 120 | (cd many && xargs touch)
ls many | wc -l
ls -f many | sort | uniq -d
find many -name '*[1-5]' -delete
ls -U many | wc -l
find many -type f -delete
rmdir many

title the file system
stat -f -c '%T %l' .
try mkdir -p deep/1/2/3/4/5/6/7/8/9
(cd deep/1/2/3 && mv ../../../1/2 ../../../moved && pwd -P | grep -o 'deep.*' && ls ..)
rm -r deep
ls -A
echo the last line
