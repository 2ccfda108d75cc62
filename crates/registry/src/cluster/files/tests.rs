//! Locks and records of cells in a directory of their own.

use std::fs::File;
use std::time::Duration;

use config::cluster::CpuScheduler;
use hostfiles::lock::{Share, at_once};
use policy::cpu::tunables::Tunables;
use protocol::CellId;

use super::*;

fn plan() -> Vec<CellPlan> {
    let cell = |number| CellPlan {
        number,
        host: None,
        cpus: vec![usize::from(number)],
        nodes: vec![0],
        memory_bytes: 1 << 30,
    };
    vec![cell(0), cell(1)]
}

#[test]
fn cell_has_one_process_at_a_time_and_counts_its_incarnations() {
    let directory = tempfile::tempdir().unwrap();
    let files = Files::at(directory.path());
    assert!(files.plan().unwrap().is_empty());
    files.create(&plan(), None).unwrap();
    assert!(files.running().unwrap().is_empty());
    let first = files.cell(1).claim(1).unwrap();
    assert_eq!(first.id, CellId { number: 1, life: 1 });
    assert_eq!(files.running().unwrap(), plan()[1..]);
    assert_eq!(
        files.cell(1).claim(1).unwrap_err().kind(),
        io::ErrorKind::ResourceBusy
    );
    drop(first);
    assert_eq!(files.cell(1).claim(1).unwrap().id.life, 2);
    files.remove().unwrap();
    files.remove().unwrap();
}

#[test]
fn guard_without_a_process_occupies_its_cell_and_keeps_a_second_guard_out() {
    let directory = tempfile::tempdir().unwrap();
    let files = Files::at(directory.path());
    files.create(&plan(), None).unwrap();
    assert!(!files.cell(1).is_guarded() && files.occupied().unwrap().is_empty());
    let guard = files.cell(1).claim_guard(1).unwrap();
    assert!(files.cell(1).is_guarded() && guard.is_current());
    assert_eq!(files.occupied().unwrap(), plan()[1..]);
    assert!(files.running().unwrap().is_empty());
    let busy = files.cell(1).claim_guard(1).unwrap_err();
    assert_eq!(busy.kind(), io::ErrorKind::ResourceBusy);
    // The guard of a failed cell starts no process.
    files.cell(1).fail().unwrap();
    assert!(files.occupied().unwrap().is_empty());
    drop(guard);
    assert!(files.cell(1).claim_guard(1).is_ok());
}

#[test]
fn probe_of_a_lock_keeps_neither_a_process_nor_a_guard_out() {
    let directory = tempfile::tempdir().unwrap();
    let files = Files::at(directory.path());
    files.create(&plan(), None).unwrap();
    drop((
        files.cell(1).claim_guard(1).unwrap(),
        files.cell(1).claim(1).unwrap(),
    ));
    let probe = |name: &str| {
        let file = File::open(files.cell(1).0.join(name)).unwrap();
        at_once(file, Share::Shared).unwrap().expect("nobody keeps it")
    };
    let probes = [probe("guard.lock"), probe("lock")];
    let probing = std::thread::spawn(move || {
        for probe in probes {
            std::thread::sleep(Duration::from_millis(20));
            drop(probe);
        }
    });
    assert!(files.cell(1).claim_guard(1).is_ok() && files.cell(1).claim(1).is_ok());
    probing.join().unwrap();
}

#[test]
fn guard_of_a_cluster_that_was_ended_notices_another_one_in_its_place() {
    let directory = tempfile::tempdir().unwrap();
    let files = Files::at(directory.path());
    files.create(&plan(), None).unwrap();
    let former = files.cell(0).claim_guard(0).unwrap();
    files.remove().unwrap();
    assert!(!former.is_current());
    files.create(&plan(), None).unwrap();
    let next = files.cell(0).claim_guard(0).unwrap();
    assert!(!former.is_current() && next.is_current());
}

#[test]
fn cell_has_failed_until_its_cluster_is_begun_anew() {
    let directory = tempfile::tempdir().unwrap();
    let files = Files::at(directory.path());
    files.create(&plan(), None).unwrap();
    assert!(!files.cell(1).has_failed());
    files.cell(1).fail().unwrap();
    files.cell(1).fail().unwrap();
    assert!(files.cell(1).has_failed() && !files.cell(0).has_failed());
    files.create(&plan(), None).unwrap();
    assert!(!files.cell(1).has_failed());
}

#[test]
fn cordon_outlives_the_cells_processes_but_not_the_plan() {
    let directory = tempfile::tempdir().unwrap();
    let files = Files::at(directory.path());
    files.create(&plan(), None).unwrap();
    files.cell(1).cordon(false).unwrap();
    assert!(!files.cell(1).is_cordoned());
    files.cell(1).cordon(true).unwrap();
    files.cell(1).cordon(true).unwrap();
    drop(files.cell(1).claim(1).unwrap());
    files.create(&plan(), None).unwrap();
    assert!(files.cell(1).is_cordoned() && !files.cell(0).is_cordoned());
    let mut other = plan();
    other[0].memory_bytes = 1;
    files.create(&other, None).unwrap();
    assert!(!files.cell(1).is_cordoned());
}

#[test]
fn record_of_loans_outlives_the_process_but_not_the_plan() {
    let directory = tempfile::tempdir().unwrap();
    let files = Files::at(directory.path());
    files.create(&plan(), None).unwrap();
    assert_eq!(files.cell(1).lent().unwrap(), None);
    let lent = Amounts::from([(0, 1 << 30)]);
    files.cell(1).keep_lent(&lent).unwrap();
    files.create(&plan(), None).unwrap();
    assert_eq!(files.cell(1).lent().unwrap(), Some(lent));
    let requested = Amounts::from([(0, 1 << 29)]);
    files.cell(1).keep_lent_on_request(&requested).unwrap();
    assert_eq!(files.cell(1).lent_on_request().unwrap(), requested);
    // A crash of the host may leave both empty.
    for name in ["lent.json", "lent-on-request.json"] {
        fs::write(files.cell(0).0.join(name), "").unwrap();
    }
    assert_eq!(files.cell(0).lent().unwrap(), None);
    assert!(files.cell(0).lent_on_request().unwrap().is_empty());
    let mut other = plan();
    other[0].memory_bytes = 1;
    files.create(&other, None).unwrap();
    assert_eq!(files.cell(1).lent().unwrap(), None);
    assert!(files.cell(1).lent_on_request().unwrap().is_empty());
}

#[test]
fn cells_borrow_by_themselves_unless_the_record_says_otherwise() {
    let directory = tempfile::tempdir().unwrap();
    let files = Files::at(directory.path());
    assert!(files.borrowing().unwrap().automatic);
    let off = BorrowingSpec {
        automatic: false,
        ..BorrowingSpec::default()
    };
    files.set_borrowing(&off).unwrap();
    assert_eq!(files.borrowing().unwrap(), off);
}

#[test]
fn low_water_of_memory_is_recorded_for_the_cells() {
    let directory = tempfile::tempdir().unwrap();
    let files = Files::at(directory.path());
    assert_eq!(files.pressure().unwrap(), PressureSpec::default());
    let low_water = Some(config::Size(64 << 20));
    files.set_pressure(&PressureSpec { low_water }).unwrap();
    assert_eq!(files.pressure().unwrap().low_water, low_water);
}

#[test]
fn shared_regions_are_those_of_the_record() {
    let directory = tempfile::tempdir().unwrap();
    let files = Files::at(directory.path());
    assert_eq!(files.regions().unwrap(), []);
    let region = RegionSpec {
        name: "table".to_owned(),
        size: config::Size(64 << 20),
        cell: 1,
        readers: Vec::new(),
        writers: vec!["db-*".to_owned()],
    };
    files.set_regions(std::slice::from_ref(&region)).unwrap();
    assert_eq!(files.regions().unwrap(), [region]);
}

#[test]
fn networks_are_those_of_the_record() {
    let directory = tempfile::tempdir().unwrap();
    let files = Files::at(directory.path());
    assert_eq!(files.networks().unwrap(), []);
    let network = NetworkSpec {
        name: "back".to_owned(),
        host: None,
        range: Some("10.20.0.0/24".to_owned()),
        isolated: false,
        outside: Some(vec!["web-*".to_owned()]),
        peers: false,
    };
    files.set_networks(std::slice::from_ref(&network)).unwrap();
    assert_eq!(files.networks().unwrap(), [network]);
}

#[test]
fn linux_divides_the_cpus_unless_the_record_says_otherwise() {
    let directory = tempfile::tempdir().unwrap();
    let files = Files::at(directory.path());
    assert_eq!(files.scheduling().unwrap(), SchedulingSpec::default());
    let gangs = SchedulingSpec {
        cpus: CpuScheduler::Gangs,
        tunables: Some(Tunables {
            slice_ns: 20_000_000,
            ..Tunables::default()
        }),
        lend_cpus: false,
    };
    files.set_scheduling(&gangs).unwrap();
    assert_eq!(files.scheduling().unwrap(), gangs);
}
