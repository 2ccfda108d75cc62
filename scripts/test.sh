#!/usr/bin/env bash
# All tests: units, then the guest tests on KVM or in a lab host. Usage: scripts/test.sh MIRRORBALL
set -euo pipefail
mirrorball=$(realpath "$1")
here=$(cd "$(dirname "$0")/.." && pwd)
cd "$here"
log() { echo "test: $(date +%T) $*"; }

log "unit tests and lab tests (a quarter of an hour on 2 CPUs, most of it compiling)"
cargo test --release --locked --no-fail-fast --workspace --exclude guest-tests
# Lock-free code, in every order that the memory model allows; compiled apart, as its atomics are others.
RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/loom" cargo test --release --locked -p urpc --lib

"$mirrorball" image build tiny --if-missing
"$mirrorball" image build tiny --kernel generic --name tiny-generic --if-missing
"$mirrorball" image build debian-12 --packages gcc,libc6-dev,make --if-missing

log "guest tests, two programs at a time, each on this machine's KVM or in a lab host of its own (three quarters of an hour on 2 CPUs without usable KVM)"
export MIRRORBALL_BIN=$mirrorball
cargo test --release --locked -p guest-tests --lib --bins
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
# A test program waits as much as it computes. Its output comes whole, when it has ended.
one() {
    local name status=0
    name=$(basename "$1")
    "$here/tests/runner.sh" "$1" >"$logs/$name" 2>&1 || status=$?
    cat "$logs/$name"
    [[ $status == 0 ]] && return
    echo "test: FAILED: ${name%-*} (status $status)" | tee -a "$logs/failed"
    # Again at the very end, where whoever sees only that looks.
    tail -n 60 "$logs/$name" >>"$logs/failed"
}
export -f one
export here logs
cargo test --release --locked -p guest-tests --test '*' --no-run 2>&1 |
    sed -n 's/^ *Executable tests\/.* (\(.*\))$/\1/p' >"$logs/programs"
[[ -s $logs/programs ]] || { echo "test: cargo names no test program"; exit 1; }
# The longest first, so that none is left alone at the end.
order=(boot isolation span moves underway shards deaths wide network control sharing auto)
for name in "${order[@]}"; do grep "/$name-" "$logs/programs"; done >"$logs/ordered"
grep -vxFf "$logs/ordered" "$logs/programs" >>"$logs/ordered"
xargs -a "$logs/ordered" -P 2 -I{} bash -euc 'one "$1"' one {}
if [[ -s $logs/failed ]]; then
    cat "$logs/failed"
    exit 1
fi
log "all passed"
