#!/usr/bin/env bash
# Times TCP between two VMs on Mirrorball's subnet, and on a bridge under QEMU, directly where KVM runs guests and in a lab host elsewhere.
# Usage: scripts/bench-net.sh MIRRORBALL [RUNS]
set -euo pipefail
mirrorball=$(realpath "$1") runs=${2:-5}
here=$(cd "$(dirname "$0")/.." && pwd)
data=${MIRRORBALL_DATA:-${XDG_DATA_HOME:-$HOME/.local/share}/mirrorball}
"$mirrorball" image build tiny --if-missing
machine="$(nproc) CPUs, $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), $(awk '/MemTotal/ {printf "%.0f GiB", $2 / 1048576}' /proc/meminfo)"
inside=()
if ! "$mirrorball" probe >/dev/null 2>&1; then
    machine="lab host (QEMU software emulation, Debian 6.1 kernel) on $machine"
    inside=("$mirrorball" lab run --)
fi
mkdir -p "$here/bench/results"
"${inside[@]}" sh -c 'modprobe -a bridge vhost_net 2>/dev/null; exec "$@"' bench "$(dirname "$mirrorball")/bench" \
    --mirrorball "$mirrorball" --kernel "$data/images/tiny/vmlinux" --initrd "$data/images/tiny/initrd" \
    --runs "$runs" --only subnet --out "$here/bench/results/net.json" --machine "$machine"
"$here/scripts/stamp.sh" "$here/bench/results/net.json"
