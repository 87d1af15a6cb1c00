//! Creating flat disks: the extents with their space, and the descriptor that names them.
//!
//! ```text
//! vmfs                 NAME.vmdk + NAME-flat.vmdk              as ESXi makes all three types
//! monolithicFlat       NAME.vmdk + NAME-flat.vmdk              as Workstation does
//! twoGbMaxExtentFlat   NAME.vmdk + NAME-f001.vmdk, -f002 ..    2047 MiB each
//! raw                  NAME                                    no descriptor
//! ```
//!
//! Order: the descriptor's text under a temporary name, durable; the extents, durable; the rename of the descriptor. A
//! crash at any point leaves a complete disk, or files that [`crate::descriptor::storage::sweep`] removes. A failure or
//! a cancellation removes everything at once.

use super::{FILE_BLOCK, Flat, Provisioning, zeros};
use crate::descriptor::storage::{self, Pending};
use crate::descriptor::{Adapter, CreateType, Descriptor, EXTENTS_MAX, ExtentKind, ExtentLine, Uuid};
use crate::{CAPACITY_MAX, Error, ErrorKind, IoContext, Result, SECTOR};
use backend::{Access, Directory, File, IoMode};
use error::text::size;
use work::{Progress, Throttle};

/// Sectors per piece of a split disk, as in VMware's products: 2047 MiB.
pub(crate) const SPLIT_SECTORS: u64 = 4_192_256;

/// The product that uses this layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewKind {
    /// One flat extent, as on VMFS.
    Vmfs,
    /// One flat extent, as in VMware Workstation.
    MonolithicFlat,
    /// Extents of 2047 MiB.
    TwoGbMaxExtentFlat,
}

/// Parameters of a new flat disk.
pub struct NewDisk<'a> {
    /// Name of the descriptor: `NAME.vmdk`.
    pub name: &'a str,
    /// Capacity in bytes, whole sectors.
    pub capacity: u64,
    /// The layout of the disk's files.
    pub kind: NewKind,
    /// The provisioning type.
    pub provisioning: Provisioning,
    /// The adapter for which the geometry is computed.
    pub adapter: Adapter,
    /// The I/O mode for writing zeros.
    pub mode: IoMode,
}

impl NewDisk<'_> {
    /// The descriptor that the disk will have.
    pub fn descriptor(&self, random: &mut dyn FnMut() -> u64) -> Result<Descriptor> {
        check_capacity(self.capacity)?;
        let stem = storage::check_name(self.name)?;
        let sectors = self.capacity / SECTOR;
        let mut extents = Vec::new();
        match self.kind {
            NewKind::Vmfs => {
                extents.push(ExtentLine::whole(ExtentKind::Vmfs, sectors, format!("{stem}-flat.vmdk")));
            }
            NewKind::MonolithicFlat => {
                extents.push(ExtentLine::whole(ExtentKind::Flat, sectors, format!("{stem}-flat.vmdk")));
            }
            NewKind::TwoGbMaxExtentFlat => {
                let pieces = sectors.div_ceil(SPLIT_SECTORS);
                if pieces > EXTENTS_MAX as u64 {
                    let text = format!("a split disk has at most {EXTENTS_MAX} pieces, and this needs {pieces}");
                    return Err(Error::new(ErrorKind::Invalid, text));
                }
                for piece in 0..pieces {
                    let length = (sectors - piece * SPLIT_SECTORS).min(SPLIT_SECTORS);
                    let name = format!("{stem}-f{:03}.vmdk", piece + 1);
                    extents.push(ExtentLine::whole(ExtentKind::Flat, length, name));
                }
            }
        }
        let create_type = match self.kind {
            NewKind::Vmfs => CreateType::Vmfs,
            NewKind::MonolithicFlat => CreateType::MonolithicFlat,
            NewKind::TwoGbMaxExtentFlat => CreateType::TwoGbMaxExtentFlat,
        };
        let mut descriptor = Descriptor::base(create_type, extents);
        descriptor.native_snapshot = Some(false);
        descriptor.database.set_disk(self.adapter, sectors, Uuid::random(random));
        let content = descriptor.content;
        descriptor.database.set_long_content(content, random);
        descriptor.set_thin(self.provisioning == Provisioning::Thin);
        Ok(descriptor)
    }
}

/// Creates a disk in `directory`: extents and descriptor. Durable on return; nothing is left after an error.
pub fn create(
    directory: &dyn Directory,
    disk: &NewDisk<'_>,
    random: &mut dyn FnMut() -> u64,
    progress: &dyn Progress,
) -> Result<Descriptor> {
    let descriptor = disk.descriptor(random)?;
    let pending = Pending::begin(directory, disk.name, &descriptor)?;
    let mut made = Vec::new();
    let mut making =
        Making { disk: disk.name, done: 0, total: disk.capacity, moved: 0, throttle: Throttle::new(progress) };
    let outcome = descriptor.extents.iter().try_for_each(|extent| {
        let Some(name) = &extent.file else { return Ok(()) };
        let mode = Flat::mode_for(disk.mode, 0, extent.length());
        let file = directory.create(name, mode).during(|| format!("creating '{name}'"))?;
        made.push(name);
        making.fill(&*file, name, extent.length(), disk.provisioning)
    });
    match outcome.and_then(|()| pending.rename()) {
        Ok(()) => pending.settle().map(|()| descriptor),
        Err(error) => {
            for name in made {
                // If the file cannot be removed now, a sweep removes it later, because the unfinished descriptor names
                // it.
                if directory.remove(name).is_err() {
                    return Err(error);
                }
            }
            pending.abandon();
            Err(error)
        }
    }
}

/// Creates a raw file of this capacity. Durable on return; nothing is left after an error.
pub fn create_raw(
    directory: &dyn Directory,
    name: &str,
    capacity: u64,
    provisioning: Provisioning,
    mode: IoMode,
    progress: &dyn Progress,
) -> Result<()> {
    check_capacity(capacity)?;
    match directory.open_foreign(name, IoMode::Buffered, Access::Read) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        _ => return Err(Error::new(ErrorKind::Exists, format!("there is a file '{name}' already"))),
    }
    let temporary = format!("{name}{}", storage::NEW_SUFFIX);
    let (file, _lock) = storage::create_unfinished(directory, name, Flat::mode_for(mode, 0, capacity))?;
    let mut making = Making { disk: name, done: 0, total: capacity, moved: 0, throttle: Throttle::new(progress) };
    let made = making
        .fill(&*file, &temporary, capacity, provisioning)
        .and_then(|()| directory.rename(&temporary, name).during(|| format!("renaming '{temporary}' to '{name}'")));
    match made {
        Ok(()) => directory.sync().during(|| format!("making '{name}' durable")),
        Err(error) => {
            // If the file cannot be removed now, a sweep removes it later.
            let _ = directory.remove(&temporary);
            Err(error)
        }
    }
}

/// Prepares one extent of a disk in a new file: length, space and zeros. On return the content is durable, but not the
/// file's name.
pub(crate) fn fill_extent(
    file: &dyn File,
    name: &str,
    length: u64,
    provisioning: Provisioning,
    progress: &dyn Progress,
) -> Result<()> {
    Making { disk: name, done: 0, total: length, moved: 0, throttle: Throttle::new(progress) }.fill(
        file,
        name,
        length,
        provisioning,
    )
}

/// A disk under creation.
struct Making<'a> {
    disk: &'a str,
    done: u64,
    total: u64,
    /// Bytes written since the last report.
    moved: u64,
    throttle: Throttle<&'a dyn Progress>,
}

impl Making<'_> {
    /// Sets the length of a new file, allocates its space, and writes its zeros.
    fn fill(&mut self, file: &dyn File, name: &str, length: u64, provisioning: Provisioning) -> Result<()> {
        let during = || format!("making '{name}' of {length} bytes");
        file.set_len(length).map_err(|error| match error.kind() {
            std::io::ErrorKind::FileTooLarge => too_large(name, length),
            _ => Error::io(during(), error),
        })?;
        if provisioning != Provisioning::Thin {
            // All space is reserved by one call, so that the space is contiguous where possible.
            file.reserve(0, length).during(during)?;
        }
        if provisioning == Provisioning::EagerZeroedThick {
            let mut at = 0;
            while at < length {
                self.tell(at)?;
                let part = (length - at).min(FILE_BLOCK);
                file.write_at(&[&zeros()[..part as usize]], at, false).during(during)?;
                at += part;
                self.moved += part;
            }
        }
        file.sync().during(during)?;
        self.done += length;
        self.tell(0)
    }

    fn tell(&mut self, within: u64) -> Result<()> {
        let moved = std::mem::take(&mut self.moved);
        match self.throttle.step(self.done + within, self.total, moved).is_break() {
            true => {
                let text = format!("making '{}' was stopped; its files are removed", self.disk);
                Err(Error::new(ErrorKind::Interrupted, text))
            }
            false => Ok(()),
        }
    }
}

/// The error for a length that the file system does not permit.
fn too_large(name: &str, length: u64) -> Error {
    let text = format!(
        "'{name}' would have {length} bytes, and the file system has no file of that size (ext4: 16 TiB at most): use a \
         file system with larger files, such as XFS, or a format that needs no such file, such as native"
    );
    Error::new(ErrorKind::Invalid, text)
}

pub(crate) fn check_capacity(capacity: u64) -> Result<()> {
    if capacity == 0 || !capacity.is_multiple_of(SECTOR) || capacity > CAPACITY_MAX {
        let (largest, capacity) = (size(CAPACITY_MAX), size(capacity));
        let text = format!("a disk has whole sectors of 512 bytes up to {largest}, not {capacity}");
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    Ok(())
}
