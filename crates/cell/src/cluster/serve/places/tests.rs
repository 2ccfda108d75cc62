//! Places in the host's registry.

use registry::vms::State as VmState;

use super::*;

fn record(span: Vec<policy::span::Part>) -> Record {
    let spec = config::parse("vm.toml", "image = \"debian-12\"\ncpus = 4\nmemory = \"1G\"\n").unwrap();
    Record {
        state: VmState::Running,
        cell: Some(1),
        span,
        ..Record::new("a".to_owned(), spec, 3)
    }
}

fn seen(record: &Record) -> Vec<(String, u16, u32, u64)> {
    let places = places(record).into_iter();
    places
        .map(|place| {
            (
                place.name,
                place.cell,
                place.share.vcpus,
                place.share.memory_bytes >> 20,
            )
        })
        .collect()
}

#[test]
fn a_vm_has_one_place_or_none() {
    let mut record = record(Vec::new());
    assert_eq!(seen(&record), [("a".to_owned(), 1, 4, 1024)]);
    record.cell = None;
    assert_eq!(seen(&record), []);
}

#[test]
fn vm_that_can_be_trimmed_has_what_was_counted_for_it() {
    let mut record = record(Vec::new());
    record.spec.resident = Some(config::Size(512 << 20));
    assert_eq!(
        seen(&record),
        [("a".to_owned(), 1, 4, 1024)],
        "its limit may be raised"
    );
    record.spec.memory_min = Some(config::Size(128 << 20));
    // The states of 262,144 pages take 10 MiB.
    assert_eq!(seen(&record), [("a".to_owned(), 1, 4, 138)]);
}

fn part(cell: u16, vcpus: std::ops::Range<u8>, mib: u64) -> policy::span::Part {
    policy::span::Part {
        cell,
        vcpus,
        memory_bytes: mib << 20,
    }
}

#[test]
fn a_spanning_vm_has_one_for_each_part_as_its_record_says() {
    let written = serde_json::to_string(&record(vec![part(1, 0..3, 768), part(0, 3..4, 256)])).unwrap();
    let read: Record = serde_json::from_str(&written).unwrap();
    let (home, other) = (("a".to_owned(), 1, 3, 768), ("a/1".to_owned(), 0, 1, 256));
    assert_eq!(seen(&read), [home, other]);
}

#[test]
fn with_coherent_memory_each_part_has_a_copy_of_all_of_it() {
    let mut record = record(vec![part(1, 0..3, 768), part(0, 3..4, 256)]);
    record.spec.span = Some(config::SpanSpec::Coherent(vec![1, 0]));
    let (home, other) = (("a".to_owned(), 1, 3, 1024), ("a/1".to_owned(), 0, 1, 1024));
    assert_eq!(seen(&record), [home, other]);
}
