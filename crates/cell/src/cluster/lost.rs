//! The end of VMs whose host has lost its membership, where the cluster's file has `on_lost = "stop"`.
//!
//! A cell records each time at which etcd has confirmed that it is a member: the time of the request, not of
//! the answer. When the last of these times is as long ago as a lease lasts, the cell's guard ends the cell's
//! VMs, whether the cell's process runs, hangs or is dead. The other cells free the VMs' names when they have
//! seen the cell absent for that time and a margin ([`super::membership::LAPSE_MARGIN`]). Both are intervals
//! on one host's clock each (leases, Gray and Cheriton, SOSP '89), so hosts need not agree on the time of
//! day. The clock counts while the host is suspended.

use std::io;
use std::path::Path;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use config::cluster::{OnLost, Site};
use nix::time::{ClockId, clock_gettime};
use registry::cluster::files::{CellFiles, Files};
use registry::control::{Request, ask};
use registry::vms::{Record, Registry, read};
use tracing::{error, warn};

use super::membership::lease_seconds;
use crate::pidfd;

/// Interval between two reads of the cell's record.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Time limit for a VM to end by order. Then its keeper is killed.
const KILL_LIMIT: Duration = Duration::from_secs(1);

/// Records that the cell was a member at `at`.
///
/// # Errors
/// If the record can't be written.
pub fn note(cell: &CellFiles, at: Instant) -> io::Result<()> {
    let past = u64::try_from(at.elapsed().as_millis()).unwrap_or(u64::MAX);
    cell.note_member(uptime_ms()?.saturating_sub(past))
}

/// Whether a cell that was a member at `member_ms` for certain, both in milliseconds of one clock, may have
/// lost its names by `now_ms`.
fn is_lost(member_ms: u64, now_ms: u64, lease: Duration) -> bool {
    u128::from(now_ms.saturating_sub(member_ms)) >= lease.as_millis()
}

/// Ends the VMs of a cell whenever its membership is lost, until the cluster is down or has other rules.
pub fn watch(files: &Files, number: u16) {
    // A plan that can't be read now is no end of the cluster.
    while !files.plan().is_ok_and(|plan| plan.is_empty()) {
        if let Ok(Some(site)) = files.site()
            && let Err(error) = end_if_lost(&files.cell(number), number, &site)
        {
            error!(%error, "VMs of a cell that is lost are not ended");
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Whether a cell may have lost its names, where VMs of lost hosts end. False for a cell that never was a
/// member: it has promised no names.
pub fn is_past_lease(cell: &CellFiles, site: &Site) -> bool {
    if site.on_lost != OnLost::Stop {
        return false;
    }
    let lease = Duration::from_secs(lease_seconds(site.silence_ms));
    let member_ms = cell.last_member();
    // A clock that can't be read is a reason to end.
    member_ms.is_some_and(|member_ms| uptime_ms().map_or(true, |now_ms| is_lost(member_ms, now_ms, lease)))
}

fn end_if_lost(cell: &CellFiles, number: u16, site: &Site) -> io::Result<()> {
    if !is_past_lease(cell, site) {
        return Ok(());
    }
    let registry = Registry::open()?;
    let lost = registry.list()?;
    let ends: Vec<_> = lost
        .into_iter()
        .filter(|record| record.cell == Some(number))
        .map(|record| {
            warn!(
                vm = record.name,
                "the VM ends, since its cell is no member of the cluster any more"
            );
            let folder = registry.folder_of(&record.name)?;
            std::thread::Builder::new()
                .name("end".into())
                .spawn(move || end(&folder, &record))
        })
        .collect();
    for end in ends {
        let _ = end?.join();
    }
    Ok(())
}

/// Ends a VM, through the process that serves it or by killing it.
fn end(folder: &Path, record: &Record) {
    let (send, ended) = mpsc::channel();
    let asked = folder.to_owned();
    let ask = move || _ = send.send(ask(&asked, &Request::Kill, Some(KILL_LIMIT)).is_ok());
    // A process that hangs may hold the request up for longer than its limit.
    let begun = std::thread::Builder::new().name("kill".into()).spawn(ask);
    if begun.is_ok() && ended.recv_timeout(KILL_LIMIT) == Ok(true) {
        return;
    }
    let is_same = |now: Record| now.cid == record.cid && now.keeper_pid == record.keeper_pid;
    for pid in [record.keeper_pid, record.shard_pid].into_iter().flatten() {
        // The identity of the process is checked after its descriptor is open.
        if let Ok(process) = pidfd::open(pid)
            && read(folder).is_ok_and(is_same)
        {
            pidfd::kill(std::os::fd::AsFd::as_fd(&process));
        }
    }
}

/// Milliseconds since the host's start, time in suspension included.
fn uptime_ms() -> io::Result<u64> {
    let time = Duration::from(clock_gettime(ClockId::CLOCK_BOOTTIME)?);
    Ok(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cell_is_lost_when_its_last_proof_of_membership_is_as_old_as_a_lease() {
        let lease = Duration::from_secs(5);
        assert!(!is_lost(1000, 5999, lease));
        assert!(is_lost(1000, 6000, lease));
        assert!(!is_lost(7000, 6000, lease));
    }

    #[test]
    fn note_has_the_time_of_the_question() {
        let directory = tempfile::tempdir().unwrap();
        let files = Files::at(directory.path());
        let plan = config::cluster::CellPlan {
            number: 3,
            host: None,
            cpus: vec![0],
            nodes: vec![0],
            memory_bytes: 1 << 30,
        };
        files.create(&[plan], None).unwrap();
        let cell = files.cell(3);
        assert_eq!(cell.last_member(), None);
        let asked = Instant::now();
        std::thread::sleep(Duration::from_millis(30));
        note(&cell, asked).unwrap();
        let past = uptime_ms().unwrap() - cell.last_member().unwrap();
        assert!((30..10_000).contains(&past), "{past} ms");
    }
}
