#!/usr/bin/env bash
# Times Mirrorball against QEMU, directly where KVM runs guests and in a lab host elsewhere.
# Usage: scripts/bench.sh MIRRORBALL [RUNS [PART OUT.json]]
set -euo pipefail
mirrorball=$(realpath "$1") runs=${2:-5} part=${3:-} out=${4:-foundation.json}
here=$(cd "$(dirname "$0")/.." && pwd)
data=${MIRRORBALL_DATA:-${XDG_DATA_HOME:-$HOME/.local/share}/mirrorball}
"$mirrorball" image build tiny --if-missing
machine="$(nproc) CPUs, $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), $(awk '/MemTotal/ {printf "%.0f GiB", $2 / 1048576}' /proc/meminfo)"
inside=()
if ! "$mirrorball" probe >/dev/null 2>&1; then
    machine="lab host (QEMU software emulation, Debian 6.1 kernel) on $machine"
    inside=("$mirrorball" lab run --)
fi
only=()
[ -z "$part" ] || only=(--only "$part")
[ -n "$part" ] || echo "bench: about 8 minutes on 2 otherwise idle CPUs without usable KVM"
mkdir -p "$here/bench/results"
"${inside[@]}" "$(dirname "$mirrorball")/bench" --mirrorball "$mirrorball" --kernel "$data/images/tiny/vmlinux" \
    --initrd "$data/images/tiny/initrd" --runs "$runs" --out "$here/bench/results/$out" --machine "$machine" "${only[@]}"
"$here/scripts/stamp.sh" "$here/bench/results/$out"
