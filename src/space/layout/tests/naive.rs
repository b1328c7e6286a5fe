//! The same policy for blocks that are not packed, in plain lists: everything is found by looking at everything.

use std::collections::BTreeMap;

use super::Part;

/// A window: its first tile, how many, where its block began in the first page, and the block's bytes.
type Window = (usize, usize, u64, u64);

pub(super) struct Naive {
    small: u64,
    large: u64,
    /// (range, page) in the order of mapping.
    tiles: Vec<(usize, u32)>,
    /// Least recently used first.
    windows: Vec<Window>,
    /// What is live.
    live: Vec<Part>,
    owner: BTreeMap<u32, u64>,
    /// How far blocks ever reached into each page, in whole small pages.
    reach: BTreeMap<u32, u64>,
}

impl Naive {
    pub(super) fn new(small: u64, large: u64) -> Self {
        let (owner, reach) = (BTreeMap::new(), BTreeMap::new());
        Self { small, large, tiles: Vec::new(), windows: Vec::new(), live: Vec::new(), owner, reach }
    }

    pub(super) fn free(&mut self, parts: &[Part]) {
        self.live.retain(|live| !parts.contains(live));
    }

    fn known(&self) -> u32 {
        self.owner.len() as u32
    }

    /// The pages of a stream that hold blocks, or those that hold none, lowest first.
    fn of(&self, stream: u64, begun: bool) -> Vec<u32> {
        let holds = |page: &u32| self.live.iter().any(|live| live.page == *page) == begun;
        (0..self.known()).filter(|page| self.owner[page] == stream && holds(page)).collect()
    }

    fn gaps(&self, page: u32, end: u64) -> Vec<(u64, u64)> {
        let mut stays: Vec<_> = self.live.iter().filter(|l| l.page == page).map(|l| (l.from, l.to)).collect();
        stays.sort_unstable();
        let begins: Vec<u64> = std::iter::once(0).chain(stays.iter().map(|stay| stay.1)).collect();
        let ends = stays.iter().map(|stay| stay.0).chain([end]);
        begins.into_iter().zip(ends).collect()
    }

    fn is_free(&self, part: Part, stream: u64) -> bool {
        self.owner[&part.page] == stream
            && self.live.iter().all(|l| l.page != part.page || l.to <= part.from || part.to <= l.from)
    }

    /// The page bytes a block gets, and whether they were mapped before. Where new tiles go is not the twin's business: `first` is
    /// the range of the block and its first tile in it.
    pub(super) fn allocate(&mut self, bytes: u64, stream: u64, first: (usize, usize)) -> (Vec<Part>, bool) {
        let (parts, reused) = match self.within(bytes, stream) {
            Ok(part) => (vec![part], true),
            Err(Some(window)) => (self.window(window, bytes).unwrap(), true),
            Err(None) => (self.stitch(bytes, stream, first), false),
        };
        for part in &parts {
            self.owner.insert(part.page, stream);
            let reach = self.reach.entry(part.page).or_default();
            *reach = part.to.next_multiple_of(self.small).max(*reach);
        }
        self.live.extend(&parts);
        (parts, reused)
    }

    /// A place within one page; or the window that was found instead, or nothing.
    fn within(&mut self, bytes: u64, stream: u64) -> Result<Part, Option<Window>> {
        let part = |page, from| Part { page, from, to: from + bytes };
        if bytes >= self.large {
            return Err(self.find(bytes, stream));
        }
        for page in self.of(stream, true) {
            for (from, to) in self.gaps(page, self.reach[&page]) {
                if to.saturating_sub(from) >= bytes {
                    return Ok(part(page, if from == 0 { to - bytes } else { from }));
                }
            }
        }
        let idle = self.of(stream, false);
        if let Some(page) = idle.iter().find(|page| self.reach[page] >= bytes) {
            return Ok(part(*page, 0));
        }
        if let Some(window) = self.find(bytes, stream) {
            return Err(Some(window));
        }
        let ends = |page: &u32| self.gaps(*page, self.large).pop().unwrap();
        if let Some(page) = self.of(stream, true).into_iter().find(|page| self.large - ends(page).0 >= bytes)
        {
            return Ok(part(page, ends(&page).0));
        }
        idle.first().map(|page| part(*page, 0)).ok_or(None)
    }

    /// The pages that a block would have at a window, if there are tiles enough.
    fn window(&self, (first, _, from, _): Window, bytes: u64) -> Option<Vec<Part>> {
        let (home, mut parts, mut from, mut rest) = (self.tiles[first].0, Vec::new(), from, bytes);
        // A range that was left for a larger one may still be filled later: its tiles adjoin all the same.
        for (_, page) in self.tiles[first..].iter().filter(|tile| tile.0 == home) {
            let to = self.large.min(from + rest);
            if rest > 0 {
                parts.push(Part { page: *page, from, to });
            }
            rest -= to - from;
            from = 0;
            if rest == 0 {
                return Some(parts);
            }
        }
        None
    }

    fn find(&mut self, bytes: u64, stream: u64) -> Option<Window> {
        let fits = |parts: &Vec<Part>| {
            let twice = (1..parts.len()).any(|n| parts[..n].iter().any(|part| part.page == parts[n].page));
            !twice && parts.iter().all(|part| self.is_free(*part, stream))
        };
        let usable = |w: &&Window| {
            (bytes >= self.large || w.1 > 1) && self.window(**w, bytes).is_some_and(|p| fits(&p))
        };
        let rank = |w: &Window| {
            let made_for = if bytes.is_multiple_of(self.large) { w.2 == 0 } else { w.3 == bytes };
            let inside = (w.2 + bytes).div_ceil(self.large) <= w.1 as u64;
            if made_for { 0 } else { 2 - u8::from(inside) }
        };
        let found = *self.windows.iter().rev().filter(usable).min_by_key(|w| rank(w))?;
        self.windows.retain(|window| *window != found);
        self.windows.push(found);
        Some(found)
    }

    fn stitch(&mut self, bytes: u64, stream: u64, first: (usize, usize)) -> Vec<Part> {
        let idle = self.of(stream, false);
        let begun = self.of(stream, true);
        let end = |page: u32| self.gaps(page, self.large).pop().unwrap().0;
        let mut heads = vec![None];
        heads.extend(
            begun
                .iter()
                .filter(|page| {
                    let length = self.large - end(**page);
                    length >= self.large / 4 && length < bytes
                })
                .map(|page| Some(*page)),
        );
        let mut choices = Vec::new();
        for head in heads {
            let rest = bytes - head.map_or(0, |page| self.large - end(page));
            let (whole, tail) = (rest / self.large, rest % self.large);
            let mut tails = vec![None];
            if tail > 0 && (head.is_some() || whole > 0) {
                tails.extend(
                    begun
                        .iter()
                        .copied()
                        .filter(|p| head != Some(*p) && self.gaps(*p, 0)[0].1 >= tail)
                        .map(Some),
                );
            }
            for begun in tails {
                let free = whole + u64::from(tail > 0 && begun.is_none());
                let parts = whole + u64::from(tail > 0) + u64::from(head.is_some());
                let gap = begun.map_or(self.large, |page| self.gaps(page, 0)[0].1);
                let gap = if tail > 0 { gap - tail } else { 0 };
                let cost = (free.saturating_sub(idle.len() as u64), free, parts, gap);
                choices.push((cost, head, begun));
            }
        }
        let (_, head, begun) = choices.into_iter().min().unwrap();
        let mut parts: Vec<Part> =
            head.map(|page| Part { page, from: end(page), to: self.large }).into_iter().collect();
        let mut rest = bytes - parts.first().map_or(0, |part| part.to - part.from);
        let mut free = idle.into_iter().chain(self.known()..);
        while rest > 0 {
            let to = rest.min(self.large);
            let page = begun.filter(|_| rest < self.large).unwrap_or_else(|| free.next().unwrap());
            parts.push(Part { page, from: 0, to });
            rest -= to;
        }
        let of_range: Vec<usize> = (0..self.tiles.len()).filter(|n| self.tiles[*n].0 == first.0).collect();
        let shown = of_range.len() - first.1;
        let begin = if shown == 0 {
            self.tiles.len()
        } else {
            assert_eq!(
                (shown, self.tiles[of_range[first.1]].1),
                (1, parts[0].page),
                "begins at a stranger's tile"
            );
            of_range[first.1]
        };
        self.windows.push((begin, parts.len(), parts[0].from, bytes));
        self.tiles.extend(parts.iter().skip(shown).map(|part| (first.0, part.page)));
        parts
    }
}
