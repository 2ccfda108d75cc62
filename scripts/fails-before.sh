#!/usr/bin/env bash
# Shows that tests see the faults that they are there for: runs them with the `mirrorball` of an older commit, where each must fail.
# Usage: scripts/fails-before.sh [COMMIT [LIST]]; by default 88dc2d3 and tests/fails-before.txt, which has PROGRAM::TEST lines.
# The tests of this commit drive the older command, natively. Needs root, for the users that tests make up.
set -euo pipefail
cd "$(dirname "$0")/.."
commit=${1:-88dc2d3} list=${2:-tests/fails-before.txt}
[ "$(id -u)" = 0 ] || { echo "fails-before: the tests need root" >&2; exit 2; }
[ -r "$list" ] || { echo "fails-before: there is no list $list" >&2; exit 2; }
program=$(scripts/build-before.sh "$commit")
blind=0 count=0
while IFS= read -r test; do
    case $test in ''|'#'*) continue ;; esac
    count=$((count + 1))
    log=$(mktemp)
    if MIRRORBALL_BIN=$program timeout 300 cargo test --quiet --release --locked --workspace --test "${test%%::*}" -- \
        --exact "${test#*::}" >"$log" 2>&1; then
        echo "passes at $commit, so it shows nothing: $test"
        blind=$((blind + 1))
    elif ! grep -q '1 failed' "$log"; then
        echo "did not run: $test"
        tail -n 5 "$log"
        blind=$((blind + 1))
    else
        echo "fails at $commit: $test"
        grep -m 1 -A 3 'panicked at' "$log" | sed 's/^/    /' | cut -c -160
    fi
    rm -f "$log"
done <"$list"
echo "fails-before: $((count - blind)) of $count tests fail at $commit"
[ "$blind" = 0 ]
