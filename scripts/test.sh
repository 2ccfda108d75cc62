#!/usr/bin/env bash
# Tests: units, then the programs whose tests start guests (on KVM or in a lab host) or labs. Usage: scripts/test.sh MIRRORBALL [rest|long]
# Where KVM can't run guests, emulation makes these programs last an hour and more: there the programs of `rest` below are left for
# a second call with that word, and this is said. `long` runs the tests that no other call does, which are ignored.
# TEST_BEGIN_BY, in seconds since 1970: programs that have not begun by then do not run, and this is said.
set -euo pipefail
mirrorball=$(realpath "$1") part=${2:-}
here=$(cd "$(dirname "$0")/.." && pwd)
cd "$here"
log() { echo "test: $(date +%T) $*"; }

# Programs that test what others test too, at greater length or in more ways.
rest=(isolation wide deaths underway shards topology debian composition cycles hosts auto mem overlays pci pmem moves clones cluster)

# Compiles tests, named as to `cargo test`; their programs.
compiled() {
    cargo test --release --locked "$@" --no-run 2>&1 | tee /dev/stderr | sed -n 's/^ *Executable tests\/.* (\(.*\))$/\1/p'
}

if [[ -z $part ]]; then
    log "unit tests (12 minutes on 2 CPUs, half of it compiling)"
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
    log "guests over several emulated hosts (half an hour on 2 CPUs)"
    program=$(compiled -p guest-tests --test hosts)
    exec tests/runner.sh "$program" --ignored --nocapture
fi
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
emulated=
"$mirrorball" probe >/dev/null 2>&1 || emulated=yes
begin_by=${TEST_BEGIN_BY:-}
# A test program waits as much as it computes. Its output comes whole, when it has ended.
run() {
    local name status=0 start=$SECONDS
    name=$(basename "$1")
    "$here/tests/runner.sh" "$@" >"$logs/$name" 2>&1 || status=$?
    cat "$logs/$name"
    echo "test: ${name%-*} took $((SECONDS - start)) s"
    return $status
}
one() {
    local name
    name=$(basename "$1")
    if [[ $begin_by && $(date +%s) -gt $begin_by ]]; then
        echo "${name%-*}" >>"$logs/late"
    elif ! run "$1"; then
        echo "test: FAILED: ${name%-*}"
        echo "$1" >>"$logs/failed"
    fi
}
# What failed is told again at the very end, where whoever sees only that looks. Emulated hosts have a fault of their own, most of
# all where two of them share the CPUs (docs/lab.md): there it runs once or twice more before, alone, and that is told. Of a program
# that came to its end, the tests that failed.
again() {
    local name failing=()
    name=$(basename "$1")
    for try in ${emulated:+second third}; do
        if grep -q '^test result: FAILED' "$logs/$name"; then
            mapfile -t failing < <(sed -n 's/^test \(.*\) \.\.\. FAILED$/\1/p' "$logs/$name")
            [[ ${#failing[@]} == 0 ]] || failing=("${failing[@]}" --exact)
        fi
        echo "test: $try try, alone: ${name%-*} ${failing[*]}"
        if run "$1" "${failing[@]}"; then
            echo "${name%-*} (at the $try)" >>"$logs/later"
            return 0
        fi
    done
    {
        echo "test: FAILED: ${name%-*}"
        tail -n 60 "$logs/$name"
    } >>"$logs/ends"
}
export -f run one
export here logs emulated begin_by
# The lab's with all packages, as above: for one package alone others would be compiled again, with fewer features.
{ compiled -p guest-tests --test '*'; compiled --workspace --exclude guest-tests --test lab; } >"$logs/programs"
# The longest first, so that none is left alone at the end.
order=(coherent boot lab isolation span underway moves shards deaths wide network control sharing auto)
for name in "${rest[@]}" "${order[@]}"; do
    grep -q "/$name-" "$logs/programs" && continue
    echo "test: there is no test program $name: mend \`rest\` or \`order\` in scripts/test.sh"
    exit 1
done
for name in "${order[@]}"; do grep "/$name-" "$logs/programs"; done >"$logs/ordered"
grep -vxFf "$logs/ordered" "$logs/programs" >>"$logs/ordered"
# Which of them now.
printf '/%s-\n' "${rest[@]}" >"$logs/rest"
chosen=(cat) left= told="all programs"
if [[ $emulated ]]; then
    if [[ $part == rest ]]; then
        chosen=(grep -Ff "$logs/rest") told="the rest of the programs; an hour on 2 CPUs"
    else
        chosen=(grep -vFf "$logs/rest") told="most programs, emulated; 20 to 35 minutes on 2 CPUs" left="${rest[*]}"
    fi
elif [[ $part == rest ]]; then
    log "nothing: \`make test\` runs all guest tests here, as KVM runs guests"
    exit 0
fi
"${chosen[@]}" "$logs/ordered" >"$logs/chosen"
if [[ $begin_by ]]; then
    # Not always the same ones are left out: each commit has an order of its own.
    shuf --random-source=<(yes "$(git rev-parse HEAD)") -o "$logs/chosen" "$logs/chosen"
    log "programs that have not begun by $(date -d "@$begin_by" +%T) do not run"
fi
log "guest and lab tests, two programs at a time, each guest on this machine's KVM or in a lab host of its program's own ($told)"
# What needs two CPUs for its own hosts runs alone.
sed -n '/\/hosts-/p' "$logs/chosen" | xargs -I{} bash -euc 'one "$1"' one {}
sed '/\/hosts-/d' "$logs/chosen" | xargs -P 2 -I{} bash -euc 'one "$1"' one {}
if [[ -s $logs/failed ]]; then
    while read -r program; do again "$program" </dev/null; done <"$logs/failed"
    if [[ -s $logs/ends ]]; then
        cat "$logs/ends"
        exit 1
    fi
fi
log "all that ran passed"
[[ ! -s $logs/later ]] || log "NOT AT THE FIRST TRY: $(paste -sd ' ' "$logs/later"); what failed is above"
[[ ! -s $logs/late ]] || log "NOT RUN, for lack of time: $(paste -sd ' ' "$logs/late")"
if [[ -n $left ]]; then
    log "NOT RUN, since guests are emulated here and these last long: $left. \`make test-rest\` runs them"
fi
log "NOT RUN: the longer stories of Linux over two hosts, all over three. \`make test-long\` runs them"
