#!/usr/bin/env bash
# Measures stressMem in a guest of which half can be in the host's memory: paged by Mirrorball, without and with the virtual
# paging disk, and by the host's swap under QEMU: here where KVM runs guests, in a lab host elsewhere.
# Usage: scripts/bench-paging.sh MIRRORBALL [RUNS [OPTION OF BENCH-PAGING]...]
# One kind again, beside the runs of the record: scripts/bench-paging.sh MIRRORBALL 1 --kinds paging-disk --add "$PWD/bench/results/paging.json"
set -euo pipefail
mirrorball=$(realpath "$1") runs=${2:-3}
shift $(($# > 1 ? 2 : 1))
here=$(cd "$(dirname "$0")/.." && pwd)
data=${MIRRORBALL_DATA:-${XDG_DATA_HOME:-$HOME/.local/share}/mirrorball}
"$mirrorball" image build tiny --if-missing
machine="$(nproc) CPUs, $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), $(awk '/MemTotal/ {printf "%.0f GiB", $2 / 1048576}' /proc/meminfo)"
# On a disk: files in memory would compete with the guests for it.
work=$(mktemp -d "${TMPDIR:-/var/tmp}/bench-paging.XXXXXX")
trap 'rm -rf "$work"' EXIT
inside=()
if ! "$mirrorball" probe >/dev/null 2>&1; then
    machine="lab host of 1 GiB (QEMU software emulation, Debian 6.1 kernel, files by 9p) on $machine"
    printf '[[hosts]]\nname = "host"\nmemory = "1G"\n' >"$work/lab.toml"
    # Where a fault takes milliseconds, little more than the guest has room for takes long enough. Its kernel takes 62 MiB.
    # With 48, 128 and 80 MiB a run of one kind took up to nine minutes.
    set -- --resident-mib 38 --memory-mib 104 --array-mib 52 "$@"
    inside=("$mirrorball" lab run "$work/lab.toml" --limit 7200 --)
fi
# Load of the machine, as other work takes time from the guests.
machine+="; load $(cut -d ' ' -f 1 /proc/loadavg) at the start"
echo "bench: stressMem beside the host's swap; about 15 minutes for each of $runs runs of all kinds on 2 CPUs without usable KVM"
mkdir -p "$here/bench/results"
"${inside[@]}" "$(dirname "$mirrorball")/bench-paging" --mirrorball "$mirrorball" --kernel "$data/images/tiny/vmlinux" \
    --initrd "$data/images/tiny/initrd" --folder "$work" --runs "$runs" "$@" \
    --out "$here/bench/results/paging.json" --machine "$machine"
"$here/scripts/stamp.sh" "$here/bench/results/paging.json"
