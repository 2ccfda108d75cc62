#!/usr/bin/env bash
# All tests: units, then the guest tests on KVM or in a lab host. Usage: scripts/test.sh MIRRORBALL
set -euo pipefail
mirrorball=$(realpath "$1")
here=$(cd "$(dirname "$0")/.." && pwd)
cd "$here"
log() { echo "test: $(date +%T) $*"; }

log "unit tests and lab tests (4 minutes)"
cargo test --release --locked --no-fail-fast --workspace --exclude guest-tests

"$mirrorball" image build tiny --if-missing
"$mirrorball" image build tiny --kernel generic --name tiny-generic --if-missing
"$mirrorball" image build debian-12 --packages gcc,libc6-dev,make --if-missing

log "guest tests, on this machine's KVM or in a lab host (18 minutes)"
export MIRRORBALL_BIN=$mirrorball
export CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER=$here/tests/runner.sh
cargo test --release --locked -p guest-tests --no-fail-fast
log "all passed"
