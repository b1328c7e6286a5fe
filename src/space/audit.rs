//! Audit of a space: checks for live blocks which share bytes.

use std::collections::BTreeSet;

use super::{Core, Phase, Space};
use crate::error::{Error, Result};
use crate::pages::{Owner, PageId, RangeId};
use crate::units::Address;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Piece {
    page: PageId,
    from: u64,
    to: u64,
    block: Address,
}

fn wrong(what: String) -> Result<()> {
    Err(Error::Internal { what: format!("the blocks: {what}") })
}

impl Space {
    /// Checks all live blocks of the space, also while other threads work: completely mapped, no
    /// shared bytes, persistent blocks apart, own pages mapped only here. Visits every mapping.
    ///
    /// # Errors
    /// [`Error::Internal`] with the first mismatch.
    pub fn audit(&self) -> Result<()> {
        self.core().audit()
    }
}

impl Core {
    pub(crate) fn audit(&self) -> Result<()> {
        let state = self.state.lock();
        if state.stage.phase() == Phase::Broken {
            return Ok(());
        }
        let pool = self.common.pool();
        let ranges: BTreeSet<RangeId> = state.ranges.iter().map(crate::pages::Reservation::id).collect();
        let blocks = state.placement.blocks();
        let mut pieces = Vec::new();
        for (number, range) in state.ranges.iter().enumerate() {
            let mapped = range.mapped();
            for at in &mapped {
                let Some((owner, shown)) = pool.showing(at.page) else { continue };
                let ours = match owner {
                    Owner::Retained { .. } => owner == self.own() && shown.is_subset(&ranges),
                    other => other == self.common.shared.owner(),
                };
                // Pages which left are replaced before the next replay.
                let ours = ours || self.is_behind() && matches!(owner, Owner::Retained { .. });
                if !ours {
                    return wrong(format!("{self:?} shows {:?} of {owner:?}, as do {shown:?}", at.page));
                }
            }
            for block in blocks.iter().filter(|block| block.place.range == number) {
                let (start, end) = (block.place.offset, block.place.offset + block.bytes);
                let (mut covered, address) = (start, state.address(block.place));
                let first = mapped.partition_point(|at| at.offset + at.bytes <= start);
                for at in mapped[first..].iter().take_while(|at| at.offset < end) {
                    let (from, to) = (at.offset.max(start), (at.offset + at.bytes).min(end));
                    if from > covered {
                        break;
                    }
                    pieces.push(Piece {
                        page: at.page,
                        from: from - at.offset,
                        to: to - at.offset,
                        block: address,
                    });
                    covered = to;
                }
                if covered < end {
                    return wrong(format!(
                        "the one at {address:?} has no page from byte {} on",
                        covered - start
                    ));
                }
            }
        }
        pieces.sort_unstable();
        for pair in pieces.windows(2) {
            let [first, second] = [pair[0], pair[1]];
            if first.page == second.page && second.from < first.to {
                let (page, at) = (first.page, second.from);
                return wrong(format!(
                    "byte {at} of {page:?} is under {:?} and {:?}",
                    first.block, second.block
                ));
            }
        }
        let mut kept: Vec<_> = state.kept.live().map(|(at, bytes, _)| (at.0, at.0 + bytes)).collect();
        kept.sort_unstable();
        disjoint(&kept)
    }

    pub(crate) fn kept(&self) -> Vec<(u64, u64)> {
        self.state.lock().kept.live().map(|(at, bytes, _)| (at.0, at.0 + bytes)).collect()
    }
}

pub(crate) fn disjoint(kept: &[(u64, u64)]) -> Result<()> {
    match kept.windows(2).find(|pair| pair[1].0 < pair[0].1) {
        Some(pair) => wrong(format!("the kept ones at {:#x} and {:#x} overlap", pair[0].0, pair[1].0)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::Common;
    use super::*;
    use crate::device::Device;
    use crate::driver::{HostDriver, HostOptions};
    use crate::order::ReplayOrder;
    use crate::pages::{Limits, SetPeers, SharedSet, Transaction};
    use crate::units::{Geometry, Stream};

    const KIB: u64 = 1 << 10;

    fn common() -> Arc<Common> {
        let host = HostOptions { granularity: 4096, ..HostOptions::default() };
        let device = Device::with_driver(Arc::new(HostDriver::new(0, host).unwrap()));
        let account = device.account("test", None, Limits::default()).unwrap();
        let geometry = Geometry::new(4096, 16 * KIB, 4096).unwrap();
        let shared = SharedSet::new(device.pool(), 1, account, geometry, SetPeers::default());
        Arc::new(Common::new(&device, shared, ReplayOrder::new(device.pool().events())))
    }

    /// Maps the page at `from` also at `at`, in the space's only range.
    fn alias(space: &Space, from: Address, at: Address) {
        let core = space.core();
        let pool = core.common.pool();
        let (range, [from, at]) = {
            let state = core.state.lock();
            (state.ranges[0].id(), [from, at].map(|address| state.ranges[0].offset_of(address).unwrap()))
        };
        let mapped = core.state.lock().ranges[0].mapped();
        let page = mapped.into_iter().find(|mapped| mapped.offset == from).unwrap();
        let mut transaction = Transaction::on(pool);
        transaction.pin_owned(page.page, core.common.shared.owner()).unwrap();
        transaction.unmap(range, at, page.bytes).unwrap();
        transaction.map(range, at, &[page.page]).unwrap();
        transaction.commit();
    }

    #[test]
    fn two_blocks_on_one_page_are_found_and_named() {
        let common = common();
        let space = Space::open(&common).unwrap();
        let [first, second] = [0, 0].map(|_| space.allocate(16 * KIB, Stream::LEGACY).unwrap());
        assert_eq!(space.audit(), Ok(()));
        alias(&space, first, second);
        assert_eq!(common.pool().audit(), Ok(()), "the pool's books are right all the same");
        let found = space.audit().unwrap_err().to_string();
        assert!(found.contains(&format!("is under {first:?} and {second:?}")), "{found}");
        // A page mapped twice is no alias while only one of its places holds a block.
        space.free(first).unwrap();
        assert_eq!(space.audit(), Ok(()));
    }

    #[test]
    fn a_retained_page_that_another_space_shows_is_found() {
        let common = common();
        let [first, second] = [0, 0].map(|_| Space::open(&common).unwrap());
        for space in [&first, &second] {
            space.allocate(16 * KIB, Stream::LEGACY).unwrap();
        }
        assert_eq!(first.seal().unwrap().retained_bytes, 16 * KIB);
        assert_eq!((first.audit(), second.audit()), (Ok(()), Ok(())));
        let page = second.core().state.lock().ranges[0].mapped()[0].page;
        let (core, pool) = (second.core(), common.pool());
        assert!(pool.hand_over(page, core.common.shared.owner(), first.core().own(), false).is_some());
        assert!(second.audit().is_err());
        assert!(pool.hand_over(page, first.core().own(), core.common.shared.owner(), false).is_some());
        assert_eq!((first.audit(), second.audit()), (Ok(()), Ok(())));
    }

    #[test]
    fn kept_blocks_that_overlap_are_found() {
        assert_eq!(disjoint(&[(0, 512), (512, 1024)]), Ok(()));
        assert!(disjoint(&[(0, 513), (512, 1024)]).is_err());
    }
}
