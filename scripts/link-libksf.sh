#!/bin/sh
# Makes the shared library from the archive that cargo built: link-libksf.sh ARCHIVE DIRECTORY
#
# Only the symbols of libksf.map can be seen from outside, under their version. What nothing reaches is left out.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
archive=$1
directory=$2
"${CC:-cc}" -shared -o "$directory/libksf.so.0" \
    -Wl,-soname,libksf.so.0 -Wl,--version-script="$root/crates/mux/libksf/libksf.map" \
    -Wl,--whole-archive "$archive" -Wl,--no-whole-archive -Wl,--gc-sections -Wl,--no-undefined \
    -Wl,-z,relro -Wl,-z,now -lgcc_s -lpthread -lm -ldl -lc
ln -sf libksf.so.0 "$directory/libksf.so"
