#!/bin/sh
# What `make check`, `make test` and `make soak` run. Prints how long each part took. Usage: scripts/test.sh check|test|soak [FILTER...]
# FILTER goes to the runner: `-E 'package(ksf)'`, or a part of the name of a test.
set -eu

cd "$(dirname "$0")/.."
kind=$1
shift
target=${CARGO_TARGET_DIR:-target}
cargo=scripts/cargo
times=$(mktemp)
# A test that does not run on this machine writes its reason here: the runner hides the output of a test that passes.
KSF_TEST_SKIPPED=$(mktemp)
export KSF_TEST_SKIPPED
trap 'rm -f "$times" "$KSF_TEST_SKIPPED"' EXIT

part() {
    name=$1
    shift
    begun=$(date +%s)
    result=0
    "$@" || result=$?
    printf '%6d s  %s\n' $(($(date +%s) - begun)) "$name" >>"$times"
    [ "$result" -eq 0 ] || failed=${failed:+$failed, }$name
    return "$result"
}

finish() {
    if [ -s "$KSF_TEST_SKIPPED" ]; then
        echo "Not run on this machine:"
        sort "$KSF_TEST_SKIPPED" | uniq -c
    fi
    echo "Time:"
    cat "$times"
    [ -z "$failed" ] || echo "FAILED: $failed"
    [ -z "$failed" ]
    exit
}

runner=$target/tools/bin/cargo-nextest

# One process for each test, twice as many at a time as there are CPUs: a test waits for sockets, disks and emulated machines more than it
# computes. .config/nextest.toml selects the tests of `make check`.
run_tests() {
    if [ -x "$runner" ]; then
        PATH=$target/tools/bin:$PATH $cargo nextest run --workspace --locked --cargo-quiet --profile "$kind" \
            --test-threads $((2 * $(nproc))) "$@"
    else
        run_tests_of_cargo "$@"
    fi
}

# Where the runner could not be installed, the tests of an executable share one process, and a filter is a part of a name.
run_tests_of_cargo() {
    ignored=
    if [ "${1:-}" = --run-ignored ]; then
        ignored=--include-ignored
        shift 2
    fi
    for word in "$@"; do
        case $word in -*)
            echo "scripts/test.sh: $word needs cargo-nextest, which scripts/setup.sh installs; without it FILTER is a part of the name of a test" >&2
            return 2
            ;;
        esac
    done
    [ "$kind" != check ] || selected="--lib --bins"
    $cargo test --workspace --locked --no-fail-fast ${selected:-} -- $ignored "$@"
}

# Clippy compiles as rustc does: one compilation has the lints and the programs.
export RUSTC_WORKSPACE_WRAPPER=clippy-driver CLIPPY_ARGS=-D__CLIPPY_HACKERY__warnings
# What is built once is not built again in part.
[ -z "${CI:-}" ] || export CARGO_INCREMENTAL=0

failed=
part format $cargo fmt --all --check || finish
if [ "$kind" = check ]; then
    part "lints, build of tests" $cargo test --workspace --no-run --locked --quiet || finish
    part tests run_tests "$@" || true
    finish
fi
# Of the whole workspace each time: of a part, cargo would build the dependencies again, with the features that this part asks for.
# The end-to-end tests and the bench start these programs and libraries.
part "lints, build of what tests start" $cargo build --workspace --lib --bin ksf --bench '*' --locked --quiet || finish
part "lints, build of tests" $cargo test --workspace --no-run --locked --quiet || finish
if [ "$kind" = soak ]; then
    export KSF_SOAK=1
    # The tests that are ignored are long, or parts of others and then without effect.
    part tests run_tests --run-ignored all "$@" || true
    unset KSF_SOAK
    kind=test
    # A test that fails by chance is a defect.
    if [ -x "$runner" ]; then
        part "tests, ten times" run_tests --stress-count 10 "$@" || true
    else
        echo "The tests are not repeated: that needs cargo-nextest, which scripts/setup.sh installs."
    fi
    finish
fi
part tests run_tests "$@" || true
part "tests of documents" $cargo test --workspace --doc --locked --quiet || true
part "bench, every row for a moment" "$target/debug/xtask" bench --smoke || true
finish
