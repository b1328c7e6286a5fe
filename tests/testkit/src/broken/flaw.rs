//! What can be wrong.

/// What is wrong with a [`BrokenDriver`](super::BrokenDriver).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Flaw {
    /// Nothing.
    None,
    /// The device's granularity is given as half of what it is.
    GranularityTooSmall,
    /// More bytes are free than there are.
    FreeBeyondTotal,
    /// The bytes that are free never change.
    FreeNeverChanges,
    /// Reservations begin behind a multiple of the granularity.
    Misaligned,
    /// A second reservation is the first one.
    OverlappingAddresses,
    /// No more addresses are reserved at once than there is memory.
    AddressesAsMemory,
    /// A page has no more than four granules.
    SmallPagesOnly,
    /// Without memory or addresses the driver's own code is returned.
    UntypedExhaustion,
    /// A page that could not be had takes memory all the same.
    ExhaustionLeaks,
    /// A page opens two files that nobody was told of.
    HiddenDescriptors,
    /// A second address of a page has a page of its own.
    AliasIsAnotherPage,
    /// An address shows the page that was there before.
    StaleMapping,
    /// A page that was just mapped reads as zeros once.
    FreshMapReadsZero,
    /// Releasing a mapped page clears it.
    ReleaseClears,
    /// A page loses its contents where it is unmapped.
    UnmapClears,
    /// Several pages are mapped last first.
    MapsBackwards,
    /// Of several mappings only the first is unmapped.
    UnmapsFirstOnly,
    /// Only the first mapping of a reservation can be made accessible (ROCm 7.0 to 7.2).
    FirstMappingOnly,
    /// No page can be mapped for a peer.
    RefusesPeers,
    /// An import is a page of its own.
    ImportsAnotherPage,
    /// A call leaves another context current on its thread.
    LeavesThreadState,
    /// Pages come from another device than the driver's.
    WrongDevice,
    /// Only the thread that opened the device can use it.
    OneThreadOnly,
    /// A fill repeats its lowest byte.
    FillsBytes,
    /// A fill is four bytes too long.
    FillsTooFar,
    /// Reads are rounded down to words.
    ReadsWords,
    /// Writes are rounded down to words.
    WritesWords,
    /// Copies to registered memory do not arrive.
    LosesRegisteredCopies,
    /// Copies to ordinary memory do not arrive.
    LosesCopiesToHost,
    /// Copies from the host do not arrive.
    LosesCopiesFromHost,
    /// Waiting for an event that was never recorded is an error.
    NeverRecordedIsAnError,
    /// A stream is said to be ready while it is captured.
    CaptureUnseen,
    /// A page mapped during a capture breaks it.
    MapBreaksCapture,
    /// Waiting for an event during a capture breaks it.
    WaitBreaksCapture,
    /// A copy during a capture breaks it.
    CopyBreaksCapture,
    /// A graph goes on with the page that was there when it was captured.
    GraphKeepsPage,
    /// A graph is said to have no nodes.
    GraphUncounted,
    /// A copy of an executable stays as it was captured.
    CopyKept,
    /// A copy of an executable cannot be left out.
    CopyAlwaysOn,
}
