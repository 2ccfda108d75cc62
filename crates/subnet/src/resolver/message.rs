//! DNS messages, as far as a forwarder reads them. Pure.

use std::net::{IpAddr, SocketAddr};

/// Bytes of the header of a message.
const HEADER_BYTES: usize = 12;
/// Bytes of the type and class of a question.
const QUESTION_TAIL_BYTES: usize = 4;
/// Longest name, with its lengths.
const NAME_BYTES_MAX: usize = 255;
/// Name servers that are used, as by the C library.
const SERVERS_MAX: usize = 3;
const DNS_PORT: u16 = 53;

/// Codes by which a server reports its own failure: SERVFAIL, NOTIMP, REFUSED.
const FAILURES: [u8; 3] = [2, 4, 5];

/// Returns the question of a message; none unless it has just one.
fn question(message: &[u8]) -> Option<&[u8]> {
    let count = message.get(4..6)?;
    let mut at = HEADER_BYTES;
    loop {
        let length = *message.get(at)?;
        at += 1 + usize::from(length);
        // Longer labels are references, which a question has not.
        if length > 63 || at - HEADER_BYTES > NAME_BYTES_MAX {
            return None;
        }
        if length == 0 {
            break;
        }
    }
    let question = message.get(HEADER_BYTES..at + QUESTION_TAIL_BYTES)?;
    (count == [0, 1]).then_some(question)
}

/// Returns whether a message is a standard query with one question.
pub(super) fn is_query(message: &[u8]) -> bool {
    // The flag of replies, and the operation.
    let is_standard = message.get(2).is_some_and(|flags| flags & 0xf8 == 0);
    is_standard && question(message).is_some()
}

/// Relation of a message to a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Relation {
    /// It is not the query's reply.
    Foreign,
    /// It is the reply.
    Reply,
    /// It is the beginning of a reply that was too long.
    Truncated,
    /// The server reports its failure.
    Failure,
}

/// Returns the relation of a message to a query.
pub(super) fn relation(query: &[u8], message: &[u8]) -> Relation {
    let is_reply = message.get(2).is_some_and(|flags| flags & 0xf8 == 0x80);
    let has_id = query.get(..2).is_some() && query.get(..2) == message.get(..2);
    let has_question = match (question(query), question(message)) {
        // Servers may change the case of letters. A length is below that of any letter.
        (Some(asked), Some(answered)) => asked.eq_ignore_ascii_case(answered),
        _ => false,
    };
    if !(is_reply && has_id && has_question) {
        return Relation::Foreign;
    }
    match (message[2] & 0x02, message[3] & 0x0f) {
        (0, code) if FAILURES.contains(&code) => Relation::Failure,
        (0, _) => Relation::Reply,
        _ => Relation::Truncated,
    }
}

/// Returns the name servers of a `resolv.conf`.
pub(super) fn servers(resolv_conf: &str) -> Vec<SocketAddr> {
    let server = |line: &str| {
        let mut words = line.split_whitespace();
        (words.next()? == "nameserver").then_some(())?;
        let address: IpAddr = words.next()?.parse().ok()?;
        Some(SocketAddr::new(address, DNS_PORT))
    };
    resolv_conf.lines().filter_map(server).take(SERVERS_MAX).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns a query for the address of a name.
    pub(in crate::resolver) fn query(id: u16, name: &str) -> Vec<u8> {
        let mut message = Vec::from(id.to_be_bytes());
        message.extend([1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
        for label in name.split('.') {
            message.push(u8::try_from(label.len()).unwrap());
            message.extend(label.bytes());
        }
        message.extend([0, 0, 1, 0, 1]);
        message
    }

    /// Returns a reply without an answer, with a code.
    pub(in crate::resolver) fn reply(query: &[u8], code: u8) -> Vec<u8> {
        let mut reply = query.to_vec();
        reply[2] |= 0x80;
        reply[3] |= code;
        reply
    }

    #[test]
    fn reply_has_the_querys_number_and_question() {
        let asked = query(7, "debian.org");
        assert_eq!(relation(&asked, &reply(&asked, 0)), Relation::Reply);
        assert_eq!(
            relation(&asked, &reply(&query(7, "DEBIAN.org"), 0)),
            Relation::Reply
        );
        assert_eq!(
            relation(&asked, &reply(&query(8, "debian.org"), 0)),
            Relation::Foreign
        );
        assert_eq!(
            relation(&asked, &reply(&query(7, "debian.com"), 0)),
            Relation::Foreign
        );
        assert_eq!(relation(&asked, &asked), Relation::Foreign);
        assert_eq!(relation(&asked, &[]), Relation::Foreign);
    }

    #[test]
    fn failure_and_truncation_are_seen() {
        let asked = query(7, "debian.org");
        assert_eq!(relation(&asked, &reply(&asked, 2)), Relation::Failure);
        assert_eq!(relation(&asked, &reply(&asked, 3)), Relation::Reply);
        let mut truncated = reply(&asked, 0);
        truncated[2] |= 2;
        assert_eq!(relation(&asked, &truncated), Relation::Truncated);
    }

    #[test]
    fn only_standard_queries_with_one_question_are_queries() {
        let asked = query(7, "debian.org");
        assert!(is_query(&asked));
        assert!(!is_query(&reply(&asked, 0)));
        assert!(!is_query(&asked[..asked.len() - 1]));
        let mut update = asked.clone();
        update[2] |= 5 << 3;
        assert!(!is_query(&update));
        let mut two = asked.clone();
        two[5] = 2;
        assert!(!is_query(&two));
        assert!(!is_query(&query(7, &"longlabel.".repeat(40))));
        let mut reference = asked;
        reference[12] = 0xc0;
        assert!(!is_query(&reference));
    }

    #[test]
    fn first_three_servers_of_a_file_are_used() {
        let text = "# nameserver 192.0.2.9\nnameserver\t127.0.0.53\nsearch a\nnameserver 2001:db8::1 # x\n\
                    nameserver fe80::1%eth0\nnameserver  192.0.2.1\nnameserver 192.0.2.2\n";
        let expected = ["127.0.0.53:53", "[2001:db8::1]:53", "192.0.2.1:53"];
        let expected: Vec<SocketAddr> = expected.iter().map(|text| text.parse().unwrap()).collect();
        assert_eq!(servers(text), expected);
    }

    proptest! {
        #[test]
        fn any_bytes_are_judged(asked: Vec<u8>, answered: Vec<u8>) {
            is_query(&asked);
            relation(&asked, &answered);
        }

        #[test]
        fn reply_is_seen_whatever_follows_its_question(id: u16, tail: Vec<u8>) {
            let asked = query(id, "a.example");
            let mut answered = reply(&asked, 0);
            answered.extend(tail);
            prop_assert_eq!(relation(&asked, &answered), Relation::Reply);
        }
    }
}
