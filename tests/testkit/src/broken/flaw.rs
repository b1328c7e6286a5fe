//! The flaws of a [`BrokenDriver`](super::BrokenDriver).

/// A broken rule of the driver interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Flaw {
    /// Nothing.
    None,
    /// Reports half of the device's granularity.
    GranularityTooSmall,
    /// Reports more free bytes than the device has.
    FreeBeyondTotal,
    /// Reports constant free bytes.
    FreeNeverChanges,
    /// Reservations are not aligned to the granularity.
    Misaligned,
    /// A second reservation of a length returns the first one.
    OverlappingAddresses,
    /// One reservation cannot exceed the size of the memory.
    AddressesAsMemory,
    /// Pages of more than four granules are refused.
    SmallPagesOnly,
    /// Exhaustion returns the driver's own code.
    UntypedExhaustion,
    /// A failed page creation takes memory.
    ExhaustionLeaks,
    /// A page opens two unreported files.
    HiddenDescriptors,
    /// A second mapping of a page shows a different page.
    AliasIsAnotherPage,
    /// A new mapping shows the previous page.
    StaleMapping,
    /// The first read of a new mapping returns zeros.
    FreshMapReadsZero,
    /// Releasing a mapped page clears it.
    ReleaseClears,
    /// Unmapping a page clears it.
    UnmapClears,
    /// Several pages are mapped in reverse order.
    MapsBackwards,
    /// Only the first of several mappings is unmapped.
    UnmapsFirstOnly,
    /// Only the first mapping of a reservation can be made accessible (ROCm 7.0 to 7.2).
    FirstMappingOnly,
    /// No page can be mapped for a peer.
    RefusesPeers,
    /// An import creates a new page.
    ImportsAnotherPage,
    /// A call changes the current context of its thread.
    LeavesThreadState,
    /// Pages come from another device.
    WrongDevice,
    /// Only the opening thread can use the device.
    OneThreadOnly,
    /// A fill repeats its lowest byte.
    FillsBytes,
    /// A fill is four bytes too long.
    FillsTooFar,
    /// Reads are rounded down to words.
    ReadsWords,
    /// Writes are rounded down to words.
    WritesWords,
    /// Copies to registered memory are lost.
    LosesRegisteredCopies,
    /// Copies to pageable memory are lost.
    LosesCopiesToHost,
    /// Copies from the host are lost.
    LosesCopiesFromHost,
    /// Waiting for an event without a record fails.
    NeverRecordedIsAnError,
    /// A captured stream is reported as ready.
    CaptureUnseen,
    /// A page mapped during a capture breaks it.
    MapBreaksCapture,
    /// Waiting for an event during a capture breaks it.
    WaitBreaksCapture,
    /// A copy during a capture breaks it.
    CopyBreaksCapture,
    /// A graph keeps the page mapped at its capture.
    GraphKeepsPage,
    /// A graph is reported with no nodes.
    GraphUncounted,
    /// The copy of an executable cannot be changed.
    CopyKept,
    /// The copy of an executable cannot be disabled.
    CopyAlwaysOn,
}
