//! The merger's hooks: words of the guest's memory, messages to other nodes, and pages that are opened and
//! closed.

use std::sync::atomic::{AtomicU64, Ordering};

use coherence::merged::{AtomicPageWords, Batch, Hooks, MergeMessage};
use coherence::{NodeId, Page, Right};

use super::{DeferredWork, fragments};
use crate::PAGE_LEN;
use crate::driver::EngineDriver;

impl EngineDriver {
    fn word(&self, page: Page, word: usize) -> &AtomicU64 {
        assert!(word < PAGE_LEN / 8);
        // SAFETY: a word of the page's bytes, which are mapped as long as the region; others write it at the
        // same time: hence the atomics.
        unsafe { AtomicU64::from_ptr(self.region.bytes(page.0).cast::<u64>().add(word)) }
    }
}

impl AtomicPageWords for EngineDriver {
    fn is_ram(&self, page: Page) -> bool {
        page.0 < self.region.pages()
    }

    fn load(&self, page: Page, word: usize) -> u64 {
        self.word(page, word).load(Ordering::Acquire)
    }

    fn has(&self, page: Page, words: &[u64]) -> bool {
        assert!(words.len() <= PAGE_LEN / 8);
        let bytes = self.region.bytes(page.0).cast();
        // SAFETY: a page of the region, and a list that is no longer. Others write the page meanwhile: no
        // compiler sees into this function of C's, which reads each aligned word at once on this processor,
        // and in order with all later reads.
        unsafe { libc::memcmp(bytes, words.as_ptr().cast(), size_of_val(words)) == 0 }
    }

    fn compare_exchange(&mut self, page: Page, word: usize, current: u64, new: u64) -> Result<(), u64> {
        let word = self.word(page, word);
        word.compare_exchange(current, new, Ordering::SeqCst, Ordering::Acquire)
            .map(|_| ())
    }
}

impl Hooks for EngineDriver {
    fn send(&mut self, to: NodeId, message: MergeMessage) {
        let page = message.op.carries_page().then(|| {
            // SAFETY: the page is closed to all processors while it is offered.
            unsafe { self.region.bytes(message.page.0).read() }
        });
        let fragments = fragments::message(&message, page.as_ref(), self.peers.links.len());
        self.post_fragments(usize::from(to.0), &fragments);
    }

    fn broadcast(&mut self, batch: Batch<'_>) {
        let fragments = fragments::batch(&batch, self.peers.links.len());
        for node in 0..self.peers.links.len() {
            self.post_fragments(node, &fragments);
        }
    }

    fn take(&mut self, page: Page) {
        self.deferred.push_back(DeferredWork::Take(page.0));
    }

    fn give_back(&mut self, page: Page) {
        self.deferred.push_back(DeferredWork::GiveBack(page.0));
    }

    fn store(&mut self, page: Page) {
        self.landing.cancel(page.0);
        if self.region.mapped(page.0) != Right::None {
            return self.refused("an offered page is in use here");
        }
        // SAFETY: a page that no processor here can use; the page server is its only writer.
        unsafe { self.region.bytes(page.0).write(*self.offered) };
    }

    fn open(&mut self, page: Page) {
        self.landing.cancel(page.0);
        self.open_to_all(page.0);
    }

    fn close(&mut self, page: Page) {
        self.revoke(page.0);
    }
}
