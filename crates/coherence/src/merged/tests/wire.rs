//! Round trips of messages, and refusal of malformed bytes.

use proptest::prelude::*;

use crate::merged::{Diff, Level, MAX_SHARERS, MergeMessage, MergeOp, VectorTime};
use crate::{NodeId, Page};

fn op() -> impl Strategy<Value = MergeOp> {
    prop_oneof![
        (1_u8..=5).prop_map(|level| MergeOp::Propose(Level(level))),
        (1_u8..=5).prop_map(|level| MergeOp::Offer(Level(level))),
        (any::<bool>(), any::<u64>())
            .prop_map(|(is_loaded, sequence)| MergeOp::Accept { is_loaded, sequence }),
        (any::<bool>(), any::<u64>())
            .prop_map(|(is_loaded, sequence)| MergeOp::Loaded { is_loaded, sequence }),
        prop::sample::select(vec![
            MergeOp::Refuse,
            MergeOp::Begin,
            MergeOp::Withdraw,
            MergeOp::Leave,
            MergeOp::Kept,
            MergeOp::Drop,
            MergeOp::Dropped,
            MergeOp::Settled,
            MergeOp::Left,
        ]),
    ]
}

proptest! {
    #[test]
    fn encoded_messages_decode_to_the_same_message(
        page: u32, word in 0_u16..512, old: u64, new: u64, round: u64, op in op(),
        counts in prop::collection::vec(any::<u64>(), 1..=usize::from(MAX_SHARERS)),
    ) {
        let diff = Diff { page: Page(page), word, old, new };
        prop_assert_eq!(Diff::decode(&diff.encode()), Ok(diff));
        let bytes: Vec<u8> = counts.iter().flat_map(|count| count.to_le_bytes()).collect();
        let stamp = VectorTime::decode(&bytes).unwrap();
        prop_assert!((0_u16..).zip(&counts).all(|(node, count)| stamp.of(NodeId(node)) == *count));
        let mut again = vec![0; bytes.len()];
        stamp.encode(u16::try_from(counts.len()).unwrap(), &mut again);
        prop_assert_eq!(again, bytes);
        let message = MergeMessage { stamp, page: Page(page), round, op };
        prop_assert_eq!(MergeMessage::decode(&message.encode(), stamp), Ok(message));
    }

    #[test]
    fn decoded_bytes_encode_to_the_same_bytes(
        bytes in any::<[u8; 22]>(),
        kind in 0_u8..16,
        detail in 0_u8..7
    ) {
        let mut bytes = bytes;
        bytes[12] = kind;
        bytes[13] = detail;
        if let Ok(message) = MergeMessage::decode(&bytes, VectorTime::default()) {
            prop_assert_eq!(message.encode(), bytes);
        }
        if let Ok(diff) = Diff::decode(&bytes) {
            prop_assert!(diff.word < 512);
            prop_assert_eq!(diff.encode(), bytes);
        }
    }
}

#[test]
fn malformed_bytes_are_refused() {
    let begin = MergeMessage {
        stamp: VectorTime::default(),
        page: Page(1),
        round: 2,
        op: MergeOp::Begin,
    };
    let mut bytes = begin.encode();
    bytes[13] = 1;
    assert!(
        MergeMessage::decode(&bytes, VectorTime::default()).is_err(),
        "a detail where none is"
    );
    bytes[12] = 99;
    assert!(
        MergeMessage::decode(&bytes, VectorTime::default()).is_err(),
        "no such kind"
    );
    assert!(VectorTime::decode(&[0; 12]).is_err(), "half a number");
    assert!(VectorTime::decode(&[0; 8 * 17]).is_err(), "too many nodes");
    let mut bytes = [0; 22];
    bytes[5] = 2;
    assert!(Diff::decode(&bytes).is_err(), "word 512");
}
