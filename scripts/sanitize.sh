#!/usr/bin/env bash
# Runs the unit tests of crates under the address sanitizer: a read or write outside its memory, or after its end, fails the test.
# Usage: scripts/sanitize.sh [CRATE...]; without a crate, those with unsafe code. Needs a Rust toolchain that has the sanitizer
# (rustup's has, Debian's has not).
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- agent cell diskstore dsm dsm_bench hostinfo lab registry shard shard_api urpc
host=$(rustc -vV | sed -n 's/^host: //p')
if ! compgen -G "$(rustc --print sysroot)/lib/rustlib/$host/lib/librustc-*_rt.asan.a" >/dev/null; then
    echo "sanitize: this Rust has no address sanitizer; help: use a toolchain of rustup" >&2
    exit 2
fi
packages=()
for crate in "$@"; do
    [ -d "crates/$crate" ] || { echo "sanitize: there is no crates/$crate" >&2; exit 2; }
    packages+=(-p "$crate")
done
# The flag is an unstable one of a stable compiler. These flags replace the configured ones: the sanitizer's runtime needs a
# program that is linked dynamically.
export RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=address -Cdebug-assertions"
# Tests end processes that still hold memory, so leaks are not counted.
export ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0:quarantine_size_mb=64
exec cargo test --release --locked --target "$host" --target-dir "${CARGO_TARGET_DIR:-target}/sanitize" \
    "${packages[@]}" --lib --no-fail-fast -- --test-threads=2
