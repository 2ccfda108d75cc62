#!/usr/bin/env bash
# Measures moves of a vCPU between two CPUs: of one node, or of two where the host has them, and of one cell or of two. The guests halt
# at once, or compute, so any KVM runs them. Usage: scripts/bench-moves.sh MIRRORBALL
set -euo pipefail
mirrorball=$(realpath "$1")
here=$(cd "$(dirname "$0")/.." && pwd)
[ -w /dev/kvm ] || { echo "bench-moves: /dev/kvm can't be opened" >&2; exit 2; }
machine="$(nproc) CPUs, $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), Linux $(uname -r)"
grep -q '^flags.* hypervisor' /proc/cpuinfo && machine="virtual machine with $machine"
machine="$machine, load $(cut -d' ' -f1 /proc/loadavg) before the bench"
work=$(mktemp -d -p /dev/shm)
folder=$work/folder
clean() {
    # Only if it was interrupted.
    if [ -d "$folder" ]; then
        for words in "kill mover" "cluster down"; do
            MIRRORBALL_RUNTIME=$folder/run timeout 60 "$mirrorball" $words 2>/dev/null || true
        done
    fi
    rm -rf "$work"
}
trap clean EXIT
printf '.globl _start\n_start: cli; hlt; jmp _start\n' >"$work/idle.S"
printf '.globl _start\n_start: jmp _start\n' >"$work/busy.S"
for kernel in idle busy; do
    gcc -nostdlib -static -no-pie -Wl,-Ttext=0x100000,--build-id=none -o "$work/$kernel" "$work/$kernel.S"
done
echo "bench: moves of a vCPU; about a minute"
"$(dirname "$mirrorball")/bench-moves" --mirrorball "$mirrorball" --folder "$folder" --idle "$work/idle" --busy "$work/busy" \
    --out "$here/bench/results/moves.json" --machine "$machine"
"$here/scripts/stamp.sh" "$here/bench/results/moves.json"
