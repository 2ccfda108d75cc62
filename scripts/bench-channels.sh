#!/usr/bin/env bash
# Measures channels beside what people use instead, between the first two CPUs of this machine. Usage: scripts/bench-channels.sh FOLDER-OF-PROGRAMS
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
machine="$(nproc) CPUs, $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)"
grep -q '^flags.* hypervisor' /proc/cpuinfo && machine="virtual machine with $machine"
echo "bench: channels; half a minute"
exec "$1/bench-channels" --out "$here/bench/results/channels.json" --machine "$machine"
