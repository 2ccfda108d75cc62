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
    programs=(--bin mirrorball --bin mirrorball-agent)
    # Shards have had a program of their own since 25 November 2026, and keepers came later.
    targets=$(cargo metadata --no-deps --format-version 1 --manifest-path "$tree/Cargo.toml")
    for beside in mirrorball-shard mirrorball-keeper; do
        [[ $targets != *"\"name\":\"$beside\""* ]] || programs+=(--bin "$beside")
    done
    (cd "$tree" && CARGO_TARGET_DIR=$old cargo build --quiet --release --locked --workspace "${programs[@]}")
fi
echo "$program"
