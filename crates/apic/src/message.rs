//! Interrupts that devices write into memory (SDM 11.11).

use crate::interrupt::{Delivery, Destination, Interrupt};

const ADDRESS_PREFIX: u64 = 0xFEE;
const ADDRESS_LOGICAL: u64 = 1 << 2;
const ADDRESS_REDIRECTED: u64 = 1 << 3;
const DATA_ASSERTED: u32 = 1 << 14;
const DATA_LEVEL: u32 = 1 << 15;

/// Decodes an MSI: `data` written to `address`. Returns `None` if the address is not in 0xFEE0_0000 to
/// 0xFEEF_FFFF, if the delivery mode is reserved, or if the message deasserts a level.
///
/// A physical destination of 0xFF is the broadcast; a logical one is a set of the first eight APIC ids. The
/// destination mode bit alone selects logical mode, with or without the redirection hint, as in Linux and in
/// hardware. A message with the redirection hint goes to one of its destinations. Reserved bits are ignored.
pub fn message(address: u64, data: u32) -> Option<Interrupt> {
    if address >> 20 != ADDRESS_PREFIX {
        return None;
    }
    let delivery = match Delivery::of_bits(data >> 8)? {
        Delivery::Startup => return None,
        Delivery::Fixed if address & ADDRESS_REDIRECTED != 0 => Delivery::LowestPriority,
        other => other,
    };
    let level = data & DATA_LEVEL != 0;
    if level && data & DATA_ASSERTED == 0 {
        return None;
    }
    Some(Interrupt {
        destination: Destination::of_8_bits((address >> 12) as u8, address & ADDRESS_LOGICAL != 0),
        delivery,
        vector: data as u8,
        level: level && delivery.has_vector(),
    })
}

#[cfg(test)]
mod tests;
