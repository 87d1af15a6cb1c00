//! The actions of the model, and the faults that can be planted in them.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Write(usize, usize),
    Discard(usize, usize),
    /// Write-back plans a batch of a disk.
    Plan(usize),
    /// As `Plan`; blocks that need new places become packs.
    PlanPacked(usize),
    /// Write-back announces the overwrites of the batch and begins all its writes.
    Go,
    /// Write-back moves the batch into the map.
    Finish,
    /// The block that a disk maps gets a permit.
    Permit(usize, usize),
    Through(usize, usize),
    /// As `Through`, if the block needs a new place, which is a pack.
    ThroughPacked(usize, usize),
    ThroughEnd,
    /// A flush moves the buffers into the pending changes.
    FlushLog,
    FlushEnd,
    SyncBegin,
    SyncEnd,
    /// One pending operation is appended to the journal.
    Append,
    PayloadBegin(usize),
    /// The payload is written to its block. True: this write took effect after every other write to the block that was
    /// under way.
    PayloadEnd(bool),
    Capture,
    CheckpointEnd,
    Snapshot,
    Clone,
    Delete(usize),
    Drop,
    Read(usize, usize),
    Detach,
    Revert,
    /// A client looks up a block.
    Look(usize, usize),
    /// The client reads the block that it has looked up.
    LookEnd,
    /// A free block is marked as not backed.
    PunchBegin(usize),
    /// The hole of a block that is marked as not backed is punched.
    Punch,
    /// Space is reserved for a free block that is not backed.
    Reserve(usize),
    /// The append of the first pending operation begins. A power cut may tear this append.
    AppendBegin,
    AppendEnd,
    /// Write-back begins to announce the overwrites of the batch, and a power cut may tear the announcement.
    GoBegin,
    /// The content of the block that a disk maps is copied to a new block.
    PackBegin(usize, usize),
    /// The new block is mapped instead.
    PackEnd,
    /// The block that a disk maps is compared with this block.
    ShareBegin(usize, usize, usize),
    /// The other block is mapped instead.
    ShareEnd,
    /// A client writes the content of this block.
    Repeat(usize, usize, usize),
    /// The buffered content of a disk is compared with this block.
    Compare(usize, usize, usize),
    /// The block is mapped instead of the buffered content, if it still has the same.
    MapShared,
    /// A power cut and recovery; the number selects which writes the medium has kept.
    Crash(u16),
}

/// A deliberate fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    None,
    BlockHoldsIgnored,
    NodeHoldsIgnored,
    NoSpread,
    PermitsSurvive,
    ResolveNotNamed,
    PayloadHomeEarly,
    ReleaseAlways,
    InFlightIgnored,
    FreedAtOnce,
    LimboIgnored,
    GateIgnored,
    CapturedReplayed,
    CheckpointLeavesPayload,
    DeletionOvertakesDetach,
    RevertKeepsBuffer,
    ReaderIgnored,
    PunchedUnderReader,
    PunchedBeforeRecord,
    DoneBeforeDurable,
    WritesBeforeAnnouncement,
    FilledAsOverwrite,
    JoinsIgnored,
    PackedBeforePayload,
    PackedUnclaimed,
    PackedBeforeDurable,
    WrittenPackBeforeDurable,
    WrittenPackAsPlain,
    SharedUnclaimed,
    SharedBeforeDurable,
    SharedKeepsPayload,
    SharedWithFreedPack,
    MappedUnwatched,
    MappedBeforeDurable,
    MappedBeforePayload,
    MappedKeepsPayload,
    MappedDuringBatch,
    PayloadLeftForChecksum,
    MappedToFreedPack,
}
