#!/usr/bin/env bash
# Compares this commit's `mirrorball` with that of an older commit: the time of a `run` whose guest turns itself off at once, and the
# memory of a VM beyond its guest's. The two take turns. The guests are a few instructions long, so any KVM runs them.
# Usage: scripts/bench-before.sh MIRRORBALL [COMMIT [RUNS]]; by default 88dc2d3 and 41 runs
set -euo pipefail
cd "$(dirname "$0")/.."
new=$(realpath "$1") commit=${2:-88dc2d3} runs=${3:-41}
[ -w /dev/kvm ] || { echo "bench-before: /dev/kvm can't be opened" >&2; exit 2; }
old=$(scripts/build-before.sh "$commit")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# off: a write to the ACPI sleep control register (S5). idle: halts for ever.
guest() {
    printf '.globl _start\n_start: %s\n1: cli; hlt; jmp 1b\n' "$2" >"$work/$1.S"
    gcc -nostdlib -static -no-pie -Wl,-Ttext=0x100000,--build-id=none -o "$work/$1" "$work/$1.S"
}
guest off 'mov $0x600, %edx; mov $0x34, %eax; outb %al, %dx'
guest idle nop

machine=(--lab never --net none --memory 128M --cpus 1)
start_us() {
    local begin=${EPOCHREALTIME/[.,]/}
    "$1" run "${machine[@]}" --name before-start --kernel "$work/off" >/dev/null 2>&1 </dev/null
    echo $((${EPOCHREALTIME/[.,]/} - begin))
}

# Of all processes of a VM that was left running: private bytes, without the guest's memory, and without pages of programs.
memory_kib() {
    "$1" run "${machine[@]}" --name before-memory --kernel "$work/idle" >/dev/null 2>&1 </dev/null &
    local run=$! pid sum=0 of wait_s=20
    # The second form is that of commits whose shards have no program of their own.
    # These have no keepers either.
    local shard='mirrorball-shard before-memory|before-memory shard'
    until pgrep -f "^($shard)" >/dev/null || ((--wait_s == 0)); do sleep 1; done
    sleep 2
    for pid in "$run" $(pgrep -f "^(mirrorball monitor|mirrorball-keeper|$shard)"); do
        of=$(awk '/^Pss_Anon:/ {print $2}' "/proc/$pid/smaps_rollup")
        sum=$((sum + of))
    done
    "$1" kill before-memory >/dev/null 2>&1
    # It says that it was killed.
    wait $run || true
    echo "$sum"
}

median() { sort -n | awk '{value[NR] = $1} END {print value[int((NR + 1) / 2)]}'; }
for ((run = 0; run < runs; run++)); do
    start_us "$old" >>"$work/old.start"
    start_us "$new" >>"$work/new.start"
done
for ((run = 0; run < 5; run++)); do
    memory_kib "$old" >>"$work/old.memory"
    memory_kib "$new" >>"$work/new.memory"
done
for program in old new; do
    echo "$program: start $(median <"$work/$program.start") us (least $(sort -n "$work/$program.start" | head -n 1)), memory $(median <"$work/$program.memory") KiB"
done
