#!/usr/bin/env bash
# Tests: units, then the guest tests on KVM or in a lab host. Usage: scripts/test.sh MIRRORBALL [rest|long]
# Where KVM can't run guests, emulation makes the guest tests last three quarters of an hour: there the programs of `rest` below are
# left for a second call with that word, and this is said. `long` runs the tests that no other call does, which are ignored.
set -euo pipefail
mirrorball=$(realpath "$1") part=${2:-}
here=$(cd "$(dirname "$0")/.." && pwd)
cd "$here"
log() { echo "test: $(date +%T) $*"; }

# Programs that test what others test too, at greater length or in more ways.
rest=(isolation wide deaths underway shards topology debian composition cycles hosts auto mem overlays pci pmem)

if [[ -z $part ]]; then
    log "unit tests and lab tests (12 minutes on 2 CPUs, half of it compiling)"
    cargo test --release --locked --no-fail-fast --workspace --exclude guest-tests
    # Lock-free code, in every order that the memory model allows; compiled apart, as its atomics are others.
    RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/loom" cargo test --release --locked -p urpc --lib
fi

"$mirrorball" image build tiny --if-missing
"$mirrorball" image build tiny --kernel generic --name tiny-generic --if-missing
"$mirrorball" image build debian-12 --packages gcc,libc6-dev,make --if-missing

export MIRRORBALL_BIN=$mirrorball
cargo test --release --locked -p guest-tests --lib --bins
if [[ $part == long ]]; then
    log "guests over several emulated hosts (a quarter of an hour on 2 CPUs)"
    program=$(cargo test --release --locked -p guest-tests --test hosts --no-run 2>&1 |
        sed -n 's/^ *Executable tests\/.* (\(.*\))$/\1/p')
    exec tests/runner.sh "$program" --ignored --nocapture
fi
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
emulated=
"$mirrorball" probe >/dev/null 2>&1 || emulated=yes
# A test program waits as much as it computes. Its output comes whole, when it has ended. Emulated hosts have a fault of their own
# (docs/lab.md): there a program that fails runs a second time, and that is told, with its first output, and at the end.
one() {
    local name status start
    name=$(basename "$1")
    for try in first second; do
        status=0 start=$SECONDS
        "$here/tests/runner.sh" "$1" >"$logs/$name" 2>&1 || status=$?
        cat "$logs/$name"
        echo "test: ${name%-*} took $((SECONDS - start)) s"
        if [[ $status == 0 ]]; then
            [[ $try == first ]] || echo "${name%-*}" >>"$logs/again"
            return
        fi
        [[ $emulated && $try == first ]] || break
        echo "test: FAILED AT THE FIRST TRY: ${name%-*} (status $status); once more"
    done
    echo "test: FAILED: ${name%-*} (status $status)" | tee -a "$logs/failed"
    # Again at the very end, where whoever sees only that looks.
    tail -n 60 "$logs/$name" >>"$logs/failed"
}
export -f one
export here logs emulated
cargo test --release --locked -p guest-tests --test '*' --no-run 2>&1 |
    sed -n 's/^ *Executable tests\/.* (\(.*\))$/\1/p' >"$logs/programs"
[[ -s $logs/programs ]] || { echo "test: cargo names no test program"; exit 1; }
# The longest first, so that none is left alone at the end.
order=(hosts boot isolation span moves underway shards deaths wide network control sharing auto)
for name in "${rest[@]}" "${order[@]}"; do
    grep -q "/$name-" "$logs/programs" && continue
    echo "test: there is no program $name in tests/tests: mend \`rest\` or \`order\` in scripts/test.sh"
    exit 1
done
for name in "${order[@]}"; do grep "/$name-" "$logs/programs"; done >"$logs/ordered"
grep -vxFf "$logs/ordered" "$logs/programs" >>"$logs/ordered"
# Which of them now.
printf '/%s-\n' "${rest[@]}" >"$logs/rest"
chosen=(cat) left= told="all programs"
if [[ $emulated ]]; then
    if [[ $part == rest ]]; then
        chosen=(grep -Ff "$logs/rest") told="the rest of the programs; three quarters of an hour on 2 CPUs"
    else
        chosen=(grep -vFf "$logs/rest") told="most programs, emulated; a quarter of an hour on 2 CPUs" left="${rest[*]}"
    fi
elif [[ $part == rest ]]; then
    log "nothing: \`make test\` runs all guest tests here, as KVM runs guests"
    exit 0
fi
"${chosen[@]}" "$logs/ordered" >"$logs/chosen"
log "guest tests, two programs at a time, each on this machine's KVM or in a lab host of its own ($told)"
xargs -a "$logs/chosen" -P 2 -I{} bash -euc 'one "$1"' one {}
if [[ -s $logs/failed ]]; then
    cat "$logs/failed"
    exit 1
fi
log "all passed"
[[ ! -s $logs/again ]] || log "ONLY AT THE SECOND TRY: $(paste -sd ' ' "$logs/again"); what failed first is above"
if [[ -n $left ]]; then
    log "NOT RUN, since guests are emulated here and these last long: $left. \`make test-rest\` runs them"
fi
log "NOT RUN: Debian over two hosts, Linux over three. \`make test-long\` runs them"
