//! Limits of the requests to disks.

use crate::{DiskName, Size, VmSpec};

fn parsed(more: &str) -> Result<VmSpec, String> {
    let text = format!("image = \"debian-12\"\n{more}\n");
    crate::parse("vm.toml", &text).map_err(|error| error.to_string())
}

#[test]
fn disks_and_the_root_disk_have_limits() {
    let mut spec = parsed(
        "root = { bandwidth = \"64K\" }\n[[disks]]\npath = \"/a\"\n[[disks]]\npath = \"/b\"\noperations = 1",
    )
    .unwrap();
    let mut limits = |disk: &str| {
        let limits = spec.disk_limits(disk.parse().unwrap()).unwrap();
        (limits.bandwidth.map(|size| size.0), *limits.operations)
    };
    assert_eq!(limits("root"), (Some(64 << 10), None));
    assert_eq!(limits("0"), (None, None));
    assert_eq!(limits("1"), (None, Some(1)));
    let fault = spec.disk_limits(DiskName::Other(2)).unwrap_err();
    assert!(fault.message.contains("the VM file has 2"), "{}", fault.message);
    *spec.disk_limits(DiskName::Other(0)).unwrap().bandwidth = Some(Size(1 << 20));
    let text = crate::text_of(&spec).unwrap();
    assert!(text.contains("bandwidth = \"1M\""), "{text}");
}

#[test]
fn limits_that_stop_a_disk_or_that_nothing_counts_are_refused() {
    for (wrong, message) in [
        ("[[disks]]\npath = \"/a\"\nbandwidth = \"63K\"", "too few bytes"),
        ("[[disks]]\npath = \"/a\"\noperations = 0", "no requests at all"),
        ("root = { operations = 0 }", "no requests at all"),
        (
            "[[disks]]\npath = \"/a\"\nas = \"pmem\"\noperations = 5",
            "no requests that could be counted",
        ),
        (
            "[[disks]]\npath = \"/a\"\nas = \"pmem\"\nbandwidth = \"1M\"",
            "no requests that could be counted",
        ),
    ] {
        let error = parsed(wrong).unwrap_err();
        assert!(error.contains(message), "{wrong}: {error}");
    }
    let kernel = "root = { operations = 5 }\n[kernel]\npath = \"/boot/vmlinuz\"\n";
    let error = crate::parse("vm.toml", kernel).unwrap_err().to_string();
    assert!(error.contains("without an image"), "{error}");
}
