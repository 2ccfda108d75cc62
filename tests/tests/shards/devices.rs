//! Disks and network cards, used from the CPUs of each cell.

use std::fs;
use std::net::TcpListener;
use std::thread;

use guest_tests::pattern::{Numbers, digest};
use guest_tests::span::{on_each_cpu, two_cells};
use guest_tests::{Cluster, Scratch, net, peer};

const CPUS: usize = 4;
/// Each CPU's own part of the disk, MiB.
const PART_MIB: usize = 8;
const PART_BYTES: usize = PART_MIB << 20;
const SENT_BYTES: u64 = 5_000_000;

#[test]
fn disks_and_network_serve_the_cpus_of_every_cell() {
    let scratch = Scratch::new("devices");
    let _cluster = Cluster::up(&scratch);
    let mut bytes = vec![0; CPUS * PART_BYTES];
    Numbers::new(61).fill(&mut bytes);
    let source = scratch.write("source", &bytes);
    let copy = scratch.sparse("copy", bytes.len() as u64);
    let vm = two_cells("devices")
        .memory("512M")
        .disk(&source, "read_only = true")
        .disk(&copy, "mode = \"exclusive\"\npersistent = true")
        .net("kind = \"user\"\nhost = true")
        .start(&scratch);
    vm.add_tool();

    // Each CPU copies its part, and then another one, of the other cell, reads it.
    on_each_cpu(&vm, CPUS, |cpu| {
        let at = cpu * PART_MIB;
        format!(
            "dd if=/dev/vda of=/dev/vdb bs=1M count={PART_MIB} skip={at} seek={at} \
             conv=notrunc,fsync 2>/dev/null"
        )
    });
    vm.sh("sync; echo 3 > /proc/sys/vm/drop_caches");
    let read = on_each_cpu(&vm, CPUS, |cpu| {
        let at = (cpu + CPUS / 2) % CPUS * PART_MIB;
        format!("dd if=/dev/vdb bs=1M count={PART_MIB} skip={at} 2>/dev/null | sha256sum")
    });
    let expected = on_each_cpu(&vm, CPUS, |cpu| {
        let at = (cpu + CPUS / 2) % CPUS * PART_MIB;
        format!("dd if=/dev/vda bs=1M count={PART_MIB} skip={at} 2>/dev/null | sha256sum")
    });
    assert_eq!(read, expected);

    // Files too, which the kernel writes when it likes.
    let files = on_each_cpu(&vm, CPUS, |cpu| {
        let at = cpu * PART_MIB;
        format!(
            "dd if=/dev/vda of=/tmp/file{cpu} bs=1M count=2 skip={at} 2>/dev/null; sha256sum < /tmp/file{cpu}"
        )
    });
    let elsewhere = on_each_cpu(&vm, CPUS, |cpu| {
        format!("sha256sum < /tmp/file{}", (cpu + CPUS / 2) % CPUS)
    });
    for (cpu, file) in files.iter().enumerate() {
        assert_eq!(*file, elsewhere[(cpu + CPUS / 2) % CPUS], "CPU {cpu}");
    }

    let router = net::lease(&vm, &scratch);
    let listeners: Vec<_> = (0..CPUS)
        .map(|_| TcpListener::bind(("127.0.0.1", 0)).expect("a free port"))
        .collect();
    let ports: Vec<u16> = listeners
        .iter()
        .map(|one| one.local_addr().expect("bound").port())
        .collect();
    let receivers: Vec<_> = listeners
        .into_iter()
        .map(|listener| thread::spawn(move || peer::receive(listener.accept()?.0)))
        .collect();
    let sent = on_each_cpu(&vm, CPUS, |cpu| {
        format!(
            "/tmp/guest-tool send {router}:{} {} {SENT_BYTES}",
            ports[cpu],
            70 + cpu
        )
    });
    for (cpu, (sent, receiver)) in sent.into_iter().zip(receivers).enumerate() {
        let received = receiver.join().expect("no panic").expect("the transfer");
        assert_eq!(sent, received, "CPU {cpu}");
        assert!(received.ends_with(&format!("-{SENT_BYTES}")), "{received}");
    }
    let servers: Vec<_> = (0..CPUS as u64)
        .map(|cpu| {
            let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
            let port = listener.local_addr().expect("bound").port();
            (
                port,
                thread::spawn(move || peer::send(listener.accept()?.0, 80 + cpu, SENT_BYTES)),
            )
        })
        .collect();
    let fetched = on_each_cpu(&vm, CPUS, |cpu| {
        format!("/tmp/guest-tool fetch {router}:{}", servers[cpu].0)
    });
    for (fetched, (_, server)) in fetched.into_iter().zip(servers) {
        assert_eq!(fetched, server.join().expect("no panic").expect("the transfer"));
    }

    vm.stop();
    let written = fs::read(&copy).expect("the disk's file");
    assert!(
        digest(&written) == digest(&bytes),
        "the copy on the host is another one"
    );
}
