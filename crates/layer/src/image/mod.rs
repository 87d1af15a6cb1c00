//! Images of other programs, as a user names them, and the chain of parents below each.
//!
//! ```text
//! Place::local(path)          the file, and the access control for files to which it refers
//!   -> open_chain             its parents, down to the base
//!        -> Image::open       descriptor, extents, lock
//!             -> open_extent  one extent, by its format
//! create(folder, image)       a new image of any kind, with or without a parent
//! ```
//!
//! Invariants:
//!
//! 1. Every file that an image names is opened through [`folder`]. Extents have the format that their lines state; a
//!    parent is opened as a VMDK, whatever other format its bytes suggest ([`probe`]).
//! 2. Parents are opened for reading. A parent's CID is the one that the child records, unless the caller forces
//!    another.
//! 3. A chain is finite: no image is in it twice, and it has at most as many images as the caller allows.
//! 4. Opening for reading changes nothing and acquires no lock. Opening for writing acquires the lock of the first
//!    extent, and the CID changes before the content does ([`home`]).

mod chain;
pub mod check;
mod concatenated;
pub mod create;
mod extent;
mod folder;
mod home;
mod lost;
mod maintain;
mod probe;

#[cfg(test)]
mod tests;

pub use chain::{Chain, open_chain};
pub use create::{ImageKind, Made, NewImage, NewParent, Unfinished, create, parent_hint};
pub use extent::Format;
pub use folder::{Folder, Place};
pub use lost::is_loss;
pub use maintain::{ImageCheck, ImageFreed};
pub use probe::{PROBE_LENGTH, Signature, probe};

use crate::descriptor::{Access, ContentId, Descriptor, ExtentLine, storage};
use crate::flat::{Counters, Flat, FlatOptions, Provisioning};
use crate::sesparse::DirtyJournal;
use crate::{Error, ErrorKind, IoContext, Layer, Result};
use backend::{File, IoMode, Lock};
use concatenated::{Concatenated, Part};
use extent::{ExtentOptions, OpenExtent, open_extent};
use home::{Identified, StoredDescriptor};
use lost::{Lost, Remembering};
use maintain::Engine;
use probe::is_raw_name;
use std::hash::{BuildHasher, Hasher};
use std::ops::Range;
use std::sync::Arc;
use work::{Progress, WorkPart, WorkPlace};

/// The default limit on parents below an image: that of ESXi.
pub const LEVELS_MAX: usize = 32;

/// How often a descriptor that another writer changes is loaded before opening for writing is given up.
const LOADS_MAX: usize = 8;

/// The source of random identities: each call returns a new number.
pub type Entropy = Arc<dyn Fn() -> u64 + Send + Sync>;

/// Random numbers from the operating system.
pub fn system_entropy() -> Entropy {
    // Every new `RandomState` has keys that differ from those before, and that derive from random bytes of the system.
    Arc::new(|| std::hash::RandomState::new().build_hasher().finish())
}

/// Options for opening images.
#[derive(Clone)]
pub struct OpenOptions {
    /// Whether the image is opened for writing; its parents never are.
    pub writable: bool,
    /// The I/O mode for flat extents, where their borders permit it.
    pub mode: IoMode,
    /// The format of the file. If `None`, its first bytes decide, except for a file named like a raw disk: there, the
    /// guest controls the first bytes.
    pub format: Option<Format>,
    /// The most parents below the image.
    pub levels_max: usize,
    /// Whether two defects are accepted: a parent that was changed after its child was made, and a truncated stream, as
    /// far as it can be read.
    pub force: bool,
    /// How to treat the journal of a SEsparse image that was not closed properly.
    pub journal: DirtyJournal,
    /// Whether the caller already holds the lock that opening for writing acquires.
    pub held: bool,
    /// The source of new identities.
    pub random: Entropy,
    /// Whether an image that is opened for reading is opened although parts of it are lost: extents, parents, or ranges
    /// that damaged tables describe. Reading these fails, so that no older content takes their place.
    pub salvage: bool,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            writable: false,
            mode: IoMode::Buffered,
            format: None,
            levels_max: LEVELS_MAX,
            force: false,
            journal: DirtyJournal::Refuse,
            held: false,
            random: system_entropy(),
            salvage: false,
        }
    }
}

impl OpenOptions {
    /// A file of an image, which records unreadable blocks if the image is opened for salvage.
    fn prepared(&self, file: Arc<dyn File>, place: &Place) -> Arc<dyn File> {
        if self.salvage { Remembering::over(file, place) } else { file }
    }
}

/// An image's reference to its parent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParentReference {
    /// The path of the parent when the image was made: a name or a path.
    pub hint: String,
    /// The parent's CID at that time.
    pub content: Option<ContentId>,
    /// The parent's format, if the image states it; otherwise it is a VMDK.
    pub format: Option<Format>,
}

/// An open image: one level of a chain.
pub struct Image {
    place: Place,
    home: Option<Arc<StoredDescriptor>>,
    layer: Arc<dyn Layer>,
    flats: Vec<Arc<Flat>>,
    engines: Vec<Engine>,
    /// Whether all extents are flat.
    only_flat: bool,
    parent: Option<ParentReference>,
    /// What of the image is lost, as text for the user.
    notes: Vec<String>,
    _lock: Option<Box<dyn Lock>>,
}

/// An extent line with its file.
struct Resolved<'a> {
    line: &'a ExtentLine,
    format: Format,
    place: Place,
}

impl Image {
    /// Opens one image, without its parents.
    pub fn open(place: Place, options: &OpenOptions) -> Result<Self> {
        let label = place.label();
        let signature = match options.format {
            Some(Format::Flat) => Signature::Raw,
            Some(Format::HostedSparse) => Signature::HostedSparse,
            Some(Format::VmfsSparse) => Signature::VmfsSparse,
            Some(Format::SeSparse) => Signature::SeSparse,
            Some(Format::VsanSparse) => Signature::VsanSparse,
            Some(Format::Qcow2) => Signature::Qcow2,
            Some(Format::Vmdk) => Self::probe_vmdk(&place)?,
            None => Self::judge(&place)?,
        };
        let alone = |format| Self::open_alone(place.clone(), format, options);
        let needs_text = !options.format.is_some_and(|format| format != Format::Vmdk);
        match signature {
            Signature::Descriptor => Self::open_described(place, options),
            Signature::HostedSparse => Self::open_embedded(place, options),
            Signature::VmfsSparse | Signature::SeSparse | Signature::VsanSparse if needs_text => {
                Err(needs_descriptor(&label, signature))
            }
            Signature::VmfsSparse => alone(Format::VmfsSparse),
            Signature::SeSparse => alone(Format::SeSparse),
            Signature::VsanSparse => alone(Format::VsanSparse),
            Signature::Qcow2 => alone(Format::Qcow2),
            Signature::Raw => alone(Format::Flat),
            Signature::ChangeTracking => {
                Err(Error::new(ErrorKind::Invalid, format!("'{label}' lists changed blocks and is no disk")))
            }
            Signature::Foreign(name) => Err(Error::new(
                ErrorKind::Unsupported,
                format!("'{label}' is of the {name} format, which is not among those that can be opened"),
            )),
        }
    }

    /// The format of a file that the user named without a format.
    fn judge(place: &Place) -> Result<Signature> {
        let (found, length) = Self::probe_file(place)?;
        probe::judge(&place.name, &place.label(), length, found)
    }

    /// The format that the first bytes of the file indicate.
    pub fn probe(place: &Place) -> Result<Signature> {
        Self::probe_file(place).map(|(found, _)| found)
    }

    fn probe_file(place: &Place) -> Result<(Signature, u64)> {
        let file = place.open(IoMode::Buffered, backend::Access::Read)?;
        let length = file.len().during(|| format!("querying the length of '{}'", place.label()))?;
        let mut bytes = [0; PROBE_LENGTH];
        let bytes = &mut bytes[..length.min(PROBE_LENGTH as u64) as usize];
        file.read_at(bytes, 0).during(|| format!("reading the beginning of '{}'", place.label()))?;
        Ok((probe(bytes), length))
    }

    /// As [`Image::probe`], for a file that has to be a VMDK.
    fn probe_vmdk(place: &Place) -> Result<Signature> {
        match Self::probe(place)? {
            found @ (Signature::Descriptor | Signature::HostedSparse) => Ok(found),
            _ => Err(Error::new(ErrorKind::Corrupt, format!("'{}' is no VMDK", place.label()))),
        }
    }

    /// Opens a file that is an image by itself, without a descriptor.
    fn open_alone(place: Place, format: Format, options: &OpenOptions) -> Result<Self> {
        let label = place.label();
        let lock = lock_for(&place, options)?;
        // A raw file can be read by direct I/O only if its length is aligned; other formats choose their mode.
        let mode = match format {
            Format::Flat => {
                let file = place.open(IoMode::Buffered, backend::Access::Read)?;
                let length = file.len().during(|| format!("querying the length of '{label}'"))?;
                Flat::mode_for(options.mode, 0, length)
            }
            other => other.mode(options.mode, 0, None),
        };
        let file = options.prepared(place.open(mode, access(options.writable))?, &place);
        let opened = open_extent(format, &place, file, ExtentOptions::alone(options))?;
        let only_flat = opened.flat.is_some();
        let flats = opened.flat.into_iter().collect();
        let engines = opened.engine.into_iter().collect();
        let parent = opened.parent;
        let (layer, notes) = (opened.layer, Vec::new());
        Ok(Self { place, home: None, layer, flats, engines, only_flat, parent, notes, _lock: lock })
    }

    /// Opens a sparse extent of VMware Workstation with an embedded descriptor.
    fn open_embedded(place: Place, options: &OpenOptions) -> Result<Self> {
        let label = place.label();
        let lock = lock_for(&place, options)?;
        let file = place.open(Format::HostedSparse.mode(options.mode, 0, None), access(options.writable))?;
        let file = options.prepared(file, &place);
        let embedded = storage::load_embedded(&*file).map_err(|error| error.context(format!("'{label}'")))?;
        let Some((range, descriptor)) = embedded else {
            if options.format.is_some() {
                drop(lock);
                return Self::open_alone(place, Format::HostedSparse, options);
            }
            return Err(needs_descriptor(&label, Signature::HostedSparse));
        };
        let parent = parent_of(&descriptor, &label, options)?;
        // The extent lines of an embedded descriptor name the file that contains it.
        let extent = ExtentOptions { parent: parent.is_some(), ..ExtentOptions::alone(options) };
        let opened = open_extent(Format::HostedSparse, &place, Arc::clone(&file), extent)?;
        if !options.force && !options.salvage {
            check_size(&*opened.layer, &descriptor, &label)?;
        }
        let home = StoredDescriptor::new(place.clone(), descriptor, Some((file, range)), Arc::clone(&options.random));
        let engines = opened.engine.into_iter().collect();
        Ok(Self::assemble(place, home, opened.layer, (Vec::new(), engines), false, parent, lock))
    }

    fn open_described(place: Place, options: &OpenOptions) -> Result<Self> {
        let label = place.label();
        let (descriptor, lock) = load_locked(&place, options)?;
        let parent = parent_of(&descriptor, &label, options)?;
        let resolved = resolve_extents(&place, &descriptor, options)?;
        let mut parts = Vec::with_capacity(resolved.len());
        let mut flats = Vec::new();
        let mut engines = Vec::new();
        let mut only_flat = true;
        let mut notes = Vec::new();
        for (line, extent) in descriptor.extents.iter().zip(&resolved) {
            let length = line.length();
            let Some(extent) = extent else {
                parts.push(Part { length, layer: None, name: String::new() });
                continue;
            };
            let name = extent.place.label();
            let mut rest = 0..length;
            match open_resolved(extent, &descriptor, parent.is_some(), options) {
                Ok(opened) => {
                    only_flat &= opened.flat.is_some();
                    flats.extend(opened.flat);
                    engines.extend(opened.engine);
                    rest.start = length.min(opened.layer.capacity());
                    parts.push(Part { length: rest.start, layer: Some(opened.layer), name: name.clone() });
                }
                Err(error) if options.salvage && is_loss(&error) => notes.push(format!("'{name}' is lost: {error}")),
                Err(error) => return Err(error.context(format!("'{label}'"))),
            }
            if !rest.is_empty() {
                let why = format!("'{name}' is lost from byte {} of {length} on", rest.start);
                if rest.start > 0 {
                    notes.push(why.clone());
                }
                let length = rest.end - rest.start;
                parts.push(Part { length, layer: Some(Arc::new(Lost { capacity: length, why })), name });
            }
        }
        let whole = match &parts[..] {
            [Part { length, layer: Some(layer), .. }] if *length == layer.capacity() => Some(Arc::clone(layer)),
            _ => None,
        };
        let layer = match whole {
            Some(layer) => layer,
            None => Arc::new(
                Concatenated::new(parts, options.writable).map_err(|error| error.context(format!("'{label}'")))?,
            ),
        };
        let home = StoredDescriptor::new(place.clone(), descriptor, None, Arc::clone(&options.random));
        Ok(Self { notes, ..Self::assemble(place, home, layer, (flats, engines), only_flat, parent, lock) })
    }

    /// What stands in for an image that is lost, below `above`. Reading it fails.
    pub fn lost(place: Place, above: &Self, why: &Error) -> Self {
        let note = format!("'{}' is lost: {why}", place.label());
        let layer = Arc::new(Lost { capacity: above.layer.capacity(), why: note.clone() });
        let (flats, engines) = (Vec::new(), Vec::new());
        let (home, parent, notes) = (None, None, vec![note]);
        Self { place, home, layer, flats, engines, only_flat: false, parent, notes, _lock: None }
    }

    /// What of the image is lost, if it was opened for salvage.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    fn assemble(
        place: Place,
        home: StoredDescriptor,
        layer: Arc<dyn Layer>,
        (flats, engines): (Vec<Arc<Flat>>, Vec<Engine>),
        only_flat: bool,
        parent: Option<ParentReference>,
        lock: Option<Box<dyn Lock>>,
    ) -> Self {
        let home = Arc::new(home);
        let layer = match layer.writable() {
            true => Arc::new(Identified { inner: layer, home: Arc::clone(&home) }),
            false => layer,
        };
        let notes = Vec::new();
        Self { place, home: Some(home), layer, flats, engines, only_flat, parent, notes, _lock: lock }
    }

    /// The file by which the image was opened.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// The layer with the image's content.
    pub fn layer(&self) -> &Arc<dyn Layer> {
        &self.layer
    }

    /// The image's descriptor as in the file; `None` for an image without one.
    pub fn descriptor(&self) -> Option<Descriptor> {
        self.home.as_ref().map(|home| home.descriptor.lock().clone())
    }

    /// Changes the descriptor durably, as a whole. An embedded descriptor is changed by [`storage::write_embedded`]
    /// instead, which is not atomic.
    pub fn update_descriptor(&self, change: impl FnOnce(&mut Descriptor)) -> Result<()> {
        match &self.home {
            Some(home) if self.layer.writable() => home.update(change),
            Some(_) => Err(crate::read_only(self.layer.format())),
            None => Err(Error::new(ErrorKind::Invalid, format!("'{}' has no descriptor", self.place.label()))),
        }
    }

    /// The image's reference to its parent.
    pub fn parent(&self) -> Option<&ParentReference> {
        self.parent.as_ref()
    }

    /// The provisioning type of a flat image; `None` for sparse formats.
    pub fn provisioning(&self) -> Option<Provisioning> {
        let of_all = |wanted| self.flats.iter().any(|flat| flat.provisioning() == wanted);
        let order = [Provisioning::Thin, Provisioning::ZeroedThick, Provisioning::EagerZeroedThick];
        order.into_iter().find(|provisioning| self.only_flat && of_all(*provisioning))
    }

    /// VMware's counters for the image's flat extents; `None` if the image has other extents.
    pub fn counters(&self) -> Option<Counters> {
        let sum = self.flats.iter().fold(Counters::default(), |sum, flat| sum + flat.counters());
        (self.only_flat && !self.flats.is_empty()).then_some(sum)
    }

    /// Number of contiguous runs of the image's flat extents on the device; `None` if the file system does not report
    /// it.
    pub fn fragments(&self) -> Result<Option<u64>> {
        let mut sum = 0;
        for flat in &self.flats {
            match flat.fragments()? {
                Some(runs) => sum += runs,
                None => return Ok(None),
            }
        }
        Ok(self.only_flat.then_some(sum))
    }

    /// Makes a flat disk eager zeroed thick while it is in use: see [`Flat::fill`]. The descriptor marks the disk as
    /// thin until all extents are filled.
    pub fn inflate(&self, progress: &dyn Progress) -> Result<()> {
        self.check_flat("inflated")?;
        self.each_flat(progress, |flat, progress| flat.fill(progress))?;
        match self.home {
            Some(_) => self.update_descriptor(|descriptor| descriptor.set_thin(false)),
            None => Ok(()),
        }
    }

    /// Makes a flat disk thin and punches file blocks that hold only zeros: see [`Flat::punch_zeros`]. The descriptor
    /// marks the disk as thin before the first punch.
    pub fn punch_zeros(&self, progress: &dyn Progress) -> Result<u64> {
        self.check_flat("punched")?;
        if self.home.is_some() {
            self.update_descriptor(|descriptor| descriptor.set_thin(true))?;
        }
        let mut given_back = 0;
        self.each_flat(progress, |flat, progress| {
            given_back += flat.punch_zeros(progress)?;
            Ok(())
        })?;
        Ok(given_back)
    }

    fn check_flat(&self, what: &str) -> Result<()> {
        if !self.only_flat || self.flats.is_empty() {
            let text = format!("'{}' cannot be {what}: only flat disks can", self.place.label());
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        match self.layer.writable() {
            true => Ok(()),
            false => Err(crate::read_only(self.layer.format())),
        }
    }

    /// Runs work on one flat extent after another, and reports the progress of all of them together.
    fn each_flat(
        &self,
        progress: &dyn Progress,
        mut work: impl FnMut(&Flat, &dyn Progress) -> Result<()>,
    ) -> Result<()> {
        let total = self.flats.iter().map(|flat| flat.capacity()).sum();
        let mut before = 0;
        for flat in self.flats.iter().filter(|flat| flat.writable()) {
            work(flat, &WorkPart { whole: progress, place: WorkPlace::Behind { before, total } })?;
            before += flat.capacity();
        }
        Ok(())
    }
}

/// Refuses an extent if its header and its embedded descriptor state different sizes: one of the two is damaged. Some
/// writers round one of the two up to whole grains.
fn check_size(layer: &dyn Layer, descriptor: &Descriptor, label: &str) -> Result<()> {
    let [line] = &descriptor.extents[..] else { return Ok(()) };
    let (header, line, grain) = (layer.capacity(), line.length(), layer.grain());
    if header.div_ceil(grain) == line.div_ceil(grain) {
        return Ok(());
    }
    let text = format!("'{label}' has {header} bytes by its header and {line} by its descriptor: one is damaged");
    Err(Error::new(
        ErrorKind::Corrupt,
        format!("{text}; --force-parent uses the header's capacity, to rescue the data"),
    ))
}

/// The error for an extent that has to be opened through its descriptor.
fn needs_descriptor(label: &str, found: Signature) -> Error {
    let format = match found {
        Signature::VmfsSparse => "vmfssparse",
        Signature::SeSparse => "sesparse",
        Signature::VsanSparse => "vsansparse",
        _ => "monolithicsparse",
    };
    let text = "is an extent: open the descriptor that names it, which names its parent too";
    let lost = format!("if that is lost, --from {format} opens the extent alone, with zeros where it holds nothing");
    Error::new(ErrorKind::Invalid, format!("'{label}' {text}; {lost}"))
}

/// The parent in a descriptor.
fn parent_of(descriptor: &Descriptor, label: &str, options: &OpenOptions) -> Result<Option<ParentReference>> {
    let contradiction = |text: &str| Err(Error::new(ErrorKind::Corrupt, format!("'{label}' {text}")));
    if descriptor.native_snapshot == Some(true) && descriptor.parent_content.is_some() {
        let text = format!("'{label}' is a snapshot that the storage array keeps: its parent's data is in no file");
        return Err(Error::new(ErrorKind::Unsupported, text));
    }
    let hint = descriptor.parent_hint.clone();
    match (hint, descriptor.parent_content) {
        (None, None) => Ok(None),
        (Some(hint), Some(content)) => Ok(Some(ParentReference { hint, content: Some(content), format: None })),
        (Some(hint), None) if options.force => Ok(Some(ParentReference { hint, content: None, format: None })),
        (Some(_), None) => contradiction("names a parent, and says that it has none"),
        (None, Some(_)) => contradiction("has a parent, and does not say where"),
    }
}

/// Finds the files of extent lines through [`folder`]: `None` for zero extents.
fn resolve_extents<'a>(
    place: &Place,
    descriptor: &'a Descriptor,
    options: &OpenOptions,
) -> Result<Vec<Option<Resolved<'a>>>> {
    let label = place.label();
    if descriptor.extents.is_empty() {
        return Err(Error::new(ErrorKind::Corrupt, format!("'{label}' names no extents")));
    }
    let mut resolved = Vec::with_capacity(descriptor.extents.len());
    let mut taken: Vec<(String, Range<u64>)> = Vec::new();
    for line in &descriptor.extents {
        let format = Format::of_line(line.kind).map_err(|error| error.context(format!("'{label}'")))?;
        let (Some(format), Some(file), true) = (format, &line.file, line.access != Access::None) else {
            resolved.push(None);
            continue;
        };
        if format == Format::VsanSparse && file.contains("://") {
            let text = format!(
                "'{label}' names '{}', an object of a vSAN store, which no file holds; copy the disk out with the \
                 host's tools",
                file.escape_debug()
            );
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let extent = match place.folder.resolve(file) {
            // Opening the extent finds that it is missing.
            Err(error) if options.salvage && is_loss(&error) => {
                Place { folder: place.folder.clone(), name: base_name(file).to_owned() }
            }
            other => other.map_err(|error| error.context(format!("'{label}'")))?,
        };
        if format != Format::Flat && line.offset != 0 {
            let text = format!("'{label}' begins '{file}' at an offset, which only flat extents have");
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let start = line.offset.saturating_mul(crate::SECTOR);
        let bytes = match format {
            Format::Flat => start..start.saturating_add(line.length()),
            _ => 0..u64::MAX,
        };
        taken.push((extent.label(), bytes));
        resolved.push(Some(Resolved { line, format, place: extent }));
    }
    if options.writable {
        taken.push((label.clone(), 0..u64::MAX));
        taken.sort_unstable_by(|a, b| (&a.0, a.1.start).cmp(&(&b.0, b.1.start)));
        if let Some(pair) = taken.windows(2).find(|pair| pair[0].0 == pair[1].0 && pair[0].1.end > pair[1].1.start) {
            let text = format!("'{label}' uses '{}' twice: a write to one place would change another", pair[0].0);
            return Err(Error::new(ErrorKind::Corrupt, text));
        }
    }
    Ok(resolved)
}

fn open_resolved(
    extent: &Resolved<'_>,
    descriptor: &Descriptor,
    parent: bool,
    options: &OpenOptions,
) -> Result<OpenExtent> {
    let label = extent.place.label();
    let writable = options.writable && extent.line.access == Access::ReadWrite;
    let length = extent.line.length();
    let offset = extent.line.offset.saturating_mul(crate::SECTOR);
    let mode = extent.format.mode(options.mode, offset, Some(length));
    let file = options.prepared(extent.place.open(mode, access(writable))?, &extent.place);
    let mut capacity = length;
    if options.salvage {
        // A truncated file is read as far as it reaches.
        let there = file.len().during(|| format!("querying the length of '{label}'"))?;
        capacity = length.min(there.saturating_sub(offset) / crate::SECTOR * crate::SECTOR);
    }
    let flat = FlatOptions { offset, capacity: Some(capacity), writable, thin: descriptor.thin() };
    let (journal, force, salvage) = (options.journal, options.force, options.salvage);
    let opened =
        open_extent(extent.format, &extent.place, file, ExtentOptions { flat, parent, journal, force, salvage })?;
    if opened.layer.capacity() < length && !salvage {
        let text = format!("'{label}' has {} bytes of disk, and {length} by its extent line", opened.layer.capacity());
        return Err(Error::new(ErrorKind::Corrupt, text));
    }
    Ok(opened)
}

fn access(writable: bool) -> backend::Access {
    if writable { backend::Access::ReadWrite } else { backend::Access::Read }
}

/// The lock of an image's writer: on the first extent, which is never renamed while the image exists.
fn lock_for(place: &Place, options: &OpenOptions) -> Result<Option<Box<dyn Lock>>> {
    if !options.writable || options.held {
        return Ok(None);
    }
    // Taking a lock would create a missing file, but a missing extent is an error.
    drop(place.open(IoMode::Buffered, backend::Access::ReadWrite)?);
    let lock = place.folder.directory().lock(&place.name);
    lock.map(Some).map_err(|error| match error.kind() {
        std::io::ErrorKind::WouldBlock => {
            Error::new(ErrorKind::Busy, format!("'{}' is open for writing elsewhere", place.label()))
        }
        _ => Error::io(format!("locking '{}'", place.label()), error),
    })
}

/// Loads the descriptor of an image, and takes the lock of the image's writer. Another writer may replace the
/// descriptor until the lock is taken, so the descriptor is loaded again then.
fn load_locked(place: &Place, options: &OpenOptions) -> Result<(Descriptor, Option<Box<dyn Lock>>)> {
    let label = place.label();
    let load = || storage::load(&*place.open(IoMode::Buffered, backend::Access::Read)?, &label);
    let mut descriptor = load()?;
    for _ in 0..LOADS_MAX {
        let resolved = resolve_extents(place, &descriptor, options)?;
        let first = resolved.iter().flatten().find(|extent| extent.line.access == Access::ReadWrite);
        let lock = first.map(|extent| lock_for(&extent.place, options)).transpose()?.flatten();
        if lock.is_none() {
            return Ok((descriptor, None));
        }
        let now = load()?;
        if now == descriptor {
            return Ok((descriptor, lock));
        }
        descriptor = now;
    }
    Err(Error::new(ErrorKind::Busy, format!("'{label}' is being changed elsewhere; try again")))
}

/// The last component of a path, which may be a Windows path.
fn base_name(hint: &str) -> &str {
    hint.rsplit(['/', '\\']).next().unwrap_or(hint)
}
