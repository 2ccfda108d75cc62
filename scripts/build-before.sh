#!/usr/bin/env bash
# Compiles `mirrorball` of an older commit, once, and prints where it is. Usage: scripts/build-before.sh COMMIT
set -euo pipefail
cd "$(dirname "$0")/.."
commit=$1
old=$(realpath "${CARGO_TARGET_DIR:-target}")/before-$commit
program=$old/x86_64-unknown-linux-gnu/release/mirrorball
if [ ! -x "$program" ]; then
    echo "build-before: compiling $commit (5 minutes on 2 CPUs)" >&2
    tree=$(mktemp -d)
    trap 'git worktree remove --force "$tree"' EXIT
    git worktree add --quiet --detach "$tree" "$commit"
    (cd "$tree" && CARGO_TARGET_DIR=$old cargo build --quiet --release --locked --workspace --bin mirrorball --bin mirrorball-agent)
fi
echo "$program"
