#!/usr/bin/env bash
# Runs each test of one program with the full number of its repetitions, and keeps what came of it with the commit in
# docs/results. Started again at the same commit, it goes on with the tests that have not passed, and within a test that records
# its repetitions with those that have not run. MIRRORBALL_CAMPAIGN_MINUTES=N begins no further repetition of a test after N minutes.
# Usage: scripts/campaign.sh MIRRORBALL PROGRAM
set -euo pipefail
if [[ ! ${2:-} ]]; then
    echo "campaign: name a test program, as in: make campaign NAME=moves" >&2
    exit 2
fi
mirrorball=$(realpath "$1")
cd "$(dirname "$0")/.."
# Upgrades go back to the release before and forth again; `scripts/former-release` names its commit.
if [[ $2 = restarts ]]; then
    former=$(scripts/build-before.sh "$(<scripts/former-release)")
    ln -sfn "$(dirname "$former")" "${CARGO_TARGET_DIR:-target}/former"
fi
MIRRORBALL_CAMPAIGN=$(realpath -m "${CARGO_TARGET_DIR:-target}/campaign/${2// /-}") exec scripts/test.sh "$mirrorball" "$2"
