use super::{Core, Phase, Space, TracedBlock};
use crate::pages::{RangeId, Reservation};
use crate::units::Address;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Spot {
    pub(crate) address: Address,
    pub(crate) bytes: u64,
    pub(crate) allocation: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct Picture {
    pub(crate) id: u64,
    pub(crate) label: Option<String>,
    pub(crate) site: Option<String>,
    pub(crate) phase: Phase,
    pub(crate) allocations: u64,
    pub(crate) live_bytes: u64,
    pub(crate) peak_live_bytes: u64,
    pub(crate) kept_bytes: u64,
    pub(crate) mapped_bytes: u64,
    pub(crate) slabs: usize,
    pub(crate) ranges: Vec<RangeId>,
    /// In a bump space all blocks ever allocated.
    pub(crate) peak: Vec<Spot>,
    /// Includes freed blocks, whose bytes belong to the space until its end.
    pub(crate) kept: Vec<Spot>,
    pub(crate) events: Option<Vec<TracedBlock>>,
}

impl Core {
    pub(crate) fn picture(&self) -> Picture {
        let state = self.state.lock();
        let (usage, kept) = (state.usage(), state.kept.usage());
        let peak = state.placement.at_peak().into_iter().map(|live| Spot {
            address: state.address(live.place),
            bytes: live.bytes,
            allocation: live.serial,
        });
        let mut peak: Vec<Spot> = peak.collect();
        peak.sort_unstable_by_key(|spot| spot.address);
        let all = state.kept.all().map(|(address, bytes, allocation)| Spot { address, bytes, allocation });
        Picture {
            id: self.id,
            label: state.observed.label(),
            site: state.observed.site(),
            phase: state.stage.phase(),
            allocations: usage.allocations + kept.allocations,
            live_bytes: usage.bytes + kept.bytes,
            peak_live_bytes: usage.peak_bytes + kept.peak_bytes,
            kept_bytes: kept.bytes,
            mapped_bytes: state.work.mapped_bytes(),
            slabs: state.placement.pages().0,
            ranges: state.ranges.iter().map(Reservation::id).collect(),
            peak,
            kept: all.collect(),
            events: state.observed.traced_blocks(),
        }
    }
}

impl Space {
    /// Whether allocations and frees are recorded; see
    /// [`SharedVmmAllocator::trace_events`](crate::SharedVmmAllocator::trace_events).
    #[must_use]
    pub fn traces_events(&self) -> bool {
        self.core().state.lock().observed.traces_events()
    }
}
