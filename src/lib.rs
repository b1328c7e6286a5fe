//! GPU memory for graph-mode LLM engines.
//!
//! An engine captures one CUDA graph for each batch shape. A replay needs fixed addresses, so each
//! captured shape keeps its activations, and memory grows with the number of shapes. With this
//! library every capture has **its own addresses over one shared set of physical pages**: N shapes
//! cost the peak memory of the largest shape.
//!
//! ```
//! use vmmgraph::{Device, DriverChoice, HostOptions, Options, SharedVmmAllocator, Stream};
//!
//! # fn main() -> vmmgraph::Result<()> {
//! let device = Device::open(DriverChoice::HOST, 0, HostOptions::default())?;
//! let arena = SharedVmmAllocator::new(&device, &Options::default())?;
//! let stream = Stream::LEGACY;
//!
//! let mut shapes = Vec::new();
//! for batch in [1, 8, 64] {
//!     let space = arena.open_space()?;               // one capture
//!     let hidden = space.allocate(batch << 20, stream)?;
//!     let logits = space.allocate(batch << 20, stream)?;
//!     space.free(hidden)?;
//!     space.free(logits)?;
//!     space.seal()?;                                 // the capture ends
//!     shapes.push(space);
//! }
//! shapes[1].replay(stream, || { /* launch the graph on the stream */ })?;
//!
//! // Peak: 64 MiB + 64 MiB live. The arena holds this memory once, for all three graphs.
//! assert!(arena.mapped_size() < 140 << 20);
//! # Ok(())
//! # }
//! ```
//!
//! Calls whose docs name a C function, such as `vmmgraph_space_seal`, have its contract: see
//! `include/vmmgraph/vmmgraph.h`. An `Error::WrongState` is `VMMGRAPH_ERROR_WRONG_STATE` there.
//!
//! # Layers
//!
//! ```text
//!   capi                C ABI: include/vmmgraph/vmmgraph.h
//!   arena   torch       SharedVmmAllocator; the allocator for torch
//!   dispatch            choice of the graph of a step, budgets, inputs (no driver)
//!   map                 page map: pages of each graph
//!   stats               snapshots
//!   space   region      blocks, slabs, persistent blocks, seal, retire; pausable memory
//!   elastic             memory that grows and shrinks, KV caches, choice of blocks
//!   ring                many addresses over few slots, filled from the host
//!   executables         residency of graph executables
//!   workspace           transient memory of kernels
//!   order   device      replay order; root object
//!   pause               pause and resume of regions and arenas
//!   pages               page pool, accounts, transactions, fences, numbered pages
//!   driver              driver interface: CUDA, HIP, Ascend, MLU, host
//!   units error sync    checked numbers; errors; locks
//! ```
//!
//! A layer names only layers below (`tests/tree/layers.rs` checks this). `dispatch`, `elastic`,
//! `ring`, `executables` and `workspace` stand beside their neighbours.

mod arena;
#[doc(hidden)]
pub mod capi;
mod device;
pub mod dispatch;
pub mod driver;
mod elastic;
mod error;
pub mod executables;
mod lending;
pub mod map;
mod order;
pub mod pages;
pub mod pause;
mod region;
pub mod ring;
mod space;
mod stats;
mod sync;
mod torch;
pub mod units;
mod workspace;

pub use arena::{Options, SharedVmmAllocator};
pub use device::{Device, ExportedPage, PagePin, PeerExtent, PeerMap, PeerPage, Ready};
pub use device::{MOST_DESCRIPTORS, receive_descriptors, send_descriptors};
pub use driver::{DeviceOptions, DriverChoice, FabricHandle, Handles, HostOptions};
pub use elastic::policy;
pub use elastic::{Ahead, Ask, BlockPool, Candidate, PreCommit, Watermarks};
pub use elastic::{Committed, ElasticBuffer, ElasticObserver, ElasticOptions, ElasticStats, Pending, Shown};
pub use elastic::{KvCache, KvLayout, KvOptions, KvStats, LimitChange};
pub use error::{Error, Result};
pub use executables::{ExecutablePool, ExecutableStats, GraphTemplate};
pub use lending::{BlockBorrower, Borrower, Lease, Vacate, VacateBlocks, Vacated};
pub use map::ArenaMap;
pub use order::ReplayOrder;
pub use region::{Policy, Region, RegionOptions, RegionStats};
pub use ring::{HostBuffer, Pinning, Ring, RingCaptureOptions, RingGraph, RingOptions, RingStats, RingUnit};
pub use space::{
    Block, Difference, POISON, Phase, PreservedBlocks, RetainPolicy, SealReport, Space, SpaceStats,
    TracedBlock,
};
pub use space::{EagerBlocks, EagerEnd, EagerScope, EagerStats};
pub use stats::{ArenaStats, Snapshot};
pub use torch::VmmTorchAllocator;
pub use units::{Address, Peers, Stream};
pub use workspace::Workspace;
