#!/bin/sh
# Proves that scripts/packages.txt is complete: in a fresh Debian tree (debootstrap, nothing but the
# minimal system) the committed state of this checkout is set up and built, or a make target is run;
# or, after the set-up for that target, another command.
# Usage, as root: scripts/prove-packages.sh [build|demo|test|bench [COMMAND]]
#
# Everything is mounted in a mount namespace of its own, which the kernel takes down with its last
# process, so no mount can stay behind however this script ends.
# The toolchain and the crates of this machine are lent to the tree, writes to them are thrown away;
# with PROVE_FRESH_RUST=1 the tree fetches its own.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
target=${1:-build}
command=${2:-make $target}
cargo_home=${CARGO_HOME:-$HOME/.cargo}
rustup_home=${RUSTUP_HOME:-$HOME/.rustup}

say() { printf 'prove: %s\n' "$*" >&2; }
fail() { say "$@"; exit 1; }

# The source that this machine's apt uses for Debian itself: "URI CODENAME COMPONENT", one a line.
debian_sources() {
    apt-get indextargets --format '$(REPO_URI) $(CODENAME) $(COMPONENT) $(ORIGIN)' \
        'Identifier: Packages' | awk '$4 == "Debian" { print $1, $2, $3 }' | sort -u
}

# Outer half: makes and removes the directory; sees none of the mounts.
outer() {
    case $target in
        build | demo | test | bench) ;;
        *) fail "unknown target '$target': build, demo, test or bench" ;;
    esac
    [ "$(id -u)" -eq 0 ] || fail "needs root (debootstrap, chroot); run: sudo $0 $target"
    command -v debootstrap >/dev/null || fail "needs debootstrap; run: apt-get install debootstrap"
    . /etc/os-release
    mirror=$(debian_sources | awk -v suite="$VERSION_CODENAME" '$2 == suite { print $1; exit }')
    [ -n "$mirror" ] || fail "apt knows no source of Debian $VERSION_CODENAME; run: apt-get update"

    # /var/tmp, not /tmp: 3 GiB are too much for a tmpfs, and overlayfs needs a real one.
    work=$(mktemp -d /var/tmp/ksf-prove.XXXXXX)
    trap 'rm -rf --one-file-system "$work"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    say "fresh $VERSION_CODENAME in $work"
    debootstrap --variant=minbase "$VERSION_CODENAME" "$work/tree" "$mirror" >"$work/log" 2>&1 ||
        { tail -n 20 "$work/log" >&2; fail "debootstrap failed (last lines above)"; }
    git clone --quiet --no-hardlinks "$root" "$work/tree/ksf"
    unshare --mount --propagation private --pid --fork --kill-child \
        "$0" --inner "$target" "$command" "$work"
    say "passed: '$target' ($command) in a fresh $VERSION_CODENAME with nothing but scripts/packages.txt"
}

# Inner half: in the namespaces; mounts, then runs the target in the tree.
inner() {
    work=$3
    tree=$work/tree
    mount --bind "$tree" "$tree" # makes the tree's / a mount point, as on a machine
    mount -t proc proc "$tree/proc"
    mount --rbind /sys "$tree/sys"
    mount --rbind /dev "$tree/dev"
    mount -t tmpfs tmpfs "$tree/tmp"
    cp -L /etc/resolv.conf /etc/hosts "$tree/etc/"
    # Certificate authorities that an administrator has added count for the tree, too.
    mkdir -p "$tree/usr/local/share/ca-certificates"
    cp -a /usr/local/share/ca-certificates/. "$tree/usr/local/share/ca-certificates/" || true
    debian_sources | sed 's/^/deb /' >"$tree/etc/apt/sources.list"
    apt-config dump | grep '^Acquire::' >"$tree/etc/apt/apt.conf.d/90host" || true
    if [ "${PROVE_FRESH_RUST:-}" != 1 ]; then
        lend "$cargo_home" cargo
        lend "$rustup_home" rustup
    fi
    case $1 in
        build) script='scripts/setup.sh demo && scripts/cargo build --release --locked &&
            target/release/ksf --version' ;;
        # With what the set-up has brought the target needs no network, and gets none: a loopback of
        # its own, which nothing else on this machine uses or disturbs.
        *) script="scripts/setup.sh $1 && unshare --net sh -ec 'ip link set lo up; eval \"\$COMMAND\"'" ;;
    esac
    # A clean environment: what the calling shell has set is not there on a fresh machine.
    env -i COMMAND="$2" HOME="$HOME" TERM="${TERM:-dumb}" CI="${CI:-}" RUSTUP_HOME="$rustup_home" \
        CARGO_HOME="$cargo_home" PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        chroot "$tree" /bin/sh -ec "cd /ksf && $script"
}

# Shows a directory of this machine in the tree, at the same path; writes go to a throw-away layer.
lend() {
    [ -d "$1" ] || return 0
    mkdir -p "$work/layers/$2/upper" "$work/layers/$2/work" "$tree$1"
    mount -t overlay overlay "$tree$1" \
        -o "lowerdir=$1,upperdir=$work/layers/$2/upper,workdir=$work/layers/$2/work"
}

if [ "${1:-}" = --inner ]; then
    shift
    inner "$@"
else
    outer
fi
