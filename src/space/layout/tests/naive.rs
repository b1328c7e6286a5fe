//! Naive model of the policy for blocks above slab size: plain lists, searched completely.

use std::collections::BTreeMap;

use super::Part;

/// An extent: first slot, number of slots, offset of the block in the first page, bytes of the
/// block.
type Extent = (usize, usize, u64, u64);

/// A way to stitch a block: cost, page of the head, page of the tail.
type Choice = ((u64, u64, u64, u64), Option<u32>, Option<u32>);

pub(super) struct Naive {
    small: u64,
    large: u64,
    /// (range, page) in order of mapping.
    page_slots: Vec<(usize, u32)>,
    extents: Vec<Extent>,
    /// Extent numbers, least recently used first.
    used: Vec<usize>,
    live: Vec<Part>,
    owner: BTreeMap<u32, u64>,
    /// In whole small pages.
    high_water: BTreeMap<u32, u64>,
}

impl Naive {
    pub(super) fn new(small: u64, large: u64) -> Self {
        let (owner, high_water) = (BTreeMap::new(), BTreeMap::new());
        Self {
            small,
            large,
            page_slots: Vec::new(),
            extents: Vec::new(),
            used: Vec::new(),
            live: Vec::new(),
            owner,
            high_water,
        }
    }

    pub(super) fn free(&mut self, parts: &[Part]) {
        self.live.retain(|live| !parts.contains(live));
    }

    fn known(&self) -> u32 {
        self.owner.len() as u32
    }

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

    /// Returns the page bytes of a new block, and whether they were mapped. `first` is the range of
    /// the block and its first slot, which is not modelled.
    pub(super) fn allocate(&mut self, bytes: u64, stream: u64, first: (usize, usize)) -> (Vec<Part>, bool) {
        let (parts, reused) = match self.within(bytes, stream) {
            Ok(part) => (vec![part], true),
            Err(Some(extent)) => (self.extent(extent, bytes).unwrap(), true),
            Err(None) => (self.stitch(bytes, stream, first), false),
        };
        for part in &parts {
            self.owner.insert(part.page, stream);
            let high_water = self.high_water.entry(part.page).or_default();
            *high_water = part.to.next_multiple_of(self.small).max(*high_water);
        }
        self.live.extend(&parts);
        (parts, reused)
    }

    fn within(&mut self, bytes: u64, stream: u64) -> Result<Part, Option<Extent>> {
        let part = |page, from| Part { page, from, to: from + bytes };
        if bytes >= self.large {
            return Err(self.find(bytes, stream));
        }
        for page in self.of(stream, true) {
            for (from, to) in self.gaps(page, self.high_water[&page]) {
                if to.saturating_sub(from) >= bytes {
                    return Ok(part(page, if from == 0 { to - bytes } else { from }));
                }
            }
        }
        let idle = self.of(stream, false);
        if let Some(page) = idle.iter().find(|page| self.high_water[page] >= bytes) {
            return Ok(part(*page, 0));
        }
        if let Some(extent) = self.find(bytes, stream) {
            return Err(Some(extent));
        }
        let ends = |page: &u32| self.gaps(*page, self.large).pop().unwrap();
        if let Some(page) = self.of(stream, true).into_iter().find(|page| self.large - ends(page).0 >= bytes)
        {
            return Ok(part(page, ends(&page).0));
        }
        idle.first().map(|page| part(*page, 0)).ok_or(None)
    }

    fn extent(&self, (first, _, from, _): Extent, bytes: u64) -> Option<Vec<Part>> {
        let (first_slot, mut parts, mut from, mut rest) = (self.page_slots[first].0, Vec::new(), from, bytes);
        // Slots of the range are adjacent, whenever they were mapped.
        for (_, page) in self.page_slots[first..].iter().filter(|page_slot| page_slot.0 == first_slot) {
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

    fn fits(&self, extent: Extent, bytes: u64, stream: u64) -> bool {
        let Some(parts) = self.extent(extent, bytes) else { return false };
        let twice = (1..parts.len()).any(|n| parts[..n].iter().any(|part| part.page == parts[n].page));
        !twice && parts.iter().all(|part| self.is_free(*part, stream))
    }

    fn find(&mut self, bytes: u64, stream: u64) -> Option<Extent> {
        let exact = |w: &Extent| w.3 == bytes && !self.keeps_out(*w, bytes) && self.fits(*w, bytes, stream);
        let number = match self.extents.iter().position(exact) {
            Some(number) => number,
            None => {
                let most = if bytes < 2 * self.large { u64::MAX } else { self.plan(bytes, stream).0.1 };
                match self.gap(bytes, stream, most) {
                    Some((number, gap)) if self.begins(number, gap) => number,
                    Some((_, gap)) => self.add(gap),
                    None => self.run(bytes, stream, most).map(|run| self.add(run))?,
                }
            }
        };
        self.touch(number);
        Some(self.extents[number])
    }

    fn begins(&self, number: usize, place: Extent) -> bool {
        (self.extents[number].0, self.extents[number].2) == (place.0, place.2)
    }

    fn takes(&self, place: Extent, bytes: u64) -> u64 {
        let parts = self.extent(place, bytes).unwrap();
        parts.iter().filter(|part| self.live.iter().all(|live| live.page != part.page)).count() as u64
    }

    fn keeps_out(&self, extent: Extent, bytes: u64) -> bool {
        bytes < self.large && extent.1 < 2
    }

    fn places(&self, page_slot: usize, from: u64, bytes: u64, stream: u64) -> Vec<Extent> {
        let place = |at: u64| (page_slot, (at + bytes).div_ceil(self.large) as usize, at, bytes);
        let gaps = self.gaps(self.page_slots[page_slot].1, self.large);
        let whole = bytes.is_multiple_of(self.large);
        let begins = gaps
            .into_iter()
            .map(|(at, _)| at.max(from))
            .filter(|at| *at < if whole { 1 } else { self.large });
        begins.map(place).filter(|w| self.fits(*w, bytes, stream)).collect()
    }

    /// First place in the most recently used extent. Only the beginning of an extent may take more
    /// pages.
    fn gap(&self, bytes: u64, stream: u64, most: u64) -> Option<(usize, Extent)> {
        let extents = self.used.iter().rev().filter(|n| !self.keeps_out(self.extents[**n], bytes));
        extents
            .filter_map(|number| {
                let (first, page_slots, from, _) = self.extents[*number];
                let of_range = self.of_range(self.page_slots[first].0);
                let begin = of_range.iter().position(|page_slot| *page_slot == first).unwrap();
                let page_slots = of_range[begin..begin + page_slots].to_vec();
                let mut places = (0..page_slots.len()).flat_map(|n| {
                    let places = self.places(page_slots[n], if n == 0 { from } else { 0 }, bytes, stream);
                    let inside = |w: &Extent| n + w.1 <= page_slots.len();
                    places.into_iter().filter(inside).collect::<Vec<_>>()
                });
                places.next().map(|place| (*number, place))
            })
            .find(|(number, place)| self.begins(*number, *place) || self.takes(*place, bytes) <= most)
    }

    fn run(&self, bytes: u64, stream: u64, most: u64) -> Option<Extent> {
        let ranges = self.page_slots.iter().map(|page_slot| page_slot.0).max().map_or(0, |last| last + 1);
        let mut page_slots = (0..ranges).flat_map(|range| self.of_range(range));
        page_slots.find_map(|page_slot| {
            let end = self.gaps(self.page_slots[page_slot].1, self.large).pop().unwrap().0;
            if end == self.large {
                return None;
            }
            let places = self.places(page_slot, end, bytes, stream).into_iter();
            places.filter(|place| place.2 == end).find(|place| self.takes(*place, bytes) <= most)
        })
    }

    fn of_range(&self, range: usize) -> Vec<usize> {
        (0..self.page_slots.len()).filter(|page_slot| self.page_slots[*page_slot].0 == range).collect()
    }

    fn add(&mut self, extent: Extent) -> usize {
        self.extents.push(extent);
        self.used.push(self.extents.len() - 1);
        self.extents.len() - 1
    }

    fn touch(&mut self, number: usize) {
        self.used.retain(|other| *other != number);
        self.used.push(number);
    }

    fn end(&self, page: u32) -> u64 {
        self.gaps(page, self.large).pop().unwrap().0
    }

    /// Returns the cost (the second field counts pages without blocks), head, and page of the tail.
    fn plan(&self, bytes: u64, stream: u64) -> Choice {
        let (idle, begun) = (self.of(stream, false), self.of(stream, true));
        let end = |page: u32| self.end(page);
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
        choices.into_iter().min().unwrap()
    }

    fn stitch(&mut self, bytes: u64, stream: u64, first: (usize, usize)) -> Vec<Part> {
        let mut idle = self.of(stream, false);
        idle.sort_by_key(|page| self.page_slots.iter().filter(|page_slot| page_slot.1 == *page).count());
        let end = |page: u32| self.end(page);
        let (_, head, begun) = self.plan(bytes, stream);
        let mut parts: Vec<Part> =
            head.map(|page| Part { page, from: end(page), to: self.large }).into_iter().collect();
        let mut rest = bytes - parts.first().map_or(0, |part| part.to - part.from);
        let of_range = self.of_range(first.0);
        let shown = of_range[first.1..].to_vec();
        let mut there: Vec<u32> = shown.iter().map(|page_slot| self.page_slots[*page_slot].1).collect();
        if !there.is_empty() && !parts.is_empty() {
            assert_eq!(there.remove(0), parts[0].page, "begins at a stranger's tile");
        }
        assert!(there.iter().all(|page| idle.contains(page)), "begins at a stranger's tiles");
        let others: Vec<u32> = idle.into_iter().filter(|page| !there.contains(page)).collect();
        let mut free = there.into_iter().chain(others).chain(self.known()..);
        while rest > 0 {
            let to = rest.min(self.large);
            let page = begun.filter(|_| rest < self.large).unwrap_or_else(|| free.next().unwrap());
            parts.push(Part { page, from: 0, to });
            rest -= to;
        }
        let begin = shown.first().copied().unwrap_or(self.page_slots.len());
        let shown = shown.len();
        self.add((begin, parts.len(), parts[0].from, bytes));
        self.page_slots.extend(parts.iter().skip(shown).map(|part| (first.0, part.page)));
        parts
    }
}
