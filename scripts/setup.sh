#!/bin/sh
# Gets a Debian 12 machine ready: packages of scripts/packages.txt, and the Rust toolchain of
# rust-toolchain.toml. Installs only what is missing, so a second run is quick, needs no network
# and no root. Usage: scripts/setup.sh [demo|test|bench|lab]
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
target=${1:-demo}

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "$@"; exit 1; }
is_root() { [ "$(id -u)" -eq 0 ]; }

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
}

packages_wanted() {
    for group in $groups_wanted; do
        awk -v group="$group" '$1 == group { print $2 }' "$root/scripts/packages.txt"
    done
}

packages_missing() {
    for package in $(packages_wanted); do
        status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) || status=absent
        [ "$status" = installed ] || echo "$package"
    done
}

# Some packages bring a daemon (rpcbind, nfs-ganesha). The tests start their own, in a namespace,
# so nothing may start on the machine because of an installation.
deny_daemons() {
    policy=/usr/sbin/policy-rc.d
    [ ! -e $policy ] || return 0
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod +x $policy
    remove="$remove $policy"
}

# Runs a command quietly; shows the end of its output only if it fails.
quietly() {
    "$@" >>"$log" 2>&1 && return 0
    code=$?
    tail -n 20 "$log" >&2
    fail "'$*' failed with code $code (last lines above)"
}

install_packages() {
    command -v dpkg-query >/dev/null 2>&1 || {
        say "not Debian: nothing installed. Needed, by their Debian names:" $(packages_wanted)
        return 0
    }
    missing=$(packages_missing)
    [ -n "$missing" ] || return 0
    missing=$(echo $missing)
    is_root || fail "packages are missing; as root run: apt-get install --no-install-recommends $missing"

    remove=
    log=$(mktemp)
    trap 'rm -f $log $remove' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    deny_daemons
    # A daemon's unit is enabled by its package; it must not come up at the next boot either.
    units_before=$(enabled_units)
    export DEBIAN_FRONTEND=noninteractive
    say "apt-get update"
    quietly apt-get -o DPkg::Lock::Timeout=300 update
    say "apt-get install $missing"
    quietly apt-get -o DPkg::Lock::Timeout=300 install --yes --no-install-recommends $missing
    disable_new_units
    rm -f $log $remove
    trap - EXIT INT TERM
}

enabled_units() {
    [ -d /run/systemd/system ] || return 0
    systemctl list-unit-files --state=enabled --no-legend rpcbind.\* nfs-ganesha\* 2>/dev/null |
        awk '{ print $1 }'
}

disable_new_units() {
    for unit in $(enabled_units); do
        case " $(echo $units_before) " in
            *" $unit "*) ;;
            *) say "disable $unit" && quietly systemctl disable "$unit" ;;
        esac
    done
}

# --- toolchain --------------------------------------------------------------------------------

install_toolchain() {
    "$root/scripts/cargo" --version >/dev/null 2>&1 && return 0
    channel=$(sed -n 's/^channel *= *"\(.*\)"/\1/p' "$root/rust-toolchain.toml")
    log=$(mktemp)
    trap 'rm -f $log' EXIT
    rustup=$(command -v rustup || echo "${CARGO_HOME:-$HOME/.cargo}/bin/rustup")
    if [ ! -x "$rustup" ]; then
        say "rustup (into ${CARGO_HOME:-$HOME/.cargo}, shell profiles stay as they are)"
        script=$(mktemp)
        trap 'rm -f $log $script' EXIT
        quietly curl --proto '=https' --tlsv1.2 -sSf -o "$script" https://sh.rustup.rs
        quietly sh "$script" -y --no-modify-path --default-toolchain none
    fi
    say "rustup toolchain install $channel"
    quietly "$rustup" toolchain install "$channel" --profile minimal -c rustfmt -c clippy
    "$root/scripts/cargo" --version >/dev/null ||
        fail "the toolchain was installed but does not run (message above)"
}

groups_wanted=$(groups) # aborts here on a wrong target
install_packages
install_toolchain
if ! is_root; then
    say "not root: the kernel engine is left out; for it run the same command as root"
fi
say "ready for '$target': $("$root/scripts/cargo" --version)"
