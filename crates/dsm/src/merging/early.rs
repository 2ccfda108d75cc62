//! What came before something that it comes after, in the order in which it came. Links keep the order of what one node sends, and
//! know nothing of what others sent before.

use std::collections::VecDeque;

use coherence::merged::VectorTime;

use super::pieces::MergePayload;
use crate::causal::AWAITED_MAX;
use crate::frame::Frame;

/// No node is so far ahead of another that more waits, bytes: as much as a few streams hold.
const BYTES_MAX: usize = 64 << 20;

/// What waits.
#[derive(Debug)]
pub enum Thing {
    /// A message of the engine, whose bytes are in their place, and what it comes after.
    Message(Frame, VectorTime),
    /// Changes, or about a page.
    MergePayload(MergePayload),
}

#[derive(Debug)]
struct Waiting {
    from: usize,
    thing: Thing,
    since_ns: u64,
}

/// All of a lane's.
#[derive(Debug, Default)]
pub struct Early {
    list: VecDeque<Waiting>,
    bytes: usize,
}

impl Early {
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Something of a node came too early.
    ///
    /// # Errors
    /// If too much waits.
    pub fn push(&mut self, from: usize, thing: Thing, now_ns: u64) -> Result<(), &'static str> {
        self.bytes += bytes(&thing);
        if self.bytes > BYTES_MAX {
            return Err("it is too far ahead of others in changes of merged pages");
        }
        self.list.push_back(Waiting {
            from,
            thing,
            since_ns: now_ns,
        });
        Ok(())
    }

    /// The first that need not wait any more.
    pub fn take(&mut self, mut is_ready: impl FnMut(usize, &Thing) -> bool) -> Option<(usize, Thing)> {
        let mut list = self.list.iter();
        let at = list.position(|waiting| is_ready(waiting.from, &waiting.thing))?;
        let Waiting { from, thing, .. } = self.list.remove(at)?;
        self.bytes -= bytes(&thing);
        Some((from, thing))
    }

    /// Whose has waited for so long that what it comes after will never be here.
    pub fn overdue(&self, now_ns: u64) -> Option<usize> {
        let first = self.list.front()?;
        let waited_ns = u128::from(now_ns.saturating_sub(first.since_ns));
        (waited_ns > AWAITED_MAX.as_nanos()).then_some(first.from)
    }
}

/// What it takes of memory, about.
fn bytes(thing: &Thing) -> usize {
    let beside = match thing {
        Thing::Message(..) => 0,
        Thing::MergePayload(MergePayload::Batch(_, diffs)) => size_of_val(&diffs[..]),
        Thing::MergePayload(MergePayload::Message(_, page)) => {
            page.as_ref().map_or(0, |page| size_of_val(&page[..]))
        }
    };
    size_of::<Waiting>() + beside
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::FRAME_BYTES;

    fn message(number: u8) -> Thing {
        Thing::Message([number; FRAME_BYTES], VectorTime::default())
    }

    fn number(thing: &Thing) -> u8 {
        match thing {
            Thing::Message(frame, _) => frame[0],
            Thing::MergePayload(_) => panic!("{thing:?}"),
        }
    }

    #[test]
    fn the_first_that_may_goes_first_and_the_rest_stays_in_order() {
        let mut early = Early::default();
        for one in 0..6 {
            early.push(usize::from(one), message(one), 0).unwrap();
        }
        let mut odd = Vec::new();
        while let Some((from, thing)) = early.take(|_, thing| number(thing) % 2 == 1) {
            assert_eq!(from, usize::from(number(&thing)));
            odd.push(from);
        }
        assert_eq!(odd, [1, 3, 5]);
        let rest: Vec<_> = std::iter::from_fn(|| early.take(|_, _| true))
            .map(|(from, _)| from)
            .collect();
        assert_eq!(rest, [0, 2, 4]);
        assert!(early.is_empty() && early.bytes == 0);
    }

    #[test]
    fn who_floods_is_refused_and_who_waits_too_long_is_named() {
        let mut early = Early::default();
        early.push(3, message(0), 1_000).unwrap();
        let limit_ns = 1_000 + AWAITED_MAX.as_nanos() as u64;
        assert_eq!(early.overdue(limit_ns), None);
        assert_eq!(early.overdue(limit_ns + 1), Some(3));
        let page = || Thing::MergePayload(MergePayload::Batch(VectorTime::default(), vec![diff(); 32_768]));
        let came = (0..200).take_while(|_| early.push(1, page(), 0).is_ok()).count();
        assert_eq!(came, BYTES_MAX / bytes(&page()));
    }

    fn diff() -> coherence::merged::Diff {
        coherence::merged::Diff {
            page: coherence::Page(1),
            word: 2,
            old: 3,
            new: 4,
        }
    }
}
