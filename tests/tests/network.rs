//! Risk: bytes are lost, reordered or changed on the way to or from the guest.

use std::fs;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use guest_tests::command::Call;
use guest_tests::{Scratch, Vm, VmFile, peer, wait};

/// Through TAP.
const TAP_BYTES: u64 = 100_000_000;
/// Through passt, to a forwarded port. From the guest more than a few kilobytes get stuck in the lab (SPECIFICATION.md).
const USER_DOWN_BYTES: u64 = 1_000_000;
const LIMIT: Duration = Duration::from_secs(120);
const GUEST_PORT: u16 = 7000;

/// Guest to host: the guest connects to `host`, where this test listens at `listener`.
fn upload(vm: &Vm, listener: TcpListener, host: &str, bytes: u64) {
    let port = listener.local_addr().expect("bound").port();
    let receiver = thread::spawn(move || peer::receive(listener.accept()?.0));
    let sent = vm
        .tool(&["send", &format!("{host}:{port}"), "21", &bytes.to_string()])
        .limit(LIMIT)
        .ok();
    let received = receiver
        .join()
        .expect("no panic")
        .expect("the transfer to the host");
    assert_eq!(sent.text().trim(), received);
    assert!(received.ends_with(&format!("-{bytes}")), "{received}");
}

/// Host to guest: this test connects to `guest`.
fn download(vm: &Vm, guest: SocketAddr, bytes: u64) {
    let mut receiver = vm
        .tool(&["receive", &GUEST_PORT.to_string()])
        .limit(LIMIT)
        .spawn();
    receiver.wait_for("listening", Duration::from_secs(20));
    let stream = wait::until("a connection to the guest", Duration::from_secs(20), || {
        TcpStream::connect(guest).ok()
    });
    let sent = peer::send(stream, 22, bytes).expect("the transfer to the guest");
    let received = receiver.wait().expect(0);
    assert_eq!(received.text().lines().last(), Some(sent.as_str()), "{received}");
}

/// A port that was free just now.
fn free_port() -> u16 {
    let probe = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    probe.local_addr().expect("bound").port()
}

#[test]
fn user_networking_carries_bytes_unchanged_to_a_forwarded_port() {
    let scratch = Scratch::new("user");
    let forwarded = free_port();
    let vm = VmFile::new("user")
        .memory("256M")
        .cpus(2)
        .net(&format!(
            "kind = \"user\"\nforward = [\"{forwarded}:{GUEST_PORT}\"]"
        ))
        .start(&scratch);
    vm.add_tool();
    // The address comes by DHCP, as for any guest; busybox leaves setting it to a script.
    let script = "#!/bin/sh\n[ \"$1\" = bound ] || exit 0\nip addr add $ip/$mask dev $interface\n\
                  ip route add default via $router\necho router=$router\n";
    let script = scratch.write("dhcp.sh", script);
    vm.put(&script, "/tmp/dhcp.sh");
    let leased = vm.sh("chmod +x /tmp/dhcp.sh; ip link set eth0 up; \
         ip -4 addr show dev eth0 | grep -q inet || udhcpc -i eth0 -n -q -t 20 -T 1 -s /tmp/dhcp.sh >&2; \
         ip route show default | sed -n 's/.*via \\([0-9.]*\\).*/\\1/p'");
    let router = leased.trim();
    assert!(!router.is_empty(), "no default route after DHCP");
    download(
        &vm,
        SocketAddr::from(([127, 0, 0, 1], forwarded)),
        USER_DOWN_BYTES,
    );
    vm.stop();
}

/// A TAP device of the host, removed with the test.
struct Tap(String);

impl Tap {
    fn new(address: &str) -> Self {
        let name = format!("mbtest{}", std::process::id() % 100_000);
        let ip = |arguments: &[&str]| Call::new("ip").args(arguments).ok();
        ip(&["tuntap", "add", "dev", &name, "mode", "tap", "vnet_hdr"]);
        let tap = Self(name);
        ip(&["addr", "add", address, "dev", &tap.0]);
        ip(&["link", "set", &tap.0, "up"]);
        tap
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        // A second error would hide the first.
        let _ = Call::new("ip").args(["link", "del", &self.0]).run();
    }
}

#[test]
fn a_tap_device_carries_a_hundred_megabytes_each_way() {
    assert!(
        fs::exists("/dev/net/tun").unwrap_or(false),
        "this host has no /dev/net/tun: modprobe tun"
    );
    let scratch = Scratch::new("tap");
    let tap = Tap::new("10.77.0.1/24");
    let vm = VmFile::new("tap")
        .memory("256M")
        .cpus(2)
        .net(&format!("kind = \"tap\"\ntap = \"{}\"", tap.0))
        .start(&scratch);
    vm.add_tool();
    vm.sh("ip link set eth0 up; ip addr flush dev eth0; ip addr add 10.77.0.2/24 dev eth0");
    let listener = TcpListener::bind(("10.77.0.1", 0)).expect("the TAP's address");
    upload(&vm, listener, "10.77.0.1", TAP_BYTES);
    download(&vm, SocketAddr::from(([10, 77, 0, 2], GUEST_PORT)), TAP_BYTES);
    vm.stop();
}
