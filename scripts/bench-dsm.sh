#!/usr/bin/env bash
# Measures one memory for processes on several hosts, here two processes with a CPU each: faults beside what they are made of, in the
# same run, and programs on one node and on two. Usage: scripts/bench-dsm.sh MIRRORBALL [RUNS]
set -euo pipefail
mirrorball=$(realpath "$1") runs=${2:-3}
here=$(cd "$(dirname "$0")/.." && pwd)
machine="$(nproc) CPUs, $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), Linux $(uname -r)"
grep -q '^flags.* hypervisor' /proc/cpuinfo && machine="virtual machine with $machine"
# What else ran: processes that wanted a CPU in the minute before, as the kernel counts them.
before=$(cut -d' ' -f1 /proc/loadavg)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "bench: one memory for two processes, $runs runs of 7 rounds; two minutes on a quiet machine, and a busy one tells less"
for run in $(seq "$runs"); do
    echo
    echo "run $run of $runs"
    timeout 300 "$mirrorball" dsm bench --rounds 7 --out "$work/faults-$run"
done
echo
timeout 300 "$mirrorball" dsm bench --kernels --out "$work/programs"
{
    printf '{\n"machine": "%s",\n"load_before": %s,\n"runs": [\n' "$machine" "$before"
    for run in $(seq "$runs"); do
        [[ $run == 1 ]] || echo ,
        cat "$work/faults-$run"
    done
    printf '],\n"programs":\n'
    cat "$work/programs"
    echo '}'
} >"$work/dsm.json"
mkdir -p "$here/bench/results"
mv "$work/dsm.json" "$here/bench/results/dsm.json"
