//! Frames on their way from one host of a link to another: which are lost, and when the others arrive.
//!
//! Decides only: whoever has frames says what time it is, and carries them. Each *way*, from one port to another, has a quality of its
//! own. Frames of one way arrive in the order in which they were sent, also while its delay is changed.

use std::collections::BinaryHeap;
use std::time::Instant;

use config::lab::Quality;

/// Frames on one way before more are lost: 6 MB of full ones, so 60 MB/s over 100 ms.
const ON_WAY_FRAMES_MAX: usize = 4096;

/// All chances, in the unit of [`config::lab::Loss`].
const CHANCES: u32 = 1_000_000;

/// What becomes of a frame.
#[derive(Debug, PartialEq, Eq)]
pub enum Fate<F> {
    /// It arrives now.
    Arrives(F),
    /// It is kept here until it is due.
    OnItsWay,
    /// Nobody sees it again.
    Lost,
}

/// Everything between the ports of a link.
pub struct Air<F> {
    ports: usize,
    /// From each port to each, row by row.
    ways: Vec<Way>,
    waiting: BinaryHeap<Waiting<F>>,
    /// How many frames have waited so far.
    waited: u64,
    random: fastrand::Rng,
}

#[derive(Clone)]
struct Way {
    quality: Quality,
    /// How many frames wait.
    waiting: usize,
    /// When the last of them is due.
    last_due: Option<Instant>,
}

struct Waiting<F> {
    due: Instant,
    /// Of frames that are due at the same time the one that was sent first comes first.
    number: u64,
    way: usize,
    frame: F,
}

impl<F> Waiting<F> {
    fn turn(&self) -> (Instant, u64) {
        (self.due, self.number)
    }
}

impl<F> Ord for Waiting<F> {
    /// The greatest is the next: a heap gives that.
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        other.turn().cmp(&self.turn())
    }
}

impl<F> PartialOrd for Waiting<F> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<F> PartialEq for Waiting<F> {
    fn eq(&self, other: &Self) -> bool {
        self.turn() == other.turn()
    }
}

impl<F> Eq for Waiting<F> {}

impl<F> Air<F> {
    /// Between so many ports, all ways of this quality; the same seed loses the same frames.
    pub fn new(ports: usize, quality: Quality, seed: u64) -> Self {
        let way = Way {
            quality,
            waiting: 0,
            last_due: None,
        };
        Self {
            ports,
            ways: vec![way; ports * ports],
            waiting: BinaryHeap::new(),
            waited: 0,
            random: fastrand::Rng::with_seed(seed),
        }
    }

    /// Changes the way from one port to another, for frames that are sent from now on.
    pub fn set(&mut self, from: usize, to: usize, quality: Quality) {
        self.ways[from * self.ports + to].quality = quality;
    }

    /// How the way from one port to another is.
    pub fn quality(&self, from: usize, to: usize) -> Quality {
        self.ways[from * self.ports + to].quality
    }

    /// A frame is sent.
    pub fn send(&mut self, from: usize, to: usize, frame: F, now: Instant) -> Fate<F> {
        let index = from * self.ports + to;
        let way = &mut self.ways[index];
        if way.quality.loss.takes(self.random.u32(..CHANCES)) || way.waiting == ON_WAY_FRAMES_MAX {
            return Fate::Lost;
        }
        let delay = way.quality.delay.duration();
        if delay.is_zero() && way.waiting == 0 {
            return Fate::Arrives(frame);
        }
        // Not before the one that was sent before it.
        let due = (now + delay).max(way.last_due.unwrap_or(now));
        way.waiting += 1;
        way.last_due = Some(due);
        self.waiting.push(Waiting {
            due,
            number: self.waited,
            way: index,
            frame,
        });
        self.waited += 1;
        Fate::OnItsWay
    }

    /// When the next frame is due, if any waits.
    pub fn next_due(&self) -> Option<Instant> {
        self.waiting.peek().map(|waiting| waiting.due)
    }

    /// The next frame that is due by now, and the port it goes to.
    pub fn arrived(&mut self, now: Instant) -> Option<(usize, F)> {
        if self.next_due()? > now {
            return None;
        }
        let Waiting { way, frame, .. } = self.waiting.pop()?;
        self.ways[way].waiting -= 1;
        Some((way % self.ports, frame))
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
        let mut air = Air::new(3, quality("2ms", "0%"), 1);
        assert_eq!(air.send(2, 1, 'a', start), Fate::OnItsWay);
        assert_eq!(air.next_due(), Some(start + Duration::from_millis(2)));
        assert_eq!(air.arrived(start + Duration::from_micros(1999)), None);
        assert_eq!(air.arrived(start + Duration::from_millis(2)), Some((1, 'a')));
        assert_eq!(air.next_due(), None);
    }

    #[test]
    fn each_direction_has_its_own_quality() {
        let start = Instant::now();
        let mut air = Air::new(3, Quality::default(), 1);
        air.set(0, 1, quality("5ms", "0%"));
        air.set(1, 0, quality("0ms", "100%"));
        assert_eq!(air.send(0, 1, 'a', start), Fate::OnItsWay);
        assert_eq!(air.send(1, 0, 'b', start), Fate::Lost);
        assert_eq!(air.send(0, 2, 'c', start), Fate::Arrives('c'));
        assert_eq!(air.quality(0, 1), quality("5ms", "0%"));
    }

    #[test]
    fn frames_keep_their_order_when_the_delay_shrinks() {
        let start = Instant::now();
        let mut air = Air::new(2, quality("50ms", "0%"), 1);
        assert_eq!(air.send(0, 1, 'a', start), Fate::OnItsWay);
        for (delay, frame) in [("1ms", 'b'), ("0ms", 'c')] {
            air.set(0, 1, quality(delay, "0%"));
            assert_eq!(air.send(0, 1, frame, start), Fate::OnItsWay);
        }
        let end = start + Duration::from_millis(50);
        assert_eq!(air.arrived(end - Duration::from_micros(1)), None);
        let arrived: Vec<_> = std::iter::from_fn(|| air.arrived(end)).collect();
        assert_eq!(arrived, [(1, 'a'), (1, 'b'), (1, 'c')]);
        assert_eq!(air.send(0, 1, 'd', end), Fate::Arrives('d'));
    }

    #[test]
    fn configured_fraction_of_frames_is_lost_at_random() {
        let now = Instant::now();
        let mut air = Air::new(2, quality("0ms", "10%"), 7);
        let lost: Vec<bool> = (0..10_000)
            .map(|_| air.send(0, 1, (), now) == Fate::Lost)
            .collect();
        let count = lost.iter().filter(|lost| **lost).count();
        // Five standard deviations to each side.
        assert!((850..=1150).contains(&count), "{count} of 10,000");
        let pairs = lost.windows(2).filter(|pair| pair[0] && pair[1]).count();
        assert!((50..=150).contains(&pairs), "{pairs} pairs of 10,000");
    }

    #[test]
    fn queue_of_a_direction_is_bounded() {
        let now = Instant::now();
        let mut air = Air::new(2, quality("1s", "0%"), 1);
        for _ in 0..ON_WAY_FRAMES_MAX {
            assert_eq!(air.send(0, 1, (), now), Fate::OnItsWay);
        }
        assert_eq!(air.send(0, 1, (), now), Fate::Lost);
        // The way back has room of its own.
        assert_eq!(air.send(1, 0, (), now), Fate::OnItsWay);
        assert!(air.arrived(now + Duration::from_secs(1)).is_some());
        assert_eq!(air.send(0, 1, (), now), Fate::OnItsWay);
    }
}
