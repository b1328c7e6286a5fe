//! Options of an arena.

use crate::error::Result;
use crate::space::RetainPolicy;
use crate::units::{Geometry, Peers};

const MIB: u64 = 1 << 20;

/// Options of an arena. The defaults are measured (docs/performance.md).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Bytes of a small page. 0: 2 MiB or the device's granularity, whichever is larger.
    pub small_page_bytes: u64,
    /// Bytes of a large page, a multiple of the small page size. 0: derived from `expected_bytes`.
    /// Compared with 16 MiB, pages of 32 MiB took 40 to 51 % fewer maps. They held 1.002 to 1.029
    /// of the lower bound on three models with a peak graph of 900 MiB or more. On eight models of
    /// 390 to 722 MiB they held up to 1.11, and more below (docs/performance.md, Page sizes).
    pub large_page_bytes: u64,
    /// Policy for blocks live at the seal.
    pub retain: RetainPolicy,
    /// Fills the shared pages of a space before each replay, which exposes graphs relying on
    /// leftover contents. Also enabled by `VMMGRAPH_POISON=1` in the environment. For debugging, as
    /// the fills cost time.
    pub poison: bool,
    /// Records time and call stack of each allocation, for lists of live blocks. Also enabled by
    /// `VMMGRAPH_TRACE_BLOCKS=1`. Costs microseconds per block.
    pub trace_blocks: bool,
    /// Limit of the arena's physical memory in bytes. `None`: only the device's limit. See
    /// [`SharedVmmAllocator::set_budget`](super::SharedVmmAllocator::set_budget).
    pub budget_bytes: Option<u64>,
    /// Guaranteed bytes, among accounts below one with a limit. Guaranteed memory is never
    /// [lent](super::SharedVmmAllocator::lend).
    pub least_bytes: u64,
    /// Bytes of addresses reserved at once for the current space of the published design, rounded
    /// up to the device's granularity. 0: reserved as needed. More is reserved when these are used
    /// up.
    pub reserve_bytes: u64,
    /// Approximate peak of live bytes of the largest graph, which determines the large page size.
    /// The size is the largest power of two up to a forty-eighth of this peak, at least a small
    /// page and at most 16 MiB. From 8 GiB on, the size is 32 MiB. 0: unknown, so 16 MiB or the
    /// small page size, whichever is larger. Larger pages need fewer driver calls; smaller pages
    /// waste less at their ends.
    pub expected_bytes: u64,
    /// Refuses replays and eager scopes on a different stream or thread than the first one's
    /// ([`Error::WrongState`](crate::Error::WrongState)), before any preparation. So the replay order is the program order of
    /// one thread. Ends with [`SharedVmmAllocator::lift_serial`](super::SharedVmmAllocator::lift_serial), not with the thread or a pause.
    /// For cooperating ranks: waits between streams of an arena can deadlock ranks with different
    /// replay orders.
    pub serial: bool,
    /// Other devices of the platform with access to the arena's pages; the arena's own device is
    /// ignored. For programs with several devices in one process. Each peer adds cost to every map.
    pub peers: Peers,
    /// As [`peers`](Self::peers), only for pages of [peer-visible](crate::Space::allocate_remote)
    /// and [private](super::SharedVmmAllocator::allocate_exclusive) blocks: the memory that other devices
    /// read in collectives. Other maps cost no more.
    pub remote_peers: Peers,
    /// Tag for [`Device::pause`](crate::Device::pause) and
    /// [`Device::resume`](crate::Device::resume), as for regions; need not be unique. With an empty
    /// tag, the arena is paused only by a pause of everything or by [`SharedVmmAllocator::pause`](super::SharedVmmAllocator::pause).
    pub tag: String,
}

impl Default for Options {
    /// 2 MiB and 16 MiB pages, live-out blocks retained, no budget.
    fn default() -> Self {
        Self {
            small_page_bytes: 0,
            large_page_bytes: 0,
            retain: RetainPolicy::Retain,
            poison: false,
            trace_blocks: false,
            budget_bytes: None,
            least_bytes: 0,
            reserve_bytes: 0,
            expected_bytes: 0,
            serial: false,
            peers: Peers::NONE,
            remote_peers: Peers::NONE,
            tag: String::new(),
        }
    }
}

impl Options {
    /// Returns the page sizes for a device of this granularity.
    pub(super) fn geometry(&self, granularity: u64) -> Result<Geometry> {
        let or = |given: u64, default: u64| if given == 0 { default } else { given };
        let small = or(self.small_page_bytes, granularity.max(2 * MIB));
        let fitting = match self.expected_bytes {
            0 => 16 * MIB,
            // A larger page than without a hint must not cost memory: from 8 GiB on, 32 MiB is at
            // most half a percent of the held memory.
            expected if expected >= 8192 * MIB => 32 * MIB,
            // 48: from tests/arena/trace.rs and tests/arena/packing.rs.
            expected => 1 << (expected / 48).clamp(1, 16 * MIB).ilog2(),
        };
        let large = or(self.large_page_bytes, small.max(fitting));
        Geometry::new(small, large, granularity)
    }
}
