#!/usr/bin/env bash
# Measures one memory for processes on several hosts, here two processes with a CPU each: faults beside what they are made of, in the
# same run; programs on one node and on two, beside the same programs with MPI; and what programs on 2, 4 and 8 nodes wait for, from
# which a model tells what they would gain by other links. Usage: scripts/bench-dsm.sh FOLDER [RUNS], with what cargo built in FOLDER.
set -euo pipefail
built=$(realpath "$1") runs=${2:-3}
mirrorball=$built/mirrorball
here=$(cd "$(dirname "$0")/.." && pwd)
machine="$(nproc) CPUs, $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), Linux $(uname -r)"
grep -q '^flags.* hypervisor' /proc/cpuinfo && machine="virtual machine with $machine"
# What else ran: processes that wanted a CPU in the minute before, as the kernel counts them.
load() { cut -d' ' -f1 /proc/loadavg; }
before=$(load) priority=$(nice)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "bench: one memory for two processes, $runs runs of 7 rounds, then programs; five minutes on a quiet machine, and a busy one tells less"
for run in $(seq "$runs"); do
    echo
    echo "run $run of $runs"
    timeout 300 "$mirrorball" dsm bench --rounds 7 --out "$work/faults-$run"
done
echo
for program in sor sort matrix tsp; do
    mpicc -O3 -Wall -Wextra -o "$work/$program" "$here/bench/mpi/$program.c"
done
timeout 900 "$built/bench-mpi" --mirrorball "$mirrorball" --programs "$work" --rounds 7 --out "$work/programs"
{
    printf '{\n"machine": "%s",\n"load_before": %s,\n"nice": %s,\n"runs": [\n' "$machine" "$before" "$priority"
    for run in $(seq "$runs"); do
        [[ $run == 1 ]] || echo ,
        cat "$work/faults-$run"
    done
    printf '],\n"mpi": "%s",\n"programs":\n' "$(mpirun --version | head -n 1)"
    cat "$work/programs"
    echo '}'
} >"$work/dsm.json"
echo
{
    printf '{"machine": "%s", "load_before": %s, "nice": %s, "records": [\n' "$machine" "$(load)" "$priority"
    for nodes in 2 4 8; do
        [[ $nodes == 2 ]] || echo ,
        echo "what programs on $nodes nodes wait for" >&2
        timeout 300 "$mirrorball" dsm bench --kernels --large --phases --rounds 3 --nodes "$nodes" --json
    done
    echo ']}'
} >"$work/stalls.json"
echo
"$built/bench-model" --faults "$work/dsm.json" --stalls "$work/stalls.json" --out "$work/model.json"
mkdir -p "$here/bench/results"
mv "$work/dsm.json" "$here/bench/results/dsm.json"
mv "$work/stalls.json" "$here/bench/results/dsm-stalls.json"
mv "$work/model.json" "$here/bench/results/dsm-model.json"
