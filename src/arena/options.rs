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
    /// See docs/performance.md, Page sizes.
    pub large_page_bytes: u64,
    /// Policy for blocks live at the seal.
    pub retain: RetainPolicy,
    /// Fills the shared pages of a space before each replay, which exposes graphs relying on
    /// leftover contents. Also `VMMGRAPH_POISON=1` in the environment.
    pub poison: bool,
    /// Records time and call stack of each allocation, for lists of live blocks. Also
    /// `VMMGRAPH_TRACE_BLOCKS=1`. Costs microseconds per block.
    pub trace_blocks: bool,
    /// See [`SharedVmmAllocator::set_budget`](super::SharedVmmAllocator::set_budget).
    pub budget_bytes: Option<u64>,
    /// Guaranteed bytes, never [lent](super::SharedVmmAllocator::lend).
    pub least_bytes: u64,
    /// Bytes of addresses reserved at once for the current space of the published design. 0:
    /// reserved as needed.
    pub reserve_bytes: u64,
    /// Approximate peak of live bytes of the largest graph, which determines the large page size:
    /// see `vmmgraph_arena_options_t`.
    pub expected_bytes: u64,
    /// Binds replays and eager scopes to the first one's stream and thread:
    /// `VMMGRAPH_ARENA_SERIAL`.
    pub serial: bool,
    /// Other devices with access to the arena's pages. Each adds cost to every map.
    pub peers: Peers,
    /// Like [`peers`](Self::peers), only for pages of [peer-visible](crate::Space::allocate_remote)
    /// and [private](super::SharedVmmAllocator::allocate_exclusive) blocks, as read by collectives.
    /// Other maps cost no more.
    pub remote_peers: Peers,
    /// For [`Device::pause`](crate::Device::pause) and [`Device::resume`](crate::Device::resume),
    /// not unique. Empty: only calls without tags include the arena.
    pub tag: String,
}

impl Default for Options {
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
    pub(super) fn geometry(&self, granularity: u64) -> Result<Geometry> {
        let or = |given: u64, default: u64| if given == 0 { default } else { given };
        let small = or(self.small_page_bytes, granularity.max(2 * MIB));
        let fitting = match self.expected_bytes {
            0 => 16 * MIB,
            // From 8 GiB on, 32 MiB is at most half a percent of the held memory.
            expected if expected >= 8192 * MIB => 32 * MIB,
            // 48: from tests/arena/trace.rs and tests/arena/packing.rs.
            expected => 1 << (expected / 48).clamp(1, 16 * MIB).ilog2(),
        };
        let large = or(self.large_page_bytes, small.max(fitting));
        Geometry::new(small, large, granularity)
    }
}
