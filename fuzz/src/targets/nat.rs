//! Packets of a guest to the translator, in a connection whose host reads, writes and ends as it likes.

use std::time::Duration;

use libfuzzer_sys::arbitrary::{Result, Unstructured};
use subnet::nat::fuzzing::{Conversation, Segment, judge};

const STEPS_MAX: usize = 64;

pub fn fuzz(bytes: &[u8]) {
    judge(bytes);
    // The one error is that the bytes have ended.
    let _ = converse(&mut Unstructured::new(bytes));
}

fn converse(u: &mut Unstructured) -> Result<()> {
    let kind = u.arbitrary::<u8>()?;
    let syn = Segment {
        flags: 2,
        sequence: 0,
        acknowledged: 0,
        ..segment(u)?
    };
    let mut conversation = Conversation::new(kind & 1 != 0, kind & 2 != 0, &syn);
    for _ in 0..STEPS_MAX {
        if u.is_empty() {
            break;
        }
        match u.arbitrary::<u8>()? % 16 {
            0..=7 => conversation.send(&segment(u)?),
            8..=9 => conversation.write(u.arbitrary()?),
            10..=11 => conversation.read(u.arbitrary()?),
            12 => conversation.end(),
            13 => conversation.set_room(u.arbitrary()?),
            14 => {
                let time = u64::from(u.arbitrary::<u16>()?);
                conversation.wait(Duration::from_millis(time * time / 64));
            }
            // Several segments arrive in one turn.
            _ => continue,
        }
        conversation.turn();
    }
    Ok(())
}

fn segment<'a>(u: &mut Unstructured<'a>) -> Result<Segment<'a>> {
    let shape = u.arbitrary::<u8>()?;
    let distance = |u: &mut Unstructured<'a>, bits: u8| {
        Ok(match bits & 3 {
            0 | 1 => 0,
            2 => i32::from(u.arbitrary::<i16>()?),
            _ => u.arbitrary()?,
        })
    };
    let options = match shape & 0x30 {
        0x30 => usize::from(u.arbitrary::<u8>()? % 41).min(u.len()),
        _ => 0,
    };
    Ok(Segment {
        // Most segments acknowledge, and few reset.
        flags: match shape & 0xc0 {
            0xc0 => u.arbitrary()?,
            0x80 => 17,
            _ => 16,
        },
        sequence: distance(u, shape)?,
        acknowledged: distance(u, shape >> 2)?,
        window: u.arbitrary()?,
        options: u.bytes(options)?,
        payload: u.arbitrary::<u16>()? >> (shape & 0x0c),
    })
}
