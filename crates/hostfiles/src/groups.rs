//! The host's list of groups, `/etc/group`, read as [`passwd`](crate::passwd) is.

use std::fs;

const LIST: &str = "/etc/group";

/// Returns the ids of the groups of which the user `name` is a member, beside `gid`, the user's own, which
/// comes first.
pub fn groups_of(name: &str, gid: u32) -> Vec<u32> {
    let bytes = fs::read(LIST).unwrap_or_default();
    groups_in(&String::from_utf8_lossy(&bytes), name, gid)
}

/// Reads the file's lines: name, password, id, and the members with commas between them (`group(5)`).
fn groups_in(list: &str, name: &str, gid: u32) -> Vec<u32> {
    let mut groups = vec![gid];
    for line in list.lines() {
        let mut fields = line.split(':').skip(2);
        let (Some(id), Some(members)) = (fields.next(), fields.next()) else {
            continue;
        };
        if let Ok(id) = id.parse()
            && members.split(',').any(|member| member == name)
            && !groups.contains(&id)
        {
            groups.push(id);
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_a_user_are_the_own_one_and_those_that_name_the_user() {
        let list = "root:x:0:\nkvm:x:36:alice,bob\nvms:x:900:bob\nbad:x:x:alice\nshort\n\
                    alice:x:1001:alice\nlike:x:7:alice2\n";
        assert_eq!(groups_in(list, "alice", 1001), [1001, 36]);
        assert_eq!(groups_in(list, "bob", 1002), [1002, 36, 900]);
        assert_eq!(groups_in(list, "carol", 5), [5]);
    }
}
