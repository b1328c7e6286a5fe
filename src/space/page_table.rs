//! Which numbered pages a space uses, and for which stream.

use crate::pages::{Class, PageNo};
use crate::units::{Geometry, Stream};

#[derive(Clone, Copy, Debug, Default)]
struct PageUse {
    busy: bool,
    /// The stream whose blocks the page holds until the seal. Another stream's work is not ordered with theirs.
    stream: Option<Stream>,
    /// The last search that passed here, to notice a page that shows twice.
    visit: u64,
}

/// Every page number a space has used so far. A page is *busy* while a live block covers a tile that shows it.
#[derive(Debug)]
pub(crate) struct PageTable {
    geometry: Geometry,
    small: Vec<PageUse>,
    large: Vec<PageUse>,
    visits: u64,
}

impl PageTable {
    pub(crate) fn new(geometry: Geometry) -> Self {
        Self { geometry, small: Vec::new(), large: Vec::new(), visits: 0 }
    }

    /// Bytes of a page of this class.
    pub(crate) fn bytes(&self, class: Class) -> u64 {
        match class {
            Class::Small => self.geometry.small(),
            Class::Large => self.geometry.large(),
        }
    }

    /// How many numbers of each class, small and large, have been used.
    pub(crate) fn used(&self) -> (usize, usize) {
        (self.small.len(), self.large.len())
    }

    /// How many pages of each class are busy.
    #[cfg(test)]
    pub(crate) fn busy(&self) -> (usize, usize) {
        let busy = |table: &[PageUse]| table.iter().filter(|page| page.busy).count();
        (busy(&self.small), busy(&self.large))
    }

    /// Free pages of a class that the stream may use, lowest number first, without end: numbers nobody used yet come last.
    pub(crate) fn free(&self, class: Class, stream: Stream) -> impl Iterator<Item = PageNo> {
        let table = match class {
            Class::Small => &self.small,
            Class::Large => &self.large,
        };
        let known = table.iter().enumerate().filter(move |(_, page)| page.usable_by(stream));
        let fresh = table.len() as u32..;
        known.map(|(index, _)| index as u32).chain(fresh).map(move |index| PageNo { class, index })
    }

    /// Begins a search: every page may be visited once.
    pub(crate) fn start_search(&mut self) {
        self.visits += 1;
    }

    /// Whether the stream may use the page and the search has not passed it yet.
    pub(crate) fn visit(&mut self, page: PageNo, stream: Stream) -> bool {
        let visits = self.visits;
        let page = self.get(page);
        let usable = page.usable_by(stream) && page.visit != visits;
        page.visit = visits;
        usable
    }

    /// Adds a number that a growth has mapped.
    pub(crate) fn add(&mut self, page: PageNo) {
        let table = match page.class {
            Class::Small => &mut self.small,
            Class::Large => &mut self.large,
        };
        table.resize(table.len().max(page.index as usize + 1), PageUse::default());
    }

    /// A block of the stream covers the page now.
    pub(crate) fn occupy(&mut self, page: PageNo, stream: Stream) {
        let page = self.get(page);
        page.busy = true;
        page.stream = Some(stream);
    }

    /// The block is gone. The page stays its stream's until the seal.
    pub(crate) fn release(&mut self, page: PageNo) {
        self.get(page).busy = false;
    }

    /// The stream whose blocks the page holds, if any.
    pub(crate) fn stream(&self, page: PageNo) -> Option<Stream> {
        match page.class {
            Class::Small => self.small[page.index as usize].stream,
            Class::Large => self.large[page.index as usize].stream,
        }
    }

    fn get(&mut self, page: PageNo) -> &mut PageUse {
        match page.class {
            Class::Small => &mut self.small[page.index as usize],
            Class::Large => &mut self.large[page.index as usize],
        }
    }
}

impl PageUse {
    fn usable_by(&self, stream: Stream) -> bool {
        !self.busy && self.stream.is_none_or(|owner| owner == stream)
    }
}
