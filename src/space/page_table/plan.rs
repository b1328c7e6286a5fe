use super::PageTable;
use crate::space::lane::Lane;

/// Part of a page under a block of several pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) page: u32,
    pub(crate) from: u64,
    pub(crate) to: u64,
}

/// Compared field by field; smaller is better.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Cost {
    fresh: u64,
    free: u64,
    /// Each costs a map.
    parts: u64,
    /// Bytes wasted after the tail.
    gap: u64,
}

#[derive(Clone, Copy)]
struct Choice {
    cost: Cost,
    head: Option<Part>,
    tail: Option<u32>,
}

impl PageTable {
    /// Selects pages for a block without an extent: the *head* at the free end of a page in use;
    /// whole free pages, used ones and fewest slots first, so extents take turns; the *tail* at the
    /// free beginning of a page in use.
    ///
    /// A head under a quarter of a page costs a map and saves little. Peer-visible (remote) blocks
    /// have neither.
    pub(crate) fn plan(&self, bytes: u64, lane: Lane) -> Vec<Part> {
        let page = self.bytes();
        let Choice { cost, head, tail } = self.choose(bytes, lane);
        let mut idle: Vec<u32> = self.idle(lane).collect();
        let by_shows = |number: &u32| (self.pages[*number as usize].shows, *number);
        let taken = cost.free as usize;
        if taken < idle.len() {
            idle.select_nth_unstable_by_key(taken, by_shows);
            idle.truncate(taken);
        }
        idle.sort_unstable_by_key(by_shows);

        let mut free = idle.into_iter().chain(self.pages.len() as u32..);
        let mut rest = bytes - head.map_or(0, |head| head.to - head.from);
        let mut parts: Vec<Part> = head.into_iter().collect();
        while rest > 0 {
            let to = rest.min(page);
            let number = tail.filter(|_| rest < page).or_else(|| free.next());
            // 2^32 pages exceed any address space.
            let Some(page) = number else { break };
            parts.push(Part { page, from: 0, to });
            rest -= to;
        }
        parts
    }

    pub(crate) fn planned_free(&self, bytes: u64, lane: Lane) -> u64 {
        self.choose(bytes, lane).cost.free
    }

    fn choose(&self, bytes: u64, lane: Lane) -> Choice {
        let (page, idle) = (self.bytes(), self.idle(lane).count() as u64);
        let (mut heads, mut beginnings) = (vec![None], Vec::new());
        for (number, found) in self.pages.iter().enumerate().filter(|(_, found)| found.lane == lane) {
            let (Some(first), Some(last), false) = (found.stays.first(), found.stays.last(), lane.remote)
            else {
                continue;
            };
            if first.start > 0 {
                beginnings.push((first.start, number as u32));
            }
            let length = page - last.end;
            if length >= page / 4 && length < bytes {
                heads.push(Some(Part { page: number as u32, from: last.end, to: page }));
            }
        }
        beginnings.sort_unstable();

        let choice = |head: Option<Part>, begun: Option<(u64, u32)>| {
            let rest = bytes - head.map_or(0, |head| head.to - head.from);
            let (whole, tail) = (rest / page, rest % page);
            let free = whole + u64::from(tail > 0 && begun.is_none());
            let cost = Cost {
                fresh: free.saturating_sub(idle),
                free,
                parts: whole + u64::from(tail > 0) + u64::from(head.is_some()),
                gap: if tail > 0 { begun.map_or(page, |(length, _)| length) - tail } else { 0 },
            };
            Choice { cost, head, tail: begun.map(|(_, number)| number) }
        };
        let mut best = choice(None, None);
        for head in heads {
            let rest = bytes - head.map_or(0, |head| head.to - head.from);
            let (whole, tail) = (rest / page, rest % page);
            let fits = beginnings.partition_point(|(length, _)| *length < tail);
            let other = beginnings[fits..].iter().find(|(_, number)| head.is_none_or(|h| h.page != *number));
            let begun = other.filter(|_| tail > 0 && (head.is_some() || whole > 0)).copied();
            for other in [choice(head, begun), choice(head, None)] {
                if other.cost < best.cost {
                    best = other;
                }
            }
        }
        best
    }
}
