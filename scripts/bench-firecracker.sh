#!/usr/bin/env bash
# Compares a VM's start and memory with Firecracker's, bare and under its jailer, seen from outside: the time from the start of the command
# until the guest's first byte is on the console, and the memory of all processes of one VM and of each further one. The guests are
# a few instructions long, so any KVM runs them. Mirrorball closes its sandbox whole (`--sandbox require`). It takes root, as the jailer does.
# Usage: scripts/bench-firecracker.sh MIRRORBALL FIRECRACKER JAILER [RUNS [VMS]]; by default 41 runs and 10 VMs
set -euo pipefail
mirrorball=$(realpath "$1") firecracker=$(realpath "$2") jailer=$(realpath "$3") runs=${4:-41} vms=${5:-10}
[ -w /dev/kvm ] || { echo "bench-firecracker: /dev/kvm can't be opened" >&2; exit 2; }
[ "$(id -u)" = 0 ] || { echo "bench-firecracker: run it as root" >&2; exit 2; }
work=$(mktemp -d -p /dev/shm)
export MIRRORBALL_RUNTIME=$work/run
mkdir -m 700 "$work/run"
end() {
    local name
    for name in $(ls "$work/run/vms" 2>/dev/null); do
        "$mirrorball" kill "$name" >/dev/null 2>&1 || true
    done
    "$mirrorball" cluster down >/dev/null 2>&1 || true
    [ ! -s "$work/pids" ] || xargs kill -9 <"$work/pids" 2>/dev/null || true
    rm -rf "$work"
}
trap end EXIT

# The guest writes a byte to the first serial port, and halts.
printf '.globl _start\n_start: mov $0x3f8, %%edx; mov $126, %%eax; outb %%al, %%dx\n1: cli; hlt; jmp 1b\n' >"$work/guest.S"
gcc -nostdlib -static -no-pie -Wl,-Ttext=0x100000,--build-id=none -o "$work/guest" "$work/guest.S"
config() {
    printf '{"boot-source": {"kernel_image_path": "%s", "boot_args": ""}, "drives": [], "machine-config": {"vcpu_count": 1, "mem_size_mib": 128}}' "$1"
}
config "$work/guest" >"$work/vm.json"

# Prepares the directory that the jailer locks a VM into. Its files are there before the command starts.
jail() {
    local root=$work/jail/firecracker/$1/root
    mkdir -p "$root"
    cp "$work/guest" "$root/guest"
    config /guest >"$root/vm.json"
    chown -R 65534:65534 "$root"
}

command_of() {
    case $1 in
        mirrorball) words=("$mirrorball" run --lab never --net none --memory 128M --cpus 1 --sandbox require --kernel "$work/guest" --name "$2") ;;
        firecracker) words=("$firecracker" --no-api --id "$2" --config-file "$work/vm.json") ;;
        jailer)
            jail "$2"
            words=("$jailer" --id "$2" --exec-file "$firecracker" --uid 65534 --gid 65534 --chroot-base-dir "$work/jail"
                -- --no-api --config-file /vm.json)
            ;;
    esac
}

# The time until the first byte, in microseconds.
start_us() {
    local words begin now pid byte=
    command_of "$1" "$2"
    begin=${EPOCHREALTIME/[.,]/}
    coproc vm { exec "${words[@]}" 2>"$work/$1.err" </dev/null; }
    # A process that has ended at once has neither any more.
    exec {output}<&"${vm[0]}" || { cat "$work/$1.err" >&2; exit 1; }
    pid=$vm_PID
    # Firecracker's own lines come before the guest's.
    while IFS= read -r -t 20 -n 1 -u "$output" byte; do
        [ "$byte" != "~" ] || break
    done
    now=${EPOCHREALTIME/[.,]/}
    exec {output}<&-
    [ "$byte" = "~" ] || { echo "bench-firecracker: the guest of $1 says nothing:" >&2; cat "$work/$1.err" >&2; exit 1; }
    kill -9 "$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
    echo $((now - begin))
}

# Of a process and all that it has started: proportional set sizes, in KiB.
pss_kib() {
    local pid sum=0 of
    for pid in "$@"; do
        of=$(awk '/^Pss:/ {print $2}' "/proc/$pid/smaps_rollup")
        sum=$((sum + of))
    done
    echo "$sum"
}

median() { sort -n | awk '{value[NR] = $1} END {print value[int((NR + 1) / 2)]}'; }
for ((run = 0; run < runs; run++)); do
    for program in mirrorball firecracker jailer; do
        start_us "$program" "start$run" >>"$work/$program.start"
    done
done

available_kib() { awk '/^MemAvailable:/ {print $2}' /proc/meminfo; }

# PSS of one VM, PSS of each further one, and by how much the host's available memory has fallen for each of all.
memory() {
    local vm words pids=() one before
    before=$(available_kib)
    : >"$work/pids"
    for ((vm = 0; vm < vms; vm++)); do
        command_of "$1" "memory$vm"
        if [ "$1" = mirrorball ]; then
            "${words[@]}" -d >/dev/null
        else
            "${words[@]}" >/dev/null 2>&1 </dev/null &
            echo $! >>"$work/pids"
        fi
        sleep 0.3
        # Idle: the work of a start is over, for each program alike.
        if ((vm == 0 || vm == vms - 1)); then sleep 3; fi
        if [ "$1" = mirrorball ]; then
            mapfile -t pids < <(grep -ho '"\(monitor\|keeper\|shard\)_pid": [0-9]*' "$work"/run/vms/*/vm.json | awk '{print $2}' | sort -u)
        else
            mapfile -t pids <"$work/pids"
        fi
        [ "$vm" != 0 ] || one=$(pss_kib "${pids[@]}")
    done
    echo "$one $((($(pss_kib "${pids[@]}") - one) / (vms - 1))) $(((before - $(available_kib)) / vms))"
    if [ "$1" = mirrorball ]; then
        for ((vm = 0; vm < vms; vm++)); do "$mirrorball" kill "memory$vm" >/dev/null; done
    else
        xargs kill -9 <"$work/pids"
        wait 2>/dev/null || true
    fi
    : >"$work/pids"
}

"$mirrorball" cluster up --lab never --cells 1 >/dev/null
in_cell=$(memory mirrorball)
"$mirrorball" cluster down >/dev/null
base=$(median <"$work/firecracker.start")
for program in mirrorball firecracker jailer; do
    start=$(median <"$work/$program.start")
    echo "$program: start $start us (median of $runs; least $(sort -n "$work/$program.start" | head -n 1)), $(awk "BEGIN {printf \"%.2f\", $start / $base}") of Firecracker's"
done

here=$(cd "$(dirname "$0")/.." && pwd)
machine="$(nproc) CPUs, $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), Linux $(uname -r)"
grep -q '^flags.* hypervisor' /proc/cpuinfo && machine="virtual machine with $machine"
row() {
    read -r one further fall <<<"$2"
    echo "$1: $one KiB for one VM, $further KiB for each further one (PSS of the processes of $vms VMs, the cell's included);" \
        "the host's available memory fell by $fall KiB for each" >&2
    printf '  {"what": "memory", "of": "%s", "unit": "KiB", "one": %s, "further": %s, "vms": %s, "available_fall": %s}' \
        "$1" "$one" "$further" "$vms" "$fall"
}
{
    printf '{"machine": "%s", "load": %s, "date": "%s", "commit": "%s", "firecracker": "%s", "rows": [\n' "$machine" \
        "$(cut -d' ' -f1 /proc/loadavg)" "$(date +%F)" "$(git -C "$here" rev-parse --short HEAD)" "$("$firecracker" --version | head -n 1)"
    for program in mirrorball firecracker jailer; do
        printf '  {"what": "start to the first byte", "of": "%s", "unit": "us", "samples": [%s]},\n' "$program" "$(paste -sd, "$work/$program.start")"
    done
    row "mirrorball in a cell" "$in_cell"
    for program in mirrorball firecracker jailer; do
        printf ',\n'
        row "$program" "$(memory "$program")"
    done
    printf '\n]}\n'
} >"$work/result"
mv "$work/result" "$here/bench/results/firecracker.json"
