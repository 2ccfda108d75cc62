#!/usr/bin/env bash
# Measures what a cell's process takes for its VMs: the time in which its next process adopts them when it is killed, its memory for
# each, and the time of a start in a cell beside one outside, in turns. The guests halt at once, so any KVM runs them.
# Usage: scripts/bench-cells.sh MIRRORBALL [VMS [ROUNDS]]; by default 50 VMs and 11 rounds
set -euo pipefail
mirrorball=$(realpath "$1") vms=${2:-50} rounds=${3:-11}
[ -w /dev/kvm ] || { echo "bench-cells: /dev/kvm can't be opened" >&2; exit 2; }
# The registry lies in memory, as /run does.
work=$(mktemp -d -p /dev/shm)
export MIRRORBALL_RUNTIME=$work/run
end() {
    for name in $(ls "$work/run/vms" 2>/dev/null); do
        "$mirrorball" kill "$name" >/dev/null 2>&1 || true
    done
    "$mirrorball" cluster down >/dev/null 2>&1 || true
    rm -rf "$work"
}
trap end EXIT
mkdir -m 700 "$work/run"

printf '.globl _start\n_start: cli; hlt; jmp _start\n' >"$work/idle.S"
gcc -nostdlib -static -no-pie -Wl,-Ttext=0x100000,--build-id=none -o "$work/idle" "$work/idle.S"
median() { sort -n | awk '{value[NR] = $1} END {print value[int((NR + 1) / 2)]}'; }
now_us() { echo "${EPOCHREALTIME/[.,]/}"; }
start() { "$mirrorball" run -d --lab never --net none --memory 128M --cpus 1 --kernel "$work/idle" --name "$1" >/dev/null; }
start_us() {
    local begin
    begin=$(now_us)
    start "$1"
    echo $(($(now_us) - begin))
    "$mirrorball" kill "$1" >/dev/null
}
cell_pid() { sed -n 's/^ *"pid": \([0-9]*\),*$/\1/p' <("$mirrorball" cluster status --json 2>/dev/null) | head -n 1; }
anon_kib() { awk '/^Pss_Anon:/ {print $2}' "/proc/$1/smaps_rollup"; }

for ((round = 0; round < rounds; round++)); do
    start_us "alone$round" >>"$work/alone"
    "$mirrorball" cluster up --lab never --cells 1 >/dev/null
    start_us "placed$round" >>"$work/placed"
    "$mirrorball" cluster down >/dev/null
done
echo "start: $(median <"$work/placed") us in a cell, $(median <"$work/alone") us outside (medians of $rounds)"

"$mirrorball" cluster up --lab never --cells 1 >/dev/null
empty=$(anon_kib "$(cell_pid)")
for ((vm = 0; vm < vms; vm++)); do
    start "vm$vm"
done
full=$(anon_kib "$(cell_pid)")
echo "memory of the cell's process: $empty KiB, and $(((full - empty) / vms)) KiB for each of $vms VMs"

# All of them, each by its record, and none whose adoption is under way.
are_adopted() {
    local other
    other=$(grep -L "\"monitor_pid\": $1," "$work"/run/vms/*/vm.json | head -n 1)
    [ -z "$other" ] && ! compgen -G "$work/run/vms/*/adoptions" >/dev/null
}
for ((round = 0; round < rounds; round++)); do
    before=$(cell_pid)
    begin=$(now_us)
    kill -9 "$before"
    limit=$((begin + 60 * 1000 * 1000))
    while :; do
        next=$(sed -n 's/.*"monitor_pid": \([0-9]*\),.*/\1/p' "$work/run/vms/vm0/vm.json" 2>/dev/null || true)
        if [ -n "$next" ] && [ "$next" != "$before" ] && are_adopted "$next"; then
            break
        fi
        # A look takes a CPU from what is measured.
        sleep 0.005
        [ "$(now_us)" -lt "$limit" ] || { echo "bench-cells: not adopted within 60 s" >&2; exit 1; }
    done
    echo $(($(now_us) - begin)) >>"$work/adopted"
    # Its guard counts short lives.
    sleep 11
done
echo "a killed cell's $vms VMs were adopted within $(median <"$work/adopted") us (median of $rounds), $(sort -n "$work/adopted" | tail -n 1) us at most"
