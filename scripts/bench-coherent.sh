#!/usr/bin/env bash
# Boots a guest of two CPUs in turns as a plain VM and over two nodes, each with a copy of the memory, and takes `dsm bench` beside:
# here where KVM runs guests, in a lab host of two nodes elsewhere. Usage: scripts/bench-coherent.sh MIRRORBALL [RUNS]
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
vm=bench-coherent
fail() { echo "bench: $*" >&2; exit 1; }
since() { echo "$1 $(date +%s.%N)" | awk '{ printf "%.2f", $2 - $1 }'; }

# On the host that runs the guests: MIRRORBALL, RUNS, the file for the result, the machine.
measure() {
    mirrorball=$1
    local runs=$2 out=$3 machine=$4 run kind
    work=$(mktemp -d)
    folder=/dev/shm/bench-coherent-$$
    export MIRRORBALL_RUNTIME=$folder/run
    leave() {
        timeout 60 "$mirrorball" kill "$vm" >/dev/null 2>&1 || true
        timeout 60 "$mirrorball" cluster down >/dev/null 2>&1 || true
        rm -rf "$work" "$folder"
    }
    trap leave EXIT
    mkdir -p "$MIRRORBALL_RUNTIME"
    timeout 120 "$mirrorball" cluster up --lab never --cells 2 >/dev/null
    : >"$work/boots"
    for run in $(seq "$runs"); do
        for kind in plain coherent; do boot "$kind"; done
    done
    timeout 120 "$mirrorball" cluster down >/dev/null
    echo "bench: two processes there, a CPU each"
    timeout 600 "$mirrorball" dsm bench --rounds 3 --out "$work/faults"
    {
        printf '{"machine": "%s", "boots": [\n' "$machine"
        cat "$work/boots"
        printf '], "processes":\n'
        cat "$work/faults"
        echo '}'
    } >"$work/whole"
    mv "$work/whole" "$out"
}

# One start: seconds until the agent answers, and until both CPUs are online; for two nodes what their memory took, too.
boot() {
    local kind=$1 how=() start answers online heat=null
    [[ $kind == plain ]] || how=(--span 0,1 --span-memory coherent)
    start=$(date +%s.%N)
    timeout 120 "$mirrorball" run --lab never -d --name "$vm" --image tiny --cpus 2 --memory 256M --net none \
        ${how[@]+"${how[@]}"} >/dev/null
    until timeout 60 "$mirrorball" exec "$vm" -T -- nproc </dev/null >"$work/cpus" 2>"$work/said"; do
        (($(date +%s) - ${start%.*} < 120)) || fail "no agent answers after 120 s: $(tail -n 1 "$work/said")"
        sleep 0.1
    done
    answers=$(since "$start")
    until grep -qx 2 "$work/cpus"; do
        (($(date +%s) - ${start%.*} < 180)) || fail "one CPU is not online after 180 s"
        sleep 0.5
        timeout 60 "$mirrorball" exec "$vm" -T -- nproc </dev/null >"$work/cpus" 2>"$work/said" || true
    done
    online=$(since "$start")
    if [[ $kind == coherent ]]; then
        heat=$(timeout 60 "$mirrorball" heat "$vm" --json)
        # As each shard counts those that it sent: half of them are answers.
        echo "$heat" | awk -v start="$answers" -v online="$online" '
            /"messages":/ { sub(/,/, "", $2); messages += $2 }
            END { printf "bench: over two nodes: the agent after %s s, both CPUs after %s s, %d messages\n", start, online, messages }'
    else
        echo "bench: plain: the agent after $answers s, both CPUs after $online s"
    fi
    [[ ! -s $work/boots ]] || echo , >>"$work/boots"
    printf '{"kind": "%s", "answers_s": %s, "online_s": %s, "heat": %s}\n' "$kind" "$answers" "$online" "$heat" >>"$work/boots"
    timeout 60 "$mirrorball" kill "$vm" >/dev/null
    for _ in {1..150}; do
        timeout 60 "$mirrorball" ps --json | grep -q "\"$vm\"" || return 0
        sleep 0.2
    done
    fail "the VM is still there 30 s after it was killed"
}

if [[ $1 == --inside ]]; then
    shift
    measure "$@"
    exit
fi
mirrorball=$(realpath "$1") runs=${2:-5}
results=$here/bench/results
mkdir -p "$results"
"$mirrorball" image build tiny --if-missing
machine="$(nproc) CPUs, $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), Linux $(uname -r)"
grep -q '^flags.* hypervisor' /proc/cpuinfo && machine="virtual machine with $machine"
inside=()
if ! "$mirrorball" probe >/dev/null 2>&1; then
    lab=$(mktemp)
    trap 'rm -f "$lab"' EXIT
    { printf '[[hosts]]\nname = "host"\n' && for _ in 0 1; do printf '[[hosts.nodes]]\ncpus = 1\nmemory = "1536M"\n'; done; } >"$lab"
    machine="lab host of two nodes with a CPU each (QEMU software emulation, Debian 6.1 kernel) on $machine"
    inside=("$mirrorball" lab run "$lab" --limit 1800 --)
fi
echo "bench: a guest of two CPUs, plain and over two nodes, $runs times; five minutes without usable KVM"
${inside[@]+"${inside[@]}"} bash "$here/scripts/bench-coherent.sh" --inside "$mirrorball" "$runs" "$results/coherent.json" "$machine"
"$here/scripts/stamp.sh" "$results/coherent.json"
