#!/usr/bin/env bash
# Measures two VMs of two vCPUs each on two CPUs, whose threads wait for one another: under Linux, with balance scheduling, and with
# gangs; here where KVM runs guests, in a lab host of two CPUs elsewhere. Usage: scripts/bench-gangs.sh MIRRORBALL [RUNS]
set -euo pipefail
mirrorball=$(realpath "$1") runs=${2:-3}
here=$(cd "$(dirname "$0")/.." && pwd)
names="one two"
. "$here/scripts/bench-set-up.sh"
if ! "$mirrorball" probe >/dev/null 2>&1; then
    printf '[[hosts]]\nname = "host"\ncpus = 2\nmemory = "2G"\n' >"$work/lab.toml"
    use_lab "two CPUs (QEMU software emulation, Debian 6.1 kernel; ratios only)"
fi
# Other work takes CPUs away from the emulated ones, with the vCPUs on them.
machine="$machine, load $(cut -d' ' -f1 /proc/loadavg) before the bench"
echo "bench: gangs; 15 minutes for each of $runs runs on 2 busy CPUs without usable KVM; quiet ones were not timed"
mkdir -p "$here/bench/results"
"${inside[@]}" "$(dirname "$mirrorball")/bench-gangs" --mirrorball "$mirrorball" --folder "$folder" --runs "$runs" \
    --out "$here/bench/results/gangs.json" --machine "$machine"
"$here/scripts/stamp.sh" "$here/bench/results/gangs.json"
