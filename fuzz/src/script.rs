//! Turns the fuzzer's bytes into a driver's actions: mostly well-formed chains, with wild values among them.

use libfuzzer_sys::arbitrary::{Result, Unstructured};
use shard::fuzzing::Bare;

use crate::guest::{BUFFERS, Descriptor, Guest, MEMORY_BYTES, QUEUE_SIZE};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const STEPS_MAX: usize = 64;
/// How often a device may request another call before the driver goes on.
const ROUNDS_MAX: usize = 64;

/// A target's view of its device.
pub trait Subject {
    /// Bytes that the device understands as a request of the driver's.
    fn request(&mut self, u: &mut Unstructured) -> Result<Vec<u8>>;
    /// Makes an event on the host's side of the device.
    fn host(&mut self, u: &mut Unstructured) -> Result<()>;
}

/// A device whose requests are small numbers, and that has no other side.
pub struct Words;

impl Subject for Words {
    fn request(&mut self, u: &mut Unstructured) -> Result<Vec<u8>> {
        let count = u.arbitrary::<u8>()? % 20;
        let word = u32::from(u.arbitrary::<u16>()? % 512);
        Ok((0..u32::from(count))
            .flat_map(|place| (word + place).to_le_bytes())
            .collect())
    }

    fn host(&mut self, _: &mut Unstructured) -> Result<()> {
        Ok(())
    }
}

/// Runs a script against `device` until its bytes end; then resets it.
pub fn run(device: &mut Bare, guest: &mut Guest, subject: &mut impl Subject, u: &mut Unstructured) {
    // The one error is that the bytes have ended.
    let _ = steps(device, guest, subject, u);
    device.stop();
}

fn steps(
    device: &mut Bare,
    guest: &mut Guest,
    subject: &mut impl Subject,
    u: &mut Unstructured,
) -> Result<()> {
    let features = features(u)?;
    device.start(guest.activation(features));
    for _ in 0..STEPS_MAX {
        if u.is_empty() {
            break;
        }
        let queue = usize::from(u.arbitrary::<u8>()?) % guest.queues();
        match u.arbitrary::<u8>()? % 16 {
            0..=5 => chain(guest, subject, queue, u)?,
            6 => {
                let descriptor = wild_descriptor(u)?;
                guest.describe(queue, u.arbitrary()?, u.arbitrary()?, descriptor);
            }
            7 => guest.offer(queue, u.arbitrary()?),
            8 => guest.set_available(queue, u.arbitrary()?),
            9 => guest.set_used_event(queue, u.arbitrary()?),
            10 => {
                let at = u64::from(u.arbitrary::<u32>()?) % MEMORY_BYTES;
                let length = usize::from(u.arbitrary::<u8>()?).min(u.len());
                let bytes = u.bytes(length)?;
                guest.write(at, bytes);
            }
            11..=12 => subject.host(u)?,
            13 => {
                // A reset, at any time.
                device.stop();
                device.start(guest.activation(features));
            }
            _ => {}
        }
        serve(device, guest, queue);
    }
    Ok(())
}

/// The features the driver takes: event index and indirect descriptors often, others sometimes.
fn features(u: &mut Unstructured) -> Result<u64> {
    let bits = u64::from(u.arbitrary::<u32>()?);
    Ok(bits | 1 << 32)
}

/// Calls the device for `queue`, and for all events that follow.
fn serve(device: &mut Bare, guest: &Guest, queue: usize) {
    device.notified(queue as u16);
    for _ in 0..ROUNDS_MAX {
        let mut again = device.serve_files();
        for queue in 0..guest.queues() {
            if guest.take_notification(queue) {
                device.notified(queue as u16);
                again = true;
            }
        }
        if !again || !device.is_running() {
            return;
        }
    }
}

/// Offers a chain: readable buffers that hold a request, then writable ones, direct or indirect.
fn chain(guest: &mut Guest, subject: &mut impl Subject, queue: usize, u: &mut Unstructured) -> Result<()> {
    let request = subject.request(u)?;
    let shape = u.arbitrary::<u8>()?;
    let (cuts, writable, indirect) = (shape & 3, (shape >> 2) & 3, shape & 0x10 != 0);
    let at = BUFFERS + u64::from(u.arbitrary::<u8>()?) * 0x800;
    guest.write(at, &request);
    let mut descriptors = Vec::new();
    let (mut start, mut left) = (at, request.len() as u32);
    for _ in 0..cuts {
        let length = u32::from(u.arbitrary::<u8>()?).min(left);
        descriptors.push(Descriptor {
            address: start,
            length,
            ..Descriptor::default()
        });
        (start, left) = (start + u64::from(length), left - length);
    }
    if left > 0 {
        descriptors.push(Descriptor {
            address: start,
            length: left,
            ..Descriptor::default()
        });
    }
    for _ in 0..writable {
        let address = BUFFERS + u64::from(u.arbitrary::<u16>()?) * 8;
        let length = match u.arbitrary::<u8>()? {
            0 => u.arbitrary::<u32>()?,
            length @ 1..=15 => u32::from(length),
            length => u32::from(length) * 64,
        };
        descriptors.push(Descriptor {
            address,
            length,
            flags: WRITE,
            next: 0,
        });
    }
    if u.arbitrary::<u8>()? == 0 {
        let wild = wild_descriptor(u)?;
        let place = usize::from(u.arbitrary::<u8>()?) % (descriptors.len() + 1);
        descriptors.insert(place, wild);
    }
    let first = u.arbitrary::<u8>()? as u16 % QUEUE_SIZE;
    let count = descriptors.len() as u16;
    for (position, mut descriptor) in (0..).zip(descriptors) {
        let place = if indirect {
            position
        } else {
            (first + position) % QUEUE_SIZE
        };
        if position + 1 < count {
            descriptor.flags |= NEXT;
            descriptor.next = if indirect {
                place + 1
            } else {
                (place + 1) % QUEUE_SIZE
            };
        }
        guest.describe(queue, indirect, place, descriptor);
    }
    if indirect {
        let length = u32::from(count) * 16;
        let table = Descriptor {
            address: Guest::indirect(queue),
            length,
            flags: INDIRECT,
            next: 0,
        };
        guest.describe(queue, false, first, table);
    }
    guest.offer(queue, first);
    Ok(())
}

fn wild_descriptor(u: &mut Unstructured) -> Result<Descriptor> {
    let address = match u.arbitrary::<u8>()? % 4 {
        0 => u.arbitrary()?,
        1 => MEMORY_BYTES - u64::from(u.arbitrary::<u8>()?),
        2 => u64::MAX - u64::from(u.arbitrary::<u8>()?),
        _ => u64::from(u.arbitrary::<u32>()?) % MEMORY_BYTES,
    };
    let length = match u.arbitrary::<u8>()? % 3 {
        0 => u.arbitrary()?,
        1 => u32::MAX - u32::from(u.arbitrary::<u8>()?),
        _ => u32::from(u.arbitrary::<u16>()?),
    };
    Ok(Descriptor {
        address,
        length,
        flags: u.arbitrary::<u16>()? & 0x8007,
        next: u.arbitrary()?,
    })
}
