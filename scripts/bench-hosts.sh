#!/usr/bin/env bash
# Measures how soon all agree that a host is dead whose processes were killed or stopped, and what a VM waits for its place by each way between cells. Hosts are
# processes on the loopback; no VM runs. Usage: scripts/bench-hosts.sh MIRRORBALL
set -euo pipefail
mirrorball=$(realpath "$1")
here=$(cd "$(dirname "$0")/.." && pwd)
machine="$(nproc) CPUs, $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)"
grep -q '^flags.* hypervisor' /proc/cpuinfo && machine="virtual machine with $machine"
echo "bench: hosts of a cluster; about a minute"
# The cells' records lie in memory, as those in /run do.
export TMPDIR=/dev/shm
"$(dirname "$mirrorball")/bench-hosts" --mirrorball "$mirrorball" --out "$here/bench/results/hosts.json" --machine "$machine"
"$here/scripts/stamp.sh" "$here/bench/results/hosts.json"
