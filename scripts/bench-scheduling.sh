#!/usr/bin/env bash
# Simulates gangs of vCPUs beside other schedulers, and times the code that balances CPUs.
# Usage: scripts/bench-scheduling.sh MIRRORBALL_SIM
set -euo pipefail
out=bench/results/scheduling.json
"$1" --gangs --balancing --json "$out"
scripts/stamp.sh "$out"
