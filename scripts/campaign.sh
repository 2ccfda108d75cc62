#!/usr/bin/env bash
# Runs one test program with the full number of its repetitions, and keeps what came of it with the commit in docs/results.
# Usage: scripts/campaign.sh MIRRORBALL PROGRAM
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
cd "$here"
mirrorball=$1 program=${2:-}
if [[ ! $program ]]; then
    echo "campaign: name a test program, as in: make campaign NAME=moves" >&2
    exit 2
fi
result=docs/results/campaign-${program// /-}.json
status=0
MIRRORBALL_CAMPAIGN=1 scripts/test.sh "$mirrorball" "$program" || status=$?
commit=$(git rev-parse --short HEAD)
[[ -z $(git status --porcelain --untracked-files=no) ]] || commit="$commit, changed"
mkdir -p docs/results
{
    echo "{"
    echo "  \"commit\": \"$commit\","
    echo "  \"date\": \"$(date -u +%F)\","
    echo "  \"machine\": \"$(nproc) CPUs, $(sed -n 's/^model name\t: //p' /proc/cpuinfo | head -n 1)\","
    echo "  \"status\": $status,"
    echo "  \"run\": $(cat "${CARGO_TARGET_DIR:-target}/tests.json")"
    echo "}"
} >"$result"
echo "campaign: $program ended with status $status; $result has the run"
exit $status
