#!/usr/bin/env bash
# Measures ways to have a CPU run the vCPU that a monitor chose, with two threads that compute on the second CPU of this machine.
# Usage: scripts/bench-gates.sh FOLDER-OF-PROGRAMS
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
machine="$(nproc) CPUs, $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), Linux $(uname -r)"
grep -q '^flags.* hypervisor' /proc/cpuinfo && machine="virtual machine with $machine"
echo "bench: gates; 40 s on a quiet machine, and a busy one tells nothing"
timeout 300 "$1/bench-gates" --out "$here/bench/results/gates.json" --machine "$machine"
"$here/scripts/stamp.sh" "$here/bench/results/gates.json"
