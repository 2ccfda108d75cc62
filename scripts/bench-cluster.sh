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
"$mirrorball" image build tiny --if-missing
machine="$(nproc) CPUs, $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), Linux $(uname -r)"
# The paging file lies on a disk: one in memory would compete with the guests for it.
work=$(mktemp -d "${TMPDIR:-/var/tmp}/bench-cluster.XXXXXX")
folder=/dev/shm/bench-cluster-$$
clean() {
    # Here, if it was interrupted. What is left in a lab host is gone with it.
    if [ -d "$folder" ]; then
        for words in "kill both" "kill rays" "kill rows" "cluster down"; do
            MIRRORBALL_RUNTIME=$folder/run timeout 60 "$mirrorball" $words 2>/dev/null || true
        done
    fi
    rm -rf "$work" "$folder"
}
trap clean EXIT
inside=()
if ! "$mirrorball" probe >/dev/null 2>&1; then
    { printf '[[hosts]]\nname = "host"\n'
        for ((node = 0; node < nodes; node++)); do printf '[[hosts.nodes]]\ncpus = 1\nmemory = "%s"\n' $memory; done
    } >"$work/lab.toml"
    machine="lab host of $nodes nodes with a CPU each (QEMU software emulation, all nodes equally far; ratios only) on $machine"
    inside=("$mirrorball" lab run "$work/lab.toml" --limit 7200 --)
fi
# Other work takes CPUs away from the emulated ones, with the vCPUs on them.
machine="$machine, load $(cut -d' ' -f1 /proc/loadavg) before the bench"
echo "bench: cells that lend; about five minutes for each of $runs runs on 2 CPUs without usable KVM"
mkdir -p "$here/bench/results"
"${inside[@]}" "$(dirname "$mirrorball")/bench-cluster" --what "$what" --mirrorball "$mirrorball" --folder "$folder" \
    --paging-folder "$work" --runs "$runs" --seconds "$seconds" --out "$here/bench/results/$out.json" --machine "$machine"
"$here/scripts/stamp.sh" "$here/bench/results/$out.json"
