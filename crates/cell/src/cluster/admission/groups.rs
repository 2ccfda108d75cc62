//! The control groups (cgroup v2) of users' VMs: one for each process that requests places, below one for
//! each user.
//!
//! A process is in its group before it has its place, so keeper and shard, which it starts afterwards, are in
//! it too. The groups are root's, so no process of a user leaves one. A group has the CPUs and the nodes of
//! its places' cells, and their memory. A user's group has the user's limits.
//!
//! Work on the groups of one user may take long: the kernel moves pages when the nodes of a group change. So
//! each user's groups have a lock of their own.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::{Mutex, TryLockError};
use std::time::{Duration, Instant};

use config::cluster::UserPlan;
use config::cpulist;
use registry::cluster::interface::{VmPlacement, VmShare};

use super::lock;
use super::peer::{self, Peer, Process};

/// The mount point of the control groups.
const ROOT: &str = "/sys/fs/cgroup";
/// Folder below [`ROOT`] with the groups of all users.
const OURS: &str = "mirrorball-users";
const CONTROLLERS: &str = "+cpuset +cpu +memory +pids";
/// Period of a limit of CPU time, in microseconds.
const PERIOD_US: u64 = 100_000;
/// Memory of a VM's processes beside the guest's, in bytes: monitor, keeper, shard, page tables, cards.
const OVERHEAD_BYTES: u64 = 256 << 20;
/// Processes and threads of one user's VMs, for each vCPU.
const TASKS_OF_VCPU: u64 = 256;
/// Time that processes may run on after their last place was given back.
const GRACE: Duration = Duration::from_secs(30);

/// The groups of all users that the cluster admits, or that have groups of an earlier server.
#[derive(Debug)]
pub(super) struct Groups(BTreeMap<u32, Mutex<UserGroups>>);

/// The groups of one user that this process has made or found.
#[derive(Debug)]
struct UserGroups {
    root: PathBuf,
    known: BTreeMap<PathBuf, Group>,
}

#[derive(Debug, Default)]
struct Group {
    uid: u32,
    places: BTreeMap<String, Held>,
    /// The time since which it has no place.
    left: Option<Instant>,
    /// An earlier server made the group. That server had a record of all its places, so its limits stay.
    is_found: bool,
}

/// The resources that a place adds to its group.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Held {
    cpus: Vec<usize>,
    nodes: Vec<u32>,
    memory_bytes: u64,
}

/// The limits of a group.
#[derive(Debug, PartialEq, Eq)]
struct Bounds {
    cpus: String,
    nodes: String,
    memory_bytes: u64,
}

impl Groups {
    /// Prepares the host for the groups of these users, and takes over those of an earlier server.
    ///
    /// # Errors
    /// If this host's control groups can't hold a VM to its place.
    pub(super) fn open(admitted: impl Iterator<Item = u32>) -> io::Result<Self> {
        let root = PathBuf::from(ROOT);
        put(&root.join("cgroup.subtree_control"), CONTROLLERS)?;
        let ours = root.join(OURS);
        make(&ours)?;
        put(&ours.join("cgroup.subtree_control"), CONTROLLERS)?;
        Self::at(&root, admitted)
    }

    /// The groups below `root`. Those of an earlier server that no process is in are removed.
    fn at(root: &Path, admitted: impl Iterator<Item = u32>) -> io::Result<Self> {
        let admitted: BTreeSet<u32> = admitted.collect();
        let mut users = BTreeMap::new();
        for uid in folders(&root.join(OURS))?.filter_map(|name| name.parse().ok()) {
            let mut found = UserGroups::found(root, uid)?;
            found.sweep();
            // The limits of a user who is not admitted any more go with the last group.
            let is_over = !admitted.contains(&uid) && found.known.is_empty();
            if !is_over || fs::remove_dir(root.join(user_group(uid))).is_err() {
                users.insert(uid, Mutex::new(found));
            }
        }
        for uid in admitted {
            users
                .entry(uid)
                .or_insert_with(|| Mutex::new(UserGroups::new(root)));
        }
        Ok(Self(users))
    }

    /// Puts a process into its group, which has this place, too, from now on. Returns the group.
    ///
    /// # Errors
    /// If the user is not admitted, the process has ended, or the host refuses. Then the group is as before.
    pub(super) fn join(
        &self,
        peer: &Peer,
        user: &UserPlan,
        vm: &str,
        place: &VmPlacement,
        share: VmShare,
    ) -> io::Result<PathBuf> {
        let groups = self.0.get(&user.uid).ok_or(io::ErrorKind::NotFound)?;
        lock(groups).join(peer, user, vm, place, share)
    }

    /// Takes a place out of a group of this user's.
    pub(super) fn part(&self, uid: u32, group: &Path, vm: &str) {
        if let Some(groups) = self.0.get(&uid) {
            lock(groups).part(group, vm);
        }
    }

    /// Removes groups without places. Processes that have gone on for too long without a place end. Groups
    /// that another thread works on are left for the next time.
    pub(super) fn sweep(&self) {
        for groups in self.0.values() {
            match groups.try_lock() {
                Ok(mut groups) => groups.sweep(),
                Err(TryLockError::Poisoned(groups)) => groups.into_inner().sweep(),
                Err(TryLockError::WouldBlock) => {}
            }
        }
    }
}

impl UserGroups {
    fn new(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
            known: BTreeMap::new(),
        }
    }

    /// The groups that an earlier server made for a user. None has a place yet.
    fn found(root: &Path, uid: u32) -> io::Result<Self> {
        let user = user_group(uid);
        let found = folders(&root.join(&user))?.map(|name| {
            let group = Group {
                uid,
                left: Some(Instant::now()),
                is_found: true,
                ..Group::default()
            };
            (user.join(name), group)
        });
        Ok(Self {
            root: root.to_owned(),
            known: found.collect(),
        })
    }

    /// Puts a process into its group, which has this place, too, from now on. Returns the group.
    ///
    /// # Errors
    /// If the process has ended, or the host refuses. Then the group is as before.
    fn join(
        &mut self,
        peer: &Peer,
        user: &UserPlan,
        vm: &str,
        place: &VmPlacement,
        share: VmShare,
    ) -> io::Result<PathBuf> {
        let cgroup = fs::read_to_string(format!("/proc/{}/cgroup", peer.pid))?;
        let joined = group_of(&cgroup, user.uid);
        let is_in = joined.is_some();
        let group = match joined {
            Some(group) => group,
            None => {
                self.make_user(user)?;
                let start = Process::of(peer.pid)?.start;
                let group = user_group(user.uid).join(format!("{}.{start}", peer.pid));
                make(&self.root.join(&group))?;
                group
            }
        };
        let known = self.known.entry(group.clone()).or_insert_with(|| Group {
            is_found: is_in,
            uid: user.uid,
            ..Group::default()
        });
        known.left = None;
        let held = Held {
            cpus: place.plan.cpus.clone(),
            nodes: place.plan.nodes.clone(),
            memory_bytes: share.memory_bytes,
        };
        known.places.insert(vm.to_owned(), held);
        let joined = self.bound(&group).and_then(|()| match is_in {
            true => Ok(()),
            false => self.add(&group, peer),
        });
        if let Err(error) = joined {
            self.part(&group, vm);
            return Err(error);
        }
        Ok(group)
    }

    /// Takes a place out of a group.
    fn part(&mut self, group: &Path, vm: &str) {
        let Some(known) = self.known.get_mut(group) else {
            return;
        };
        known.places.remove(vm);
        if known.places.is_empty() {
            known.left = Some(Instant::now());
            self.sweep();
        } else if let Err(error) = self.bound(group) {
            tracing::warn!(%error, group = %group.display(), "the limits of a group stay as they were");
        }
    }

    /// Removes groups without places. Processes that have gone on for too long without a place end.
    fn sweep(&mut self) {
        let root = &self.root;
        self.known.retain(|path, group| {
            let Some(left) = group.left else { return true };
            let folder = root.join(path);
            if fs::remove_dir(&folder).is_ok() || !folder.exists() {
                return false;
            }
            // Places of one that was found may still come back.
            if left.elapsed() > GRACE && !group.is_found {
                tracing::debug!(group = %path.display(), "processes go on without a place, and are ended");
                if !kill(&folder) {
                    members(&folder)
                        .into_iter()
                        .for_each(|pid| end_if_of(pid, group.uid));
                }
            }
            true
        });
    }

    fn make_user(&self, user: &UserPlan) -> io::Result<()> {
        let folder = self.root.join(user_group(user.uid));
        make(&folder)?;
        put(&folder.join("cgroup.subtree_control"), CONTROLLERS)?;
        let vcpus = u64::from(user.vcpus);
        let cpu_us = vcpus.saturating_mul(PERIOD_US);
        put(&folder.join("cpu.max"), &format!("{cpu_us} {PERIOD_US}"))?;
        let overhead_bytes = vcpus.saturating_mul(OVERHEAD_BYTES);
        let memory_bytes = user.memory_bytes.saturating_add(overhead_bytes);
        put(&folder.join("memory.max"), &memory_bytes.to_string())?;
        let tasks = vcpus.saturating_mul(TASKS_OF_VCPU);
        put(&folder.join("pids.max"), &tasks.to_string())
    }

    /// Sets the limits of a group to the sum of its places.
    fn bound(&self, group: &Path) -> io::Result<()> {
        let Some(known) = self.known.get(group).filter(|known| !known.is_found) else {
            return Ok(());
        };
        let bounds = Bounds::of(known.places.values());
        let folder = self.root.join(group);
        put(&folder.join("cpuset.mems"), &bounds.nodes)?;
        put(&folder.join("cpuset.cpus"), &bounds.cpus)?;
        put(&folder.join("memory.max"), &bounds.memory_bytes.to_string())
    }

    fn add(&self, group: &Path, peer: &Peer) -> io::Result<()> {
        let folder = self.root.join(group);
        // The holder of the lock before may have kept it for long.
        if !peer.lives() {
            return Err(io::ErrorKind::NotFound.into());
        }
        put(&folder.join("cgroup.procs"), &peer.pid.to_string())?;
        if peer.lives() {
            return Ok(());
        }
        // The id may have been another process's by then.
        for pid in members(&folder) {
            if Process::of(pid).is_ok_and(|process| process.uid != peer.uid) {
                put(&self.root.join("cgroup.procs"), &pid.to_string())?;
            }
        }
        Err(io::ErrorKind::NotFound.into())
    }
}

impl Bounds {
    fn of<'a>(places: impl Iterator<Item = &'a Held>) -> Self {
        let (mut cpus, mut nodes, mut memory_bytes) = (BTreeSet::new(), BTreeSet::new(), 0_u64);
        for place in places {
            cpus.extend(&place.cpus);
            nodes.extend(place.nodes.iter().map(|node| *node as usize));
            memory_bytes = memory_bytes
                .saturating_add(place.memory_bytes)
                .saturating_add(OVERHEAD_BYTES);
        }
        let list = |set: BTreeSet<usize>| cpulist::write(&set.into_iter().collect::<Vec<_>>());
        Self {
            cpus: list(cpus),
            nodes: list(nodes),
            memory_bytes,
        }
    }
}

/// A control group that is written down in the record of a user's VM.
#[derive(Debug)]
pub(super) struct RecordedGroup {
    folder: PathBuf,
    uid: u32,
}

impl RecordedGroup {
    /// The group of a user by its path below the root of control groups; none if the path is that of no group
    /// of the user's VMs.
    pub(super) fn of(uid: u32, group: &Path) -> Option<Self> {
        Self::below(Path::new(ROOT), uid, group)
    }

    pub(super) fn below(root: &Path, uid: u32, group: &Path) -> Option<Self> {
        let folder = root.join(group);
        is_group_of(group, uid).then_some(Self { folder, uid })
    }

    /// The processes in the group.
    pub(super) fn members(&self) -> Vec<i32> {
        members(&self.folder)
    }

    /// Kills all processes in the group, those with other ids of the user's, too. Where the kernel can't, it
    /// kills those with the user's id.
    pub(super) fn kill(&self) {
        if !kill(&self.folder) {
            self.members()
                .into_iter()
                .for_each(|pid| end_if_of(pid, self.uid));
        }
    }

    /// Whether a process is in the group (`cgroup.events`).
    pub(super) fn has_members(&self) -> bool {
        let events = fs::read_to_string(self.folder.join("cgroup.events")).unwrap_or_default();
        events.lines().any(|line| line == "populated 1")
    }
}

/// Kills all processes in a group and below it (`cgroup.kill`, Linux 5.14). Returns whether the kernel can.
/// Processes that are forked meanwhile are killed, too.
fn kill(folder: &Path) -> bool {
    put(&folder.join("cgroup.kill"), "1").is_ok()
}

fn members(folder: &Path) -> Vec<i32> {
    let list = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
    list.lines().filter_map(|line| line.trim().parse().ok()).collect()
}

/// Kills a process, if it is this user's.
pub(super) fn end_if_of(pid: i32, uid: u32) {
    let Ok(process) = peer::open(pid) else { return };
    // The descriptor is not another process's from here on, and if the process is this user's now, it was
    // then.
    if Process::of(pid).is_ok_and(|known| known.uid == uid) {
        peer::kill(std::os::fd::AsFd::as_fd(&process));
    }
}

/// The group of all VMs of a user, below the root of control groups.
fn user_group(uid: u32) -> PathBuf {
    Path::new(OURS).join(uid.to_string())
}

/// The group of ours that a process of this user is in, by its `/proc` file `cgroup`; none if it is in none.
fn group_of(text: &str, uid: u32) -> Option<PathBuf> {
    let path = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let path = Path::new(path);
    is_group_of(path, uid).then(|| path.to_owned())
}

/// Whether a path below the root of control groups is that of a group of this user's VMs.
fn is_group_of(path: &Path, uid: u32) -> bool {
    let Ok(name) = path.strip_prefix(user_group(uid)) else {
        return false;
    };
    let mut parts = name.components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None))
}

/// The names of the folders in a folder; none if it is missing.
fn folders(folder: &Path) -> io::Result<impl Iterator<Item = String> + use<>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => Some(entries),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(at(folder, &error)),
    };
    let entries = entries.into_iter().flatten().flatten();
    let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    Ok(folders.filter_map(|entry| entry.file_name().into_string().ok()))
}

fn make(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(at(path, &error)),
        _ => Ok(()),
    }
}

/// Writes to a file that is there: where no cgroup v2 is mounted a new one would limit nothing.
fn put(path: &Path, text: &str) -> io::Result<()> {
    let mut file = fs::OpenOptions::new()
        .write(true)
        .open(path)
        .map_err(|error| at(path, &error))?;
    io::Write::write_all(&mut file, text.as_bytes()).map_err(|error| at(path, &error))
}

fn at(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(cpus: &[usize], nodes: &[u32], gib: u64) -> Held {
        Held {
            cpus: cpus.to_vec(),
            nodes: nodes.to_vec(),
            memory_bytes: gib << 30,
        }
    }

    #[test]
    fn group_has_what_its_places_have_together() {
        let places = [held(&[2, 3], &[1], 1), held(&[0, 1, 3], &[0, 1], 2)];
        let bounds = Bounds {
            cpus: "0-3".to_owned(),
            nodes: "0-1".to_owned(),
            memory_bytes: (3 << 30) + 2 * OVERHEAD_BYTES,
        };
        assert_eq!(Bounds::of(places.iter()), bounds);
        let one = Bounds::of(places[..1].iter());
        assert_eq!((&one.cpus[..], &one.nodes[..]), ("2-3", "1"));
    }

    #[test]
    fn group_of_a_process_is_one_of_its_own_users() {
        let group = Path::new("mirrorball-users/1001/42.7");
        let text = |path: &str| format!("12:cpu:/x\n0::/{path}\n");
        assert_eq!(
            group_of(&text("mirrorball-users/1001/42.7"), 1001),
            Some(group.to_owned())
        );
        for other in [
            "",
            "mirrorball-users",
            "mirrorball-users/1001",
            "mirrorball-users/1002/42.7",
            "mirrorball-users/1001/a/b",
            "user.slice/mirrorball-users/1001/42.7",
            "mirrorball-users/10011/42.7",
            "mirrorball-users/1001/..",
        ] {
            assert_eq!(group_of(&text(other), 1001), None, "{other}");
        }
    }

    /// A folder with groups, as in the file system of control groups. A group with a member can't be removed
    /// there, and a folder with a file can't be here.
    fn host(groups: &[(&str, bool)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (group, has_member) in groups {
            let folder = root.path().join(OURS).join(group);
            fs::create_dir_all(&folder).unwrap();
            if *has_member {
                fs::write(folder.join("member"), "").unwrap();
            }
        }
        root
    }

    #[test]
    fn groups_of_an_earlier_server_are_removed_when_no_process_is_in_them() {
        let host = host(&[
            ("1001/4.7", false),
            ("1001/5.7", true),
            ("1002/6.7", false),
            ("1003/7.7", true),
        ]);
        let ours = host.path().join(OURS);
        let is_there = |group: &str| ours.join(group).exists();
        let groups = Groups::at(host.path(), [1001].into_iter()).unwrap();
        assert!(!is_there("1001/4.7") && is_there("1001/5.7"));
        // A user who is not admitted any more.
        assert!(!is_there("1002") && is_there("1003/7.7"));
        fs::remove_file(ours.join("1001/5.7/member")).unwrap();
        groups.sweep();
        assert!(is_there("1001") && !is_there("1001/5.7"));
    }

    #[test]
    fn slow_work_on_the_groups_of_one_user_delays_no_other() {
        let host = host(&[("1001/4.7", true), ("1002/5.7", true)]);
        let ours = host.path().join(OURS);
        let groups = Groups::at(host.path(), [1001, 1002].into_iter()).unwrap();
        let _slow = groups.0[&1001].lock().unwrap();
        fs::remove_file(ours.join("1002/5.7/member")).unwrap();
        groups.part(1002, Path::new("mirrorball-users/1002/6.7"), "web");
        groups.sweep();
        assert!(!ours.join("1002/5.7").exists());
    }

    #[test]
    fn process_of_another_user_is_not_ended() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id() as i32;
        let own = Process::of(pid).unwrap().uid;
        end_if_of(pid, own + 1);
        assert!(child.try_wait().unwrap().is_none());
        end_if_of(pid, own);
        assert!(!child.wait().unwrap().success());
        end_if_of(pid, own);
    }
}
