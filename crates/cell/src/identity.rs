//! The user and group that the shards of one VM are outside: numbers of a range, which no other VM and no daemon has.
//!
//! Root takes the range of the entry `mirrorball` in `/etc/subuid` and `/etc/subgid`; without one, a range that systemd's
//! list of users and groups leaves unused. Another user takes the range of their own entry, which `newuidmap` and `newgidmap`
//! (uidmap, shadow-utils) map for them. VMs take numbers from the end of a range, parts of VMs of other hosts from its
//! beginning.

use std::fs;
use std::ops::Range;

use nix::unistd::{User, geteuid};
use shard_api::launch::Identity;

/// The entry of root's VMs.
const ENTRY: &str = "mirrorball";
/// <https://systemd.io/UIDS-GIDS/>: above the containers' range, below 2^31.
const UNUSED: Range<u32> = 0x7000_0000..0x8000_0000;
/// The user that a kernel shows for files and processes without one in this namespace.
const NOBODY: u32 = 65_534;

/// Which number of the range a shard takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// That of a VM, counted by its address on the socket device.
    Vm(u32),
    /// That of a part of another host's VM, counted from 0.
    Part(u32),
}

/// The identity of a shard, and a note about one that it could not get.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Given {
    /// The user and group; none where the shard keeps its user's.
    pub identity: Option<Identity>,
    /// Why they are not its own, if they are not.
    pub note: Option<String>,
}

impl Given {
    /// The identity for the shards at `place`, on this host.
    pub fn of(place: Place) -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let (uids, gids) = (read("/etc/subuid"), read("/etc/subgid"));
        if geteuid().is_root() {
            let mapped = (read("/proc/self/uid_map"), read("/proc/self/gid_map"));
            return of_root(place, (&uids, &gids), (&mapped.0, &mapped.1));
        }
        let uid = geteuid();
        let name = User::from_uid(uid).ok().flatten().map(|user| user.name);
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

/// Root's, by the files `/etc/subuid` and `/etc/subgid` and the maps of this user namespace.
fn of_root(place: Place, (uids, gids): (&str, &str), (uid_map, gid_map): (&str, &str)) -> Given {
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
        "user id of its own: {} and {} are not mapped in this user namespace; name a range `{ENTRY}` in /etc/subuid and /etc/subgid",
        own.uid, own.gid
    );
    Given {
        // `nobody` may be another's too, but is not root.
        identity: Some(nobody).filter(is_mapped),
        note: Some(note),
    }
}

/// The first range of a file like `/etc/subuid` that is not empty and belongs to one of `names`. Ranges with root in them, and
/// such that do not fit the numbers of users, are none.
fn entry(text: &str, names: &[String]) -> Option<Range<u32>> {
    text.lines().find_map(|line| {
        let mut fields = line.trim().split(':');
        let (name, start, count) = (fields.next()?, fields.next()?, fields.next()?);
        if name.is_empty() || !names.iter().any(|wanted| wanted == name) {
            return None;
        }
        let (start, count): (u32, u32) = (start.parse().ok()?, count.parse().ok()?);
        // The last number of all stands for none.
        let end = start.checked_add(count)?;
        (start > 0 && count > 0).then_some(start..end)
    })
}

fn identity(place: Place, uids: &Range<u32>, gids: &Range<u32>) -> Identity {
    Identity {
        uid: number(place, uids),
        gid: number(place, gids),
    }
}

/// The number of `range` at `place`: half of them for VMs. Different for each until all have been used.
fn number(place: Place, range: &Range<u32>) -> u32 {
    let count = range.end - range.start;
    let for_parts = count / 2;
    match place {
        Place::Part(part) if for_parts > 0 => range.start + part % for_parts,
        Place::Vm(number) | Place::Part(number) => range.end - 1 - number % (count - for_parts),
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
    use super::*;

    const WHOLE: (&str, &str) = ("         0          0 4294967295\n", "0 0 4294967295\n");

    fn uid(given: &Given) -> u32 {
        given.identity.expect("root's shards always have one").uid
    }

    #[test]
    fn each_vm_of_root_has_a_number_of_its_own_which_is_no_daemons() {
        let given = |place| of_root(place, ("", ""), WHOLE);
        let places = (3..2003).map(Place::Vm).chain((0..2000).map(Place::Part));
        let mut uids: Vec<u32> = places.map(|place| uid(&given(place))).collect();
        assert!(uids.iter().all(|uid| UNUSED.contains(uid)));
        uids.sort_unstable();
        uids.dedup();
        assert_eq!(uids.len(), 4000);
        assert_eq!(given(Place::Vm(3)).note, None);
    }

    #[test]
    fn root_takes_the_range_that_the_host_names() {
        let subuid = "alice:100000:65536\nmirrorball:500000:100\n";
        let subgid = "mirrorball:700000:10";
        let given = of_root(Place::Vm(3), (subuid, subgid), WHOLE);
        assert_eq!(
            given.identity,
            Some(Identity {
                uid: 500_096,
                gid: 700_006
            })
        );
        let part = of_root(Place::Part(1), (subuid, subgid), WHOLE);
        assert_eq!(uid(&part), 500_001);
    }

    #[test]
    fn numbers_that_are_not_mapped_make_nobody_and_are_reported_and_never_root() {
        let container = "0 100000 65536\n";
        let given = of_root(Place::Vm(3), ("", ""), (container, container));
        assert_eq!(uid(&given), NOBODY);
        assert!(given.note.is_some_and(|note| note.contains("not mapped")));
        let alone = of_root(Place::Vm(3), ("", ""), ("0 1000 1", "0 1000 1"));
        assert!(alone.identity.is_none() && alone.note.is_some());
        let inside = of_root(
            Place::Vm(3),
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
        assert_eq!(number(Place::Part(5), &(7..8)), 7);
    }
}
