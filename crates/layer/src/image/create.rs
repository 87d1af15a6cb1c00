//! Creating images of any writable format, with extents, descriptor, and parent.
//!
//! ```text
//! thin, zeroedthick, eagerzeroedthick   NAME.vmdk + NAME-flat.vmdk           as on VMFS
//! vmfssparse                            NAME.vmdk + NAME-delta.vmdk          deltas, also usable as bases
//! sesparse                              NAME.vmdk + NAME-sesparse.vmdk
//! vsansparse                            NAME.vmdk + NAME-vsan.vmdk
//! monolithicsparse                      NAME.vmdk                            the descriptor is embedded
//! monolithicflat                        NAME.vmdk + NAME-flat.vmdk           as Workstation makes them
//! 2gbsparse, 2gbflat                    NAME.vmdk + NAME-s001.vmdk, ..; NAME-f001.vmdk, ..
//! raw                                   NAME                                 no descriptor
//! ```
//!
//! Invariants:
//!
//! 1. The file with the image's name exists only after [`Unfinished::finish`], and then the image is complete. A
//!    conversion fills an image between [`begin`] and `finish`, so a partly filled image is never used as a disk.
//! 2. The descriptor that names the extents is durable, under a temporary name, before any extent is created: so
//!    [`storage::sweep`] can remove the files that a crash leaves. An image in a single file is created as a whole
//!    under the temporary name.
//! 3. The file with the temporary name is locked while an image is unfinished: a second creation fails with `Busy`.
//! 4. No existing file is overwritten, and after an error no new file is left.

use super::{Folder, Image, OpenOptions, Place};
use crate::descriptor::storage::{self, NEW_SUFFIX, Pending};
use crate::descriptor::{Adapter, CreateType, Descriptor, EXTENTS_MAX, ExtentKind, ExtentLine, Uuid};
use crate::flat::{self, Flat, Provisioning};
use crate::{Error, ErrorKind, IoContext, Layer, Result, SECTOR, hosted, sesparse, vmfssparse, vsansparse};
use backend::{Access, Directory, File, IoMode, Lock};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use work::{Progress, WorkPart, WorkPlace};

/// The format of an image, and the provisioning type of a flat one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ImageKind {
    /// Flat on VMFS, allocated on first write.
    Thin,
    /// Flat on VMFS, allocated at creation.
    ZeroedThick,
    /// Flat on VMFS, allocated and zeroed at creation.
    EagerZeroedThick,
    /// A redo log with 512-byte grains.
    VmfsSparse,
    /// A redo log with 4 KiB grains.
    SeSparse,
    /// A delta object, as in a vSAN store.
    VsanSparse,
    /// One sparse extent of VMware Workstation.
    MonolithicSparse,
    /// One flat extent of VMware Workstation.
    MonolithicFlat,
    /// Sparse extents of at most 2 GiB.
    SplitSparse,
    /// Flat extents of at most 2 GiB.
    SplitFlat,
    /// A raw file without a descriptor.
    Raw,
}

impl ImageKind {
    /// Every kind of image.
    pub const ALL: [Self; 11] = [
        Self::Thin,
        Self::ZeroedThick,
        Self::EagerZeroedThick,
        Self::VmfsSparse,
        Self::SeSparse,
        Self::VsanSparse,
        Self::MonolithicSparse,
        Self::MonolithicFlat,
        Self::SplitSparse,
        Self::SplitFlat,
        Self::Raw,
    ];

    /// The name of the kind on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Thin => "thin",
            Self::ZeroedThick => "zeroedthick",
            Self::EagerZeroedThick => "eagerzeroedthick",
            Self::VmfsSparse => "vmfssparse",
            Self::SeSparse => "sesparse",
            Self::VsanSparse => "vsansparse",
            Self::MonolithicSparse => "monolithicsparse",
            Self::MonolithicFlat => "monolithicflat",
            Self::SplitSparse => "2gbsparse",
            Self::SplitFlat => "2gbflat",
            Self::Raw => "raw",
        }
    }

    /// The `createType` in the descriptor; `None` for a kind without a descriptor.
    pub fn create_type(self) -> Option<CreateType> {
        Some(match self {
            Self::Thin | Self::ZeroedThick | Self::EagerZeroedThick => CreateType::Vmfs,
            Self::VmfsSparse => CreateType::VmfsSparse,
            Self::SeSparse => CreateType::SeSparse,
            Self::VsanSparse => CreateType::VsanSparse,
            Self::MonolithicSparse => CreateType::MonolithicSparse,
            Self::MonolithicFlat => CreateType::MonolithicFlat,
            Self::SplitSparse => CreateType::TwoGbMaxExtentSparse,
            Self::SplitFlat => CreateType::TwoGbMaxExtentFlat,
            Self::Raw => return None,
        })
    }

    /// Whether images of this kind can have a parent: flat images contain all data themselves.
    pub fn can_have_parent(self) -> bool {
        self.provisioning().is_none()
    }

    /// The provisioning type of flat kinds; `None` for others.
    pub fn provisioning(self) -> Option<Provisioning> {
        match self {
            Self::Thin | Self::MonolithicFlat | Self::SplitFlat | Self::Raw => Some(Provisioning::Thin),
            Self::ZeroedThick => Some(Provisioning::ZeroedThick),
            Self::EagerZeroedThick => Some(Provisioning::EagerZeroedThick),
            _ => None,
        }
    }

    /// The kind of an open image; `None` for read-only kinds: qcow2, streamOptimized, mixed extents.
    pub fn of(image: &Image) -> Option<Self> {
        let Some(descriptor) = image.descriptor() else {
            return image.provisioning().map(|_| Self::Raw);
        };
        let of_flat = match image.provisioning() {
            Some(Provisioning::Thin) => Some(Self::Thin),
            Some(Provisioning::ZeroedThick) => Some(Self::ZeroedThick),
            Some(Provisioning::EagerZeroedThick) => Some(Self::EagerZeroedThick),
            None => None,
        };
        match descriptor.create_type {
            CreateType::Vmfs => of_flat,
            other => Self::ALL.into_iter().find(|kind| kind.create_type().as_ref() == Some(&other)),
        }
    }

    /// The extents of a disk `stem`.vmdk with this many sectors. Those of a split disk have at most `piece` sectors.
    fn extents(self, stem: &str, sectors: u64, piece: u64) -> Result<Vec<ExtentLine>> {
        let whole = |kind, file| Ok(vec![ExtentLine::whole(kind, sectors, file)]);
        match self {
            Self::Thin | Self::ZeroedThick | Self::EagerZeroedThick => {
                whole(ExtentKind::Vmfs, format!("{stem}-flat.vmdk"))
            }
            Self::VmfsSparse => whole(ExtentKind::VmfsSparse, format!("{stem}-delta.vmdk")),
            Self::SeSparse => whole(ExtentKind::SeSparse, format!("{stem}-sesparse.vmdk")),
            Self::VsanSparse => whole(ExtentKind::VsanSparse, format!("{stem}-vsan.vmdk")),
            Self::MonolithicSparse => whole(ExtentKind::Sparse, format!("{stem}.vmdk")),
            Self::MonolithicFlat => whole(ExtentKind::Flat, format!("{stem}-flat.vmdk")),
            Self::SplitSparse => {
                split(sectors, piece, ExtentKind::Sparse, |number| format!("{stem}-s{number:03}.vmdk"))
            }
            Self::SplitFlat => split(sectors, piece, ExtentKind::Flat, |number| format!("{stem}-f{number:03}.vmdk")),
            Self::Raw => Ok(Vec::new()),
        }
    }
}

impl fmt::Display for ImageKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ImageKind {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|kind| kind.name().eq_ignore_ascii_case(name)).ok_or_else(|| {
            let known: Vec<&str> = Self::ALL.iter().map(|kind| kind.name()).collect();
            let text = format!("'{}' is none of the formats {}", name.escape_debug(), known.join(", "));
            Error::new(ErrorKind::Invalid, text)
        })
    }
}

/// The extents of a split disk, of at most `each` sectors.
fn split(sectors: u64, each: u64, kind: ExtentKind, name: impl Fn(u64) -> String) -> Result<Vec<ExtentLine>> {
    if each == 0 || !each.is_multiple_of(hosted::GRAIN_SECTORS) {
        let text = format!("a piece of a split disk has whole grains of {} sectors, not {each}", hosted::GRAIN_SECTORS);
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    let pieces = sectors.div_ceil(each);
    if pieces > EXTENTS_MAX as u64 {
        let text = format!("a split disk has at most {EXTENTS_MAX} pieces, and this needs {pieces}");
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    let piece = |number: u64| {
        let length = (sectors - number * each).min(each);
        ExtentLine::whole(kind, length, name(number + 1))
    };
    Ok((0..pieces).map(piece).collect())
}

/// The parent of a new image.
#[derive(Clone, Debug)]
pub struct NewParent {
    /// The parent's present descriptor: the child records its CID.
    pub descriptor: Descriptor,
    /// The parent's path as recorded in the child: see [`parent_hint`].
    pub hint: String,
}

impl NewParent {
    /// An open image as the parent of a new image in `folder`.
    ///
    /// # Errors
    /// `Unsupported` when the image has no descriptor: then it has no CID that a child could record.
    pub fn of(parent: &Image, folder: &Folder) -> Result<Self> {
        let Some(descriptor) = parent.descriptor() else {
            let text = format!(
                "'{}' cannot be a parent: it has no descriptor, so a child cannot record its content",
                parent.place().label()
            );
            return Err(Error::new(ErrorKind::Unsupported, text));
        };
        Ok(Self { descriptor, hint: parent_hint(folder, parent.place()) })
    }
}

/// The path by which an image in `folder` records its parent: the file name if the parent is in the same folder, the
/// absolute path otherwise, as ESXi does.
pub fn parent_hint(folder: &Folder, parent: &Place) -> String {
    match folder.path() == parent.folder.path() {
        true => parent.name.clone(),
        false => parent.label(),
    }
}

/// Parameters of a new image.
#[derive(Clone, Debug)]
pub struct NewImage<'a> {
    /// The name of the file by which the image is opened: `NAME.vmdk`, or any name for a raw image.
    pub name: &'a str,
    /// Capacity in bytes, whole sectors.
    pub capacity: u64,
    /// The kind of image.
    pub kind: ImageKind,
    /// The parent of the image.
    pub parent: Option<NewParent>,
    /// The adapter for which the geometry is computed.
    pub adapter: Adapter,
    /// The I/O mode for the zeros of eager zeroed disks.
    pub mode: IoMode,
    /// The most sectors of an extent of a split disk.
    pub piece: u64,
}

impl<'a> NewImage<'a> {
    /// An image without a parent, with the default adapter, and pieces as VMware's products make them.
    pub fn new(name: &'a str, capacity: u64, kind: ImageKind) -> Self {
        let (adapter, mode, piece) = (Adapter::default(), IoMode::Buffered, flat::SPLIT_SECTORS);
        Self { name, capacity, kind, parent: None, adapter, mode, piece }
    }

    /// Makes `parent` the parent of the image.
    #[must_use]
    pub fn above(self, parent: NewParent) -> Self {
        Self { parent: Some(parent), ..self }
    }

    /// The I/O mode for an extent of this length during creation.
    fn mode_of(&self, length: u64) -> IoMode {
        match self.kind.provisioning() {
            Some(_) => Flat::mode_for(self.mode, 0, length),
            None => IoMode::Buffered,
        }
    }

    /// The descriptor of the new image; `None` for a raw file.
    pub fn descriptor(&self, random: &mut dyn FnMut() -> u64) -> Result<Option<Descriptor>> {
        flat::check_capacity(self.capacity)?;
        if self.parent.is_some() && !self.kind.can_have_parent() {
            let text = format!(
                "'{}' cannot have a parent: a {} disk stores all of its data itself; give --format sesparse, \
                 vmfssparse or another format of deltas",
                self.name, self.kind
            );
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let Some(create_type) = self.kind.create_type() else {
            check_plain_name(self.name)?;
            return Ok(None);
        };
        let stem = storage::check_name(self.name)?;
        let sectors = self.capacity / SECTOR;
        let extents = self.kind.extents(stem, sectors, self.piece)?;
        Ok(Some(match &self.parent {
            Some(parent) => Descriptor::delta(&parent.descriptor, &parent.hint, create_type, extents, random),
            None => {
                let mut descriptor = Descriptor::base(create_type, extents);
                descriptor.native_snapshot = Some(false);
                descriptor.database.set_disk(self.adapter, sectors, Uuid::random(random));
                let content = descriptor.content;
                descriptor.database.set_long_content(content, random);
                descriptor.set_thin(self.kind == ImageKind::Thin);
                descriptor
            }
        }))
    }
}

/// An image that is complete except for its name.
pub struct Unfinished {
    folder: Folder,
    name: String,
    descriptor: Option<Descriptor>,
    /// Extents that were created, without the file with the temporary name.
    extents: Vec<String>,
    /// The lock on the file with the temporary name.
    lock: Box<dyn Lock>,
}

/// A new image that is complete and has its final name.
#[derive(Clone)]
pub struct Made {
    /// Folder and name of the image.
    pub place: Place,
    /// The image's files, the descriptor first.
    pub files: Vec<String>,
}

impl Made {
    /// Removes the image. After a crash the image is complete, or [`storage::sweep`] removes its files.
    pub fn remove(&self) -> Result<()> {
        let directory = self.place.folder.directory();
        let temporary = format!("{}{NEW_SUFFIX}", self.place.name);
        let during = || format!("removing '{}'", self.place.label());
        directory.rename(&self.place.name, &temporary).during(during)?;
        for extent in self.files.iter().filter(|file| **file != self.place.name) {
            directory.remove(extent).during(during)?;
        }
        directory.remove(&temporary).during(during)?;
        directory.sync().during(during)
    }
}

/// Creates an empty image. Durable on return; nothing is left after an error.
pub fn create(
    folder: &Folder,
    image: &NewImage<'_>,
    random: &mut dyn FnMut() -> u64,
    progress: &dyn Progress,
) -> Result<Made> {
    let descriptor = image.descriptor(random)?;
    begin_described(folder, image, descriptor, random, progress)?.finish()
}

/// Creates an empty image under a temporary name, so that it can be filled before it gets its final name. An image that
/// is neither finished nor abandoned is swept at the next opening of the folder.
pub fn begin(
    folder: &Folder,
    image: &NewImage<'_>,
    random: &mut dyn FnMut() -> u64,
    progress: &dyn Progress,
) -> Result<Unfinished> {
    let mut descriptor = image.descriptor(random)?;
    // The image will be filled, so it must not have the CID of an empty disk.
    if let Some(descriptor) = &mut descriptor {
        descriptor.renew_content(random);
    }
    begin_described(folder, image, descriptor, random, progress)
}

fn begin_described(
    folder: &Folder,
    image: &NewImage<'_>,
    descriptor: Option<Descriptor>,
    random: &mut dyn FnMut() -> u64,
    progress: &dyn Progress,
) -> Result<Unfinished> {
    let directory = &**folder.directory();
    let unfinished = |lock| Unfinished {
        folder: folder.clone(),
        name: image.name.to_owned(),
        descriptor: descriptor.clone(),
        extents: Vec::new(),
        lock,
    };
    let (unfinished, made) = match &descriptor {
        Some(descriptor) if !is_single(Some(descriptor)) => {
            let mut unfinished = unfinished(Pending::begin(directory, image.name, descriptor)?.suspend());
            let made = make_extents(directory, descriptor, image, &mut unfinished.extents, random, progress);
            (unfinished, made)
        }
        embedded => {
            refuse_existing(directory, image.name)?;
            let (file, lock) = storage::create_unfinished(directory, image.name, image.mode_of(image.capacity))?;
            let unfinished = unfinished(lock);
            let made = make_extent(file, image.name, image.capacity, image, embedded.as_ref(), random, progress);
            (unfinished, made)
        }
    };
    match made {
        Ok(()) => Ok(unfinished),
        Err(error) => {
            unfinished.abandon();
            // An error about the only file of an image names the image already.
            match is_single(descriptor.as_ref()) {
                true => Err(error),
                false => Err(error.context(format!("'{}'", image.name))),
            }
        }
    }
}

/// Whether the image consists of a single file, which has the temporary name.
fn is_single(descriptor: Option<&Descriptor>) -> bool {
    descriptor.is_none_or(|descriptor| descriptor.create_type == CreateType::MonolithicSparse)
}

impl Unfinished {
    fn temporary(&self) -> String {
        format!("{}{NEW_SUFFIX}", self.name)
    }

    /// Opens the unfinished image, usually for writing. The caller closes and drops it before [`Unfinished::finish`].
    pub fn open(&self, options: &OpenOptions) -> Result<Image> {
        let format = match self.descriptor {
            Some(_) => None,
            None => Some(super::Format::Flat),
        };
        let place = Place { folder: self.folder.clone(), name: self.temporary() };
        // This value already holds the lock of a single-file image, which is the lock on the file with the temporary
        // name.
        let held = is_single(self.descriptor.as_ref());
        Image::open(place, &OpenOptions { format, held, ..options.clone() })
    }

    /// Renames the image to its final name, durably. Data written into the image must be durable.
    pub fn finish(self) -> Result<Made> {
        let Self { folder, name, descriptor: _, extents, lock } = self;
        let directory = &**folder.directory();
        let pending = Pending::resume(directory, &name, lock);
        // A file that has taken the name meanwhile is kept.
        if let Err(error) = refuse_existing(directory, &name).and_then(|()| pending.rename()) {
            take_back(pending, directory, &extents);
            return Err(error);
        }
        pending.settle()?;
        let mut files = vec![name.clone()];
        files.extend(extents);
        Ok(Made { place: Place { folder, name }, files })
    }

    /// Removes the files of the image, as far as possible; a later sweep removes the others.
    pub fn abandon(self) {
        let directory = &**self.folder.directory();
        take_back(Pending::resume(directory, &self.name, self.lock), directory, &self.extents);
    }
}

fn take_back(pending: Pending<'_>, directory: &dyn Directory, extents: &[String]) {
    for extent in extents {
        // The unfinished descriptor is kept as long as this extent exists, so that a sweep can find the extent.
        if directory.remove(extent).is_err_and(|error| error.kind() != std::io::ErrorKind::NotFound) {
            return;
        }
    }
    pending.abandon();
}

/// Creates the extents of an image; adds each that was or may have been created to `extents`.
fn make_extents(
    directory: &dyn Directory,
    descriptor: &Descriptor,
    image: &NewImage<'_>,
    extents: &mut Vec<String>,
    random: &mut dyn FnMut() -> u64,
    progress: &dyn Progress,
) -> Result<()> {
    let mut before = 0;
    for extent in &descriptor.extents {
        let Some(name) = &extent.file else { continue };
        let (length, total) = (extent.length(), image.capacity);
        let file = directory.create(name, image.mode_of(length)).during(|| format!("creating '{name}'"));
        // A file that existed before belongs to another image.
        if !matches!(&file, Err(error) if error.kind() == ErrorKind::Exists) {
            extents.push(name.clone());
        }
        let part = WorkPart { whole: progress, place: WorkPlace::Behind { before, total } };
        make_extent(file?, name, length, image, None, random, &part)?;
        before += length;
    }
    Ok(())
}

/// Creates one extent in a new file, or the single file of the image.
fn make_extent(
    file: Arc<dyn File>,
    name: &str,
    length: u64,
    image: &NewImage<'_>,
    embedded: Option<&Descriptor>,
    random: &mut dyn FnMut() -> u64,
    progress: &dyn Progress,
) -> Result<()> {
    if let Some(provisioning) = image.kind.provisioning() {
        return flat::fill_extent(&*file, name, length, provisioning, progress);
    }
    progress.update(0, length);
    if progress.cancelled() {
        let text = format!("making '{name}' was stopped; its files are removed");
        return Err(Error::new(ErrorKind::Interrupted, text));
    }
    match image.kind {
        ImageKind::VmfsSparse => vmfssparse::create(file, name, &vmfssparse::CreateOptions::new(length)),
        ImageKind::SeSparse => {
            let options = sesparse::Options { write: true, ..Default::default() };
            sesparse::SeSparse::create(file, name, length, options)?.close()
        }
        ImageKind::VsanSparse => {
            let mut id = [0; 16];
            id[..8].copy_from_slice(&random().to_le_bytes());
            id[8..].copy_from_slice(&random().to_le_bytes());
            vsansparse::create(file, name, &vsansparse::CreateOptions { capacity: length, id })
        }
        _ => {
            let text = match embedded {
                Some(descriptor) => Some(descriptor.to_bytes()?),
                None => None,
            };
            let options = hosted::CreateOptions { capacity: length, descriptor: text.as_deref(), zero_grains: false };
            hosted::create(&*file, name, &options)
        }
    }
}

/// Refuses a name that exists.
fn refuse_existing(directory: &dyn Directory, name: &str) -> Result<()> {
    match directory.open_foreign(name, IoMode::Buffered, Access::Read) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        _ => Err(Error::new(ErrorKind::Exists, format!("there is a file '{name}' already"))),
    }
}

/// Checks the name of a file without a descriptor.
fn check_plain_name(name: &str) -> Result<()> {
    let refused = |c: char| c.is_control() || c == '/';
    if name.is_empty() || name == "." || name == ".." || name.len() > 255 - NEW_SUFFIX.len() || name.contains(refused) {
        return Err(Error::new(ErrorKind::Invalid, format!("'{}' is no file name", name.escape_debug())));
    }
    Ok(())
}
