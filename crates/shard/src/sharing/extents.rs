//! Map from guest pages to the image pages that they stand for, stored as runs.
//!
//! Pure: no I/O. Runs never overlap, and adjacent runs that continue in the same image are one run. The
//! kernel merges such mappings, so the number of runs is the number of their mappings.

use std::collections::BTreeMap;
use std::ops::Range;

pub use shard_api::saved::{ImageId, NOTHING, Run};

/// Map from guest pages to image pages.
#[derive(Clone, Debug, Default)]
pub struct Extents {
    runs: BTreeMap<u64, Run>,
}

impl Extents {
    /// Number of runs.
    pub fn len(&self) -> usize {
        self.runs.len()
    }

    /// Returns whether the map is empty.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Number of pages in all runs.
    pub fn pages(&self) -> u64 {
        self.runs.values().map(|run| run.pages).sum()
    }

    /// Maps the guest pages from `at` on to `run`, replacing earlier entries.
    pub fn insert(&mut self, mut at: u64, mut run: Run) {
        self.remove(at..at + run.pages);
        if let Some((&before_at, before)) = self.runs.range(..at).next_back()
            && before_at + before.pages == at
            && before.goes_on_with(&run)
        {
            run = Run {
                pages: before.pages + run.pages,
                ..*before
            };
            at = before_at;
        }
        let end = at + run.pages;
        if let Some(after) = self.runs.get(&end)
            && run.goes_on_with(after)
        {
            run.pages += after.pages;
            self.runs.remove(&end);
        }
        self.runs.insert(at, run);
    }

    /// Removes the pages of `range`.
    pub fn remove(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        if let Some((&at, &run)) = self.runs.range(..range.start).next_back() {
            let end = at + run.pages;
            if end > range.start {
                self.runs.insert(at, run.part(0, range.start - at));
                if end > range.end {
                    self.runs
                        .insert(range.end, run.part(range.end - at, end - range.end));
                }
            }
        }
        while let Some((&at, &run)) = self.runs.range(range.clone()).next() {
            self.runs.remove(&at);
            let end = at + run.pages;
            if end > range.end {
                self.runs
                    .insert(range.end, run.part(range.end - at, end - range.end));
            }
        }
    }

    /// Returns the runs inside `range` in order, cut to it.
    pub fn inside(&self, range: Range<u64>) -> impl Iterator<Item = (u64, Run)> + '_ {
        let before = self.runs.range(..range.start).next_back();
        let within = self.runs.range(range.start..range.end.max(range.start));
        before.into_iter().chain(within).filter_map(move |(&at, run)| {
            let start = at.max(range.start);
            let end = (at + run.pages).min(range.end);
            (start < end).then(|| (start, run.part(start - at, end - start)))
        })
    }

    /// All runs in order.
    pub fn iter(&self) -> impl Iterator<Item = (u64, Run)> + '_ {
        self.runs.iter().map(|(&at, &run)| (at, run))
    }

    /// Returns the parts of `range` outside of all runs, in order.
    pub fn gaps(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut gaps = Vec::new();
        let mut at = range.start;
        for (start, run) in self.inside(range.clone()) {
            if at < start {
                gaps.push(at..start);
            }
            at = start + run.pages;
        }
        if at < range.end {
            gaps.push(at..range.end);
        }
        gaps
    }

    /// Returns whether every page of `range` is in a run.
    pub fn cover(&self, range: Range<u64>) -> bool {
        let pages: u64 = self.inside(range.clone()).map(|(_, run)| run.pages).sum();
        pages == range.end - range.start
    }

    /// Removes runs from the front, at most `pages` pages in all.
    pub fn take_front(&mut self, pages: u64) -> Vec<(u64, Run)> {
        let mut taken = Vec::new();
        let mut left = pages;
        while left > 0
            && let Some((&at, &run)) = self.runs.first_key_value()
        {
            self.runs.remove(&at);
            let part = run.part(0, run.pages.min(left));
            if part.pages < run.pages {
                let rest = run.part(part.pages, run.pages - part.pages);
                self.runs.insert(at + part.pages, rest);
            }
            left -= part.pages;
            taken.push((at, part));
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAGES: u64 = 48;

    fn run() -> impl Strategy<Value = (u64, Run)> {
        (0..PAGES, 1..9u64, 0..2u16, 0..PAGES).prop_map(|(at, pages, image, first)| {
            (
                at,
                Run {
                    pages: pages.min(PAGES - at),
                    image,
                    first,
                },
            )
        })
    }

    #[derive(Debug, Clone)]
    enum Step {
        Insert(u64, Run),
        Remove(Range<u64>),
        Take(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => run().prop_map(|(at, run)| Step::Insert(at, run)),
            2 => (0..PAGES, 0..9u64).prop_map(|(at, pages)| Step::Remove(at..(at + pages).min(PAGES))),
            1 => (0..6u64).prop_map(Step::Take),
        ]
    }

    fn flat(extents: &Extents) -> Vec<Option<(ImageId, u64)>> {
        let mut flat = vec![None; PAGES as usize];
        for (at, run) in extents.iter() {
            for page in 0..run.pages {
                let place = &mut flat[(at + page) as usize];
                assert!(place.is_none(), "runs overlap");
                *place = Some((run.image, run.first + page));
            }
        }
        flat
    }

    proptest! {
        #[test]
        fn extents_behave_as_a_plain_array(
            steps in proptest::collection::vec(step(), 0..60),
            from in 0..PAGES,
            pages in 0..PAGES
        ) {
            let mut extents = Extents::default();
            let mut model = vec![None; PAGES as usize];
            for step in steps {
                match step {
                    Step::Insert(at, run) => {
                        extents.insert(at, run);
                        for page in 0..run.pages {
                            model[(at + page) as usize] = Some((run.image, run.first + page));
                        }
                    }
                    Step::Remove(range) => {
                        extents.remove(range.clone());
                        for page in range {
                            model[page as usize] = None;
                        }
                    }
                    Step::Take(pages) => {
                        let taken = extents.take_front(pages);
                        for (at, run) in &taken {
                            for page in 0..run.pages {
                                let expected = Some((run.image, run.first + page));
                                prop_assert_eq!(model[(at + page) as usize].take(), expected);
                            }
                        }
                        let count: u64 = taken.iter().map(|(_, run)| run.pages).sum();
                        prop_assert!(count == pages || extents.is_empty());
                    }
                }
                prop_assert_eq!(&flat(&extents), &model);
                prop_assert_eq!(extents.pages(), model.iter().flatten().count() as u64);
            }
            // No two adjacent runs could be one mapping.
            let runs: Vec<_> = extents.iter().collect();
            for pair in runs.windows(2) {
                let joined = pair[0].0 + pair[0].1.pages == pair[1].0 && pair[0].1.goes_on_with(&pair[1].1);
                prop_assert!(!joined || pair.is_empty() || extents.len() == runs.len());
            }
            let range = from..(from + pages).min(PAGES);
            let pages_of = |(at, run): (u64, Run)| {
                (at..at + run.pages).map(move |page| (page, run.image, run.first + page - at))
            };
            let inside: Vec<_> = extents.inside(range.clone()).flat_map(pages_of).collect();
            let entry = |page: u64| model[page as usize].map(|(image, first)| (page, image, first));
            let expected: Vec<_> = range.clone().filter_map(entry).collect();
            let gaps: Vec<u64> = extents.gaps(range.clone()).into_iter().flatten().collect();
            let holes: Vec<u64> = range.clone().filter(|page| model[*page as usize].is_none()).collect();
            prop_assert_eq!(gaps, holes);
            prop_assert_eq!(extents.cover(range.clone()), expected.len() as u64 == range.end - range.start);
            prop_assert_eq!(inside, expected);
        }
    }

    #[test]
    fn adjacent_runs_that_continue_are_joined() {
        let mut extents = Extents::default();
        let run = |pages, first| Run {
            pages,
            image: 0,
            first,
        };
        extents.insert(10, run(2, 100));
        extents.insert(14, run(2, 104));
        extents.insert(12, run(2, 102));
        assert_eq!(extents.iter().collect::<Vec<_>>(), [(10, run(6, 100))]);
        extents.insert(16, run(1, 200));
        assert_eq!(extents.len(), 2);
    }
}
