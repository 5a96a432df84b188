# Writes while its server is killed and started. Every step is one that a repeated request does not change: what is created is
# created exclusively, and the server knows the retry of that by its verifier.
cd /mnt
file=0
while [ $file -lt 24 ]; do
    seq $file $((file + 3000)) >/tmp/data
    (set -C && cat /tmp/data >"file$file")
    sync "file$file"
    cmp /tmp/data "file$file"
    echo "file $file."
    file=$((file + 1))
done
sha256sum file* >/tmp/sums
cp /tmp/sums sums
echo finished
