#!/usr/bin/env bash
# Compiles all test programs, builds the images that guest tests boot, and runs everything: unit tests on this machine, guest
# tests on its KVM or in lab hosts. Usage: scripts/test.sh MIRRORBALL [PROGRAM...]; without a program all of them run.
# MIRRORBALL_CAMPAIGN=FOLDER repeats as often as was promised instead of as often as a landing can wait for, and records repetitions
# in that folder.
set -euo pipefail
mirrorball=$(realpath "$1")
shift
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
log() { echo "test: $(date +%T) $*"; }

log "compiling the test programs (5 minutes on 2 CPUs)"
# All packages at once: for one alone, crates would be compiled again with fewer features.
compiled() { cargo test --release --locked --workspace --no-run --message-format=json-render-diagnostics "$@"; }
# The program that starts labs is none that a plain `cargo test` runs.
{ compiled; compiled --test lab; } >"$target/test-programs.json"
runner=$target/x86_64-unknown-linux-gnu/release/test-runner
# Lock-free code, in every order that the memory model allows; compiled apart, as its atomics are others.
RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR="$target/loom" cargo test --release --locked -p urpc --lib --no-run \
    --message-format=json-render-diagnostics >>"$target/test-programs.json"
# All fuzz targets, as one program.
if [[ $# = 0 || " $* " = *" fuzz "* ]]; then
    log "compiling the fuzz targets (3 minutes on 2 CPUs)"
    scripts/fuzz.sh --build
fi

"$mirrorball" image build tiny --if-missing
"$mirrorball" image build tiny --kernel generic --name tiny-generic --if-missing
"$mirrorball" image build debian-12 --packages gcc,libc6-dev,make --if-missing

log "running the test programs"
exec "$runner" "$mirrorball" "$target/test-programs.json" . "$@"
