#!/usr/bin/env bash
# Runs each test of one program with the full number of its repetitions, and keeps what came of it with the commit in
# docs/results. Started again at the same commit, it goes on with the tests that have not passed.
# Usage: scripts/campaign.sh MIRRORBALL PROGRAM
set -euo pipefail
if [[ ! ${2:-} ]]; then
    echo "campaign: name a test program, as in: make campaign NAME=moves" >&2
    exit 2
fi
MIRRORBALL_CAMPAIGN=1 exec "$(dirname "$0")/test.sh" "$1" "$2"
