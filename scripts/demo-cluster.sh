#!/usr/bin/env bash
# Two cells of this host lend memory and CPUs to each other, in the view of `mirrorball top`: a VM borrows the memory that its cell
# lacks, a vCPU of a VM over both cells moves to the other cell's CPU and back by command, and a vCPU of a loaded cell moves to the
# other cell's idle CPU by decision, until that cell recalls its CPU. On a terminal the view is live.
# Usage: scripts/demo-cluster.sh MIRRORBALL
set -euo pipefail
mirrorball=$1
store=demo-store worker=demo-worker loaded=demo-loaded rival=demo-rival

# A step: LIMIT in seconds, then arguments of `mirrorball`.
step() { timeout --foreground -k 5 "$1" "$mirrorball" "${@:2}" </dev/null; }
in_guest() { step "$1" exec "$2" -T -- /bin/sh -c "$3"; }
# Without KVM the lab will do: all that runs there is of this demo. `auto` refuses it to root.
"$mirrorball" probe >/dev/null && lab=auto || lab=always
fail() { echo "demo: $*" >&2; exit 1; }

work=$(mktemp -d) cluster=''
clean() {
    if [[ $cluster ]]; then
        # Gone already if the lab died.
        for vm in $store $worker $loaded $rival; do step 30 kill "$vm" >/dev/null 2>&1; done
        step 60 cluster down >/dev/null 2>&1
    fi
    rm -rf "$work"
}
trap 'status=$?; set +e; clean; exit $status' EXIT

echo "demo: the image tiny, a kernel and a shell of Debian (built once, in some seconds)"
step 300 image build tiny --if-missing
step 60 cluster status >/dev/null 2>&1 && fail "a cluster is up; end it with \`mirrorball cluster down\`"

# Two CPUs that this program may use. A lab host keeps CPU 0 for itself.
if [[ $lab = always ]]; then
    cpus=(1 2)
else
    # shellcheck disable=SC2207 # a list of numbers
    cpus=($(sed -n 's/^Cpus_allowed_list:\t//p' /proc/self/status | tr ',' '\n' |
        while IFS=- read -r first last; do seq "$first" "${last:-$first}"; done | head -n 2))
    [[ ${#cpus[@]} = 2 ]] || fail "two cells need two CPUs, and this program may use CPUs ${cpus[*]} only"
fi
for cpu in "${cpus[@]}"; do printf '[[cells]]\ncpus = "%s"\nmemory = "384M"\n' "$cpu"; done >"$work/cluster.toml"
printf '[scheduling]\nlend_cpus = true\n' >>"$work/cluster.toml"
echo "demo: two cells of one CPU and 384 MiB each, which lend CPUs by themselves"
cluster=up
step 120 cluster up "$work/cluster.toml" --lab $lab

# Prints what `top` shows, with a title.
look() {
    echo "demo: $*"
    # The live view shows the same.
    [[ ! -e $work/live ]] || { sleep 6; return; }
    step 60 top --batch --count 2 --interval 1 | awk '/^mirrorball top/ { sample++ } sample == 2 { print "  | " $0 }'
}
starts() { # NAME ARGUMENTS...
    step 120 run --lab $lab -d --name "$1" --image tiny --net none "${@:2}" >/dev/null
    local begun=$SECONDS
    until in_guest 60 "$1" true 2>"$work/error"; do
        ((SECONDS - begun < 180)) || fail "no agent of $1 answers after 180 s: $(tail -n 1 "$work/error")"
        sleep 1
    done
}
# A program of the guest that computes forever, on one of its CPUs.
computes() { # NAME CPU
    in_guest 60 "$1" "(taskset $((1 << $2)) sh -c 'while :; do :; done') </dev/null >/dev/null 2>&1 &"
}
# Waits until `top` shows a vCPU on another cell's CPU by decision ("away"), or none ("home").
awaits() { # away|home NAME REASON
    local begun=$SECONDS shown
    while :; do
        shown=$(step 60 top --batch --count 1 --interval 0.5)
        if grep -q "^$2 .* by decision" <<<"$shown"; then [[ $1 = home ]] || return 0; else [[ $1 = away ]] || return 0; fi
        ((SECONDS - begun < 30)) || fail "$3 after 30 s: $shown"
    done
}
lends() { [[ $(step 30 cluster status) == *"has lent"* ]]; }

steps() {
    echo "demo: $worker has a vCPU in each cell, and both compute"
    starts $worker --cpus 2 --memory 128M --span 0,1
    for cpu in 0 1; do computes $worker $cpu; done
    look "a vCPU of $worker runs on the CPU of each cell"
    step 60 move $worker --vcpu 1 --cell 0
    look "vCPU 1 has moved: cell 0 lends its CPU to both (RUN% and WAIT% of each are about a half)"
    step 60 move $worker --vcpu 1 --cell 1
    look "and back: each has a CPU again"

    echo "demo: $store has 480 MiB, more than a cell: one cell borrows from the other by itself"
    starts $store --cpus 1 --memory 480M
    lends || fail "no cell has lent memory: $(step 30 cluster status)"
    in_guest 120 $store 'mkdir -p /m && mount -t tmpfs -o size=400M none /m && dd if=/dev/zero of=/m/data bs=1M count=300 2>/dev/null'
    look "it has written 300 MiB. See LENT and BORROWED of the cells"

    step 60 kill $store >/dev/null
    local begun=$SECONDS
    while lends; do
        ((SECONDS - begun < 60)) || fail "what $store used is still lent: $(step 30 cluster status)"
        sleep 1
    done
    look "$store has ended, and its memory is returned"
    step 60 kill $worker >/dev/null

    echo "demo: $loaded has two vCPUs in cell 0, which has one CPU, and both compute; $rival in cell 1 is idle"
    starts $rival --cpus 1 --memory 128M --cell 1
    starts $loaded --cpus 2 --memory 128M --cell 0
    for cpu in 0 1; do computes $loaded $cpu; done
    awaits away $loaded "no vCPU of $loaded is on the idle CPU of cell 1"
    look "cell 0 has moved a vCPU of $loaded to the CPU of cell 1. See MOVED, and \`by decision\`"
    computes $rival 0
    awaits home $loaded "cell 1 has not recalled its CPU"
    look "$rival computes now, so cell 1 has its CPU back. See RECALLED"
    for vm in $rival $loaded; do step 60 kill $vm >/dev/null; done
}

if [[ -t 1 ]]; then
    echo "demo: in the view look at the lines of the cells (lent, borrowed) and at the CELL and RUN% of $worker; q leaves it"
    sleep 5
    touch "$work/live"
    # The first step that fails ends the steps, and their end ends the view.
    (
        trap 'kill "$(<"$work/view")" 2>/dev/null || true' EXIT
        until [[ -s $work/view ]]; do sleep 0.1; done
        steps
    ) >"$work/log" 2>&1 &
    run=$!
    # Its process id, so that it ends with the steps, also where it runs in the lab.
    bash -c 'echo $$ >"$0"; exec "$@"' "$work/view" "$mirrorball" top --interval 1 || true
    # A view in the lab ends without its last output: back from the alternate screen, and the cursor.
    printf '\033[?1049l\033[?25h'
    wait "$run" && status=0 || status=$?
    cat "$work/log"
    [[ $status = 0 ]] || exit "$status"
else
    steps
fi
echo "demo: power off"
cluster=''
step 60 cluster down
