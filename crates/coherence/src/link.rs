//! Links that deliver each item once over a way that loses, doubles and reorders packets.
//!
//! A [`Link`] is one end. Every packet has a [`Header`]: the item's number, if it carries one, and which items of the other end
//! have come: all below a number, and by a bit each those of the window beyond it. Items are delivered as they come, since
//! engines need no order. What is not acknowledged in time is sent again, and only that.
//!
//! The window is fixed: at most [`WINDOW`] items are under way from the oldest that is not acknowledged on. Who sends more
//! keeps it until there is room. Nothing is allocated.

use thiserror::Error;

/// So many items can be under way each way, from the oldest that is not acknowledged. One bit each in a header.
pub const WINDOW: usize = 64;

/// The length of a header, bytes.
pub const HEADER_BYTES: usize = 24;

/// What goes before an item, or alone as an acknowledgement.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Header {
    /// The item's number, from 1. 0: no item.
    pub number: u64,
    /// All items of the other end below this number have come.
    pub before: u64,
    /// Bit `n`: item `before + 1 + n` has come too.
    pub beyond: u64,
}

impl Header {
    /// As bytes, little endian.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[0..8].copy_from_slice(&self.number.to_le_bytes());
        out[8..16].copy_from_slice(&self.before.to_le_bytes());
        out[16..24].copy_from_slice(&self.beyond.to_le_bytes());
        out
    }

    /// From bytes. What they say is checked by [`Link::receive`].
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Self {
        let [number, before, beyond] = [0, 8, 16].map(|from| {
            let word = bytes[from..from + 8].try_into().expect("eight bytes");
            u64::from_le_bytes(word)
        });
        Self {
            number,
            before,
            beyond,
        }
    }
}

/// The other end is broken or hostile: end the link.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum LinkError {
    /// The number is past the window.
    #[error("item {0} came, which is past the window; end the link")]
    PastWindow(u64),
    /// It acknowledges what was never sent.
    #[error("item {0} is acknowledged, which was never sent; end the link")]
    NeverSent(u64),
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct Sent<T> {
    item: T,
    /// When it goes again, by the driver's clock.
    again_ns: u64,
}

/// One end of a link for items of type `T`: a message, and the page beside it as it was when it was sent.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Link<T> {
    timeout_ns: u64,
    /// Item `n` at `n % WINDOW`, until it is acknowledged.
    sent: [Option<Sent<T>>; WINDOW],
    /// The oldest that is not acknowledged, or `next`.
    oldest: u64,
    /// The next item's number.
    next: u64,
    /// As in [`Header`], of what has come here.
    before: u64,
    beyond: u64,
    /// Something came since the other end was last told what has come.
    owes: bool,
    silent_since_ns: u64,
}

impl<T> Link<T> {
    /// An end of which nothing has gone or come. What is not acknowledged within `timeout_ns` of the driver's clock is sent again.
    pub fn new(timeout_ns: u64, now_ns: u64) -> Self {
        Self {
            timeout_ns,
            sent: std::array::from_fn(|_| None),
            oldest: 1,
            next: 1,
            before: 1,
            beyond: 0,
            owes: false,
            silent_since_ns: now_ns,
        }
    }

    fn slot(number: u64) -> usize {
        usize::try_from(number % WINDOW as u64).expect("less than the window")
    }

    fn header(&mut self, number: u64) -> Header {
        self.owes = false;
        Header {
            number,
            before: self.before,
            beyond: self.beyond,
        }
    }

    /// Whether an item can be sent now.
    pub fn has_room(&self) -> bool {
        self.next - self.oldest < WINDOW as u64
    }

    /// An item goes out, after the header that is returned. It is kept until it is acknowledged.
    ///
    /// # Errors
    /// If the window is full: the item is given back, to be sent when there is room.
    pub fn send(&mut self, item: T, now_ns: u64) -> Result<Header, T> {
        if !self.has_room() {
            return Err(item);
        }
        if self.oldest == self.next {
            self.silent_since_ns = now_ns;
        }
        let number = self.next;
        self.next += 1;
        let again_ns = now_ns.saturating_add(self.timeout_ns);
        self.sent[Self::slot(number)] = Some(Sent { item, again_ns });
        Ok(self.header(number))
    }

    /// A packet has come. Whether its item, if it has one, is to be taken: not if it has come before.
    ///
    /// # Errors
    /// If it can't be the other end's. The link is as it was.
    pub fn receive(&mut self, header: Header, now_ns: u64) -> Result<bool, LinkError> {
        let number = header.number;
        if number >= self.before.saturating_add(WINDOW as u64) {
            return Err(LinkError::PastWindow(number));
        }
        let last = match u64::from(u64::BITS - header.beyond.leading_zeros()) {
            0 => header.before.saturating_sub(1),
            bits => header.before.saturating_add(bits),
        };
        if last >= self.next {
            return Err(LinkError::NeverSent(last));
        }
        self.silent_since_ns = now_ns;
        self.acknowledged(header);
        if number == 0 {
            return Ok(false);
        }
        // Also a double is answered: what told of the first may have been lost.
        self.owes = true;
        Ok(self.is_new(number))
    }

    /// Notes that an item has come, if it had not.
    fn is_new(&mut self, number: u64) -> bool {
        if number < self.before {
            return false;
        }
        if number > self.before {
            let bit = 1 << (number - self.before - 1);
            let is_new = self.beyond & bit == 0;
            self.beyond |= bit;
            return is_new;
        }
        let run = self.beyond.trailing_ones();
        self.before += 1 + u64::from(run);
        self.beyond = self.beyond.checked_shr(run + 1).unwrap_or(0);
        true
    }

    fn acknowledged(&mut self, header: Header) {
        for number in self.oldest..self.next {
            let has_come = match number.checked_sub(header.before) {
                None => true,
                Some(0) => false,
                // What is further ahead than the other end's window is of a header that is late.
                Some(distance) => distance <= WINDOW as u64 && header.beyond >> (distance - 1) & 1 != 0,
            };
            if has_come {
                self.sent[Self::slot(number)] = None;
            }
        }
        while self.oldest < self.next && self.sent[Self::slot(self.oldest)].is_none() {
            self.oldest += 1;
        }
    }

    /// The driver's clock is at `now_ns`: sends again what has waited too long, and says what has come if nothing that was sent since
    /// did. The driver calls it at [`Link::due_ns`], and after a batch of packets.
    pub fn tick(&mut self, now_ns: u64, mut send: impl FnMut(Header, Option<&T>)) {
        for number in self.oldest..self.next {
            let slot = Self::slot(number);
            let is_due = self.sent[slot]
                .as_ref()
                .is_some_and(|sent| sent.again_ns <= now_ns);
            if !is_due {
                continue;
            }
            let header = self.header(number);
            if let Some(sent) = &mut self.sent[slot] {
                sent.again_ns = now_ns.saturating_add(self.timeout_ns);
                send(header, Some(&sent.item));
            }
        }
        if self.owes {
            let header = self.header(0);
            send(header, None);
        }
    }

    /// When something is to be sent again, if nothing comes until then.
    pub fn due_ns(&self) -> Option<u64> {
        let sent = self.sent.iter().flatten();
        sent.map(|sent| sent.again_ns).min()
    }

    /// Since when nothing has come from the other end while something was to be acknowledged. It is for the driver to say when
    /// that is too long.
    pub fn silent_since_ns(&self) -> Option<u64> {
        (self.oldest < self.next).then_some(self.silent_since_ns)
    }
}

#[cfg(test)]
mod tests;
