//! The record of a disk: its images, its snapshots, and the pending operation.
//!
//! ```text
//! lamina disk 1 crc32c=89ABCDEF
//! { "name": "web", "uuid": "...", "head": 3, "nodes": [ ... ], ... }
//! ```
//!
//! 1. The checksum covers everything after the first line. A text with a wrong checksum, or with contradictions, is
//!    refused, unless one changed byte makes it right ([`crate::stored`]).
//! 2. Nodes form trees: parents exist, and no node is its own ancestor. The head is a node without children.
//! 3. Names of files are plain names without a path; the path of their folder is in `folder`.

use crate::{Error, ErrorKind, Result};
use checksums::checksum;
use layer::image::ImageKind;
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};

/// The beginning of the file, with the version.
const MAGIC: &str = "lamina disk 1 crc32c=";
/// The beginning of the file in every version.
const MAGIC_ANY: &str = "lamina disk ";
/// The longest record, in bytes: enough for thousands of snapshots.
pub(crate) const RECORD_MAX: u64 = 16 << 20;
/// The most images of one disk.
pub(crate) const NODES_MAX: usize = 4096;
/// The most snapshots of one disk.
pub(crate) const SNAPSHOTS_MAX: usize = 4096;
/// The longest text that a record stores on behalf of its caller.
const TEXT_MAX: usize = 1 << 20;

/// The formats of deltas, in which snapshots and clones are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeltaFormat {
    /// ESX's redo logs, 512-byte grains, below 2 TiB.
    VmfsSparse,
    /// ESXi's space-efficient redo logs, 4 KiB grains.
    SeSparse,
    /// Delta objects, space in units of 4 MiB.
    VsanSparse,
}

impl DeltaFormat {
    /// The limit of VMFSsparse deltas: ESXi stops one sector before 2 TiB.
    const VMFS_MAX: u64 = (2 << 40) - layer::SECTOR;

    /// The largest disk for which SEsparse deltas are made.
    const SE_MAX: u64 = 62 << 40;

    /// The format that vSphere uses for a disk of this size; vsanSparse for a disk that is too large for the formats of
    /// vSphere.
    pub fn usual(capacity: u64) -> Self {
        if capacity <= Self::VMFS_MAX {
            Self::VmfsSparse
        } else if capacity <= Self::SE_MAX {
            Self::SeSparse
        } else {
            Self::VsanSparse
        }
    }

    /// This format, or the usual one if a disk has grown beyond the limit of this one.
    pub(crate) fn holding(self, capacity: u64) -> Self {
        let most = match self {
            Self::VmfsSparse => Self::VMFS_MAX,
            Self::SeSparse => Self::SE_MAX,
            Self::VsanSparse => u64::MAX,
        };
        if capacity > most { Self::usual(capacity) } else { self }
    }

    /// The kind of image for this format.
    pub fn kind(self) -> ImageKind {
        match self {
            Self::VmfsSparse => ImageKind::VmfsSparse,
            Self::SeSparse => ImageKind::SeSparse,
            Self::VsanSparse => ImageKind::VsanSparse,
        }
    }

    /// The name of the format on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::VmfsSparse => "vmfssparse",
            Self::SeSparse => "sesparse",
            Self::VsanSparse => "vsansparse",
        }
    }

    /// The suffix in the name of the extent file.
    pub(crate) fn suffix(self) -> &'static str {
        match self {
            Self::VmfsSparse => "-delta.vmdk",
            Self::SeSparse => "-sesparse.vmdk",
            Self::VsanSparse => "-vsan.vmdk",
        }
    }
}

impl std::str::FromStr for DeltaFormat {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let all = [Self::VmfsSparse, Self::SeSparse, Self::VsanSparse];
        all.into_iter().find(|format| format.name().eq_ignore_ascii_case(name)).ok_or_else(|| {
            let text = format!("'{}' is no delta format: vmfssparse, sesparse or vsansparse", name.escape_debug());
            Error::new(ErrorKind::Invalid, text)
        })
    }
}

/// The ownership of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ImageOwnership {
    /// Made by this disk: changed, merged and removed as needed, and removed with the disk.
    Made,
    /// Adopted for writing: changed, merged and removed as needed, but not removed with the disk.
    Adopted,
    /// Owned by another disk or program: read only.
    Foreign,
}

/// An image of the disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    /// The number of the image in this record.
    pub id: u32,
    /// The number of the image below this image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<u32>,
    /// Path of the image's folder; `None` for the folder of the record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub folder: Option<String>,
    /// The file by which the image is opened.
    pub descriptor: String,
    /// The format of that file if it has no descriptor: `raw`, which its bytes cannot show, `qcow2`, or the format of
    /// an extent without its descriptor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// The ownership of the image.
    pub standing: ImageOwnership,
    /// The CID of the image below, if the user forced the adoption although this image records another parent CID. No
    /// other CID is accepted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accepted: Option<u32>,
    /// Whether the journal of this SEsparse image may be replayed, as far as its transactions are proven complete. The
    /// user decides this at adoption.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub replay: bool,
}

impl Node {
    /// Whether this disk may change the image.
    pub fn is_own(&self) -> bool {
        self.standing != ImageOwnership::Foreign
    }
}

/// A snapshot: a name for the content of an image and those below it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotRecord {
    /// Name, unique within the disk.
    pub name: String,
    /// The name in VMware's list at adoption, if it could not be used as the name in this record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listed: Option<String>,
    /// VMware's number for the snapshot (UID).
    pub uid: u32,
    /// The image of the snapshot.
    pub node: u32,
    /// When the snapshot was taken: microseconds since 1970.
    pub created: u64,
    /// Capacity of the disk at the time of the snapshot, in bytes.
    pub capacity: u64,
    /// The description of the snapshot.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub description: String,
}

/// Tunables that are stored with the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tunables {
    /// The most extents in the metadata cache.
    pub metadata_entries: usize,
    /// Bytes around a cache miss that are looked up with it.
    pub prefetch: u64,
    /// The most extents that one prefetch inserts into the metadata cache.
    pub prefetch_extents: usize,
    /// Bytes of the read cache.
    pub read_cache: u64,
    /// The most levels of the chain.
    pub levels_max: usize,
}

impl Default for Tunables {
    fn default() -> Self {
        let usual = chain::Tunables::default();
        Self {
            metadata_entries: usual.entries,
            prefetch: usual.prefetch_bytes,
            prefetch_extents: usual.prefetch_extents,
            read_cache: 0,
            levels_max: chain::limits::LEVELS_DEFAULT,
        }
    }
}

/// The origin of a linked clone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OriginRecord {
    /// The UUID of the source disk.
    pub uuid: String,
    /// The name of the source disk when the clone was made.
    pub disk: String,
    /// The snapshot from which the clone was made.
    pub snapshot: String,
}

/// A linked clone of a snapshot of this disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CloneRecord {
    /// The UUID of the clone.
    pub uuid: String,
    /// The name of the clone when it was made.
    pub name: String,
    /// The folder with the clone's record.
    pub folder: String,
    /// The image above which the clone was made.
    pub node: u32,
}

/// A file of the disk.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileRecord {
    /// Path of the file's folder, as in [`Node`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub folder: Option<String>,
    /// The name of the file.
    pub name: String,
}

/// The statement about the parent in the descriptor of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum ParentNow {
    /// No parent: the descriptor becomes that of a base, with the adapter, and the UUID of the disk if it is known.
    None {
        /// The adapter type in the new descriptor.
        adapter: String,
        /// The UUID of the disk.
        uuid: Option<String>,
    },
    /// A parent: its path, and its CID if it has one.
    Of {
        /// The parent's CID; `None` leaves the recorded one unchanged.
        content: Option<u32>,
        /// The parent's path, as the file name hint.
        hint: String,
    },
}

/// The correction of an image's descriptor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settlement {
    /// The image with the descriptor to be corrected.
    pub node: u32,
    /// The new CID of the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<u32>,
    /// What the descriptor will state about the parent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<ParentNow>,
    /// The complete new text, if the descriptor is inside an extent: such a text is overwritten in place, so a power
    /// cut may leave an invalid one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

/// The direction of a merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MergeSide {
    /// An image is copied into the one below it.
    Down,
    /// An image is filled from the one below it.
    Up,
}

/// A merge under way, which changes the content of an image: until the merge is settled, the image's CID may differ
/// from the one that its children record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Merging {
    /// The direction of the merge.
    pub side: MergeSide,
    /// The image that is written: the target.
    pub node: u32,
    /// In a merge down: the image above the target, which hides the written ranges.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub above: Option<u32>,
    /// The CID of the target before the merge.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<u32>,
}

/// The creation or deletion of the disk itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fate {
    /// The disk is being created: after a crash it does not exist.
    Creating,
    /// The disk is being deleted: after a crash its remaining files are removed. This state is in the name of the
    /// record's file, not in its text.
    #[serde(skip)]
    Deleting,
}

/// The pending operation. Opening the disk finishes or undoes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pending {
    /// The name of the operation, for messages.
    pub operation: String,
    /// Files that are being created: they are removed if they exist, unless they belong to an image of the record.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub made: Vec<FileRecord>,
    /// Files to be removed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gone: Vec<FileRecord>,
    /// Descriptors to be corrected.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub settle: Vec<Settlement>,
    /// The merge under way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merging: Option<Merging>,
    /// Set while the disk itself is created or deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fate: Option<Fate>,
}

impl Pending {
    pub(crate) fn new(operation: impl Into<String>) -> Self {
        Self {
            operation: operation.into(),
            made: Vec::new(),
            gone: Vec::new(),
            settle: Vec::new(),
            merging: None,
            fate: None,
        }
    }
}

/// The record of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// Name of the disk.
    pub name: String,
    /// The UUID of the disk.
    pub uuid: String,
    /// Time of creation: seconds since 1970.
    pub created: u64,
    /// The common beginning of the names of the disk's files.
    pub stem: String,
    /// The kind of the base, as named by option `-d`.
    pub kind: String,
    /// The format of new deltas.
    pub delta: DeltaFormat,
    /// The adapter for which the geometry was computed.
    pub adapter: String,
    /// Whether the head is read only.
    #[serde(default)]
    pub read_only: bool,
    /// Whether a list of snapshots is written for VMware.
    #[serde(default)]
    pub vmsd: bool,
    /// The image in which guest writes are made.
    pub head: u32,
    /// The images of the disk.
    pub nodes: Vec<Node>,
    /// The snapshots, oldest first.
    pub snapshots: Vec<SnapshotRecord>,
    /// The UID of the newest snapshot so far.
    pub last_uid: u32,
    /// The tunables of the disk.
    pub tunables: Tunables,
    /// The overlay above the head, as described by the caller that placed it there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overlay: Option<String>,
    /// The snapshot of which the disk is a linked clone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<OriginRecord>,
    /// Linked clones of this disk.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub clones: Vec<CloneRecord>,
    /// Folders that the disk's images may refer to, besides their own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub permitted: Vec<String>,
    /// The pending operation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending: Option<Pending>,
}

impl Record {
    /// The image with this number.
    pub fn node(&self, id: u32) -> Result<&Node> {
        self.nodes
            .iter()
            .find(|node| node.id == id)
            .ok_or_else(|| Error::new(ErrorKind::Corrupt, format!("the record of '{}' has no image {id}", self.name)))
    }

    /// The children of an image.
    pub fn children(&self, id: u32) -> Vec<u32> {
        self.nodes.iter().filter(|node| node.parent == Some(id)).map(|node| node.id).collect()
    }

    /// The images from `id` down to its base, newest first.
    pub fn line(&self, id: u32) -> Result<Vec<u32>> {
        let mut line = vec![id];
        let mut at = self.node(id)?;
        while let Some(parent) = at.parent {
            at = self.node(parent)?;
            line.push(parent);
            // A record that was read has no cycles; this check protects against a cycle made in memory.
            if line.len() > self.nodes.len() {
                return Err(Error::new(ErrorKind::Corrupt, format!("the images of '{}' form a circle", self.name)));
            }
        }
        Ok(line)
    }

    /// Whether the disk has adopted images, which are kept when it is deleted.
    pub(crate) fn has_adopted(&self) -> bool {
        self.nodes.iter().any(|node| node.standing == ImageOwnership::Adopted)
    }

    /// Whether the disk is being deleted.
    pub fn is_going(&self) -> bool {
        self.pending.as_ref().is_some_and(|pending| pending.fate == Some(Fate::Deleting))
    }

    /// The snapshot with this name.
    pub fn snapshot(&self, name: &str) -> Result<&SnapshotRecord> {
        self.snapshots.iter().find(|snapshot| snapshot.name == name).ok_or_else(|| {
            let text = format!("disk '{}' has no snapshot '{}'", self.name, name.escape_debug());
            Error::new(ErrorKind::NotFound, text)
        })
    }

    /// The last snapshot of an image.
    pub fn snapshot_of(&self, node: u32) -> Option<&SnapshotRecord> {
        self.snapshots.iter().rev().find(|snapshot| snapshot.node == node)
    }

    /// The snapshot before this one: an earlier one of the same image, or the last one of the nearest image below that
    /// has any.
    pub fn snapshot_before(&self, snapshot: &SnapshotRecord) -> Option<&SnapshotRecord> {
        let same = self.snapshots.iter().take_while(|other| other.uid != snapshot.uid);
        same.filter(|other| other.node == snapshot.node).last().or_else(|| {
            let line = self.line(snapshot.node).ok()?;
            line[1..].iter().find_map(|node| self.snapshot_of(*node))
        })
    }

    /// The snapshot on which the head is based.
    pub fn current(&self) -> Option<&SnapshotRecord> {
        self.line(self.head).ok()?.iter().find_map(|node| self.snapshot_of(*node))
    }

    /// An unused number for a new image.
    pub(crate) fn next_id(&self) -> u32 {
        self.nodes.iter().map(|node| node.id).max().map_or(1, |id| id.saturating_add(1))
    }

    /// Images that must not change, because clones depend on them.
    pub(crate) fn pinned(&self) -> HashSet<u32> {
        let lines = self.clones.iter().filter_map(|clone| self.line(clone.node).ok());
        lines.flatten().collect()
    }

    /// The content of the record's file.
    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        let failed = |error: serde_json::Error| {
            Error::new(ErrorKind::Invalid, format!("the record of '{}' cannot be written: {error}", self.name))
        };
        let mut text = serde_json::to_vec_pretty(self).map_err(failed)?;
        text.push(b'\n');
        if text.len() as u64 > RECORD_MAX - 64 {
            return Err(Error::new(ErrorKind::NoSpace, format!("the record of '{}' would be too long", self.name)));
        }
        let mut bytes = first_line(checksum(&text));
        bytes.append(&mut text);
        Ok(bytes)
    }

    /// Parses the content of the record's file.
    ///
    /// # Errors
    /// `Corrupt` for other bytes than a record, `Unsupported` for a record of another version.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let corrupt = |what: &str| Err(Error::new(ErrorKind::Corrupt, format!("the record of the disk {what}")));
        let Some(end) = bytes.iter().take(64).position(|byte| *byte == b'\n') else {
            return corrupt("has an invalid first line");
        };
        let first = String::from_utf8_lossy(&bytes[..end]);
        let Some(sum) = first.strip_prefix(MAGIC) else {
            if first.starts_with(MAGIC_ANY) {
                let text = format!("the record of the disk is of another version: '{}'", first.escape_debug());
                return Err(Error::new(ErrorKind::Unsupported, text));
            }
            return corrupt("has an invalid first line");
        };
        let text = &bytes[end + 1..];
        if *sum != format!("{:08X}", checksum(text)) {
            return corrupt("fails its checksum");
        }
        let record: Self = serde_json::from_slice(text)
            .map_err(|error| Error::new(ErrorKind::Corrupt, format!("the record of the disk: {error}")))?;
        record.check()?;
        Ok(record)
    }

    /// Checks all properties on which other code relies.
    fn check(&self) -> Result<()> {
        let corrupt = |what: String| {
            Err(Error::new(ErrorKind::Corrupt, format!("the record of '{}': {what}", self.name.escape_debug())))
        };
        let creating = self.pending.as_ref().is_some_and(|pending| pending.fate == Some(Fate::Creating));
        if self.nodes.len() > NODES_MAX || self.snapshots.len() > SNAPSHOTS_MAX {
            return corrupt("too many images or snapshots".to_owned());
        }
        if self.overlay.as_ref().is_some_and(|text| text.len() > TEXT_MAX) {
            return corrupt("its overlay's text is too long".to_owned());
        }
        if !is_plain(&self.stem) {
            return corrupt(format!("'{}' cannot begin file names", self.stem.escape_debug()));
        }
        let parents: HashMap<u32, Option<u32>> = self.nodes.iter().map(|node| (node.id, node.parent)).collect();
        if parents.len() != self.nodes.len() {
            return corrupt("two images have one number".to_owned());
        }
        // The parents of every image are followed to a base, or to an image from which a base was reached before.
        let mut ending: HashSet<u32> = HashSet::new();
        for node in &self.nodes {
            if !is_plain(&node.descriptor) {
                return corrupt(format!("'{}' is no plain file name", node.descriptor.escape_debug()));
            }
            let mut walked = Vec::new();
            let mut at = Some(node.id);
            while let Some(id) = at.filter(|id| !ending.contains(id)) {
                walked.push(id);
                match parents.get(&id) {
                    Some(parent) if walked.len() <= self.nodes.len() => at = *parent,
                    Some(_) => return corrupt("its images form a circle".to_owned()),
                    None => return corrupt(format!("image {id} is missing")),
                }
            }
            ending.extend(walked);
        }
        if !creating && (!parents.contains_key(&self.head) || !self.children(self.head).is_empty()) {
            return corrupt("its head is no image, or has children".to_owned());
        }
        let mut names = HashSet::new();
        let mut uids = HashSet::new();
        for snapshot in &self.snapshots {
            if !parents.contains_key(&snapshot.node) {
                return corrupt(format!("snapshot '{}' has no image", snapshot.name.escape_debug()));
            }
            if !names.insert(&snapshot.name) || !uids.insert(snapshot.uid) {
                return corrupt(format!("snapshot '{}' is listed twice", snapshot.name.escape_debug()));
            }
        }
        let pending = self.pending.iter();
        let mut files = pending.flat_map(|pending| pending.made.iter().chain(&pending.gone));
        match files.find(|file| !is_plain(&file.name)) {
            Some(file) => corrupt(format!("'{}' is no plain file name", file.name.escape_debug())),
            None => Ok(()),
        }
    }
}

/// The first line of the record's file, for the checksum of the rest.
pub(crate) fn first_line(sum: u32) -> Vec<u8> {
    format!("{MAGIC}{sum:08X}\n").into_bytes()
}

/// Whether a name can only refer to a file in its folder.
pub(crate) fn is_plain(name: &str) -> bool {
    !name.is_empty() && name.len() <= 255 && name != "." && name != ".." && !name.contains(['/', '\\', '\0'])
}
