#!/usr/bin/env bash
# Shows that the tests of a security review's findings fail on the code that was reviewed. Compiles `mirrorball` of that commit
# beside today's, and runs the tests of tests/findings.txt with it: each of them must fail there. `make test` runs them on
# today's code, where they must pass. Usage: scripts/findings.sh MIRRORBALL [COMMIT]
set -euo pipefail
mirrorball=$(realpath "$1")
commit=${2:-88dc2d3}
cd "$(dirname "$0")/.."
target=$(realpath "${CARGO_TARGET_DIR:-target}")
old=$target/reviewed/$commit
if [[ ! -x $old/program ]]; then
    echo "findings: compiling mirrorball of $commit (5 minutes on 2 CPUs)"
    mkdir -p "$old/tree"
    git archive "$commit" | tar -x -C "$old/tree"
    (cd "$old/tree" && CARGO_TARGET_DIR=$old/target cargo build --release --locked --workspace --bin mirrorball --bin mirrorball-agent)
    cp "$old/target/x86_64-unknown-linux-gnu/release/mirrorball" "$old/program"
fi
programs=$target/test-programs.json
[[ -s $programs ]] || { echo "findings: run make test once, which compiles the tests" >&2; exit 2; }

# The executable of a guest test program, by cargo's messages.
executable() {
    sed -nE 's/.*"name":"'"$1"'".*"executable":"([^"]+)".*/\1/p' "$programs" | grep "/deps/$1-" | tail -1
}
# Where this machine's KVM runs no guests, tests run in a lab host.
inside=(env)
"$mirrorball" probe >/dev/null 2>&1 || inside=("$mirrorball" lab run -- env TMPDIR=/run XDG_RUNTIME_DIR=/run)
missed=0 failed=0
for program in $(sed -nE 's/^[0-9]+ ([a-z]+)::.*/\1/p' tests/findings.txt | sort -u); do
    mapfile -t names < <(sed -nE "s/^[0-9]+ $program:://p" tests/findings.txt)
    echo "findings: ${#names[@]} tests of $program"
    output=$("${inside[@]}" MIRRORBALL_BIN="$old/program" "$(executable "$program")" --test-threads=1 --exact "${names[@]}" 2>&1 || true)
    for name in "${names[@]}"; do
        if grep -q "^test $name \.\.\. FAILED" <<<"$output"; then
            failed=$((failed + 1))
        else
            echo "findings: $program::$name does not fail at $commit"
            missed=$((missed + 1))
        fi
    done
done
echo "findings: $failed tests fail at $commit as they must, $missed do not"
((missed == 0))
