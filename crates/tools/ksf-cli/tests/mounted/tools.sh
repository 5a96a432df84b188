# What people do on a file system, and what tests of file systems do. Each line that begins with "==" names the next one.
step() { echo "== $*"; }

cd /mnt
step a repository, its clone and a build
git init -q source
cd source
for number in 1 2 3; do
    echo "int f$number(int x) { return x + $number; }" >f$number.c
done
echo 'int f1(int), f2(int), f3(int); int main(void) { return f1(f2(f3(36))) - 42; }' >main.c
printf 'program: f1.o f2.o f3.o main.o\n\tgcc -o $@ $^\n' >Makefile
git add .
git -c user.name=tests -c user.email=tests@example.org commit -q -m first
cd ..
git clone -q source clone
cd clone
git fsck --strict --no-progress
make -s CC=gcc
./program
test -z "$(git status --porcelain --untracked-files=no)"
cd ..

step tar, find, diff and rm
tar cf all.tar source clone
mkdir out
tar xf all.tar -C out
diff -r source out/source
diff -r clone out/clone
test "$(find source clone -type f | wc -l)" = "$(find out -type f | wc -l)"
mkdir many
cd many
seq -f 'entry-with-a-longer-name-%g' 1000 | xargs touch
test "$(ls | wc -l)" = 1000
find . -name '*7' -delete
test "$(ls | wc -l)" = 900
cd ..
rm -r out many
test ! -e out

step fsx
/fsx -N 1000 -S 7 -q -P /tmp /mnt/fsx

step fio
fio --name=cached --directory=/mnt --size=1m --bs=4k --rw=randwrite --verify=crc32c --fallocate=none --thread --minimal >/dev/null
fio --name=direct --directory=/mnt --size=512k --bs=4k --rw=randwrite --direct=1 --verify=crc32c --fallocate=none --thread --minimal >/dev/null

step postmark
printf 'set location /mnt\nset number 50\nset transactions 50\nrun\nquit\n' >/tmp/postmark
postmark /tmp/postmark | grep -A1 '^Deleting files'

step dbench
dbench -t 2 -D /mnt -c /load.txt 2 | grep '^Throughput'

step stress-ng
set --
for stressor in access chmod chown copy-file dir dirdeep dirmany fstat getdent hdd iomix mknod msync open rename revio seek touch utime; do
    set -- "$@" --$stressor 1 --$stressor-ops 5
done
stress-ng --verify --temp-path /mnt --timeout 5 "$@" 2>/dev/null

step sums
find . -type f -print0 | sort -z | xargs -0 sha256sum >/tmp/sums
cp /tmp/sums /mnt/sums
step end
