//! Ends a user's VM by root's means alone: sends no request to the user's processes, and trusts no report of
//! theirs.
//!
//! A process is killed if the kernel reports that it is the user's, and that it is in the session or the
//! control group that requested the place. The keeper of the VM is killed first, since one command may have
//! several VMs; then, if the place is still held, all of them. The kernel ends the control group as a whole,
//! so that processes with subordinate ids of the user's (`subuid(5)`) end as well.

use std::fs;
use std::time::{Duration, Instant};

use registry::cluster::files::Files;
use registry::cluster::user_vms::UserVm;

use super::groups::{RecordedGroup, end_if_of};
use super::peer::Process;

/// The first word of a keeper's command line.
const KEEPER: &[u8] = crate::programs::KEEPER.as_bytes();
/// Time that the user's monitor has to give the place back once the VM's keeper is killed.
const KEEPER_LIMIT: Duration = Duration::from_secs(2);
/// Time for all processes of the session and the group to end.
const LIMIT: Duration = Duration::from_secs(5);
/// Interval between two checks.
const INTERVAL: Duration = Duration::from_millis(20);

/// Ends a user's VM, and returns when it has no place any more.
pub fn end(files: &Files, vm: &UserVm) {
    let group = vm.group.as_deref();
    end_with(
        files,
        vm,
        group.and_then(|group| RecordedGroup::of(vm.uid, group)),
    );
}

fn end_with(files: &Files, vm: &UserVm, group: Option<RecordedGroup>) {
    let group = group.as_ref();
    for pid in processes(vm, group) {
        if is_keeper_of(pid, &vm.name) {
            end_if_of(pid, vm.uid);
        }
    }
    let until = |limit| {
        let deadline = Instant::now() + limit;
        move || Instant::now() < deadline
    };
    let waits = until(KEEPER_LIMIT);
    while waits() {
        if !files.has_user_vm(vm) {
            return;
        }
        std::thread::sleep(INTERVAL);
    }
    let waits = until(LIMIT);
    loop {
        let left = processes(vm, group);
        let is_over = left.is_empty() && !group.is_some_and(RecordedGroup::has_members);
        if is_over || !waits() {
            break;
        }
        if let Some(group) = group {
            group.kill();
        }
        left.into_iter().for_each(|pid| end_if_of(pid, vm.uid));
        std::thread::sleep(INTERVAL);
    }
    // The admission server may be gone. A record that it has written since is of another VM.
    if files.has_user_vm(vm) {
        let _ = files.remove_user_vm(vm.uid, &vm.name);
    }
}

/// The user's processes in the session and in the control group of a VM.
fn processes(vm: &UserVm, group: Option<&RecordedGroup>) -> Vec<i32> {
    let in_group = group.map(RecordedGroup::members).unwrap_or_default();
    let all = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let belongs = |pid: &i32| {
        Process::of(*pid).is_ok_and(|process| {
            // Sessions of other PID namespaces are all 0 here.
            let is_of_session = vm.session > 0 && process.session == vm.session;
            process.uid == vm.uid && (is_of_session || in_group.contains(pid))
        })
    };
    numbers.filter(belongs).collect()
}

/// Whether a process's command line names it as the keeper of a VM of this name.
fn is_keeper_of(pid: i32, name: &str) -> bool {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let mut words = line.split(|byte| *byte == 0);
    words.next() == Some(KEEPER) && words.next() == Some(name.as_bytes())
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::path::PathBuf;
    use std::process::{Child, Command};

    use child_process::in_new_session;
    use registry::cluster::interface::VmShare;

    use super::*;

    /// A process in a session of its own.
    fn started(arg0: &str, argument: &str) -> Child {
        let mut command = Command::new("sleep");
        command.arg0(arg0).arg(argument);
        in_new_session(&mut command).spawn().unwrap()
    }

    fn vm(session: i32, name: &str) -> UserVm {
        UserVm {
            uid: nix::unistd::getuid().as_raw(),
            name: name.to_owned(),
            cell: 0,
            share: VmShare {
                vcpus: 1,
                memory_bytes: 1 << 30,
                ..VmShare::default()
            },
            borrowed: Vec::new(),
            session,
            group: None,
        }
    }

    #[test]
    fn keeper_is_known_by_its_command_line() {
        let mut child = started("mirrorball-keeper", "60");
        let pid = child.id() as i32;
        let is_known = (
            is_keeper_of(pid, "60"),
            is_keeper_of(pid, "6"),
            is_keeper_of(pid, ""),
        );
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(is_known, (true, false, false));
        assert!(!is_keeper_of(pid, "60"));
    }

    #[test]
    fn vm_whose_keeper_does_not_end_it_ends_with_its_whole_session() {
        let directory = tempfile::tempdir().unwrap();
        let files = Files::at(directory.path());
        let (mut child, mut other) = (started("liar", "60"), started("mirrorball-keeper", "61"));
        let held = vm(child.id() as i32, "61");
        files.keep_user_vm(&held).unwrap();
        end(&files, &held);
        assert_eq!(files.user_vms().unwrap(), []);
        assert!(!child.wait().unwrap().success());
        // The keeper of a VM of the same name in another session.
        assert!(other.try_wait().unwrap().is_none());
        other.kill().unwrap();
        other.wait().unwrap();
    }

    #[test]
    fn process_in_the_group_ends_whatever_its_user_id_is() {
        let (directory, host) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let files = Files::at(directory.path());
        // The process is in the group, and is not known by its user id or its session.
        let mut child = started("helper", "60");
        let mut held = vm(0, "web");
        let path = PathBuf::from(format!("mirrorball-users/{}/4.7", held.uid));
        held.group = Some(path.clone());
        files.keep_user_vm(&held).unwrap();
        let folder = host.path().join(&path);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("cgroup.events"), "populated 1\nfrozen 0\n").unwrap();
        fs::write(folder.join("cgroup.kill"), "").unwrap();
        let kernel = std::thread::spawn(move || {
            let deadline = Instant::now() + LIMIT;
            while fs::read_to_string(folder.join("cgroup.kill")).unwrap() != "1" {
                assert!(Instant::now() < deadline, "the group is not killed");
                std::thread::sleep(INTERVAL);
            }
            child.kill().unwrap();
            child.wait().unwrap();
            fs::write(folder.join("cgroup.events"), "populated 0\nfrozen 0\n").unwrap();
        });
        let group = RecordedGroup::below(host.path(), held.uid, &path);
        assert!(group.is_some());
        end_with(&files, &held, group);
        kernel.join().unwrap();
        assert_eq!(files.user_vms().unwrap(), []);
    }

    #[test]
    fn process_of_another_user_is_in_no_session_of_this_ones() {
        let mut child = started("sleep", "60");
        let mut foreign = vm(child.id() as i32, "x");
        assert_eq!(processes(&foreign, None), [child.id() as i32]);
        foreign.uid += 1;
        assert!(processes(&foreign, None).is_empty());
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
