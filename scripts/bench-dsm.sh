#!/usr/bin/env bash
# Measures one memory for processes on several hosts, here processes of one. Parts, all of them if none is named:
#   faults    two processes with a CPU each: faults beside what they are made of, in the same run
#   programs  on one node and on two, beside the same programs with MPI
#   stalls    what programs on 2, 4 and 8 nodes wait for, and from that a model of what they would gain by other links
# Usage: scripts/bench-dsm.sh FOLDER [PART ...], with what cargo built in FOLDER; RUNS and ROUNDS in the environment: how often.
set -euo pipefail
built=$(realpath "$1")
shift
parts=${*:-faults programs stalls}
mirrorball=$built/mirrorball
here=$(cd "$(dirname "$0")/.." && pwd)
results=$here/bench/results
machine="$(nproc) CPUs, $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), Linux $(uname -r)"
grep -q '^flags.* hypervisor' /proc/cpuinfo && machine="virtual machine with $machine"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$results"

# Where it ran, and what else did: processes that wanted a CPU in the minute before, as the kernel counts them.
where() {
    printf '"machine": "%s", "load_before": %s, "nice": %s' "$machine" "$(cut -d' ' -f1 /proc/loadavg)" "$(nice)"
}

faults() {
    local runs=${RUNS:-3} run
    echo "bench: one memory for two processes, $runs runs of 7 rounds; two minutes on a quiet machine, and a busy one tells less"
    where >"$work/where"
    for run in $(seq "$runs"); do
        echo
        echo "run $run of $runs"
        timeout 300 "$mirrorball" dsm bench --rounds 7 --out "$work/faults-$run"
    done
    {
        printf '{%s, "runs": [\n' "$(cat "$work/where")"
        for run in $(seq "$runs"); do
            [[ $run == 1 ]] || echo ,
            cat "$work/faults-$run"
        done
        echo ']}'
    } >"$work/dsm.json"
    "$here/scripts/stamp.sh" "$work/dsm.json"
    mv "$work/dsm.json" "$results/dsm.json"
}

programs() {
    local program
    echo "bench: programs beside MPI, ${ROUNDS:-7} rounds; three minutes on a quiet machine"
    where >"$work/where"
    for program in sor sort matrix tsp; do
        mpicc -O3 -Wall -Wextra -o "$work/$program" "$here/bench/mpi/$program.c"
    done
    timeout 1800 "$built/bench-mpi" --mirrorball "$mirrorball" --programs "$work" --rounds "${ROUNDS:-7}" --out "$work/programs"
    {
        printf '{%s, "mpi": "%s", "programs":\n' "$(cat "$work/where")" "$(mpirun --version | head -n 1)"
        cat "$work/programs"
        echo '}'
    } >"$work/dsm-mpi.json"
    "$here/scripts/stamp.sh" "$work/dsm-mpi.json"
    mv "$work/dsm-mpi.json" "$results/dsm-mpi.json"
}

stalls() {
    local nodes record
    echo "bench: what programs on 2, 4 and 8 nodes wait for; two minutes on a quiet machine"
    where >"$work/where"
    : >"$work/records"
    for nodes in 2 4 8; do
        record=$work/stalls-$nodes
        # More nodes than CPUs may take very long: then there is no record of them, and the model says nothing of so many.
        if ! timeout 300 "$mirrorball" dsm bench --kernels --large --phases --rounds "${RUNS:-3}" --nodes "$nodes" --out "$record"; then
            echo "bench: $nodes nodes did not end within 5 minutes, or failed; they are left out" >&2
            continue
        fi
        [[ ! -s $work/records ]] || echo , >>"$work/records"
        cat "$record" >>"$work/records"
    done
    {
        printf '{%s, "records": [\n' "$(cat "$work/where")"
        cat "$work/records"
        echo ']}'
    } >"$work/dsm-stalls.json"
    "$here/scripts/stamp.sh" "$work/dsm-stalls.json"
    mv "$work/dsm-stalls.json" "$results/dsm-stalls.json"
    "$built/bench-model" --faults "$results/dsm.json" --stalls "$results/dsm-stalls.json" \
        --builds "$results/dsm-compile.json" --out "$results/dsm-model.json"
    "$here/scripts/stamp.sh" "$results/dsm-model.json"
}

for part in $parts; do
    case $part in
    faults | programs | stalls) "$part" ;;
    *)
        echo "bench-dsm.sh: no part named '$part' (faults, programs, stalls)" >&2
        exit 2
        ;;
    esac
    echo
done
