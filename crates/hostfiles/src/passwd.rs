//! The host's list of users, `/etc/passwd`.
//!
//! Reads the file itself. The C library would load modules for other user databases (NSS), which a static
//! program must not do: they link another C library and crash. Users of those databases are known only by
//! their ids.

use std::fs;

const LIST: &str = "/etc/passwd";

/// Returns the id of the user with this name; none if the file has no such user.
pub fn uid_of(name: &str) -> Option<u32> {
    entries(&list()).find_map(|(known, uid)| (known == name).then_some(uid))
}

/// Returns the name of the user with this id; none if the file has no such user.
pub fn name_of(uid: u32) -> Option<String> {
    entries(&list()).find_map(|(name, known)| (known == uid).then(|| name.to_owned()))
}

/// A user of the host.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct User {
    /// The user's name.
    pub name: String,
    /// The user's id.
    pub uid: u32,
    /// Id of the user's own group.
    pub gid: u32,
    /// The user's home directory.
    pub home: String,
}

/// Returns the user with this id; none if the file has no such user.
pub fn user_of(uid: u32) -> Option<User> {
    users(&list()).find(|user| user.uid == uid)
}

/// Yields the users of which the file has an id, a group and a home.
fn users(list: &str) -> impl Iterator<Item = User> {
    list.lines().filter_map(|line| {
        let fields: Vec<&str> = line.split(':').collect();
        let [name, _, uid, gid, _, home, ..] = fields[..] else {
            return None;
        };
        Some(User {
            name: Some(name).filter(|name| !name.is_empty())?.to_owned(),
            uid: uid.parse().ok()?,
            gid: gid.parse().ok()?,
            home: home.to_owned(),
        })
    })
}

fn list() -> String {
    let bytes = fs::read(LIST).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Yields names and ids, one pair per line of the file (`passwd(5)`).
fn entries(list: &str) -> impl Iterator<Item = (&str, u32)> {
    list.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next().filter(|name| !name.is_empty())?;
        Some((name, fields.nth(1)?.parse().ok()?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_found_by_name_and_by_id() {
        assert_eq!(uid_of("root"), Some(0));
        assert_eq!(name_of(0).as_deref(), Some("root"));
        assert_eq!(uid_of("no such user"), None);
        // No user has this id: the C library would query its modules for it.
        assert_eq!(name_of(4_000_000_001), None);
    }

    #[test]
    fn user_has_a_group_and_a_home() {
        let list = "root:x:0:0:root:/root:/bin/sh\nshort:x:7:7\nalice:x:1001:100:A:/home/alice:/bin/sh\n";
        let found: Vec<_> = users(list).map(|user| (user.uid, user.gid, user.home)).collect();
        assert_eq!(
            found,
            [(0, 0, "/root".to_owned()), (1001, 100, "/home/alice".to_owned())]
        );
    }

    #[test]
    fn lines_that_are_no_users_are_left_out() {
        let list = "root:x:0:0:root:/root:/bin/sh\n\n+::::::\nshort:x\nbad:x:-1:1\nalice:x:1001:100:::\n";
        assert_eq!(entries(list).collect::<Vec<_>>(), [("root", 0), ("alice", 1001)]);
    }
}
