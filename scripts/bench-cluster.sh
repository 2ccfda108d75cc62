#!/usr/bin/env bash
# Measures cells that lend each other memory and CPUs: `sharing` compares two programs in one VM, in two such cells, and in two fixed
# partitions; `borrowing` a VM with its own cell's memory and one with three quarters borrowed. Here where KVM runs guests, in a lab
# host elsewhere. Usage: scripts/bench-cluster.sh MIRRORBALL sharing|borrowing [RUNS [SECONDS]]
set -euo pipefail
mirrorball=$(realpath "$1") what=$2 runs=${3:-2} seconds=${4:-15}
here=$(cd "$(dirname "$0")/.." && pwd)
case $what in
    sharing) out=cluster nodes=2 memory=2G ;;
    borrowing) out=borrowing nodes=4 memory=1G ;;
    *) echo "bench-cluster: '$what' is neither sharing nor borrowing" >&2; exit 2 ;;
esac
names="both rays rows"
. "$here/scripts/bench-set-up.sh"
if ! "$mirrorball" probe >/dev/null 2>&1; then
    { printf '[[hosts]]\nname = "host"\n'
        for ((node = 0; node < nodes; node++)); do printf '[[hosts.nodes]]\ncpus = 1\nmemory = "%s"\n' $memory; done
    } >"$work/lab.toml"
    use_lab "$nodes nodes with a CPU each (QEMU software emulation, all nodes equally far; ratios only)"
fi
# Other work takes CPUs away from the emulated ones, with the vCPUs on them.
machine="$machine, load $(cut -d' ' -f1 /proc/loadavg) before the bench"
echo "bench: cells that lend; about five minutes for each of $runs runs on 2 CPUs without usable KVM"
mkdir -p "$here/bench/results"
"${inside[@]}" "$(dirname "$mirrorball")/bench-cluster" --what "$what" --mirrorball "$mirrorball" --folder "$folder" \
    --paging-folder "$work" --runs "$runs" --seconds "$seconds" --out "$here/bench/results/$out.json" --machine "$machine"
"$here/scripts/stamp.sh" "$here/bench/results/$out.json"
