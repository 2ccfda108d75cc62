//! A guest's network access through user networking.

use std::net::TcpListener;

use crate::{Scratch, Vm};

/// A port that was free just now.
pub fn free_port() -> u16 {
    let probe = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    probe.local_addr().expect("bound").port()
}

/// Gives the guest's `eth0` its address; returns the router's, at which this host answers.
#[track_caller]
pub fn lease(vm: &Vm, scratch: &Scratch) -> String {
    // Address and MTU come by DHCP, as for any guest; busybox leaves setting them to a script.
    let script = "#!/bin/sh\n[ \"$1\" = bound ] || exit 0\nip addr add $ip/$mask dev $interface\n\
                  [ -z \"$mtu\" ] || ip link set mtu $mtu dev $interface\n\
                  ip route add default via $router\necho router=$router\n";
    let script = scratch.write("dhcp.sh", script);
    vm.put(&script, "/tmp/dhcp.sh");
    let leased = vm.sh("chmod +x /tmp/dhcp.sh; ip link set eth0 up; \
         ip -4 addr show dev eth0 | grep -q inet || \
         udhcpc -i eth0 -n -q -t 20 -T 1 -O mtu -s /tmp/dhcp.sh >&2; \
         ip route show default | sed -n 's/.*via \\([0-9.]*\\).*/\\1/p'");
    let router = leased.trim().to_owned();
    assert!(!router.is_empty(), "no default route after DHCP");
    router
}
