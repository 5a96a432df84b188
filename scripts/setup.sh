#!/bin/sh
# Gets a Debian 12 machine ready: packages of scripts/packages.txt, the Rust toolchain of
# rust-toolchain.toml, the crates of Cargo.lock, the runner of the tests, the clients that the store is tested with, fsx for the
# NFS server, and the kernel of the VM lab. After it nothing that the target does needs the network.
# Installs only what is missing, so a second run is quick, needs no network and no root. Usage: scripts/setup.sh [demo|test|bench|lab]
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
target=${1:-demo}
cargo_home=${CARGO_HOME:-$HOME/.cargo}
policy=/usr/sbin/policy-rc.d
fsx_version=0.3.2

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "$@"; exit 1; }
is_root() { [ "$(id -u)" -eq 0 ]; }

scratch=$(mktemp -d)
log=$scratch/log
installer_dir=
policy_added=
clean_up() {
    rm -rf "$scratch" ${installer_dir:+"$installer_dir"}
    [ -z "$policy_added" ] || rm -f "$policy"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Runs a command quietly; if it fails, shows the end of its output and says so.
quietly() {
    attempt "$@" || {
        code=$?
        tail -n 20 "$log" >&2
        fail "'$*' failed with code $code (last lines above)"
    }
}

# Runs a command; what it says is in the log, and its exit status is the answer.
attempt() { "$@" >"$log" 2>&1; }

# The last thing the command said, for a message of one line.
last_words() { grep '[^ ]' "$log" | tail -n 1; }

# --- packages ---------------------------------------------------------------------------------

groups() {
    case $target in
        demo) echo build ;;
        test | bench) echo build test ;;
        lab) echo build test lab ;;
        *) fail "unknown target '$target': demo, test, bench or lab" ;;
    esac
    # Only root can load eBPF programs and start the peers in a namespace of their own.
    is_root || return 0
    echo kernel
    [ "$target" = demo ] || echo peers
    # Without root the machines run as well, but their tests are not worth a refusal: they skip.
    [ "$target" != test ] || echo lab
}

packages_wanted() {
    for group in $groups_wanted; do
        awk -v group="$group" '$1 == group { print $2 }' "$root/scripts/packages.txt"
    done
}

packages_missing() {
    for package in $(packages_wanted); do
        # A nodejs from elsewhere brings npm and conflicts with Debian's.
        [ "$package" != npm ] || ! command -v npm >/dev/null 2>&1 || continue
        status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) || status=absent
        [ "$status" = installed ] || echo "$package"
    done
}

# Some packages bring a daemon (rpcbind, nginx, ...). The tests start their own, in a namespace,
# so nothing may start on the machine because of an installation.
deny_daemons() {
    [ ! -e "$policy" ] || return 0
    policy_added=yes
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
}

allow_daemons() {
    [ -z "$policy_added" ] || rm -f "$policy"
    policy_added=
}

apt_get() { quietly apt-get -o DPkg::Lock::Timeout=300 "$@"; }

# Lists of package names are words that are to be split.
# shellcheck disable=SC2046,SC2086
install_packages() {
    command -v dpkg-query >/dev/null 2>&1 || {
        say "not Debian: nothing installed. Needed, by their Debian names:" $(packages_wanted)
        return 0
    }
    missing=$(packages_missing | tr '\n' ' ')
    [ -n "$missing" ] || return 0
    is_root || fail "packages are missing; as root run: apt-get install --no-install-recommends $missing"

    deny_daemons
    # A daemon's unit is enabled by its package; it must not come up at the next boot either.
    units_before=$(enabled_units | tr '\n' ' ')
    export DEBIAN_FRONTEND=noninteractive
    say "apt-get update"
    apt_get update
    say "apt-get install $missing"
    apt_get install --yes --no-install-recommends $missing
    disable_new_units
    allow_daemons
}

enabled_units() {
    [ -d /run/systemd/system ] || return 0
    systemctl list-unit-files --state=enabled --no-legend rpcbind.\* nfs-ganesha\* nginx.\* \
        haproxy.\* lighttpd.\* redis\* memcached.\* nutcracker.\* nfs-\* rpc-\* 2>/dev/null |
        awk '{ print $1 }'
}

disable_new_units() {
    for unit in $(enabled_units); do
        case " $units_before" in
            *" $unit "*) ;;
            *) say "disable $unit" && quietly systemctl disable "$unit" ;;
        esac
    done
}

# --- toolchain --------------------------------------------------------------------------------

# A value of rust-toolchain.toml; of a list, its words.
pinned() { sed -n "s/^$1 *= *//p" "$root/rust-toolchain.toml" | tr -d '[]",'; }

install_toolchain() {
    "$root/scripts/cargo" --version >/dev/null 2>&1 && return 0
    channel=$(pinned channel)
    remedy="or install Rust $channel yourself (https://rustup.rs), and run this again"
    rustup=$(command -v rustup || echo "$cargo_home/bin/rustup")
    [ -x "$rustup" ] || install_rustup
    say "rustup toolchain install $channel"
    set --
    for component in $(pinned components); do set -- "$@" --component "$component"; done
    attempt "$rustup" toolchain install "$channel" --profile "$(pinned profile)" --no-self-update "$@" ||
        fail "cannot install Rust $channel by rustup ($(last_words)); connect to the network, $remedy"
    attempt "$root/scripts/cargo" --version ||
        fail "Rust $channel was installed but does not run ($(last_words)); reinstall it, $remedy"
}

# Nothing that came over the network is run before it is known to be whole and what was pinned.
install_rustup() {
    pin=$(grep "/$(uname -m)-unknown-linux-gnu/rustup-init\$" "$root/scripts/rustup.sha256") ||
        fail "no Rust here, and no rustup for $(uname -m) in scripts/rustup.sha256; add it there, $remedy"
    sum=${pin%% *}
    url=${RUSTUP_UPDATE_ROOT:-https://static.rust-lang.org/rustup}/${pin##* }
    say "rustup (into $cargo_home, shell profiles stay as they are)"
    # Not in /tmp, from where a careful administrator lets nothing be run.
    installer_dir=$({ mkdir -p "$cargo_home" && mktemp -d "$cargo_home/ksf-setup.XXXXXX"; } 2>"$log") ||
        fail "no place for Rust ($(last_words)); name a directory in CARGO_HOME, $remedy"
    installer=$installer_dir/rustup-init # it looks at its own name

    # No redirection can lead away from TLS either. The limits end a connection that hangs.
    attempt curl --proto '=https' --tlsv1.2 --fail --location --silent --show-error --retry 3 \
        --connect-timeout 30 --speed-limit 1 --speed-time 60 --output "$installer" "$url" ||
        fail "cannot download $url ($(last_words)); connect to the network, $remedy"
    echo "$sum  $installer" | sha256sum --check --status 2>/dev/null ||
        fail "$url came incomplete or changed ($(wc -c <"$installer") bytes), it was not run; run this again, $remedy"
    chmod +x "$installer"
    # An old Rust in PATH is no reason to stop: scripts/cargo knows which to take.
    attempt env RUSTUP_INIT_SKIP_PATH_CHECK=yes \
        "$installer" -y --no-modify-path --profile minimal --default-toolchain none ||
        fail "the installer of rustup failed with code $? ($(last_words)); look into $cargo_home, $remedy"
    [ -x "$rustup" ] || fail "the installer of rustup left no $rustup; look into $cargo_home, $remedy"
}

# --- what builds and tests would download -----------------------------------------------------

fetch_crates() {
    attempt "$root/scripts/cargo" fetch --locked --target "$(uname -m)-unknown-linux-gnu" \
        --manifest-path "$root/Cargo.toml" && return 0
    fail "cargo cannot fetch the crates of Cargo.lock ($(last_words)); connect to the network, and run this again"
}

# redis-py, node-redis and go-redis, and porcupine, which judges histories of the store: what the folder tests/registry of ksf-kv
# names.
fetch_clients() {
    [ "$target" = test ] || return 0
    clients=${CARGO_TARGET_DIR:-$root/target}/clients
    fetch_client python3 python requirements.txt install_redis_py
    fetch_client npm node package-lock.json install_node_redis
    fetch_client go go '*' build_go
    fetch_client go porcupine '*' build_go
    fetch_fsx
}

# PROGRAM FOLDER FILES INSTALLER: once for what the files say.
fetch_client() {
    command -v "$1" >/dev/null 2>&1 || return 0 # the tests say what they lack
    from=$root/crates/services/ksf-kv/tests/registry/$2
    into=$clients/$2
    # shellcheck disable=SC2086 # the files are a pattern
    sum=$(cd "$from" && cat $3 | sha256sum)
    [ "$(cat "$into/installed" 2>/dev/null)" != "$sum" ] || return 0
    say "$2: the client of the store's tests, into $into"
    rm -rf "$into"
    mkdir -p "$into"
    if attempt "$4"; then
        echo "$sum" >"$into/installed"
        return 0
    fi
    why="no client for the tests of the store in $2 ($(last_words))"
    rm -rf "$into"
    [ -z "${CI:-}" ] || fail "$why"
    say "$why; its test will be skipped"
}

# fsx, which writes and reads files in ways that servers get wrong, for the tests that mount an export. Not optimised: it takes
# less time to build, and waits for the server. That test needs root.
fetch_fsx() {
    is_root || return 0
    into=$clients/fsx
    [ "$(cat "$into/installed" 2>/dev/null)" != "$fsx_version" ] || return 0
    say "fsx $fsx_version: a test of mounted exports, into $into"
    if attempt timeout 600 "$root/scripts/cargo" install fsx --version "=$fsx_version" --locked --debug --force \
        --root "$into" --target-dir "$into/build"; then
        rm -rf "$into/build"
        echo "$fsx_version" >"$into/installed"
        return 0
    fi
    why="no fsx for the tests of mounted exports ($(last_words))"
    rm -rf "$into"
    [ -z "${CI:-}" ] || fail "$why"
    say "$why; their test will be skipped"
}

# The runner of the tests: the program lies in a package of Python.
fetch_runner() {
    [ "$target" = test ] || return 0
    tools=${CARGO_TARGET_DIR:-$root/target}/tools
    wanted=$(cat "$root/scripts/nextest.txt")
    [ "$(cat "$tools/installed" 2>/dev/null)" != "$wanted" ] || return 0
    say "the runner of the tests, into $tools"
    rm -rf "$tools"
    mkdir -p "$(dirname "$tools")"
    if attempt python3 -m venv "$tools" &&
        attempt timeout 300 "$tools/bin/python3" -m pip install --disable-pip-version-check \
            --only-binary :all: --require-hashes --requirement "$root/scripts/nextest.txt"; then
        echo "$wanted" >"$tools/installed"
        return 0
    fi
    say "no runner of the tests ($(last_words)); cargo test runs them, more slowly"
    rm -rf "$tools"
}

install_redis_py() {
    python3 -m venv "$into/venv" &&
        timeout 300 "$into/venv/bin/python3" -m pip install --disable-pip-version-check \
            --only-binary :all: --require-hashes --requirement "$from/requirements.txt"
}

install_node_redis() {
    cp "$from/package.json" "$from/package-lock.json" "$into"
    (cd "$into" && timeout 300 npm ci --ignore-scripts --no-audit --no-fund)
}

# With the Go that is here, of any version from 1.18.
build_go() {
    (cd "$from" && GOTOOLCHAIN=local GOFLAGS=-mod=readonly timeout 300 go build -o "$into/client" .)
}

fetch_kernel() {
    case $target in test | lab) ;; *) return 0 ;; esac
    command -v qemu-system-x86_64 >/dev/null 2>&1 || return 0 # the tests say what they lack
    attempt lab_kernel && return 0
    # The lists of apt may be older than the mirror, or not here at all, as in images of containers.
    if is_root && command -v apt-get >/dev/null 2>&1; then
        say "apt-get update"
        attempt apt-get -o DPkg::Lock::Timeout=300 update && attempt lab_kernel && return 0
    fi
    why="no kernel for the VM lab ($(last_words))"
    [ -z "${CI:-}" ] || fail "$why"
    say "$why; its tests will be skipped"
}

lab_kernel() {
    "$root/scripts/cargo" run --quiet --locked --manifest-path "$root/Cargo.toml" -p ksf-lab -- kernel
}

groups_wanted=$(groups) # aborts here on a wrong target
install_packages
install_toolchain
fetch_crates
fetch_runner
fetch_clients
fetch_kernel
if ! is_root; then
    say "not root: the kernel engine is left out; for it run the same command as root"
fi
say "ready for '$target': $("$root/scripts/cargo" --version)"
