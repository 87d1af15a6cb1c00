//! The files of one image: their location and names; making, editing and removing them.
//!
//! 1. Files are named as by ESXi: `STEM.vmdk`, `STEM-000001.vmdk` with `STEM-000001-delta.vmdk`, `-sesparse.vmdk` or
//!    `-vsan.vmdk`. A new image gets the lowest number for which no file exists.
//! 2. A descriptor file is replaced as a whole. A descriptor inside a sparse extent is rewritten in place, after the
//!    record has the complete new text for a repair after a crash. Two cases do without a text in the record:
//!    overwriting only the digits of the CIDs, and a text that is not UTF-8.
//! 3. Removing a missing file succeeds, because removals are repeated after a crash.

use crate::disk::Disk;
use crate::record::{DeltaFormat, FileRecord, Node, ParentNow, Record, Settlement, is_plain};
use crate::{Error, ErrorKind, Result};
use backend::{Access, Directory, IoMode};
use layer::descriptor::storage::{self, NEW_SUFFIX};
use layer::descriptor::{Adapter, ContentId, CreateType, Descriptor, Uuid};
use layer::image::{Folder, Format, Image, OpenOptions, Place, Signature};
use layer::sesparse::DirtyJournal;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The highest number of a delta: six digits.
const DELTAS_MAX: u32 = 999_999;
/// The key of the long content ID, which ends with the CID.
const LONG_CONTENT: &str = "ddb.longContentID";

impl Disk {
    /// The folder with this path in a record.
    pub(crate) fn folder(&self, record: &Record, folder: Option<&str>) -> Result<Folder> {
        let Some(folder) = folder else { return Ok(self.home.clone()) };
        if let Some(find) = &self.options.folders {
            return find(folder);
        }
        let mut permitted: Vec<PathBuf> = self.options.permitted.clone();
        permitted.extend(record.permitted.iter().map(PathBuf::from).filter(|path| path.is_dir()));
        Folder::local(Path::new(folder), &permitted)
    }

    /// Where an image is.
    pub(crate) fn place(&self, record: &Record, node: &Node) -> Result<Place> {
        Ok(Place { folder: self.folder(record, node.folder.as_deref())?, name: node.descriptor.clone() })
    }

    /// Opens an image.
    pub(crate) fn open_image(&self, record: &Record, id: u32, writable: bool) -> Result<Image> {
        let node = record.node(id)?;
        let mut options = OpenOptions { writable, format: format_of(node)?, ..self.open_options() };
        if node.replay {
            options.journal = DirtyJournal::Replay;
        }
        Image::open(self.place(record, node)?, &options)
    }

    pub(crate) fn open_options(&self) -> OpenOptions {
        OpenOptions {
            writable: false,
            mode: self.options.mode,
            format: None,
            levels_max: chain::limits::LEVELS_MAX,
            force: self.options.force_parent,
            journal: match self.options.replay_journal {
                true => DirtyJournal::Replay,
                false => DirtyJournal::Refuse,
            },
            held: false,
            random: self.options.random.clone(),
            salvage: false,
        }
    }

    /// The files of an image. An extent in another folder than its descriptor is not included.
    pub(crate) fn files(&self, record: &Record, node: &Node) -> Vec<FileRecord> {
        let file = |name: String| FileRecord { folder: node.folder.clone(), name };
        let mut files = vec![file(node.descriptor.clone())];
        if let Ok(Some(descriptor)) = self.descriptor_of(record, node) {
            let extents = descriptor.extents.into_iter().filter_map(|extent| extent.file);
            files.extend(extents.filter(|name| is_plain(name) && *name != node.descriptor).map(file));
        }
        files
    }

    /// The descriptor of an image, read from its file; `None` for an image without one. Guest data at the beginning of
    /// a raw disk is never read as a descriptor.
    pub(crate) fn descriptor_of(&self, record: &Record, node: &Node) -> Result<Option<Descriptor>> {
        match node.format {
            Some(_) => Ok(None),
            None => load_descriptor(&self.place(record, node)?),
        }
    }

    /// The CID of an image, read from its file.
    pub(crate) fn content_of(&self, record: &Record, node: &Node) -> Result<Option<u32>> {
        Ok(self.descriptor_of(record, node)?.map(|descriptor| descriptor.content.number()))
    }

    /// The parent CID for an image made above `node`. If `node` has no CID, this is the initial CID of a disk that was
    /// never written.
    pub(crate) fn parent_content_of(&self, record: &Record, node: &Node) -> Result<Option<u32>> {
        Ok(self.content_of(record, node)?.or(node.format.is_some().then_some(ContentId::INITIAL.number())))
    }

    /// Whether images of this kind can be written.
    pub(crate) fn is_writable_kind(&self, record: &Record, node: &Node) -> bool {
        match self.descriptor_of(record, node) {
            Ok(Some(descriptor)) => descriptor.create_type != CreateType::StreamOptimized,
            // A raw file is writable. For a file that cannot be read, the later opening reports the error.
            _ => true,
        }
    }

    /// An unused name for a new delta in a folder, and the files that the delta will have.
    pub(crate) fn name_delta(
        &self,
        record: &Record,
        folder: Option<&str>,
        format: DeltaFormat,
    ) -> Result<(String, Vec<FileRecord>)> {
        let directory = self.folder(record, folder)?;
        let names = list(&**directory.directory())?;
        for number in 1..=DELTAS_MAX {
            let stem = format!("{}-{number:06}", record.stem);
            let of_it = |name: &String| {
                name.strip_prefix(&stem).is_some_and(|rest| rest.starts_with('.') || rest.starts_with('-'))
            };
            if names.range(stem.clone()..).take_while(|name| name.starts_with(&stem)).any(of_it) {
                continue;
            }
            let name = format!("{stem}.vmdk");
            let file = |name: String| FileRecord { folder: folder.map(str::to_owned), name };
            let files = vec![
                file(format!("{name}{NEW_SUFFIX}")),
                file(name.clone()),
                file(format!("{stem}{}", format.suffix())),
            ];
            return Ok((name, files));
        }
        Err(Error::new(ErrorKind::NoSpace, format!("disk '{}' has no number left for a new image", record.name)))
    }

    /// Removes files, if they exist, and makes the removals durable.
    pub(crate) fn remove_files(&self, record: &Record, files: &[FileRecord]) -> Result<()> {
        let folders: BTreeSet<Option<&str>> = files.iter().map(|file| file.folder.as_deref()).collect();
        for reference in folders {
            let folder = match self.folder(record, reference) {
                Ok(folder) => folder,
                // If the folder is missing, its files are, too.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            };
            let directory = &**folder.directory();
            for file in files.iter().filter(|file| file.folder.as_deref() == reference) {
                remove(directory, &file.name)?;
            }
            directory.sync().map_err(|error| Error::io("making removals durable", error))?;
        }
        Ok(())
    }

    /// Corrects the descriptor of an image that no chain has open for writing.
    pub(crate) fn settle_closed(&self, record: &Record, settlement: &Settlement) -> Result<()> {
        let node = record.node(settlement.node)?;
        if node.format.is_some() {
            return Ok(());
        }
        let place = self.place(record, node)?;
        if let Some(text) = &settlement.text {
            let file = place.open(IoMode::Buffered, Access::ReadWrite)?;
            let Some(range) = storage::embedded_place(&*file)? else { return Ok(()) };
            let mut whole = Descriptor::parse(text.as_bytes())?;
            match storage::load_embedded(&*file) {
                Ok(Some((_, now))) => keep_content(record, settlement, &now, &mut whole),
                Err(error) if error.kind() == ErrorKind::Io => return Err(error),
                // A power cut has torn the text while it was overwritten. A head whose descriptor is torn has not been
                // opened since, so it has no newer CID.
                Ok(None) | Err(_) => {}
            }
            return storage::write_embedded(&*file, range, &whole);
        }
        edit_descriptor(&place, &mut |descriptor| self.apply(settlement, descriptor))
    }

    /// Overwrites only the digits of the CIDs that a settlement corrects in a descriptor inside an extent. Called only
    /// while no chain has the image open for writing.
    pub(crate) fn renumber(&self, record: &Record, settlement: &Settlement) -> Result<()> {
        let file = self.place(record, record.node(settlement.node)?)?.open(IoMode::Buffered, Access::ReadWrite)?;
        let Some((range, mut descriptor)) = storage::load_embedded(&*file)? else { return Ok(()) };
        self.apply(settlement, &mut descriptor);
        storage::renumber(&*file, range, descriptor.content, descriptor.parent_content).map(drop)
    }

    /// Adds the complete new text to those settlements that concern descriptors inside extents.
    pub(crate) fn with_texts(&self, record: &Record, settlements: Vec<Settlement>) -> Result<Vec<Settlement>> {
        let mut whole = Vec::with_capacity(settlements.len());
        for mut settlement in settlements {
            let node = record.node(settlement.node)?;
            let place = self.place(record, node)?;
            if node.format.is_none()
                && signature(&place)? == Signature::HostedSparse
                && let Some(mut descriptor) = load_descriptor(&place)?
            {
                self.apply(&settlement, &mut descriptor);
                // A text that is not UTF-8 does not fit into the record; such a descriptor is corrected in place.
                settlement.text = String::from_utf8(descriptor.to_bytes()?).ok();
            }
            whole.push(settlement);
        }
        Ok(whole)
    }

    /// Applies the corrections of a settlement to a descriptor.
    pub(crate) fn apply(&self, settlement: &Settlement, descriptor: &mut Descriptor) {
        if let Some(content) = settlement.content.and_then(ContentId::new)
            && descriptor.content != content
        {
            descriptor.content = content;
            descriptor.database.set_long_content(content, &mut || (self.options.random)());
        }
        match &settlement.parent {
            None => {}
            Some(ParentNow::Of { content, hint }) => {
                descriptor.parent_hint = Some(hint.clone());
                if let Some(content) = content.and_then(ContentId::new) {
                    descriptor.parent_content = Some(content);
                }
            }
            Some(ParentNow::None { adapter, uuid }) => {
                descriptor.parent_content = None;
                descriptor.parent_hint = None;
                if descriptor.database.uuid().is_none() {
                    let known = uuid.as_deref().and_then(Uuid::parse);
                    let uuid = known.unwrap_or_else(|| Uuid::random(&mut || (self.options.random)()));
                    let adapter = Adapter::named(adapter).unwrap_or_default();
                    descriptor.database.set_disk(adapter, descriptor.sectors(), uuid);
                }
            }
        }
    }
}

/// If the head was written after a settlement had recorded the text `whole`, sets the CID in `whole` to that of the
/// present descriptor `now`. The text is applied again if the operation could not be committed after the text was first
/// applied, and the head may be written in between. An image below the head is not written before the operation is
/// finished, and its children record the CID of the text, so its CID is not changed.
pub(crate) fn keep_content(record: &Record, settlement: &Settlement, now: &Descriptor, whole: &mut Descriptor) {
    if settlement.node == record.head && settlement.content.is_none() && whole.content != now.content {
        whole.content = now.content;
        if let Some(long) = now.database.get(LONG_CONTENT) {
            whole.database.set(LONG_CONTENT, long);
        }
    }
}

/// The format of an image, as its node records it.
pub(crate) fn format_of(node: &Node) -> Result<Option<Format>> {
    match node.format.as_deref() {
        None => Ok(None),
        Some("raw") => Ok(Some(Format::Flat)),
        Some("qcow2") => Ok(Some(Format::Qcow2)),
        Some("vmfssparse") => Ok(Some(Format::VmfsSparse)),
        Some("sesparse") => Ok(Some(Format::SeSparse)),
        Some("vsansparse") => Ok(Some(Format::VsanSparse)),
        Some("monolithicsparse" | "streamoptimized") => Ok(Some(Format::HostedSparse)),
        Some(other) => {
            let text = format!("'{}' is recorded as of format '{}'", node.descriptor, other.escape_debug());
            Err(Error::new(ErrorKind::Corrupt, text))
        }
    }
}

/// The format that a record states for an image without a descriptor.
pub(crate) fn format_name(image: &Image) -> Option<String> {
    let name = if image.provisioning().is_some() { "raw" } else { image.layer().format() };
    image.descriptor().is_none().then(|| name.to_owned())
}

/// Removes a file, if it exists.
pub(crate) fn remove(directory: &dyn Directory, name: &str) -> Result<()> {
    match directory.remove(name) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::io(format!("removing '{name}'"), error))
        }
        _ => Ok(()),
    }
}

/// The names of all files in a folder.
pub(crate) fn list(directory: &dyn Directory) -> Result<BTreeSet<String>> {
    let names = directory.list().map_err(|error| Error::io("listing a folder", error))?;
    Ok(names.into_iter().collect())
}

/// The descriptor of an image, read from its file; `None` for an image without one.
pub(crate) fn load_descriptor(place: &Place) -> Result<Option<Descriptor>> {
    let file = place.open(IoMode::Buffered, Access::Read)?;
    let found = match signature(place)? {
        Signature::Descriptor => storage::load(&*file, &place.label()).map(Some),
        Signature::HostedSparse => storage::load_embedded(&*file).map(|found| found.map(|(_, descriptor)| descriptor)),
        _ => Ok(None),
    };
    found.map_err(|error| error.context(format!("'{}'", place.label())))
}

fn signature(place: &Place) -> Result<Signature> {
    let file = place.open(IoMode::Buffered, Access::Read)?;
    let failed = |error| Error::io(format!("reading '{}'", place.label()), error);
    let length = file.len().map_err(failed)?.min(layer::image::PROBE_LENGTH as u64);
    let mut bytes = vec![0; length as usize];
    file.read_at(&mut bytes, 0).map_err(failed)?;
    Ok(layer::image::probe(&bytes))
}

/// Changes the descriptor of an image that is not open for writing. An embedded descriptor is overwritten in place.
pub(crate) fn edit_descriptor(place: &Place, change: &mut dyn FnMut(&mut Descriptor)) -> Result<()> {
    let Some(old) = load_descriptor(place)? else { return Ok(()) };
    let mut new = old.clone();
    change(&mut new);
    if new == old {
        return Ok(());
    }
    match signature(place)? {
        Signature::Descriptor => storage::replace_or_renumber(&**place.folder.directory(), &place.name, &old, &new),
        _ => {
            let file = place.open(IoMode::Buffered, Access::ReadWrite)?;
            match storage::load_embedded(&*file)? {
                Some((range, _)) => storage::write_embedded(&*file, range, &new),
                None => Ok(()),
            }
        }
    }
}
