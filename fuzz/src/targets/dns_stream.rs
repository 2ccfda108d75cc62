//! A guest's bytes to its gateway's DNS by TCP: queries in pieces, and the guest's reads; answers of the
//! host's resolver in any order.

use std::time::Duration;

use gateway::fuzzing::Conversation;
use libfuzzer_sys::arbitrary::{Result, Unstructured};

const STEPS_MAX: usize = 64;
/// Factor of the lengths of answers: the greatest ones are longer than DNS permits.
const ANSWER_STEP: usize = 17;

pub fn fuzz(bytes: &[u8]) {
    let mut conversation = Conversation::new();
    // The one error is that the bytes have ended.
    let _ = converse(&mut conversation, &mut Unstructured::new(bytes));
    conversation.finish();
}

fn converse(conversation: &mut Conversation, u: &mut Unstructured) -> Result<()> {
    for _ in 0..STEPS_MAX {
        if u.is_empty() {
            break;
        }
        match u.arbitrary::<u8>()? % 16 {
            0..=5 => {
                let message = query(u)?;
                let shape = u.arbitrary::<u8>()?;
                let cut = usize::from(shape).min(message.len());
                conversation.send(&message[..cut]);
                conversation.turn();
                conversation.send(&message[cut..]);
                conversation.send(&message.repeat(usize::from(shape % 8)));
            }
            // Most other bytes are no query and end the connection, so they are rare.
            6 => match u.arbitrary::<u8>()? {
                0..=31 => {
                    let count = usize::from(u.arbitrary::<u8>()?).min(u.len());
                    conversation.send(u.bytes(count)?);
                }
                32..=63 => {
                    let count = usize::from(u.arbitrary::<u16>()? % 4200);
                    conversation.send(&framed(&vec![0; count]));
                }
                _ => {}
            },
            7..=8 => drop(conversation.receive(usize::from(u.arbitrary::<u16>()?))),
            9..=11 => {
                let count = usize::from(u.arbitrary::<u16>()?) * ANSWER_STEP;
                conversation.answer(u.arbitrary::<u8>()?.into(), count);
            }
            12 => conversation.wait(Duration::from_millis(u.arbitrary::<u16>()?.into())),
            13 => conversation.end(),
            // Several events are served in one turn.
            _ => continue,
        }
        conversation.turn();
    }
    Ok(())
}

/// A query with its length before it, of a name that the network has in some cases.
fn query(u: &mut Unstructured) -> Result<Vec<u8>> {
    let shape = u.arbitrary::<u8>()?;
    let flags = if shape & 0xc0 == 0 {
        u.arbitrary::<u16>()?
    } else {
        0x0100
    };
    let questions = if shape & 0x30 == 0 {
        u.arbitrary::<u16>()?
    } else {
        1
    };
    let mut message = Vec::new();
    for field in [u.arbitrary::<u16>()?, flags, questions, 0, 0, 0] {
        message.extend(field.to_be_bytes());
    }
    let labels: &[&[u8]] = match shape & 0x07 {
        0 => &[b"web"],
        1 => &[b"db", b"vm", b"internal"],
        2 => &[b"30", b"134", b"213", b"10", b"in-addr", b"arpa"],
        3 => &[b"example", b"org"],
        _ => &[],
    };
    for label in labels {
        message.push(label.len() as u8);
        message.extend(*label);
    }
    if labels.is_empty() {
        let count = usize::from(u.arbitrary::<u8>()?).min(u.len());
        message.extend(u.bytes(count)?);
    }
    message.push(0);
    let kinds = [1_u16, 28, 12, 255];
    let kind = kinds[usize::from(shape >> 3 & 1) * 2 + usize::from(flags & 1)];
    message.extend(kind.to_be_bytes());
    message.extend(1_u16.to_be_bytes());
    Ok(framed(&message))
}

/// A message with its length before it.
fn framed(message: &[u8]) -> Vec<u8> {
    let mut bytes = (message.len() as u16).to_be_bytes().to_vec();
    bytes.extend(message);
    bytes
}
