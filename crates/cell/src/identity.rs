//! The user and group of a VM's shards outside their user namespace: numbers of a range, which no other VM
//! and no daemon has.
//!
//! Root takes the range of the entry `mirrorball` in `/etc/subuid` and `/etc/subgid`; without one, a range
//! that systemd's list of users and groups leaves unused. Another user takes the range of their own entry,
//! which `newuidmap` and `newgidmap` (uidmap, shadow-utils) map. VMs take numbers from the end of a range,
//! parts of VMs of other hosts from its beginning.

use std::fs;
use std::ops::Range;

use hostfiles::passwd;
use nix::unistd::geteuid;
use shard_api::launch::Identity;

/// The entry of root's VMs.
const ENTRY: &str = "mirrorball";
/// Range without a use in <https://systemd.io/UIDS-GIDS/>: above the containers' range, below 2^31.
const UNUSED: Range<u32> = 0x7000_0000..0x8000_0000;
/// The user that a kernel shows for files and processes without a mapping in this namespace.
const NOBODY: u32 = 65_534;

/// The position of a shard's number in the range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdOwner {
    /// The number of a VM, counted by its address on the socket device.
    Vm(u32),
    /// The number of a part of another host's VM, counted from 0.
    Part(u32),
    /// The number of the gateway of the user's subnet: the last of those of parts.
    Gateway,
}

/// The identity of a shard, and a note if it has none of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Given {
    /// The user and group; none where the shard keeps its user's.
    pub identity: Option<Identity>,
    /// The reason why they are not its own, if they are not.
    pub note: Option<String>,
}

impl Given {
    /// The identity for the shards at `place`, on this host.
    pub fn of(place: IdOwner) -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let (uids, gids) = (read("/etc/subuid"), read("/etc/subgid"));
        if geteuid().is_root() {
            let mapped = (read("/proc/self/uid_map"), read("/proc/self/gid_map"));
            return of_root(place, (&uids, &gids), (&mapped.0, &mapped.1));
        }
        let uid = geteuid();
        let name = passwd::name_of(uid.as_raw());
        let names = [name.unwrap_or_default(), uid.to_string()];
        let refused = |why: &str| Self {
            identity: None,
            note: Some(format!("user id of its own: {why}")),
        };
        let Some((uids, gids)) = entry(&uids, &names).zip(entry(&gids, &names)) else {
            return refused(
                "this user has no range in /etc/subuid and /etc/subgid; `usermod --add-subuids` adds one",
            );
        };
        Self {
            identity: Some(identity(place, &uids, &gids)),
            note: None,
        }
    }
}

/// The identity of root's shards, by the files `/etc/subuid` and `/etc/subgid` and the maps of this user
/// namespace.
fn of_root(place: IdOwner, (uids, gids): (&str, &str), (uid_map, gid_map): (&str, &str)) -> Given {
    let names = [ENTRY.to_owned()];
    let range = |text| entry(text, &names).unwrap_or(UNUSED);
    let own = identity(place, &range(uids), &range(gids));
    let nobody = Identity {
        uid: NOBODY,
        gid: NOBODY,
    };
    let is_mapped = |one: &Identity| is_mapped(uid_map, one.uid) && is_mapped(gid_map, one.gid);
    if is_mapped(&own) {
        return Given {
            identity: Some(own),
            note: None,
        };
    }
    let note = format!(
        "user id of its own: {} and {} are not mapped in this user namespace; name a range `{ENTRY}` in \
         /etc/subuid and /etc/subgid",
        own.uid, own.gid
    );
    Given {
        // `nobody` may belong to other processes too, but is not root.
        identity: Some(nobody).filter(is_mapped),
        note: Some(note),
    }
}

/// The first range of a file like `/etc/subuid` that is not empty and belongs to one of `names`. Ranges that
/// contain root, or numbers that no user can have, are skipped.
fn entry(text: &str, names: &[String]) -> Option<Range<u32>> {
    text.lines().find_map(|line| {
        let mut fields = line.trim().split(':');
        let (name, start, count) = (fields.next()?, fields.next()?, fields.next()?);
        if name.is_empty() || !names.iter().any(|wanted| wanted == name) {
            return None;
        }
        let (start, count): (u32, u32) = (start.parse().ok()?, count.parse().ok()?);
        // The last of all numbers means no user.
        let end = start.checked_add(count)?;
        (start > 0 && count > 0).then_some(start..end)
    })
}

fn identity(place: IdOwner, uids: &Range<u32>, gids: &Range<u32>) -> Identity {
    Identity {
        uid: number(place, uids),
        gid: number(place, gids),
    }
}

/// The number of `range` at `place`: half of them for VMs. Numbers repeat only after all have been used.
fn number(place: IdOwner, range: &Range<u32>) -> u32 {
    let count = range.end - range.start;
    let for_parts = count / 2;
    match place {
        IdOwner::Part(part) if for_parts > 0 => range.start + part % for_parts,
        IdOwner::Gateway => range.start + for_parts.saturating_sub(1),
        IdOwner::Vm(number) | IdOwner::Part(number) => range.end - 1 - number % (count - for_parts),
    }
}

/// Whether a map like `/proc/self/uid_map` has the number `id` inside.
fn is_mapped(map: &str, id: u32) -> bool {
    map.lines().any(|line| {
        let mut numbers = line
            .split_whitespace()
            .filter_map(|word| word.parse::<u64>().ok());
        let (first, _, count) = (numbers.next(), numbers.next(), numbers.next());
        let first_and_count = first.zip(count);
        first_and_count.is_some_and(|(first, count)| (first..first + count).contains(&u64::from(id)))
    })
}

#[cfg(test)]
mod tests {
    use std::fs::{File, Permissions};
    use std::os::fd::AsFd;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    use std::path::Path;
    use std::process::Command;
    use std::time::{Duration, Instant};

    use keeper::spawn::{Child, Namespaces, Spawn, spawn};
    use nix::mount::{MsFlags, mount};
    use nix::sched::{CloneFlags, unshare};
    use nix::unistd::Pid;

    use super::*;

    const WHOLE: (&str, &str) = ("         0          0 4294967295\n", "0 0 4294967295\n");

    fn uid(given: &Given) -> u32 {
        given.identity.expect("root's shards always have one").uid
    }

    #[test]
    fn each_vm_of_root_has_a_number_of_its_own_which_is_no_daemons() {
        let given = |place| of_root(place, ("", ""), WHOLE);
        let places = (3..2003).map(IdOwner::Vm).chain((0..2000).map(IdOwner::Part));
        let mut uids: Vec<u32> = places.map(|place| uid(&given(place))).collect();
        assert!(uids.iter().all(|uid| UNUSED.contains(uid)));
        uids.sort_unstable();
        uids.dedup();
        assert_eq!(uids.len(), 4000);
        assert_eq!(given(IdOwner::Vm(3)).note, None);
    }

    #[test]
    fn root_takes_the_range_that_the_host_names() {
        let subuid = "alice:100000:65536\nmirrorball:500000:100\n";
        let subgid = "mirrorball:700000:10";
        let given = of_root(IdOwner::Vm(3), (subuid, subgid), WHOLE);
        assert_eq!(
            given.identity,
            Some(Identity {
                uid: 500_096,
                gid: 700_006
            })
        );
        let part = of_root(IdOwner::Part(1), (subuid, subgid), WHOLE);
        assert_eq!(uid(&part), 500_001);
        let gateway = of_root(IdOwner::Gateway, (subuid, subgid), WHOLE);
        assert_eq!(uid(&gateway), 500_049);
    }

    #[test]
    fn numbers_that_are_not_mapped_make_nobody_and_are_reported_and_never_root() {
        let container = "0 100000 65536\n";
        let given = of_root(IdOwner::Vm(3), ("", ""), (container, container));
        assert_eq!(uid(&given), NOBODY);
        assert!(given.note.is_some_and(|note| note.contains("not mapped")));
        let alone = of_root(IdOwner::Vm(3), ("", ""), ("0 1000 1", "0 1000 1"));
        assert!(alone.identity.is_none() && alone.note.is_some());
        let inside = of_root(
            IdOwner::Vm(3),
            ("mirrorball:60000:500", "mirrorball:60000:500"),
            (container, container),
        );
        assert_eq!((uid(&inside), inside.note), (60_496, None));
    }

    #[test]
    fn a_range_that_is_none_is_passed_over() {
        let names = ["mirrorball".to_owned(), String::new()];
        for text in [
            "",
            "mirrorball",
            "mirrorball:1",
            "mirrorball:x:1",
            "mirrorball:1000:0",
            "mirrorball:0:65536",
            "mirrorball:4294967295:2",
            ":1000:10",
            "mirrorballs:1000:10",
        ] {
            assert_eq!(entry(text, &names), None, "{text:?}");
        }
        assert_eq!(
            entry("a:1:1\n mirrorball:7:2 \nmirrorball:9:1", &names),
            Some(7..9)
        );
        assert_eq!(number(IdOwner::Part(5), &(7..8)), 7);
    }

    /// A user that a test makes up, and the ids that it may give to processes.
    const MADE_UP: u32 = 61_234;
    const RANGE: std::ops::Range<u32> = 1_950_000_000..1_950_065_536;
    /// Set for the test program when the made-up user runs it.
    const AS_USER: &str = "MIRRORBALL_TEST_AS_MADE_UP_USER";

    #[test]
    fn a_process_of_a_user_with_a_range_is_a_number_of_that_range_outside() {
        if std::env::var_os(AS_USER).is_some() {
            return as_made_up_user();
        }
        assert!(
            nix::unistd::geteuid().is_root(),
            "this test needs root to make up a user"
        );
        let directory = tempfile::tempdir().unwrap();
        fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).unwrap();
        // A copy that the user can reach, wherever this program is.
        let program = directory.path().join("test");
        fs::copy("/proc/self/exe", &program).unwrap();
        fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
        let status = std::thread::scope(|scope| {
            let alone = scope.spawn(|| {
                make_up_user();
                Command::new(&program)
                    .args([
                        "identity::tests::a_process_of_a_user_with_a_range_is_a_number_of_that_range_outside",
                        "--exact",
                        "--nocapture",
                    ])
                    .env(AS_USER, "1")
                    .current_dir("/")
                    .uid(MADE_UP)
                    .gid(MADE_UP)
                    .status()
                    .unwrap()
            });
            alone.join().unwrap()
        });
        assert!(status.success(), "as the made-up user: {status}");
    }

    /// Gives the calling thread and its children a view of `/etc` with a user that has a range.
    fn make_up_user() {
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
        mount(
            Some("none"),
            "/etc",
            Some("tmpfs"),
            MsFlags::empty(),
            Some("mode=755"),
        )
        .unwrap();
        let range = format!("made-up:{}:{}\n", RANGE.start, RANGE.end - RANGE.start);
        for (file, text) in [
            (
                "passwd",
                format!("root:x:0:0::/:/bin/sh\nmade-up:x:{MADE_UP}:{MADE_UP}::/:/bin/sh\n"),
            ),
            ("group", format!("root:x:0:\nmade-up:x:{MADE_UP}:\n")),
            ("nsswitch.conf", "passwd: files\ngroup: files\n".to_owned()),
            ("subuid", range.clone()),
            ("subgid", range),
        ] {
            fs::write(Path::new("/etc").join(file), text).unwrap();
        }
    }

    fn as_made_up_user() {
        assert_eq!(nix::unistd::geteuid().as_raw(), MADE_UP);
        let namespaces = Namespaces::probe();
        if !namespaces.missing.is_empty() {
            return eprintln!("left out: {}", namespaces.missing.join("; "));
        }
        let helpers = ["newuidmap", "newgidmap"].map(|helper| Path::new("/usr/bin").join(helper));
        assert!(
            helpers.iter().all(|helper| helper.exists()),
            "this test needs newuidmap and newgidmap (Debian: uidmap)"
        );
        let identities = [3, 4].map(|cid| {
            let given = Given::of(IdOwner::Vm(cid));
            assert_eq!(given.note, None);
            given.identity.unwrap()
        });
        assert_ne!(identities[0], identities[1]);
        for identity in identities {
            assert!(RANGE.contains(&identity.uid) && RANGE.contains(&identity.gid));
            start_and_look(&namespaces, identity);
        }
        // The helpers refuse ids that are not the user's.
        let foreign = Identity {
            uid: RANGE.end,
            gid: RANGE.end,
        };
        let refused = start(&namespaces, foreign);
        assert!(
            refused
                .as_ref()
                .is_err_and(|error| error.to_string().starts_with("newuidmap: ")),
            "{:?}",
            refused.err()
        );
    }

    /// Starts a process that sleeps, as `identity`.
    fn start(namespaces: &Namespaces, identity: Identity) -> std::io::Result<Child> {
        let null = File::options().write(true).open("/dev/null").unwrap();
        spawn(&Spawn {
            program: File::open("/bin/sleep").unwrap().as_fd(),
            control: null.as_fd(),
            log: null.as_fd(),
            words: &["sleep", "100"],
            flags: namespaces.flags(),
            identity: Some(keeper::spawn::Identity {
                uid: identity.uid,
                gid: identity.gid,
            }),
            file_bytes: 1 << 40,
        })
    }

    /// Starts a process as `identity`, and checks that others see it so.
    fn start_and_look(namespaces: &Namespaces, identity: Identity) {
        let spawned = start(namespaces, identity).unwrap();
        assert!(spawned.is_mapped);
        let deadline = Instant::now() + Duration::from_secs(10);
        let wanted = [("Uid", identity.uid), ("Gid", identity.gid)]
            .map(|(field, id)| format!("{field}:\t{id}\t{id}\t{id}\t{id}\n"));
        loop {
            let status = std::fs::read_to_string(format!("/proc/{}/status", spawned.pid)).unwrap();
            if wanted.iter().all(|line| status.contains(line.as_str())) {
                break;
            }
            assert!(Instant::now() < deadline, "{status}");
            std::thread::sleep(Duration::from_millis(1));
        }
        let pid = Pid::from_raw(spawned.pid);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
        nix::sys::wait::waitpid(pid, None).unwrap();
    }
}
