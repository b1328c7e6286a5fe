//! Numbers derived from the pages needed by each space.

use super::{ArenaMap, MapPoint, PageClass};

impl ArenaMap {
    /// Indices, without duplicates.
    pub(super) fn needs(&self) -> Vec<Vec<usize>> {
        let of_space = |space: &super::MapSpace| {
            let shown = space.maps.iter().map(|tile| tile.page).chain(space.kept_pages.iter().copied());
            let mut pages: Vec<usize> = shown.map(|page| page as usize).collect();
            pages.sort_unstable();
            pages.dedup();
            pages
        };
        self.spaces.iter().map(of_space).collect()
    }

    pub(super) fn sum(&mut self) {
        let needs = self.needs();
        let mut users = vec![0_u64; self.pages.len()];
        needs.iter().flatten().for_each(|page| users[*page] += 1);
        for (page, users) in self.pages.iter_mut().zip(&users) {
            page.spaces = *users;
        }
        self.held_bytes = self.pages.iter().filter(|page| !page.absent).map(|page| page.bytes).sum();
        self.apart_bytes = self.spaces.iter().map(|space| space.peak_live_bytes).sum();
        let (pages, spaces) = (&self.pages, &mut self.spaces);
        for (space, needs) in spaces.iter_mut().zip(&needs) {
            let bytes = |wanted: &dyn Fn(usize) -> bool| -> u64 {
                needs.iter().filter(|page| wanted(**page)).map(|page| pages[*page].bytes).sum()
            };
            let own = |page: usize| pages[page].class == PageClass::Own;
            let kept = |page: usize| pages[page].class == PageClass::Kept;
            space.shown_bytes = bytes(&|_| true);
            space.retained_bytes = bytes(&own);
            space.alone_bytes = bytes(&|page| users[page] == 1 && !own(page) && !kept(page));
            space.drop_gives_bytes = bytes(&|page| users[page] == 1);
        }
        self.curve = self.points(&needs, users);
    }

    fn points(&self, needs: &[Vec<usize>], mut users: Vec<u64>) -> Vec<MapPoint> {
        let mut order: Vec<usize> = (0..self.spaces.len()).collect();
        order.sort_by_key(|index| {
            let space = &self.spaces[*index];
            (std::cmp::Reverse((space.shown_bytes, space.peak_live_bytes)), space.id)
        });
        let mut seen = vec![false; self.pages.len()];
        let needed = self.pages.iter().zip(&users).filter(|(_, users)| **users > 0);
        let (mut with_bytes, mut without_bytes) = (0, needed.map(|(page, _)| page.bytes).sum::<u64>());
        let point = |index: usize| {
            for page in &needs[index] {
                let bytes = self.pages[*page].bytes;
                if !std::mem::replace(&mut seen[*page], true) {
                    with_bytes += bytes;
                }
                users[*page] -= 1;
                if users[*page] == 0 {
                    without_bytes -= bytes;
                }
            }
            MapPoint { space: self.spaces[index].id, with_bytes, without_bytes }
        };
        order.into_iter().map(point).collect()
    }
}
