#!/bin/sh
# Runs the targets of fuzz/ under libFuzzer, each for so long; ends at the first finding. Usage: scripts/fuzz.sh SECONDS [TARGET...]
set -eu

cd "$(dirname "$0")/.."
seconds=${1:?the seconds for each target}
shift
[ $# -gt 0 ] || set -- $(ls fuzz/fuzz_targets | sed 's/\.rs$//')
bins=
for target in "$@"; do
    bins="$bins --bin $target"
done
triple=$(scripts/cargo -vV | sed -n 's/^host: //p')
# The pass of LLVM that cargo-fuzz asks for, without the sanitizer of addresses, which needs a nightly toolchain. With --target, the
# flags are not for build scripts.
coverage="-Cpasses=sancov-module -Ccodegen-units=1 -Cdebug-assertions --cfg fuzzing"
for option in level=4 inline-8bit-counters pc-table trace-compares; do
    coverage="$coverage -Cllvm-args=-sanitizer-coverage-$option"
done
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/fuzz
CXX=clang++ RUSTFLAGS=$coverage scripts/cargo build --release --locked --target "$triple" --manifest-path fuzz/Cargo.toml $bins
for target in "$@"; do
    echo "fuzz: $target"
    mkdir -p "fuzz/artifacts/$target/found"
    # What is new goes to the first folder.
    "$CARGO_TARGET_DIR/$triple/release/$target" -max_total_time="$seconds" -artifact_prefix="fuzz/artifacts/$target/" \
        "fuzz/artifacts/$target/found" "fuzz/corpus/$target" >"fuzz/artifacts/$target/log" 2>&1 || {
        tail -n 30 "fuzz/artifacts/$target/log" >&2
        exit 1
    }
    grep -h 'DONE' "fuzz/artifacts/$target/log"
done
