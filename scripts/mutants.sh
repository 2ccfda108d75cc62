#!/usr/bin/env bash
# Mutation testing of one crate: changes its code in so many places, one at a time, runs its unit tests on each change, and keeps in
# docs/results which changes no test noticed. The seed chooses the places: the same seed and code give the same ones.
# Usage: scripts/mutants.sh CRATE [SEED [COUNT]]
set -euo pipefail
if [[ ! ${1:-} ]]; then
    echo "mutants: name a crate, as in: make mutants CRATE=apic" >&2
    exit 2
fi
crate=$1 seed=${2:-1} count=${3:-60}
cd "$(dirname "$0")/.."
if [[ ! -d crates/$crate ]]; then
    echo "mutants: there is no crates/$crate" >&2
    exit 2
fi
if ! cargo mutants --version >/dev/null 2>&1; then
    echo "mutants: compiling cargo-mutants, once (3 minutes)"
    cargo install --quiet --locked cargo-mutants
fi
out=${CARGO_TARGET_DIR:-target}/mutants/$crate
mkdir -p "$out"
cargo mutants --list --package "$crate" | sort >"$out/all"
shuf --random-source=<(yes "$seed") -n "$count" "$out/all" >"$out/chosen"
chosen=()
while IFS= read -r name; do
    chosen+=(--re "^$(sed 's/[][\.*^$+?(){}|/]/\\&/g' <<<"$name")\$")
done <"$out/chosen"
# It exits with 2 where a change was missed, with 3 where tests took too long: both are results.
cargo mutants --package "$crate" --output "$out" --no-shuffle --colors never "${chosen[@]}" || (($? == 2 || $? == 3))

lines() { wc -l <"$out/mutants.out/$1.txt"; }
caught=$(($(lines caught) + $(lines timeout)))
viable=$((caught + $(lines missed)))
result=docs/results/mutants-$crate.txt
{
    echo "crate: $crate"
    echo "commit: $(git rev-parse --short HEAD)"
    echo "date: $(date +%F)"
    echo "seed: $seed"
    echo "places: $(wc -l <"$out/chosen") of $(wc -l <"$out/all"), $(lines unviable) of which do not compile"
    echo "noticed: $caught of $viable, $((100 * caught / (viable > 0 ? viable : 1)))%"
    echo
    echo "not noticed:"
    sort "$out/mutants.out/missed.txt"
} >"$result"
cat "$result"
