#!/usr/bin/env bash
# Mutation testing of one crate: changes its code in so many places, one at a time, runs its unit tests on each change, and keeps in
# docs/results which changes no test noticed. The seed chooses the places: the same seed and code give the same ones.
# Usage: [FILES=GLOBS] [AGAIN=1] scripts/mutants.sh CRATE [SEED [COUNT]]
# FILES restricts the places, as in FILES='crates/shard/src/virtio/** crates/shard/src/rtc.rs'. AGAIN=1 tries only what the run before did not notice.
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
top=$PWD
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")/mutants
out=$target/$crate tree=$target/tree
mkdir -p "$out"

# The changes are made to a copy. Its files are new, so that Cargo compiles them again whatever their dates were.
rm -rf "$tree"
mkdir "$tree"
git ls-files -z --cached --others --exclude-standard | tar -c --null --ignore-failed-read -T - | tar -x -m -C "$tree"
cd "$tree"
export CARGO_TARGET_DIR=$target/build
options=(--package "$crate" --colors never)
read -ra globs <<<"${FILES:-}"
for glob in "${globs[@]}"; do
    options+=(--file "$glob")
done
cargo mutants --list "${options[@]}" | sort -u >"$out/all"
shuf --random-source=<(yes "$seed") -n "$count" "$out/all" >"$out/chosen"
while IFS= read -r name; do
    options+=(--re "^$(sed 's/[][\.*^$+?(){}|/]/\\&/g' <<<"$name")\$")
done <"$out/chosen"
commit=$(git -C "$top" describe --always --dirty --exclude='*')
if [[ ${AGAIN:-} ]]; then
    options+=(--iterate)
else
    rm -rf "$out/mutants.out"
    : >"$out/unviable"
    echo "$commit" >"$out/commit"
fi
# It exits with 2 where a change was missed, with 3 where tests took too long: both are results.
# On a busy machine tests take longer than at first; a change that makes one loop is one that it noticed.
cargo mutants --in-place --profile mutants --cargo-arg=--lib --timeout 120 --output "$out" --no-shuffle "${options[@]}" || (($? == 2 || $? == 3))

# A pattern may have matched a change that was not chosen.
of_chosen() { sort -u "$@" | comm -12 - <(sort "$out/chosen"); }
of_chosen "$out/unviable" "$out/mutants.out/unviable.txt" >"$out/unviable.new"
mv "$out/unviable.new" "$out/unviable"
of_chosen "$out/mutants.out/missed.txt" >"$out/missed"
chosen=$(wc -l <"$out/chosen")
unviable=$(wc -l <"$out/unviable")
viable=$((chosen - unviable))
caught=$((viable - $(wc -l <"$out/missed")))
before=$(<"$out/commit")
result=$top/docs/results/mutants-$crate.txt
{
    echo "crate: $crate${FILES:+, $FILES}"
    echo "commit: $commit$([[ $before = "$commit" ]] || echo ", the changes noticed at $before not tried again")"
    echo "date: $(date +%F)"
    echo "seed: $seed"
    echo "places: $chosen of $(wc -l <"$out/all"), $unviable of which do not compile"
    echo "noticed: $caught of $viable, $((100 * caught / (viable > 0 ? viable : 1)))%"
    echo
    echo "not noticed:"
    cat "$out/missed"
} >"$result"
cat "$result"
