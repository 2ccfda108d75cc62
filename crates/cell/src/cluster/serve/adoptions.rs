//! The VMs of the cell that this process serves, each on a thread of its own.
//!
//! An error in an adoption ends the process, as a fault would: values that it had taken can't be released
//! without an end of the VM. A VM whose adoption has ended two processes of the cell in a row is set aside:
//! its keeper has a monitor serve it. The count is a file in the VM's directory, from the time on when its
//! keeper has accepted the cell until clients are served.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use fault_point::fault_point;
use hostfiles::private;
use keeper::socket::Socket;
use locks::{IgnorePoison, lock};
use registry::cluster::interface::CellResponse;
use registry::cluster::windows::CellReport;
use registry::control::{Request, ask};
use registry::vms::{self, Record, Registry};
use shard_api::Platform;
use tracing::{error, info, warn};

use super::cpu_lending::LendingReport;
use super::span_windows::WindowArbiter;
use crate::cluster::adoption_table::{AdoptionTable, Failures, Unreadable, Verdict};
use crate::ending::of_failed_cell;
use crate::handle::VmHandle;
use crate::memory_watch::{MemoryWatch, ROUND};
use crate::monitor::Accepted;
use crate::scheduler::Scheduler;
use crate::vm::keeper::KEEPER_SOCKET;

/// The file with the number of adoptions that were begun and not completed.
const ATTEMPTS_FILE: &str = "adoptions";
/// The file that says that drivers had the VM's vCPUs, each on one CPU.
const SCHEDULED_FILE: &str = "scheduled";
/// Time limit for a VM to be adopted before it is ended in another way.
const ADOPTION_LIMIT: Duration = Duration::from_secs(5);
/// Time limit for the VMs of an earlier process to be adopted.
const FIRST_LIMIT: Duration = Duration::from_secs(25);
/// Interval between two checks whether a VM is adopted.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);
/// Time limit for a VM to end that another process serves.
const KILL_LIMIT: Duration = Duration::from_secs(30);

/// Adopts the cell's VMs. Cheap to clone; all clones are the same.
#[derive(Clone, Debug)]
pub(super) struct Adoptions {
    cell: u16,
    platform: Platform,
    /// The drivers of the cell's CPUs, if it has any.
    scheduler: Option<Scheduler>,
    /// Moves between cells by decision, where there are any.
    lending: Option<Arc<LendingReport>>,
    /// Arbiter of windows, where the CPUs have drivers.
    windows: Option<WindowArbiter>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    table: Mutex<AdoptionTable<VmHandle>>,
    /// Notified when the table changes.
    changed: Condvar,
}

impl Adoptions {
    pub(super) fn new(
        cell: u16,
        is_on_trial: bool,
        platform: Platform,
        scheduler: Option<Scheduler>,
    ) -> Self {
        let shared = Shared {
            table: AdoptionTable::new(is_on_trial).into(),
            changed: Condvar::new(),
        };
        Self {
            cell,
            platform,
            scheduler,
            lending: None,
            windows: None,
            shared: Arc::new(shared),
        }
    }

    /// The same with a report of moves between cells by decision.
    pub(super) fn with_lending(self, lending: Option<Arc<LendingReport>>) -> Self {
        Self { lending, ..self }
    }

    /// The counts of moves between cells by decision.
    pub(super) fn report_lending(&self) -> CellResponse {
        match &self.lending {
            Some(lending) => CellResponse::CpuLending(lending.counts()),
            None => CellResponse::Refused {
                why: "the cell lends no CPU by itself (`lend_cpus` in [scheduling] of the cluster file)"
                    .to_owned(),
            },
        }
    }

    /// The same with an arbiter of windows.
    pub(super) fn with_windows(self, windows: Option<WindowArbiter>) -> Self {
        Self { windows, ..self }
    }

    /// Takes the report of a cell as the arbiter of windows.
    pub(super) fn arrange_windows(&self, report: CellReport) -> CellResponse {
        match &self.windows {
            Some(arbiter) => arbiter.respond(report),
            None => CellResponse::Refused {
                why: format!("the CPUs of cell {} have no drivers", self.cell),
            },
        }
    }

    /// The VMs that are served.
    pub(super) fn served(&self) -> Vec<VmHandle> {
        self.table().served().cloned().collect()
    }

    /// Starts a thread that takes a vCPU back from a lender that needs its CPU.
    ///
    /// # Errors
    /// If the host has no threads left.
    pub(super) fn begin_to_return_cpu(
        &self,
        (vm, vcpu): (String, u8),
        lender: u16,
        told: impl FnOnce(CellResponse) + Send + 'static,
    ) -> io::Result<()> {
        let adoptions = self.clone();
        let back = move || {
            let named = |handle: &VmHandle| handle.recorder().read(|record| record.name == vm) == Some(true);
            let handle = adoptions.served().into_iter().find(named);
            if let Some(lending) = &adoptions.lending {
                lending.note_recall(lender);
            }
            let returned = match handle {
                Some(handle) => handle.return_by_decision(vcpu, Some(lender)),
                None => Err(io::Error::other(format!("VM {vm} is not served just now"))),
            };
            told(match returned {
                Ok(()) => CellResponse::Done,
                Err(error) => CellResponse::Refused {
                    why: error.to_string(),
                },
            });
        };
        std::thread::Builder::new()
            .name("return".into())
            .spawn(back)
            .map(drop)
    }

    /// Adopts the VMs that an earlier process of the cell left.
    ///
    /// # Errors
    /// If the registry can't be read.
    pub(super) fn begin_all(&self) -> io::Result<()> {
        let registry = Registry::open()?;
        for record in registry.list()? {
            let folder = registry.folder_of(&record.name)?;
            // A VM over several hosts has no keeper, and a VM whose monitor still opens its files is adopted
            // when that monitor requests it.
            if record.cell != Some(self.cell) || !folder.join(KEEPER_SOCKET).exists() {
                continue;
            }
            self.change(|table| table.await_first(record.cid));
            if let Err(error) = self.begin_in(&folder, &record) {
                warn!(vm = record.name, %error, "the VM is not adopted");
            }
            self.change(|table| table.tried_first(record.cid));
        }
        self.change(AdoptionTable::all_are_listed);
        Ok(())
    }

    /// Starts a thread that watches the host's memory for the VMs that are served, while some can be trimmed.
    ///
    /// # Errors
    /// If the host has no threads left.
    pub(super) fn begin_to_watch_memory(&self, mut watch: MemoryWatch) -> io::Result<()> {
        let adoptions = self.clone();
        let watch = move || {
            loop {
                let vms = adoptions.await_trimmable();
                watch.round(&vms);
                std::thread::sleep(ROUND);
            }
        };
        std::thread::Builder::new()
            .name("memory".into())
            .spawn(watch)
            .map(drop)
    }

    /// Waits until a VM is served that can be trimmed. Returns all of them.
    fn await_trimmable(&self) -> Vec<VmHandle> {
        let can = |vm: &&VmHandle| vm.trimmable().is_some();
        let none = |table: &mut AdoptionTable<VmHandle>| !table.served().any(|vm| can(&vm));
        let table = self.shared.changed.wait_while(self.table(), none);
        table.ignore_poison().served().filter(can).cloned().collect()
    }

    fn change<T>(&self, change: impl FnOnce(&mut AdoptionTable<VmHandle>) -> T) -> T {
        let changed = change(&mut self.table());
        self.shared.changed.notify_all();
        changed
    }

    /// Starts a thread that waits until the VMs are adopted that an earlier process of the cell left. Refuses
    /// if one can't be, or it takes longer than [`FIRST_LIMIT`].
    ///
    /// # Errors
    /// If the host has no threads left.
    pub(super) fn begin_to_await_first(
        &self,
        told: impl FnOnce(CellResponse) + Send + 'static,
    ) -> io::Result<()> {
        let adoptions = self.clone();
        let wait = move || told(adoptions.await_first());
        std::thread::Builder::new()
            .name("trial".into())
            .spawn(wait)
            .map(drop)
    }

    fn await_first(&self) -> CellResponse {
        let open = |table: &mut AdoptionTable<VmHandle>| table.is_trial_open();
        let waited = self
            .shared
            .changed
            .wait_timeout_while(self.table(), FIRST_LIMIT, open);
        let (mut table, _) = waited.ignore_poison();
        let why = match table.verdict() {
            Verdict::Adopted => return CellResponse::Done,
            Verdict::Refused(reasons) => reasons.join("; "),
            Verdict::Late(count) => {
                format!("{count} VMs were not adopted within {} s", FIRST_LIMIT.as_secs())
            }
        };
        CellResponse::Refused { why }
    }

    /// Orders the VM's keeper to wait for the end of the process that serves it now, and serves the VM from
    /// then on; `again`, if it was set aside.
    ///
    /// # Errors
    /// If the VM is not of this cell, was set aside, or its keeper can't be reached.
    pub(super) fn begin(&self, name: &str, again: bool) -> io::Result<()> {
        let folder = Registry::open()?.folder_of(name)?;
        let record = vms::read(&folder)?;
        if record.cell != Some(self.cell) {
            return Err(io::Error::other("the VM has no place in this cell"));
        }
        if again {
            end_attempt(&folder);
        }
        self.begin_in(&folder, &record)
    }

    /// Starts a thread that lists the vCPUs of the VMs that are served: a spanning VM's shards have seconds
    /// to report where theirs are.
    ///
    /// # Errors
    /// If the host has no threads left.
    pub(super) fn begin_to_list_vcpus(
        &self,
        told: impl FnOnce(CellResponse) + Send + 'static,
    ) -> io::Result<()> {
        let vms = self.served();
        let (scheduler, lending) = (self.scheduler.clone(), self.lending.clone());
        let list = move || {
            let (mut vcpus, mut missing) = (Vec::new(), Vec::new());
            for vm in vms {
                // A VM that has ended has no name any more.
                let Some(name) = vm.recorder().read(|record| record.name.clone()) else {
                    continue;
                };
                match vm.vcpus() {
                    Ok(all) => vcpus.extend(all),
                    Err(error) => missing.push((name, error.to_string())),
                }
            }
            let queues = scheduler.map_or_else(Vec::new, |scheduler| scheduler.queues());
            told(CellResponse::Vcpus {
                vcpus,
                missing,
                queues,
                lending: lending.map(|lending| lending.counts()),
            });
        };
        std::thread::Builder::new()
            .name("vcpus".into())
            .spawn(list)
            .map(drop)
    }

    /// Ends a VM because of a failed cell, which may be its own. Does not wait for its end.
    pub(super) fn end(&self, name: &str, failed: u16) {
        let end = || {
            let folder = Registry::open()?.folder_of(name)?;
            let record = vms::read(&folder)?;
            let why = of_failed_cell(failed);
            let adoptions = self.clone();
            let end = move || adoptions.end_now(&record, &folder, &why);
            std::thread::Builder::new().name("end".into()).spawn(end)
        };
        if let Err(error) = end() {
            error!(vm = name, %error, "the VM does not end");
        }
    }

    /// Ends the VM of `record`; adopts it first if no process serves it, so that its client receives the
    /// reason.
    fn end_now(&self, record: &Record, folder: &Path, why: &str) {
        // A VM that can't be adopted is ended below.
        let _ = self.begin_in(folder, record);
        let deadline = Instant::now() + ADOPTION_LIMIT;
        while Instant::now() < deadline {
            // The table is unlocked before the VM ends, which may take seconds.
            let vm = self.table().get(record.cid).map(|vm| vm.cloned());
            match vm {
                Some(Some(vm)) => return vm.end_as_lost(why.to_owned()),
                Some(None) => {}
                None => break,
            }
            std::thread::sleep(LOOK_INTERVAL);
        }
        // By the process that serves it, unless another VM has the name by now.
        if vms::read(folder).is_ok_and(|now| now.cid == record.cid) {
            let _ = ask(folder, &Request::Kill, Some(KILL_LIMIT));
        }
    }

    /// Adopts the VM in `folder`, unless this is under way.
    fn begin_in(&self, folder: &Path, record: &Record) -> io::Result<()> {
        let cid = record.cid;
        if !self.change(|table| table.begin(cid)) {
            return Ok(());
        }
        let begun = failures(folder)
            .and_then(|_| Socket::connect(&folder.join(KEEPER_SOCKET)))
            .and_then(|keeper| {
                let (adoptions, folder, name) = (self.clone(), folder.to_owned(), record.name.clone());
                let serve = move || adoptions.serve(keeper, &folder, &name, cid);
                std::thread::Builder::new().name(record.name.clone()).spawn(serve)
            });
        if begun.is_err() {
            self.change(|table| table.is_over(cid));
        }
        begun.map(drop)
    }

    /// Serves a VM, until it has ended or another process has to serve it.
    fn serve(&self, keeper: OwnedFd, folder: &Path, name: &str, cid: u32) {
        let _over = AdoptionGuard(self, cid);
        match Accepted::by(keeper) {
            Ok(vm) => self.adopt(vm, folder, name, cid),
            Err(error) => {
                warn!(vm = name, %error, "the VM is not adopted");
                // A later attempt of this program would fail as well; the former program's may not.
                if error.kind() == io::ErrorKind::InvalidData {
                    let why = format!("VM {name}: {error}");
                    if self.change(|table| table.is_unreadable(why)) == Unreadable::SetAside {
                        let _ = count(folder, Failures::SET_ASIDE);
                    }
                }
            }
        }
    }

    /// Serves a VM that no other process serves, until it has ended.
    fn adopt(&self, vm: Accepted, folder: &Path, name: &str, cid: u32) {
        let before = failures(folder).unwrap_or(Failures::SET_ASIDE);
        let may_not = |table: &mut AdoptionTable<VmHandle>| !table.begin_attempt(cid, before);
        drop(self.shared.changed.wait_while(self.table(), may_not));
        // A VM whose directory can't be written is adopted all the same.
        let _ = count(folder, before.with_begun());
        fault_point!(adopt_accepted);
        vm.serve(self.platform, |handle| {
            end_attempt(folder);
            self.change(|table| table.is_served(cid, handle.clone()));
            info!(vm = name, "the VM is served");
            // The process before may have died in the midst of a move.
            handle.restrict_to_borrowed_cpus();
            self.begin_scheduling(folder, cid, handle);
            fault_point!(adopt_served);
        });
    }

    /// Brings a VM to the drivers of the cell's CPUs. Without drivers, it gives the vCPUs back the CPUs that
    /// drivers of an earlier process took from them.
    fn begin_scheduling(&self, folder: &Path, cid: u32, handle: &VmHandle) {
        let mark = folder.join(SCHEDULED_FILE);
        match &self.scheduler {
            Some(scheduler) => {
                // An earlier process may have died while it had each vCPU on one CPU for its windows.
                if mark.exists() && handle.spans_this_host() {
                    handle.restore_affinity();
                }
                // Without the mark the threads would stay on their CPUs without drivers; the VM runs on.
                let _ = hostfiles::replace_volatile_file(&mark, private::FILE_MODE, b"");
                scheduler.serve(cid, handle);
            }
            None if mark.exists() => {
                handle.restore_affinity();
                let _ = fs::remove_file(&mark);
            }
            None => {}
        }
    }

    /// Ends the drivers of the cell's CPUs, if there are any, before the process ends by order.
    pub(super) fn end_scheduling(&self) {
        if let Some(scheduler) = &self.scheduler {
            scheduler.end();
        }
    }

    fn table(&self) -> MutexGuard<'_, AdoptionTable<VmHandle>> {
        lock(&self.shared.table)
    }
}

/// The adoption of a VM by a thread, which is over when this is dropped: others may wait for it.
struct AdoptionGuard<'a>(&'a Adoptions, u32);

impl Drop for AdoptionGuard<'_> {
    fn drop(&mut self) {
        if let Some(scheduler) = &self.0.scheduler {
            scheduler.is_over(self.1);
        }
        self.0.change(|table| table.is_over(self.1));
    }
}

/// Adoptions of the VM that have failed in a row.
///
/// # Errors
/// If it was set aside for them.
fn failures(folder: &Path) -> io::Result<Failures> {
    let failures = match fs::read_to_string(folder.join(ATTEMPTS_FILE)) {
        Ok(text) => Failures::read(&text),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Failures::default(),
        Err(error) => return Err(error),
    };
    if failures.is_set_aside() {
        return Err(io::Error::other(format!(
            "the VM was set aside, since its adoption failed {} times; help: `mirrorball cluster adopt VM` \
             tries again",
            failures.count()
        )));
    }
    Ok(failures)
}

/// Sets the number of adoptions that have failed in a row. One that begins counts until its end.
fn count(folder: &Path, failures: Failures) -> io::Result<()> {
    let text = failures.count().to_string();
    hostfiles::replace_volatile_file(&folder.join(ATTEMPTS_FILE), private::FILE_MODE, text.as_bytes())
}

/// Records that the adoption did not fail: those before it count no longer.
fn end_attempt(folder: &Path) {
    // Without a file none was counted.
    let _ = fs::remove_file(folder.join(ATTEMPTS_FILE));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vm_is_set_aside_when_two_adoptions_have_failed_in_a_row() {
        let directory = tempfile::tempdir().unwrap();
        let begin = || count(directory.path(), failures(directory.path())?.with_begun());
        for _ in 0..5 {
            begin().unwrap();
            end_attempt(directory.path());
        }
        begin().unwrap();
        begin().unwrap();
        let error = begin().unwrap_err().to_string();
        assert!(error.contains("set aside") && error.contains("help: "), "{error}");
        end_attempt(directory.path());
        begin().unwrap();
        fs::write(directory.path().join(ATTEMPTS_FILE), "x").unwrap();
        assert!(begin().is_err(), "a count that makes no sense");
    }
}
