//! One stream connection as a state machine without I/O (5.10.6.3, 5.10.6.6).
//!
//! Invariants: the bytes that wait for the host never exceed the credit of the guest ([`BUFFER_BYTES`]). The
//! bytes in flight to the guest never exceed the credit that it granted. Counters are modulo 2^32, as in the
//! specification.

use std::collections::VecDeque;

use super::packet::{SHUTDOWN_RECEIVE, SHUTDOWN_SEND, op};

/// Bytes that may wait for the host in one connection: two packets of the largest size, so that the guest can
/// send one while the other is written.
pub const BUFFER_BYTES: u32 = 128 << 10;

/// Error: the guest violated the connection's rules, and receives a reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Violation;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// REQUEST was sent, or is to be sent.
    Requested,
    Open,
    /// The guest has closed the connection; its bytes are still in transit to the host.
    Draining,
}

/// A connection, from the host's view.
#[derive(Debug)]
pub struct Connection {
    state: State,
    owes_request: bool,
    owes_response: bool,
    owes_credit: bool,
    owes_reset: bool,
    owes_shutdown: u32,
    told_shutdown: u32,
    guest_shutdown: u32,
    guest_alloc: u32,
    guest_forwarded: u32,
    sent: u32,
    received: u32,
    forwarded: u32,
    reported_forwarded: u32,
    waiting: VecDeque<u8>,
}

impl Connection {
    fn new(state: State) -> Self {
        Self {
            state,
            owes_request: state == State::Requested,
            owes_response: state == State::Open,
            owes_credit: false,
            owes_reset: false,
            owes_shutdown: 0,
            told_shutdown: 0,
            guest_shutdown: 0,
            guest_alloc: 0,
            guest_forwarded: 0,
            sent: 0,
            received: 0,
            forwarded: 0,
            reported_forwarded: 0,
            waiting: VecDeque::new(),
        }
    }

    /// Creates a connection that the host requests.
    pub fn request() -> Self {
        Self::new(State::Requested)
    }

    /// Creates a connection that the guest requested and that is accepted, with the credit of its REQUEST.
    pub fn accept(buf_alloc: u32, fwd_cnt: u32) -> Self {
        let mut connection = Self::new(State::Open);
        connection.guest_alloc = buf_alloc;
        connection.guest_forwarded = fwd_cnt;
        connection
    }

    /// Processes a packet of the guest other than REQUEST. Returns true if the packet was the RESPONSE that
    /// opened the connection.
    pub fn receive(
        &mut self,
        op: u16,
        flags: u32,
        buf_alloc: u32,
        fwd_cnt: u32,
        payload: &[u8],
    ) -> Result<bool, Violation> {
        self.guest_alloc = buf_alloc;
        self.guest_forwarded = fwd_cnt;
        match (op, self.state) {
            (op::RST, _) => {
                self.state = State::Draining;
                Ok(false)
            }
            (op::RESPONSE, State::Requested) if !self.owes_request => {
                self.state = State::Open;
                Ok(true)
            }
            (_, State::Requested) | (op::RESPONSE, _) => Err(Violation),
            (_, State::Draining) => Ok(false),
            (op::SHUTDOWN, State::Open) => {
                self.guest_shutdown |= flags & (SHUTDOWN_RECEIVE | SHUTDOWN_SEND);
                if self.guest_shutdown == SHUTDOWN_RECEIVE | SHUTDOWN_SEND {
                    // The guest waits for a reset before it drops the connection.
                    self.owes_reset = true;
                    self.state = State::Draining;
                }
                Ok(false)
            }
            (op::RW, State::Open) => {
                let pending = self.received.wrapping_sub(self.forwarded) as usize;
                if self.guest_shutdown & SHUTDOWN_SEND != 0 || pending + payload.len() > BUFFER_BYTES as usize
                {
                    return Err(Violation);
                }
                // At most BUFFER_BYTES, just checked.
                self.received = self.received.wrapping_add(payload.len() as u32);
                self.waiting.extend(payload);
                Ok(false)
            }
            (op::CREDIT_UPDATE, State::Open) => Ok(false),
            (op::CREDIT_REQUEST, State::Open) => {
                self.owes_credit = true;
                Ok(false)
            }
            _ => Err(Violation),
        }
    }

    /// Returns the number of bytes that may be sent to the guest now.
    pub fn room(&self) -> usize {
        let on_their_way = self.sent.wrapping_sub(self.guest_forwarded);
        let closed = self.told_shutdown & SHUTDOWN_SEND != 0 || self.guest_shutdown & SHUTDOWN_RECEIVE != 0;
        let early = self.owes_response || self.state != State::Open;
        if closed || early {
            0
        } else {
            self.guest_alloc.saturating_sub(on_their_way) as usize
        }
    }

    /// Records that `bytes` were sent to the guest; at most [`Connection::room`].
    pub fn sent(&mut self, bytes: usize) {
        self.sent = self.sent.wrapping_add(bytes as u32);
    }

    /// Returns the first bytes that wait for the host.
    pub fn waiting(&self) -> &[u8] {
        let (first, second) = self.waiting.as_slices();
        if first.is_empty() { second } else { first }
    }

    /// Records that the host took the first `bytes` of the waiting ones.
    pub fn forwarded(&mut self, bytes: usize) {
        self.waiting.drain(..bytes.min(self.waiting.len()));
        self.forwarded = self.forwarded.wrapping_add(bytes as u32);
        // An update is worth a packet if it gives the guest a large part of the buffer.
        if self.forwarded.wrapping_sub(self.reported_forwarded) >= BUFFER_BYTES / 4
            && self.state == State::Open
        {
            self.owes_credit = true;
        }
        if self.waiting.is_empty() && self.waiting.capacity() > BUFFER_BYTES as usize / 8 {
            // An idle connection holds no memory.
            self.waiting = VecDeque::new();
        }
    }

    /// Records that the host sends no further bytes. With `gone` it does not receive either.
    pub fn host_ended(&mut self, gone: bool) {
        let flags = if gone {
            SHUTDOWN_SEND | SHUTDOWN_RECEIVE
        } else {
            SHUTDOWN_SEND
        };
        self.owes_shutdown |= flags & !self.told_shutdown;
    }

    /// Returns the operation and flags of the next packet without payload.
    pub fn next_control(&mut self) -> Option<(u16, u32)> {
        let take = std::mem::take::<bool>;
        if take(&mut self.owes_request) {
            return Some((op::REQUEST, 0));
        }
        if self.state == State::Draining {
            return take(&mut self.owes_reset).then_some((op::RST, 0));
        }
        if take(&mut self.owes_response) {
            return Some((op::RESPONSE, 0));
        }
        if self.owes_shutdown != 0 && self.state == State::Open {
            self.told_shutdown |= std::mem::take(&mut self.owes_shutdown);
            return Some((op::SHUTDOWN, self.told_shutdown));
        }
        take(&mut self.owes_credit).then_some((op::CREDIT_UPDATE, 0))
    }

    /// Returns whether [`Connection::next_control`] has a packet.
    pub fn has_control(&self) -> bool {
        match self.state {
            State::Requested => self.owes_request,
            State::Draining => self.owes_request || self.owes_reset,
            State::Open => self.owes_response || self.owes_shutdown != 0 || self.owes_credit,
        }
    }

    /// Returns the credit for a packet about to be sent: buffer size and forwarded count.
    pub fn credit(&mut self) -> (u32, u32) {
        self.reported_forwarded = self.forwarded;
        self.owes_credit = false;
        (BUFFER_BYTES, self.forwarded)
    }

    /// Returns whether the connection is open.
    pub fn is_open(&self) -> bool {
        self.state == State::Open
    }

    /// Returns whether the guest has finished sending and the host took all its bytes: the host's side can be
    /// shut down.
    pub fn guest_sent_all(&self) -> bool {
        let ended = self.state == State::Draining || self.guest_shutdown & SHUTDOWN_SEND != 0;
        ended && self.waiting.is_empty()
    }

    /// Returns whether nothing remains to be done: the connection can be dropped and the host's side closed.
    pub fn is_over(&self) -> bool {
        let drained = self.state == State::Draining && self.waiting.is_empty();
        let left = self.told_shutdown == SHUTDOWN_RECEIVE | SHUTDOWN_SEND;
        (drained || left) && !self.has_control()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: u32 = 1000;

    /// Returns a connection that the guest requested, whose response was sent.
    fn open() -> Connection {
        let mut connection = Connection::accept(ROOM, 0);
        assert_eq!(connection.next_control(), Some((op::RESPONSE, 0)));
        connection
    }

    #[test]
    fn nothing_is_sent_before_the_connection_is_open() {
        let mut asked = Connection::request();
        assert!(asked.has_control() && !asked.is_open());
        assert_eq!(asked.receive(op::RESPONSE, 0, ROOM, 0, &[]), Err(Violation));
        assert_eq!(asked.next_control(), Some((op::REQUEST, 0)));
        assert!(!asked.has_control());
        assert_eq!((asked.next_control(), asked.room()), (None, 0));
        assert_eq!(asked.receive(op::RW, 0, ROOM, 0, b"x"), Err(Violation));
        assert_eq!(asked.receive(op::RESPONSE, 0, ROOM, 0, &[]), Ok(true));
        assert_eq!((asked.is_open(), asked.room()), (true, ROOM as usize));
        let accepted = Connection::accept(ROOM, 0);
        assert_eq!(accepted.room(), 0, "its response comes first");
    }

    #[test]
    fn credit_of_the_guest_is_what_it_has_room_for() {
        let mut connection = Connection::accept(ROOM, u32::MAX - 9);
        connection.next_control();
        // Counters wrap: ten bytes were forwarded before and none since.
        connection.sent = u32::MAX - 9;
        connection.sent(400);
        assert_eq!(connection.room(), 600);
        connection.receive(op::CREDIT_UPDATE, 0, ROOM, 90, &[]).unwrap();
        assert_eq!(connection.room(), 700);
        connection.receive(op::CREDIT_UPDATE, 0, 200, 90, &[]).unwrap();
        assert_eq!(connection.room(), 0, "a guest may take credit back");
    }

    #[test]
    fn bytes_wait_up_to_the_credit_that_was_given() {
        let mut connection = open();
        let half = vec![7; BUFFER_BYTES as usize / 2];
        for _ in 0..2 {
            connection.receive(op::RW, 0, ROOM, 0, &half).unwrap();
        }
        assert_eq!(connection.receive(op::RW, 0, ROOM, 0, b"x"), Err(Violation));
        connection.forwarded(1);
        connection.receive(op::RW, 0, ROOM, 0, b"x").unwrap();
        let mut waiting = 0;
        while !connection.waiting().is_empty() {
            let bytes = connection.waiting().len();
            waiting += bytes;
            connection.forwarded(bytes);
        }
        assert_eq!(waiting, BUFFER_BYTES as usize);
    }

    #[test]
    fn quarter_of_the_buffer_causes_a_credit_update() {
        let mut connection = open();
        let quarter = BUFFER_BYTES as usize / 4;
        connection
            .receive(op::RW, 0, ROOM, 0, &vec![7; quarter + 5])
            .unwrap();
        connection.forwarded(quarter - 1);
        assert_eq!(connection.next_control(), None);
        connection.forwarded(1);
        assert!(connection.has_control());
        assert_eq!(connection.next_control(), Some((op::CREDIT_UPDATE, 0)));
        assert_eq!(connection.credit(), (BUFFER_BYTES, quarter as u32));
        connection.forwarded(5);
        assert_eq!(connection.next_control(), None, "counted from the last update on");
        connection.receive(op::CREDIT_REQUEST, 0, ROOM, 0, &[]).unwrap();
        assert_eq!(connection.next_control(), Some((op::CREDIT_UPDATE, 0)));
    }

    #[test]
    fn any_packet_carries_the_credit_that_an_update_would() {
        let mut connection = open();
        connection.receive(op::CREDIT_REQUEST, 0, ROOM, 0, &[]).unwrap();
        connection.credit();
        assert_eq!(
            (connection.has_control(), connection.next_control()),
            (false, None)
        );
    }

    #[test]
    fn each_direction_is_shut_down_by_itself() {
        let mut connection = open();
        connection
            .receive(op::SHUTDOWN, SHUTDOWN_RECEIVE, ROOM, 0, &[])
            .unwrap();
        assert_eq!((connection.room(), connection.guest_sent_all()), (0, false));
        connection.receive(op::RW, 0, ROOM, 0, b"x").unwrap();
        let mut connection = open();
        connection
            .receive(op::SHUTDOWN, SHUTDOWN_SEND, ROOM, 0, &[])
            .unwrap();
        assert_eq!(
            (connection.room(), connection.guest_sent_all()),
            (ROOM as usize, true)
        );
        assert_eq!(connection.receive(op::RW, 0, ROOM, 0, b"x"), Err(Violation));
        assert!(connection.is_open() && !connection.is_over());
    }

    #[test]
    fn a_guest_that_shuts_both_directions_down_gets_a_reset_once_its_bytes_are_taken() {
        let mut connection = open();
        connection.receive(op::RW, 0, ROOM, 0, b"last").unwrap();
        let both = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;
        connection.receive(op::SHUTDOWN, both, ROOM, 0, &[]).unwrap();
        assert!(!connection.is_open() && !connection.guest_sent_all());
        assert_eq!(connection.next_control(), Some((op::RST, 0)));
        assert_eq!((connection.next_control(), connection.is_over()), (None, false));
        connection.forwarded(4);
        assert!(connection.guest_sent_all() && connection.is_over());
    }

    #[test]
    fn host_announces_each_shut_direction_once() {
        let mut connection = open();
        connection.host_ended(false);
        connection.host_ended(false);
        assert_eq!(connection.next_control(), Some((op::SHUTDOWN, SHUTDOWN_SEND)));
        assert_eq!((connection.next_control(), connection.room()), (None, 0));
        assert!(!connection.is_over(), "the guest may still send");
        connection.host_ended(true);
        assert!(!connection.is_over(), "the guest has not received the reset");
        let both = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;
        assert_eq!(connection.next_control(), Some((op::SHUTDOWN, both)));
        assert!(connection.is_over());
    }

    #[test]
    fn reset_by_the_guest_ends_the_connection_without_a_reply() {
        let mut connection = open();
        connection.receive(op::RST, 0, ROOM, 0, &[]).unwrap();
        assert_eq!((connection.next_control(), connection.is_over()), (None, true));
        assert_eq!(connection.receive(op::RW, 0, ROOM, 0, b"x"), Ok(false));
    }
}
