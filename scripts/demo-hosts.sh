#!/usr/bin/env bash
# One unmodified Debian VM over two hosts, which a lab stands for: its nodes, a program built on both, what its CPUs waited for.
# Usage: scripts/demo-hosts.sh MIRRORBALL
set -euo pipefail
mirrorball=$(realpath "$1")
image=debian-12-numactl vm=demo-hosts lab=demo-hosts
# The lab's hosts see this directory at the same place.
shared=${XDG_CACHE_HOME:-$HOME/.cache}/mirrorball/demo-hosts
hosts=(alpha beta)

fail() { echo "demo: $*" >&2; exit 1; }
now() { date +%s.%N; }
since() { echo "$1 $(now)" | awk '{ printf "%.1f", $2 - $1 }'; }
# LIMIT in seconds, a host, and what `mirrorball` is told there.
on() { timeout --foreground -k 5 "$1" "$mirrorball" lab exec --lab "$lab" "$2" -- "$shared/mirrorball" "${@:3}" </dev/null; }
# Its pages take milliseconds to come in emulation: an agent that is late is asked again.
in_guest() {
    for _ in 1 2 3; do
        on "$1" alpha exec "$vm" -T -- /bin/sh -c "$2" 2>"$log" && return
        grep -q 'no agent answers' "$log" || break
    done
    fail "in the guest: $(tail -n 1 "$log")"
}

echo "demo: the image $image: Debian 12 with gcc, make and numactl (built once, in about a minute)"
timeout -k 5 900 "$mirrorball" image build debian-12 --packages gcc,libc6-dev,make,numactl --name "$image" --if-missing

mkdir -p "$shared"
cp "$mirrorball" "$shared/mirrorball"
for beside in mirrorball-shard mirrorball-keeper; do
    cp "$(dirname "$mirrorball")/$beside" "$shared/$beside"
done
for host in "${hosts[@]}"; do
    printf '[[hosts]]\nname = "%s"\ncpus = 1\nmemory = "2G"\n' "$host"
done >"$shared/lab.toml"
echo 'links = [{ hosts = ["alpha", "beta"] }]' | cat - "$shared/lab.toml" >"$shared/whole" && mv "$shared/whole" "$shared/lab.toml"
{
    # Emulated hosts stand still for seconds now and then; nobody else is on this network.
    printf '[membership]\nsilence_ms = 20000\nspans = "plain"\n'
    printf '[[hosts]]\nname = "alpha"\naddress = "10.77.0.1:7400"\n[[hosts]]\nname = "beta"\naddress = "10.77.0.2:7400"\n'
    printf '[[cells]]\nhost = "alpha"\n[[cells]]\nhost = "beta"\n'
} >"$shared/cluster.toml"

log=$(mktemp) up=''
clean() {
    [[ $up ]] && timeout -k 5 60 "$mirrorball" lab down --name "$lab" >/dev/null 2>&1
    rm -f "$log"
}
trap 'status=$?; set +e; clean; exit $status' EXIT
echo "demo: two hosts, alpha and beta, in emulation"
timeout -k 5 240 "$mirrorball" lab up --name "$lab" "$shared/lab.toml"
up=yes
timeout -k 5 30 "$mirrorball" cluster keys "$shared/cluster.toml" >/dev/null
for host in "${hosts[@]}"; do on 60 "$host" cluster up "$shared/cluster.toml" >/dev/null; done
start=$(now)
until on 30 alpha cluster status | tee "$log" | grep -q ' beta .*runs'; do
    (($(date +%s) - ${start%.*} < 60)) || fail "the hosts do not find each other: $(tail -n 1 "$log")"
    sleep 1
done
sed 's/^/  | /' "$log"

echo "demo: one VM boots across both; each has a copy of its memory, and they keep the copies the same"
start=$(now)
on 240 alpha run --lab never -d --name "$vm" --image "$image" --cpus 2 --memory 640M --net none --span 0,1 --span-memory coherent >/dev/null
# The agent brings beta's CPU online when all services have started.
until on 120 alpha exec "$vm" -T -- nproc 2>"$log" | grep -qx 2; do
    (($(date +%s) - ${start%.*} < 600)) || fail "both CPUs are not online after 600 s: $(tail -n 1 "$log")"
    sleep 3
done
boot=$(since "$start")
echo "demo: \$ nproc; numactl -H"
in_guest 120 'nproc; numactl -H' | sed 's/^/  | /'

echo "demo: a C program, its modules compiled at the same time, one on the CPU of each host"
cat >"$shared/Makefile" <<'END'
hello: hello.o main.o
	gcc -o $@ $^
hello.o: CPU = 0
main.o: CPU = 1
%.o: %.c
	taskset -c $(CPU) gcc -O2 -c -o $@ $<
END
printf '#include <stdio.h>\nvoid hello(const char *whom) { printf("hello, %%s\\n", whom); }\n' >"$shared/hello.c"
printf 'void hello(const char *whom);\nint main(void) { hello("two hosts"); return 0; }\n' >"$shared/main.c"
in_guest 120 'mkdir -p /root/hello'
for file in Makefile hello.c main.c; do
    on 60 alpha cp "$shared/$file" "$vm:/root/hello/$file" >/dev/null
done
start=$(now)
in_guest 900 'cd /root/hello && make -j2 && ./hello && sha256sum *.o >sums' | sed 's/^/  | /'
work=$(since "$start")
echo "demo: the same on the CPU of one host: are the object files the same?"
in_guest 240 'cd /root/hello && rm *.o && taskset -c 0 make CPU=0 hello.o main.o && sha256sum -c sums' | sed 's/^/  | /'

echo "demo: what its CPUs waited for, and the hottest pages"
in_guest 240 'grep " [bdBD] " /proc/kallsyms' >"$shared/kallsyms" || fail "the guest does not tell its kernel's symbols"
on 60 alpha heat "$vm" --symbols "$shared/kallsyms" | sed 's/^/  | /'
on 60 alpha kill "$vm" >/dev/null
for host in "${hosts[@]}"; do on 60 "$host" cluster down >/dev/null; done
echo "demo: one Debian over two hosts: up with both CPUs after $boot s, a program built on both in $work s, in emulation"
