//! Events in the order of their times; of two at one time the one that was added first.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::Time;

/// Queue of future events in the order of their times.
#[derive(Debug)]
pub struct Queue<E> {
    events: BinaryHeap<Reverse<Entry<E>>>,
    count: u64,
}

#[derive(Debug)]
struct Entry<E> {
    at: Time,
    number: u64,
    event: E,
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.number) == (other.at, other.number)
    }
}

impl<E> Eq for Entry<E> {}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

impl<E> Default for Queue<E> {
    fn default() -> Self {
        Self {
            events: BinaryHeap::new(),
            count: 0,
        }
    }
}

impl<E> Queue<E> {
    /// Adds an event.
    pub fn put(&mut self, at: Time, event: E) {
        self.count += 1;
        let number = self.count;
        self.events.push(Reverse(Entry { at, number, event }));
    }

    /// Removes the next event.
    pub fn take(&mut self) -> Option<(Time, E)> {
        self.events.pop().map(|Reverse(entry)| (entry.at, entry.event))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_by_time_and_then_as_they_were_put_in() {
        let mut queue = Queue::default();
        for (at, event) in [(5, 'c'), (1, 'a'), (5, 'd'), (2, 'b')] {
            queue.put(at, event);
        }
        let all: String = std::iter::from_fn(|| queue.take())
            .map(|(_, event)| event)
            .collect();
        assert_eq!(all, "abcd");
    }
}
