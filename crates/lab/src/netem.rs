//! Emulation of delay and loss on a link, per direction, as Linux's netem does.
//!
//! A state machine without I/O and clock: the caller passes the time, and carries the frames. Each direction,
//! from one port to another, has its own quality. Frames of one direction arrive in the order in which they
//! were sent, even while its delay changes.

use std::collections::BinaryHeap;
use std::time::Instant;

use config::lab::Quality;

/// Most queued frames of one direction; more are dropped. 6 MB of full frames, so 60 MB/s over 100 ms.
const QUEUED_FRAMES_MAX: usize = 4096;

/// Certainty, in the unit of [`config::lab::Loss`].
const CHANCES: u32 = 1_000_000;

/// Decision on a frame.
#[derive(Debug, PartialEq, Eq)]
pub enum Forwarding<F> {
    /// The frame is to be delivered now.
    Deliver(F),
    /// The frame is queued until it is due.
    Queued,
    /// The frame is lost.
    Dropped,
}

/// The queues between the ports of a link.
pub struct Netem<F> {
    ports: usize,
    /// One direction for each pair of ports, row by row.
    directions: Vec<Direction>,
    queued: BinaryHeap<QueuedFrame<F>>,
    /// Number of frames that were ever queued.
    sequence: u64,
    random: fastrand::Rng,
}

#[derive(Clone)]
struct Direction {
    quality: Quality,
    /// Number of queued frames.
    queued: usize,
    /// Due time of the last of them.
    last_due: Option<Instant>,
}

struct QueuedFrame<F> {
    due: Instant,
    /// Sequence number: breaks ties of equal due times.
    number: u64,
    direction: usize,
    frame: F,
}

impl<F> QueuedFrame<F> {
    fn turn(&self) -> (Instant, u64) {
        (self.due, self.number)
    }
}

impl<F> Ord for QueuedFrame<F> {
    /// Reversed, since the heap returns the greatest element.
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        other.turn().cmp(&self.turn())
    }
}

impl<F> PartialOrd for QueuedFrame<F> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<F> PartialEq for QueuedFrame<F> {
    fn eq(&self, other: &Self) -> bool {
        self.turn() == other.turn()
    }
}

impl<F> Eq for QueuedFrame<F> {}

impl<F> Netem<F> {
    /// Creates the queues between `ports` ports, all directions with this quality. Equal seeds lose the same
    /// frames.
    pub fn new(ports: usize, quality: Quality, seed: u64) -> Self {
        let direction = Direction {
            quality,
            queued: 0,
            last_due: None,
        };
        Self {
            ports,
            directions: vec![direction; ports * ports],
            queued: BinaryHeap::new(),
            sequence: 0,
            random: fastrand::Rng::with_seed(seed),
        }
    }

    /// Changes the quality from one port to another, for frames that are sent from now on.
    pub fn set(&mut self, from: usize, to: usize, quality: Quality) {
        self.directions[from * self.ports + to].quality = quality;
    }

    /// Returns the quality from one port to another.
    pub fn quality(&self, from: usize, to: usize) -> Quality {
        self.directions[from * self.ports + to].quality
    }

    /// Decides on a frame that is sent at `now`.
    pub fn send(&mut self, from: usize, to: usize, frame: F, now: Instant) -> Forwarding<F> {
        let index = from * self.ports + to;
        let direction = &mut self.directions[index];
        if direction.quality.loss.takes(self.random.u32(..CHANCES)) || direction.queued == QUEUED_FRAMES_MAX {
            return Forwarding::Dropped;
        }
        let delay = direction.quality.delay.duration();
        if delay.is_zero() && direction.queued == 0 {
            return Forwarding::Deliver(frame);
        }
        // Not before the frame that was sent before it.
        let due = (now + delay).max(direction.last_due.unwrap_or(now));
        direction.queued += 1;
        direction.last_due = Some(due);
        self.queued.push(QueuedFrame {
            due,
            number: self.sequence,
            direction: index,
            frame,
        });
        self.sequence += 1;
        Forwarding::Queued
    }

    /// Returns the due time of the next queued frame.
    pub fn next_due(&self) -> Option<Instant> {
        self.queued.peek().map(|queued| queued.due)
    }

    /// Removes the next frame that is due at `now`. Returns the frame and its port.
    pub fn arrived(&mut self, now: Instant) -> Option<(usize, F)> {
        if self.next_due()? > now {
            return None;
        }
        let QueuedFrame { direction, frame, .. } = self.queued.pop()?;
        self.directions[direction].queued -= 1;
        Some((direction % self.ports, frame))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn quality(delay: &str, loss: &str) -> Quality {
        Quality {
            delay: delay.parse().unwrap(),
            loss: loss.parse().unwrap(),
        }
    }

    #[test]
    fn frame_arrives_exactly_after_its_delay() {
        let start = Instant::now();
        let mut netem = Netem::new(3, quality("2ms", "0%"), 1);
        assert_eq!(netem.send(2, 1, 'a', start), Forwarding::Queued);
        assert_eq!(netem.next_due(), Some(start + Duration::from_millis(2)));
        assert_eq!(netem.arrived(start + Duration::from_micros(1999)), None);
        assert_eq!(netem.arrived(start + Duration::from_millis(2)), Some((1, 'a')));
        assert_eq!(netem.next_due(), None);
    }

    #[test]
    fn each_direction_has_its_own_quality() {
        let start = Instant::now();
        let mut netem = Netem::new(3, Quality::default(), 1);
        netem.set(0, 1, quality("5ms", "0%"));
        netem.set(1, 0, quality("0ms", "100%"));
        assert_eq!(netem.send(0, 1, 'a', start), Forwarding::Queued);
        assert_eq!(netem.send(1, 0, 'b', start), Forwarding::Dropped);
        assert_eq!(netem.send(0, 2, 'c', start), Forwarding::Deliver('c'));
        assert_eq!(netem.quality(0, 1), quality("5ms", "0%"));
    }

    #[test]
    fn frames_keep_their_order_when_the_delay_shrinks() {
        let start = Instant::now();
        let mut netem = Netem::new(2, quality("50ms", "0%"), 1);
        assert_eq!(netem.send(0, 1, 'a', start), Forwarding::Queued);
        for (delay, frame) in [("1ms", 'b'), ("0ms", 'c')] {
            netem.set(0, 1, quality(delay, "0%"));
            assert_eq!(netem.send(0, 1, frame, start), Forwarding::Queued);
        }
        let end = start + Duration::from_millis(50);
        assert_eq!(netem.arrived(end - Duration::from_micros(1)), None);
        let arrived: Vec<_> = std::iter::from_fn(|| netem.arrived(end)).collect();
        assert_eq!(arrived, [(1, 'a'), (1, 'b'), (1, 'c')]);
        assert_eq!(netem.send(0, 1, 'd', end), Forwarding::Deliver('d'));
    }

    #[test]
    fn configured_fraction_of_frames_is_lost_at_random() {
        let now = Instant::now();
        let mut netem = Netem::new(2, quality("0ms", "10%"), 7);
        let lost: Vec<bool> = (0..10_000)
            .map(|_| netem.send(0, 1, (), now) == Forwarding::Dropped)
            .collect();
        let count = lost.iter().filter(|lost| **lost).count();
        // Within five standard deviations.
        assert!((850..=1150).contains(&count), "{count} of 10,000");
        let pairs = lost.windows(2).filter(|pair| pair[0] && pair[1]).count();
        assert!((50..=150).contains(&pairs), "{pairs} pairs of 10,000");
    }

    #[test]
    fn queue_of_a_direction_is_bounded() {
        let now = Instant::now();
        let mut netem = Netem::new(2, quality("1s", "0%"), 1);
        for _ in 0..QUEUED_FRAMES_MAX {
            assert_eq!(netem.send(0, 1, (), now), Forwarding::Queued);
        }
        assert_eq!(netem.send(0, 1, (), now), Forwarding::Dropped);
        // The other direction has its own queue.
        assert_eq!(netem.send(1, 0, (), now), Forwarding::Queued);
        assert!(netem.arrived(now + Duration::from_secs(1)).is_some());
        assert_eq!(netem.send(0, 1, (), now), Forwarding::Queued);
    }
}
