#!/bin/sh
# Sees to it that this machine has what `make demo` and `make test` need; installs it as root on Debian,
# otherwise says what is missing. Usage: scripts/setup.sh build|run|test|bench|mpi|fuzz|lint ...
set -eu

# package:command, or package:/file; one for each thing needed.
BUILD="gcc:gcc libc6-dev:/usr/include/stdio.h"
RUN="qemu-system-x86:qemu-system-x86_64 e2fsprogs:mke2fs mmdebstrap:mmdebstrap passt:passt cpio:cpio"
TEST="etcd-server:etcd uidmap:newuidmap iproute2:ip qemu-utils:qemu-img busybox-static:/usr/share/doc/busybox-static"
FUZZ="g++:g++"
LINT="python3-pip:pip3"
BENCH="qemu-system-x86:qemu-system-x86_64 iperf3:iperf3 iproute2:ip"
MPI="gcc:gcc libc6-dev:/usr/include/stdio.h openmpi-bin:mpirun libopenmpi-dev:mpicc"
# Kept in step with rust-version in Cargo.toml.
RUST_MINOR=95

[ -d "$HOME/.cargo/bin" ] && PATH="$PATH:$HOME/.cargo/bin"
PATH="$PATH:/usr/sbin:/sbin"

wanted=""
for part in "$@"; do
    case $part in
    build) wanted="$wanted $BUILD" ;;
    run) wanted="$wanted $RUN" ;;
    test) wanted="$wanted $TEST" ;;
    bench) wanted="$wanted $BENCH" ;;
    mpi) wanted="$wanted $MPI" ;;
    fuzz) wanted="$wanted $FUZZ" ;;
    lint) wanted="$wanted $LINT" ;;
    *) echo "setup: no part named '$part' (build, run, test, bench, mpi, fuzz, lint)" >&2; exit 2 ;;
    esac
done

missing=""
for entry in $wanted; do
    package=${entry%%:*} thing=${entry#*:}
    case $thing in
    /*) [ -e "$thing" ] && continue ;;
    *) command -v "$thing" >/dev/null 2>&1 && continue ;;
    esac
    case " $missing " in *" $package "*) ;; *) missing="$missing $package" ;; esac
done

rust_is_new_enough() {
    command -v cargo >/dev/null 2>&1 && command -v rustc >/dev/null 2>&1 || return 1
    minor=$(rustc --version | sed -n 's/^rustc 1\.\([0-9]*\)\..*/\1/p')
    [ -n "$minor" ] && [ "$minor" -ge "$RUST_MINOR" ]
}
case " $* " in
*" build "*) rust_is_new_enough || missing="$missing rustc-web cargo-web" ;;
esac

[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "setup: installing$missing (Debian packages; a minute or two)"
    export DEBIAN_FRONTEND=noninteractive
    log=$(mktemp)
    # shellcheck disable=SC2086 # a list of package names
    if ! { apt-get update && apt-get install -y --no-install-recommends $missing; } >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        rm -f "$log"
        echo "setup: apt-get could not install:$missing" >&2
        exit 1
    fi
    rm -f "$log"
else
    echo "setup: missing:$missing" >&2
    echo "setup: install them, on Debian with: sudo apt-get install --no-install-recommends$missing" >&2
    case $missing in *rustc-web*) echo "setup: or Rust 1.$RUST_MINOR or newer by rustup" >&2 ;; esac
    exit 1
fi
