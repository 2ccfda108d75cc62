//! Risk: a driver leaves its device, or moves it, and the next driver finds it in a wrong state or nowhere.
//!
//! All with the sandbox closed: the shard's system calls for these must be among those that it may still
//! make.

use std::collections::BTreeSet;

use guest_tests::pattern::{Numbers, digest};
use guest_tests::{Scratch, Vm, VmFile};

const MIB: usize = 1 << 20;
/// The entropy device, whichever number it has among the virtio devices.
const ENTROPY: &str = "/sys/bus/virtio/drivers/virtio_rng/virtio*";

struct Guest {
    vm: Vm,
    contents: String,
    _scratch: Scratch,
}

impl Guest {
    fn start(name: &str) -> Self {
        let scratch = Scratch::new(name);
        let mut bytes = vec![0; 4 * MIB];
        Numbers::new(5).fill(&mut bytes);
        let disk = scratch.write("disk", &bytes);
        let vm = VmFile::new(name)
            .cpus(2)
            .key("sandbox", "\"require\"")
            .disk(&disk, "")
            .disk(&disk, "")
            .net("kind = \"user\"")
            .start(&scratch);
        vm.add_tool();
        Self {
            vm,
            contents: digest(&bytes),
            _scratch: scratch,
        }
    }

    /// Checks that the disks are read right, the network card receives frames from outside, and the entropy
    /// device gives random bytes.
    #[track_caller]
    fn works(&self, when: &str) {
        for disk in ["/dev/vda", "/dev/vdb"] {
            let found = self.vm.tool(&["disk-digest", disk]).ok().text();
            assert_eq!(found.trim(), self.contents, "{disk} {when}");
        }
        let lease = "ip link set eth0 up && udhcpc -i eth0 -n -q -t 10 -T 1 -s /bin/true 2>&1";
        let said = self.vm.sh(lease);
        assert!(said.contains("obtained"), "the network {when}: {said}");
        let current = self.vm.sh("cat /sys/class/misc/hw_random/rng_current");
        assert!(current.starts_with("virtio_rng"), "hwrng {when}: {current}");
        let [first, second] = [(); 2].map(|()| {
            let read = self.vm.exec(["head", "-c", "4096", "/dev/hwrng"]);
            read.ok().stdout
        });
        for bytes in [&first, &second] {
            // Each value is expected 16 times: more than 40 missing ones are no chance.
            let values: BTreeSet<u8> = bytes.iter().copied().collect();
            let (count, values) = (bytes.len(), values.len());
            assert!(
                count == 4096 && values > 216,
                "{count} bytes, {values} different, from /dev/hwrng {when}"
            );
        }
        assert!(first != second, "/dev/hwrng gave the same bytes twice {when}");
    }

    /// The PCI address of the device that the guest knows as `path` in `/sys`.
    fn address(&self, path: &str) -> String {
        let place = self.vm.sh(&format!("readlink -f {path}"));
        let address = place.split('/').find(|part| part.starts_with("0000:00:"));
        address.unwrap_or_else(|| panic!("{path} is {place}")).to_owned()
    }
}

#[test]
fn drivers_are_unbound_and_bound_and_their_modules_loaded_again() {
    let guest = Guest::start("rebind");
    guest.works("at first");
    let devices = [
        guest.address("/sys/block/vda/device"),
        guest.address("/sys/class/net/eth0/device"),
        guest.address(ENTROPY),
    ];
    for round in 0..3 {
        for device in &devices {
            let driver = "/sys/bus/pci/drivers/virtio-pci";
            guest.vm.sh(&format!(
                "echo {device} >{driver}/unbind; ! [ -e {driver}/{device} ]; echo {device} >{driver}/bind"
            ));
        }
        guest.works(&format!("bound again, round {round}"));
    }
    guest.vm.sh("for module in blk net rng; do \
             rmmod virtio_$module && insmod /modules/virtio?$module.ko || exit 1; done");
    guest.works("with new modules");
    guest.vm.stop();
}

/// The address of a device's first BAR.
#[track_caller]
fn bar(vm: &Vm, device: &str) -> u64 {
    let line = vm.sh(&format!("head -1 /sys/bus/pci/devices/{device}/resource"));
    let start = line
        .split_whitespace()
        .next()
        .and_then(|word| word.strip_prefix("0x"));
    let start = start.and_then(|word| u64::from_str_radix(word, 16).ok());
    start.unwrap_or_else(|| panic!("no BAR of {device} in {line:?}"))
}

#[test]
fn devices_work_wherever_the_guest_puts_their_registers() {
    let guest = Guest::start("move");
    // Not the first device, which any alignment would put at the same place again.
    for path in ["/sys/block/vdb/device", "/sys/class/net/eth0/device"] {
        let device = guest.address(path);
        let before = bar(&guest.vm, &device);
        // Found again, it gets a place of the alignment asked for: 2^25 bytes.
        guest.vm.sh(&format!(
            "echo 25@{device} >/sys/bus/pci/resource_alignment; \
             echo 1 >/sys/bus/pci/devices/{device}/remove; echo 1 >/sys/bus/pci/rescan"
        ));
        let after = bar(&guest.vm, &device);
        assert!(
            after != before && after.is_multiple_of(1 << 25),
            "{device} went from {before:#x} to {after:#x}"
        );
        guest.works(&format!("with {device} moved"));
    }
    guest.vm.stop();
}
