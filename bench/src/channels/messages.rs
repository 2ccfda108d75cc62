//! Messages of 64 bytes: round trips, and one way as fast as possible. The reference is two CPUs that pass
//! one cache line back and forth.

pub mod bare;
pub mod crossbeam;
pub mod iceoryx;
pub mod ring;
pub mod socket;
pub mod waiting;

use bench::tables::{Column, Row, Table};

/// Messages that a queue holds: the length in the paper's Table 2.
pub const LINES: usize = 16;
/// Round trips of polling transports.
pub const TRIPS: u64 = 100_000;
/// Round trips of blocking transports.
pub const TRIPS_SLOW: u64 = 5_000;
/// Messages one way.
pub const MESSAGES: u64 = 2_000_000;

pub const TABLE: Table = Table {
    title: "one message of 64 bytes between two CPUs",
    columns: &[
        Column::Ns("round trip, ns"),
        Column::Millions("messages per second, million"),
    ],
    compared: true,
    rows: &[
        Row::new("bare cache lines", &[Some(bare::round_trip), None]),
        Row::new("channel, polling", &[Some(ring::round_trip), Some(ring::one_way)]),
        Row::new(
            "channel, polling, with prefetch",
            &[Some(ring::round_trip_prefetched), Some(ring::one_way_prefetched)],
        ),
        Row::new(
            "channel, polling, between processes",
            &[Some(ring::round_trip_processes), Some(ring::one_way_processes)],
        ),
        Row::new(
            "channel that may block",
            &[Some(waiting::round_trip), Some(waiting::one_way)],
        ),
        Row::new(
            "channel that may block, between processes",
            &[Some(waiting::round_trip_processes), None],
        ),
        Row::new(
            "channel that blocks at once",
            &[Some(waiting::round_trip_asleep), None],
        ),
        Row::new(
            "iceoryx2, polling, between processes",
            &[Some(iceoryx::round_trip), Some(iceoryx::one_way)],
        ),
        Row::new(
            "iceoryx2 events, blocking, between processes",
            &[Some(iceoryx::events), None],
        ),
        Row::new(
            "crossbeam bounded, polling, between threads",
            &[Some(crossbeam::round_trip), Some(crossbeam::one_way)],
        ),
        Row::new(
            "crossbeam bounded, blocking, between threads",
            &[Some(crossbeam::round_trip_blocking), None],
        ),
        Row::new(
            "unix socket between processes",
            &[Some(socket::round_trip), Some(socket::one_way)],
        ),
    ],
};

/// A message whose every word is its number.
pub fn message(number: u64) -> urpc::Message {
    urpc::Message {
        words: [number; 7],
        kind: 1,
    }
}
