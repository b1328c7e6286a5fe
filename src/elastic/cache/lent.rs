//! Leases: blocks of a cache on pages of a lender.

use std::ops::Range;

use super::super::backing::Lender;
use super::super::page_states::Place;
use super::super::spans::Spans;
use super::KvCache;
use crate::error::{Error, Result};
use crate::pages::{Fence, LentPlace};

impl KvCache {
    /// Backs unbacked blocks with a lender's pages, wherever no page is mapped, until the blocks
    /// are released. Work on the blocks must wait by [`before`](Self::before), which includes the
    /// lender's fence.
    pub(crate) fn borrow_pages(&self, blocks: &Range<u64>, lender: Lender<'_>) -> Result<()> {
        self.check(blocks)?;
        let _section = self.enter_commit_section()?;
        self.let_go_now();
        {
            let states = self.states.lock();
            if blocks.end > states.limit {
                return Err(self.beyond_limit(&states, blocks.end));
            }
            if !states.backed.within(blocks).is_empty() {
                return Err(Error::wrong_state(format!(
                    "cannot lend pages to blocks {}..{}: some have memory already; decommit them first",
                    blocks.start, blocks.end
                )));
            }
        }
        self.backing.borrow(&self.shape.pages(blocks), false, lender)?;
        self.note_committed(blocks.end, std::slice::from_ref(blocks), None);
        Ok(())
    }

    /// Returns the backed blocks on these pages, and all other backed blocks.
    pub(crate) fn blocks_on(&self, lent: &[LentPlace]) -> (Vec<Range<u64>>, Vec<Range<u64>>) {
        let on = self.spans_on(&self.backing.places(lent));
        let backed = self.states.lock().backed.clone();
        let mut others = backed.clone();
        let all = 0..self.shape.most();
        let on: Vec<_> = on.within(&all).iter().flat_map(|span| backed.within(span)).collect();
        on.iter().for_each(|span| others.remove(span));
        (on, others.within(&all))
    }

    fn spans_on(&self, places: &[Place]) -> Spans {
        let mut on = Spans::default();
        places.iter().for_each(|(range, page)| on.insert(&self.shape.blocks_on(*range, *page)));
        on
    }

    /// Releases the given blocks on these leased pages. Returns the bytes of pages without backed
    /// blocks, including pages which had none before. No block on these pages is backed again
    /// before the unmap.
    pub(crate) fn give_back(&self, lent: &[LentPlace], blocks: &[Range<u64>], fence: &Fence) -> Result<u64> {
        let places = self.backing.places(lent);
        let _section = self.enter_commit_section()?;
        self.let_go_now();
        let (mut given, mut going) = (Spans::default(), Vec::new());
        blocks.iter().for_each(|blocks| given.insert(blocks));
        {
            let states = &mut *self.states.lock();
            for place in &places {
                let mut on = states.backed.within(&self.shape.blocks_on(place.0, place.1)).into_iter();
                if on.all(|span| given.missing(&span).is_empty()) {
                    going.push(*place);
                }
            }
            // No commit runs: this thread has the commit section.
            self.backing.recall(&going);
            let on = self.spans_on(&places).within(&(0..self.shape.most()));
            let vacated = on.iter().flat_map(|span| given.within(span));
            states.released.extend(vacated.map(|span| (span, fence.clone())));
        }
        Ok(going.len() as u64 * self.backing.page())
    }
}
