#!/usr/bin/env bash
# Measures channels and what cells make of them beside what people use instead, between the first two CPUs of this machine.
# Usage: scripts/bench-channels.sh FOLDER-OF-PROGRAMS
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
machine="$(nproc) CPUs, $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)"
grep -q '^flags.* hypervisor' /proc/cpuinfo && machine="virtual machine with $machine"
echo "bench: channels; a minute on a quiet machine, and a busy one tells nothing"
# Its own waits have limits of ten seconds; other processes end with it.
timeout 300 "$1/bench-channels" --out "$here/bench/results/channels.json" --machine "$machine"
"$here/scripts/stamp.sh" "$here/bench/results/channels.json"
