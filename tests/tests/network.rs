//! Risk: bytes are lost, reordered or changed on the way to or from the guest, or reach the host without
//! permission.

use std::fs;
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::Duration;

use guest_tests::command::Call;
use guest_tests::host::{self, Traces};
use guest_tests::vm::TOOL;
use guest_tests::{Scratch, Vm, VmFile, net, peer, repetitions, wait};

/// Bytes each way in a campaign, and a part of it at a landing.
const BYTES: usize = 100_000_000;
const LIMIT: Duration = Duration::from_secs(120);
const GUEST_PORT: u16 = 7000;
/// An address that this host has for the time of a test.
const OWN: &str = "192.0.2.77";

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

/// A VM in user mode that has its address; the rest of the card's table is `more`.
fn user_vm(name: &str, more: &str, scratch: &Scratch) -> (Vm, String) {
    let vm = VmFile::new(name)
        .memory("256M")
        .cpus(2)
        .net(&format!("kind = \"user\"\n{more}"))
        .start(scratch);
    vm.add_tool();
    let router = net::lease(&vm, scratch);
    (vm, router)
}

#[test]
fn user_networking_carries_a_hundred_megabytes_each_way() {
    let scratch = Scratch::new("user");
    let forwarded = net::free_port();
    let more = format!("host = true\nforward = [\"{forwarded}:{GUEST_PORT}\"]");
    let (vm, router) = user_vm("user", &more, &scratch);
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    upload(&vm, listener, &router, repetitions(BYTES) as u64);
    download(
        &vm,
        SocketAddr::from(([127, 0, 0, 1], forwarded)),
        repetitions(BYTES) as u64,
    );
    // The card asks for the host, so it reaches the host's other addresses, too.
    let _own = OwnAddress::add();
    let listener = TcpListener::bind((OWN, 0)).expect("a free port");
    upload(&vm, listener, OWN, 100_000);
    vm.stop();
}

/// [`OWN`] on the host's loopback interface, removed with the test.
struct OwnAddress;

impl OwnAddress {
    fn add() -> Self {
        let own = format!("{OWN}/32");
        Call::new("ip").args(["addr", "add", &own, "dev", "lo"]).ok();
        Self
    }
}

impl Drop for OwnAddress {
    fn drop(&mut self) {
        let own = format!("{OWN}/32");
        // A second error would hide the first.
        let _ = Call::new("ip").args(["addr", "del", &own, "dev", "lo"]).run();
    }
}

/// Checks that no connection from the guest to `host` arrives at this host.
#[track_caller]
fn expect_unreachable(vm: &Vm, host: &str) {
    let listener = TcpListener::bind(("0.0.0.0", 0)).expect("a free port");
    listener.set_nonblocking(true).expect("a socket");
    let port = listener.local_addr().expect("bound").port();
    let tried = vm.sh(&format!(
        "timeout 5 {TOOL} send {host}:{port} 25 1000 2>/dev/null && echo connected || echo refused"
    ));
    assert_eq!(tried.trim(), "refused", "{host}");
    let arrived = listener.accept().map(|(_, from)| from);
    assert!(arrived.is_err(), "{host}: a connection from {arrived:?}");
}

#[test]
fn a_slow_receiver_on_the_host_does_not_end_a_transfer_through_user_networking() {
    let scratch = Scratch::new("slow");
    let (vm, router) = user_vm("slow", "host = true", &scratch);
    // Frames of 1,500 bytes, as for a guest that does not request the MTU.
    vm.sh("ip link set mtu 1500 dev eth0");
    let bytes = 12_000_000;
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    let port = listener.local_addr().expect("bound").port();
    let receiver = thread::spawn(move || {
        let stream = listener.accept()?.0;
        // Longer than it takes to fill the buffers on the way: the window closes.
        thread::sleep(Duration::from_secs(8));
        peer::receive(stream)
    });
    let sent = vm
        .tool(&["send", &format!("{router}:{port}"), "23", &bytes.to_string()])
        .limit(LIMIT)
        .ok();
    let received = receiver.join().expect("no panic").expect("the transfer");
    assert_eq!(sent.text().trim(), received);
    vm.stop();
}

/// A card without `host` does not lead to this host, either.
#[test]
fn a_forwarded_udp_port_carries_datagrams_both_ways() {
    let scratch = Scratch::new("udp");
    let host = UdpSocket::bind(("127.0.0.1", 0)).expect("a free port");
    let probe = UdpSocket::bind(("0.0.0.0", 0)).expect("a free port");
    let forwarded = probe.local_addr().expect("bound").port();
    drop(probe);
    let forward = format!("forward = [\"udp:{forwarded}:{GUEST_PORT}\"]");
    let (vm, router) = user_vm("udp", &forward, &scratch);
    let sizes = [1usize, 100, 1_400];
    let mut reflector = vm
        .tool(&["reflect", &GUEST_PORT.to_string(), &sizes.len().to_string()])
        .limit(LIMIT)
        .spawn();
    reflector.wait_for("listening", Duration::from_secs(20));
    host.connect(("127.0.0.1", forwarded)).expect("a UDP address");
    host.set_read_timeout(Some(Duration::from_secs(20)))
        .expect("a limit");
    for bytes in sizes {
        let sent: Vec<u8> = (0..bytes).map(|place| (place * 7 + bytes) as u8).collect();
        host.send(&sent).expect("room for a datagram");
        let mut received = vec![0; 2_000];
        let count = host.recv(&mut received).expect("an answer from the guest");
        assert_eq!(received[..count], sent);
    }
    reflector.wait().expect(0);
    let _own = OwnAddress::add();
    for host in [router.as_str(), OWN] {
        expect_unreachable(&vm, host);
    }
    let filtered = vm.inspect()["status"]["filtered_frames"].as_u64();
    assert!(
        filtered.is_some_and(|frames| frames >= 2),
        "{filtered:?} frames were dropped"
    );
    vm.stop();
}

/// The VM's log, in its runtime directory.
fn shard_log(vm: &Vm) -> String {
    let path = vm.folder().join("shard.log");
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn has_carrier(vm: &Vm) -> bool {
    vm.sh("cat /sys/class/net/eth0/carrier").trim() == "1"
}

#[test]
fn killed_frame_filter_takes_down_its_card_and_nothing_else() {
    let scratch = Scratch::new("cut");
    let before = Traces::now();
    let (vm, _) = user_vm("cut", "", &scratch);
    assert!(has_carrier(&vm));
    let of_card = vm.card_processes();
    let filter = of_card.iter().find(|pid| host::is_frame_filter(**pid));
    host::kill9(*filter.expect("a frame filter"));
    // passt ends with its socket.
    host::wait_gone(&of_card, Duration::from_secs(20));
    wait::until("the end of the guest's link", Duration::from_secs(20), || {
        (!has_carrier(&vm)).then_some(())
    });
    let line = "net0: the frame filter was ended by SIGKILL";
    wait::until("a line of the log", Duration::from_secs(20), || {
        shard_log(&vm).contains(line).then_some(())
    });
    vm.reboot();
    net::lease(&vm, &scratch);
    let renewed = vm.card_processes();
    assert_eq!(renewed.len(), 2, "{renewed:?}");
    // The end of the monitor and the keeper leaves nothing of a card, either.
    let (monitor, keeper) = (vm.monitor(), vm.keeper());
    host::kill9(monitor);
    host::kill9(keeper);
    host::wait_gone(&renewed, Duration::from_secs(20));
    vm.wait_ended(Duration::from_secs(20));
    before.expect_unchanged("kill -9 of monitor and keeper of a VM with a card");
}

/// A TAP device of the host, removed with the test.
struct Tap(String);

impl Tap {
    /// Makes a device; `kind` is more words for `ip tuntap add`.
    fn new(address: &str, kind: &[&str]) -> Self {
        let name = format!("mbtest{}", std::process::id() % 100_000);
        let ip = |arguments: &[&str]| Call::new("ip").args(arguments).ok();
        ip(&[&["tuntap", "add", "dev", &name, "mode", "tap", "vnet_hdr"], kind].concat());
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

fn expect_tun() {
    assert!(
        fs::exists("/dev/net/tun").unwrap_or(false),
        "this host has no /dev/net/tun: modprobe tun"
    );
}

#[test]
fn a_tap_device_carries_a_hundred_megabytes_each_way() {
    expect_tun();
    let scratch = Scratch::new("tap");
    let tap = Tap::new("10.77.0.1/24", &[]);
    let vm = VmFile::new("tap")
        .memory("256M")
        .cpus(2)
        .net(&format!("kind = \"tap\"\ntap = \"{}\"", tap.0))
        .start(&scratch);
    vm.add_tool();
    vm.sh("ip link set eth0 up; ip addr flush dev eth0; ip addr add 10.77.0.2/24 dev eth0");
    let listener = TcpListener::bind(("10.77.0.1", 0)).expect("the TAP's address");
    upload(&vm, listener, "10.77.0.1", repetitions(BYTES) as u64);
    download(
        &vm,
        SocketAddr::from(([10, 77, 0, 2], GUEST_PORT)),
        repetitions(BYTES) as u64,
    );
    vm.stop();
}

#[test]
fn a_tap_device_with_two_queue_pairs_uses_both() {
    expect_tun();
    let scratch = Scratch::new("pairs");
    let tap = Tap::new("10.78.0.1/24", &["multi_queue"]);
    let vm = VmFile::new("pairs")
        .memory("256M")
        .cpus(2)
        .net(&format!("kind = \"tap\"\ntap = \"{}\"\nqueues = 2", tap.0))
        .start(&scratch);
    vm.add_tool();
    vm.sh("ip link set eth0 up; ip addr flush dev eth0; ip addr add 10.78.0.2/24 dev eth0");
    let bytes = 10_000_000;
    // The guest's driver picks the pair by the CPU that sends.
    for cpu in [0, 1] {
        let listener = TcpListener::bind(("10.78.0.1", 0)).expect("the TAP's address");
        let port = listener.local_addr().expect("bound").port();
        let receiver = thread::spawn(move || peer::receive(listener.accept()?.0));
        let sent = vm.sh(&format!(
            "taskset {} /tmp/guest-tool send 10.78.0.1:{port} 24 {bytes}",
            1 << cpu
        ));
        let received = receiver.join().expect("no panic").expect("the transfer");
        assert_eq!(sent.trim(), received);
    }
    // The host answers each flow on the pair it came from.
    let interrupts = vm.sh("cat /proc/interrupts");
    for queue in ["virtio0-input.0", "virtio0-input.1"] {
        let count: u64 = interrupts
            .lines()
            .filter(|line| line.ends_with(queue))
            .flat_map(|line| {
                line.split_whitespace()
                    .skip(1)
                    .map_while(|word| word.parse::<u64>().ok())
            })
            .sum();
        assert!(count > 10, "{queue}: {count} interrupts\n{interrupts}");
    }
    vm.stop();
}

/// A VM on the network `name` of a subnet, with its address.
fn subnet_vm(name: &str, network: &str, more: &str, scratch: &Scratch) -> (Vm, String) {
    let vm = VmFile::new(name)
        .memory("256M")
        .net(&format!("kind = \"subnet\"\nnetwork = \"{network}\"\n{more}"))
        .start(scratch);
    vm.add_tool();
    let router = net::lease(&vm, scratch);
    (vm, router)
}

#[test]
fn guests_of_a_subnet_find_each_other_by_name_and_the_outside_by_the_gateway() {
    let scratch = Scratch::new("subnet");
    let network = format!("t-{}", std::process::id());
    let forwarded = net::free_port();
    let forward = format!("forward = [\"{forwarded}:{GUEST_PORT}\"]");
    let (a, router) = subnet_vm("net-a", &network, &forward, &scratch);
    let (b, _) = subnet_vm("net-b", &network, "host = true", &scratch);
    let (other, _) = subnet_vm("net-c", &format!("{network}-other"), "", &scratch);
    // By its name, then by its address.
    let found = b.sh(&format!("nslookup {} {router}", a.name()));
    let address = a.sh("ip -4 addr show dev eth0 | sed -n 's/.*inet \\([0-9.]*\\).*/\\1/p'");
    assert!(found.contains(address.trim()), "{found} has no {address}");
    b.sh(&format!("ping -c 3 -W 10 {}", address.trim()));
    let unknown = other.sh(&format!("nslookup {} {router} || true", a.name()));
    assert!(!unknown.contains(address.trim()), "{unknown}");
    let unreached = other.sh(&format!(
        "ping -c 1 -W 3 {} >&2 && echo reached || echo lost",
        address.trim()
    ));
    assert_eq!(unreached.trim(), "lost");
    // Between two guests.
    let mut receiver = a.tool(&["receive", "7001"]).limit(LIMIT).spawn();
    receiver.wait_for("listening", Duration::from_secs(20));
    let target = format!("{}:7001", address.trim());
    let sent = b.tool(&["send", &target, "31", "3000000"]).limit(LIMIT).ok();
    let received = receiver.wait().expect(0);
    assert_eq!(
        received.text().lines().last(),
        Some(sent.text().trim()),
        "{received}"
    );
    // The host: by its loopback for a card that may, by a forwarded port, and not at all for another card.
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    upload(&b, listener, &router, 3_000_000);
    let from_host = SocketAddr::from(([127, 0, 0, 1], forwarded));
    download(&a, from_host, 3_000_000);
    expect_unreachable(&a, &router);
}
