#!/usr/bin/env bash
# Six VMs on a network of two cells, by one command and without root: a web server, a database, four clients. They find each other by
# name, the host fetches the page through a forwarded port, and `mem` shows what they share.
# Usage: scripts/demo-net.sh MIRRORBALL
set -euo pipefail
mirrorball=$(realpath "$1")
network=demo port=${PORT:-8180}
clients=(demo-client-1 demo-client-2 demo-client-3 demo-client-4)

# Without KVM a lab host will do: what runs there is of this demo.
if ! "$mirrorball" probe >/dev/null; then
    echo "demo: this machine's KVM runs no guests, so all of it happens in a lab host"
    exec "$mirrorball" lab run -- env TMPDIR=/run XDG_RUNTIME_DIR=/run PORT="$port" "$(realpath "$0")" "$mirrorball"
fi

# A step: LIMIT in seconds, then arguments of `mirrorball`.
step() { timeout --foreground -k 5 "$1" "$mirrorball" "${@:2}" </dev/null; }
in_guest() { step 120 exec "$1" -T -- /bin/sh -c "$2"; }
fail() { echo "demo: $*" >&2; exit 1; }
shows() { sed 's/^/  | /'; }

command -v curl >/dev/null || fail "curl is missing; install it (Debian: \`apt install curl\`)"
work=$(mktemp -d) cluster=''
clean() {
    if [[ $cluster ]]; then
        for vm in demo-web demo-db "${clients[@]}"; do step 30 kill "$vm" >/dev/null 2>&1; done
        step 60 cluster down >/dev/null 2>&1
    fi
    rm -rf "$work"
}
trap 'status=$?; set +e; clean; exit $status' EXIT

echo "demo: the image tiny, a kernel and a shell of Debian (built once, in some seconds)"
step 300 image build tiny --if-missing
step 60 cluster status >/dev/null 2>&1 && fail "a cluster is up; end it with \`mirrorball cluster down\`"

# Two CPUs that this program may use.
# shellcheck disable=SC2207 # a list of numbers
cpus=($(sed -n 's/^Cpus_allowed_list:\t//p' /proc/self/status | tr ',' '\n' |
    while IFS=- read -r first last; do seq "$first" "${last:-$first}"; done | head -n 2))
[[ ${#cpus[@]} = 2 ]] || fail "two cells need two CPUs, and this program may use CPUs ${cpus[*]} only"
{
    for cpu in "${cpus[@]}"; do printf '[[cells]]\ncpus = "%s"\nmemory = "512M"\n' "$cpu"; done
    printf '[[networks]]\nname = "%s"\nrange = "10.77.0.0/24"\noutside = ["demo-web"]\n' $network
} >"$work/cluster.toml"
vm() { # NAME CELL [KEYS OF THE CARD]
    cat >"$work/$1.toml" <<VM
name = "$1"
image = "tiny"
memory = "128M"
share = "at-read"
cell = $2

[[nets]]
kind = "subnet"
network = "$network"
${3-}
VM
}
vm demo-web 0 "forward = [\"$port:80\"]"
vm demo-db 1
for number in 1 2 3 4; do vm demo-client-$number $((number % 2)); done

echo "demo: two cells, and a network of both: 10.77.0.0/24, from which only the web server reaches the outside"
cluster=up
step 120 cluster up "$work/cluster.toml"
echo "demo: one command starts six VMs"
step 300 run -d "$work"/demo-*.toml >/dev/null

# The guest's card asks for its address by DHCP, as any guest's does; busybox leaves setting it to a script.
cat >"$work/lease" <<'LEASE'
#!/bin/sh
[ "$1" = bound ] || exit 0
ip addr add "$ip/$mask" dev "$interface"
[ -z "$router" ] || ip route add default via "$router"
printf 'search %s\nnameserver %s\n' "$domain" "$dns" >/etc/resolv.conf
LEASE
for vm in demo-web demo-db "${clients[@]}"; do
    begun=$SECONDS
    until in_guest "$vm" true 2>"$work/error"; do
        ((SECONDS - begun < 300)) || fail "no agent of $vm answers after 300 s: $(tail -n 1 "$work/error")"
        sleep 1
    done
    step 60 cp "$work/lease" "$vm:/tmp/lease" >/dev/null
    in_guest "$vm" 'mkdir -p /etc; chmod +x /tmp/lease; ip link set lo up; ip link set eth0 up
        udhcpc -i eth0 -n -q -t 20 -T 1 -s /tmp/lease >/dev/null 2>&1' || fail "$vm gets no address by DHCP"
done
echo "demo: all have an address"
step 60 net ls | shows

# The database counts orders. The web server's page has the count, by the database's name.
in_guest demo-db 'mkdir -p /srv/cgi-bin; echo 0 >/srv/orders
    cat >/srv/cgi-bin/order <<"CGI"
#!/bin/sh
orders=$(($(cat /srv/orders) + 1))
echo "$orders" >/srv/orders
printf "Content-Type: text/plain\r\n\r\n%s\n" "$orders"
CGI
    chmod +x /srv/cgi-bin/order; httpd -p 5432 -h /srv'
in_guest demo-web 'mkdir -p /srv/cgi-bin
    cat >/srv/cgi-bin/page <<"CGI"
#!/bin/sh
printf "Content-Type: text/html\r\n\r\n<p>Order %s.</p>\n" "$(wget -q -O - http://demo-db:5432/cgi-bin/order)"
CGI
    chmod +x /srv/cgi-bin/page; httpd -p 80 -h /srv'
echo "demo: each client fetches the page by the server's name, and the page asks the database by its name"
for client in "${clients[@]}"; do
    page=$(in_guest "$client" 'wget -q -O - http://demo-web/cgi-bin/page')
    echo "$client: $page" | shows
    [[ $page = *"Order "[1-9]* ]] || fail "$client got another page: $page"
done
echo "demo: this host fetches it from its port $port: curl http://127.0.0.1:$port/cgi-bin/page"
page=$(curl --silent --show-error --fail --max-time 60 "http://127.0.0.1:$port/cgi-bin/page")
shows <<<"$page"
[[ $page = *"Order 5."* ]] || fail "this is not the fifth order: $page"
in_guest demo-client-1 'wget -q -T 5 -O - http://192.0.2.1/ 2>/dev/null' && fail "a client reaches the outside"

echo "demo: \`mirrorball net inspect demo-client-1\`: its card, with counters and what was dropped"
step 60 net inspect demo-client-1 | shows
echo "demo: \`mirrorball mem\`: see SHARED, the memory that the VMs have in common"
step 60 mem >"$work/mem"
shows <"$work/mem"
awk '$1 == "total" && $5 + 0 > 0 { found = 1 } END { exit !found }' "$work/mem" || fail "the VMs share no memory"
echo "demo: power off"
for vm in demo-web demo-db "${clients[@]}"; do step 60 kill "$vm" >/dev/null; done
cluster=''
step 60 cluster down
