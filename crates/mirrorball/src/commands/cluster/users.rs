//! Users that a cluster admits: checks of `up`, output of `status`, and other clusters of the host.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use cell::cluster::admission;
use config::Size;
use config::cluster::{CellPlan, UserPlan, overlap};
use config::cpulist;
use miette::{IntoDiagnostic, Result, miette};
use nix::unistd::geteuid;
use registry::cluster::admission::{Reply, Request, UserStatus, UserUse, request};
use registry::cluster::files::Files;
use registry::cluster::interface::owner_of;
use registry::cluster::user_vms::UserVm;

use super::plan::host_nodes;

/// Time limit for the admission server to start and to end.
const LIMIT: Duration = Duration::from_secs(10);
/// Poll interval for its state.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Checks before a cluster of `plan` begins that it may admit `users`, and that the host's cluster does not
/// use its CPUs or memory.
pub(super) fn check(plan: &[CellPlan], users: &[UserPlan]) -> Result<()> {
    if geteuid().is_root() {
        return check_admission(users);
    }
    if !users.is_empty() {
        return Err(miette!(
            help = "let root bring it up, or leave `[[users]]` out",
            "only root's cluster can admit other users: their processes are no other user's to limit"
        ));
    }
    match request(&Request::Taken {}) {
        Ok(Some(Reply::Taken { cells })) => match overlap(plan, &cells, &host_nodes()?) {
            None => Ok(()),
            Some(what) => Err(miette!(
                help = "name other `cpus` and less `memory` for each cell in a cluster file",
                "the host's cluster, which is root's, has cells with the same resources: {what}"
            )),
        },
        Ok(_) => Ok(()),
        Err(error) => {
            eprintln!("mirrorball: it is not known what the host's cluster has: {error}");
            Ok(())
        }
    }
}

fn check_admission(users: &[UserPlan]) -> Result<()> {
    if users.is_empty() || !admission::is_served().map_err(|error| miette!("{error}"))? {
        return Ok(());
    }
    Err(miette!(
        help = "end that cluster, or leave `[[users]]` out of this one",
        "another cluster of this host admits users already"
    ))
}

/// Waits until the admission server serves the cluster's users. False if a signal asked a foreground process
/// to end meanwhile.
pub(super) fn wait_until_admitted(files: &Files, users: &[UserPlan]) -> Result<bool> {
    if users.is_empty() {
        return Ok(true);
    }
    let deadline = Instant::now() + LIMIT;
    while !matches!(request(&Request::Status {}), Ok(Some(Reply::Users { .. }))) {
        if super::foreground::is_to_end() {
            return Ok(false);
        }
        if Instant::now() > deadline {
            let said = std::fs::read_to_string(files.admission_log()).unwrap_or_default();
            let said = said.lines().last().unwrap_or("nothing").to_owned();
            return Err(miette!(
                help = "end the cluster with `mirrorball cluster down`",
                "users are not admitted after {} s; the admission server said: {said}",
                LIMIT.as_secs()
            ));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(true)
}

/// Waits until the admission server has ended, and removes the socket.
pub(super) fn wait_until_closed() -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    while admission::is_served().into_diagnostic()? {
        if Instant::now() > deadline {
            return Err(miette!(
                help = "end the process `mirrorball cell-admission`",
                "the admission server did not end within {} s",
                LIMIT.as_secs()
            ));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    admission::remove_socket().into_diagnostic()
}

/// Formats names of VMs in the cluster for people: `alice:web` for another user's VM.
pub(super) fn names(vms: &[String], users: &[UserPlan]) -> Vec<String> {
    let name = |vm: &String| {
        let owned = owner_of(vm);
        let known = owned.and_then(|(uid, _)| users.iter().find(|user| user.uid == uid));
        match (owned, known) {
            (Some((_, vm)), Some(user)) => format!("{}:{vm}", user.name),
            _ => vm.clone(),
        }
    };
    vms.iter().map(name).collect()
}

/// Ends a VM of another user, which is named as in [`names`], or with the user's id.
pub(super) fn evict(vm: &str) -> Result<ExitCode> {
    let files = Files::open().into_diagnostic()?;
    let users = files.users().into_diagnostic()?;
    let vms = files.user_vms().into_diagnostic()?;
    let is_named = |known: &&UserVm| {
        let owned = known.owned_name();
        owned == vm || names(std::slice::from_ref(&owned), &users) == [vm]
    };
    let found = vms.iter().find(is_named).ok_or_else(|| {
        miette!(
            help = "`mirrorball cluster status` shows them, as USER:VM",
            "no VM {vm} of another user is in this host's cells"
        )
    })?;
    admission::end(&files, found);
    Ok(ExitCode::SUCCESS)
}

/// Prints the use of the cluster's users, for its owner.
pub(super) fn print_use(users: &[UserPlan]) {
    if users.is_empty() {
        return;
    }
    match request(&Request::Status {}) {
        Ok(Some(Reply::Users { users })) => users.iter().for_each(|user| println!("{}", use_line(user))),
        Ok(_) => eprintln!("mirrorball: the admission server does not run; users' VMs run on"),
        Err(error) => eprintln!("mirrorball: the admission server does not answer: {error}"),
    }
}

fn use_line(user: &UserUse) -> String {
    let size = |bytes: u64| Size(bytes >> 20 << 20);
    format!(
        "user {}: {} of {} vCPUs, {} of {}; limits: {}",
        user.name,
        user.used.vcpus,
        user.most.vcpus,
        size(user.used.memory_bytes),
        size(user.most.memory_bytes),
        user.limits.describe()
    )
}

/// Shows this user's share of the host's cluster. Returns the exit status; none if no cluster admits the
/// user.
pub(super) fn status(json: bool) -> Result<Option<ExitCode>> {
    if geteuid().is_root() {
        return Ok(None);
    }
    let reply = request(&Request::Status {}).map_err(|error| {
        miette!(
            help = "try again, or tell the cluster's administrator",
            "the host's cluster does not answer: {error}"
        )
    })?;
    match reply {
        Some(Reply::Status(status)) if json => {
            println!("{}", serde_json::to_string_pretty(&status).into_diagnostic()?);
        }
        Some(Reply::Status(status)) => print(&status),
        Some(Reply::Refused { why }) => return Err(miette!("{why}")),
        _ => return Ok(None),
    }
    Ok(Some(ExitCode::SUCCESS))
}

fn print(status: &UserStatus) {
    println!("{:<5} {:<12} {:<8} {:>8}", "CELL", "CPUS", "NODES", "FREE");
    for cell in &status.cells {
        let nodes: Vec<usize> = cell.nodes.iter().map(|node| *node as usize).collect();
        println!(
            "{:<5} {:<12} {:<8} {:>8}",
            cell.number,
            cpulist::write(&cell.cpus),
            cpulist::write(&nodes),
            format!("{}M", cell.free_bytes >> 20)
        );
    }
    println!("{}", use_line(&status.own));
    for vm in &status.own.vms {
        println!(
            "{}: cell {}, {} vCPUs, {}M",
            vm.name,
            vm.cell,
            vm.share.vcpus,
            vm.share.memory_bytes >> 20
        );
    }
}

#[cfg(test)]
mod tests {
    use registry::cluster::admission::Limits;
    use registry::cluster::interface::VmShare;

    use super::*;

    #[test]
    fn vm_of_another_user_is_shown_with_its_owner() {
        let alice = UserPlan {
            uid: 1001,
            name: "alice".to_owned(),
            vcpus: 4,
            memory_bytes: 8 << 30,
        };
        let vms = ["web", "1001:web", "1002:web"].map(str::to_owned);
        assert_eq!(names(&vms, &[alice]), ["web", "alice:web", "1002:web"]);
    }

    #[test]
    fn use_of_a_user_is_a_line_that_says_who_holds_the_limits() {
        let share = |vcpus, mib: u64| VmShare {
            vcpus,
            memory_bytes: mib << 20,
            ..VmShare::default()
        };
        let mut user = UserUse {
            uid: 1001,
            name: "alice".to_owned(),
            most: share(4, 8192),
            used: share(2, 3072),
            limits: Limits::Group,
            vms: Vec::new(),
        };
        assert_eq!(
            use_line(&user),
            "user alice: 2 of 4 vCPUs, 3G of 8G; limits: held by control groups"
        );
        user.limits = Limits::BestEffort;
        assert!(use_line(&user).ends_with("limits: best effort"));
    }
}
