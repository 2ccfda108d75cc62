# Set-up that the benches of cells share; they read it by `.`. It needs `mirrorball`, the program, and has
# `machine`, `folder`, `work` and `inside`; `names` are the VMs that are left over after an interruption.
"$mirrorball" image build tiny --if-missing
machine="$(nproc) CPUs, $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), Linux $(uname -r)"
# A paging file lies on a disk: one in memory would compete with the guests for it.
work=$(mktemp -d "${TMPDIR:-/var/tmp}/bench.XXXXXX")
folder=/dev/shm/bench-$$
inside=()
clean() {
    # Here, if it was interrupted. What is left in a lab host is gone with it.
    if [ -d "$folder" ]; then
        for name in $names; do MIRRORBALL_RUNTIME=$folder/run timeout 60 "$mirrorball" kill "$name" 2>/dev/null || true; done
        MIRRORBALL_RUNTIME=$folder/run timeout 60 "$mirrorball" cluster down 2>/dev/null || true
    fi
    rm -rf "$work" "$folder"
}
trap clean EXIT
# Runs the bench in a lab host where KVM runs no guests here. $1 describes that host, and $work/lab.toml is its file.
use_lab() {
    machine="lab host of $1 on $machine"
    inside=("$mirrorball" lab run "$work/lab.toml" --limit 7200 --)
}
