//! Descriptor files: loading, creating together with extents, replacing, and cleaning up after a crash.
//!
//! A descriptor file is not overwritten while there is space for a new one. The new text is written to a file of the
//! same name with [`NEW_SUFFIX`], which is made durable and then renamed over the old file. Invariants:
//!
//! 1. A file opened by the descriptor's name has the complete old text or the complete new one. If CID digits are
//!    overwritten in place, for lack of space, each sector is old or new after a crash, and every combination is a
//!    valid text.
//! 2. Before a file that only the new text names is created, this text is durable ([`Pending`]). So a crash while a
//!    disk is being created leaves a file that names all other new files, and [`sweep`] removes all of them.
//! 3. A sweep removes a file only if the unfinished text names it, if lamina gives such a name to extents of that
//!    descriptor, and if no finished descriptor in the folder names it.
//! 4. The process that creates a disk holds the lock of the temporary file from its creation until it is renamed or
//!    removed. A sweep in a folder with other processes' disks takes that lock first ([`sweep_one`]).
//!
//! An embedded descriptor cannot be replaced by renaming: only the digits of its CIDs are overwritten, each within its
//! sector ([`renew_embedded`], [`renumber`]). If a full file system has no space for the new text of a descriptor file,
//! only the digits are overwritten in that file, too.

use super::{ContentId, Descriptor, Result, TEXT_MAX, corrupt, invalid};
use crate::{Error, ErrorKind, IoContext, SECTOR};
use backend::replace::remove_if_there;
use backend::{Access, Directory, File, IoMode, Lock};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

/// The suffix of an unfinished descriptor's name.
pub const NEW_SUFFIX: &str = ".lamina-new";

/// The longest name of a new descriptor: the names of its extents, which are longer, have to fit into 255 bytes.
pub const NAME_MAX: usize = 200;

/// Reads the descriptor in `file`; error messages call it `name`.
pub fn load(file: &dyn File, name: &str) -> Result<Descriptor> {
    let length = file.len().during(|| format!("querying the length of '{name}'"))?;
    if length > TEXT_MAX as u64 {
        return Err(corrupt(format!("'{name}' has {length} bytes: too many for a disk descriptor")));
    }
    let mut bytes = vec![0; length as usize];
    file.read_at(&mut bytes, 0).during(|| format!("reading '{name}'"))?;
    Descriptor::parse(&bytes).map_err(|error| error.context(format!("'{name}'")))
}

/// Replaces the text of the existing descriptor `name`. Durable on return; after a failure the old text is in place.
pub fn replace(directory: &dyn Directory, name: &str, descriptor: &Descriptor) -> Result<()> {
    let temporary = format!("{name}{NEW_SUFFIX}");
    // A crash or a failed creation may have left a temporary file. This process owns the disk, so it can remove the
    // file.
    remove_if_there(directory, &temporary).during(|| format!("removing the unfinished '{temporary}'"))?;
    let pending = Pending::write(directory, name, descriptor)?;
    if let Err(error) = directory.copy_permissions(name, &temporary) {
        pending.abandon();
        return Err(Error::io(format!("giving '{temporary}' the permissions of '{name}'"), error));
    }
    pending.commit()
}

/// A descriptor under creation: its text is durable under its temporary name while the files that it names are created.
pub struct Pending<'a> {
    directory: &'a dyn Directory,
    name: String,
    temporary: String,
    /// While this lock is held, no sweep treats the text as left by a crash.
    lock: Box<dyn Lock>,
}

/// Creates the file that is to become `name`, under its temporary name, and locks it.
///
/// # Errors
/// `Exists` if a file has the temporary name; `Busy` if a concurrent sweep has removed the new file as one left by a
/// crash.
pub fn create_unfinished(
    directory: &dyn Directory,
    name: &str,
    mode: IoMode,
) -> Result<(Arc<dyn File>, Box<dyn Lock>)> {
    let temporary = format!("{name}{NEW_SUFFIX}");
    directory.create_locked(&temporary, mode).map_err(|error| match error.kind() {
        std::io::ErrorKind::WouldBlock => is_being_made(name),
        // A sweep has removed what a crash has left, but it removes no link.
        std::io::ErrorKind::AlreadyExists => {
            let text = format!(
                "there is a file or link '{temporary}' already, and '{name}' has this name until it is complete: \
                 remove '{temporary}', and try again"
            );
            Error::new(ErrorKind::Exists, text)
        }
        _ => Error::io(format!("creating '{temporary}'"), error),
    })
}

fn is_being_made(name: &str) -> Error {
    Error::new(ErrorKind::Busy, format!("'{name}' is being made elsewhere"))
}

impl<'a> Pending<'a> {
    /// Begins the creation of descriptor `name`.
    ///
    /// # Errors
    /// `Exists` if there is a file of that name, finished or unfinished.
    pub fn begin(directory: &'a dyn Directory, name: &str, descriptor: &Descriptor) -> Result<Self> {
        check_name(name)?;
        match directory.open_foreign(name, IoMode::Buffered, Access::Read) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            _ => return Err(Error::new(ErrorKind::Exists, format!("there is a file '{name}' already"))),
        }
        let pending = Self::write(directory, name, descriptor)?;
        match directory.sync().during(|| format!("making '{name}' durable")) {
            Ok(()) => Ok(pending),
            Err(error) => {
                pending.abandon();
                Err(error)
            }
        }
    }

    /// Continues a creation that this process began: the text still has its temporary name and is locked.
    pub fn resume(directory: &'a dyn Directory, name: &str, lock: Box<dyn Lock>) -> Self {
        Self { directory, name: name.to_owned(), temporary: format!("{name}{NEW_SUFFIX}"), lock }
    }

    /// Keeps the files, and returns the lock of the text for [`Pending::resume`].
    pub fn suspend(self) -> Box<dyn Lock> {
        self.lock
    }

    fn write(directory: &'a dyn Directory, name: &str, descriptor: &Descriptor) -> Result<Self> {
        let text = descriptor.to_bytes().map_err(|error| error.context(format!("descriptor '{name}'")))?;
        let (file, lock) = create_unfinished(directory, name, IoMode::Buffered)?;
        let pending = Self::resume(directory, name, lock);
        let written = file.write_at(&[&text], 0, false).and_then(|()| file.sync());
        match written.during(|| format!("writing '{}'", pending.temporary)) {
            Ok(()) => Ok(pending),
            Err(error) => {
                pending.abandon();
                Err(error)
            }
        }
    }

    /// Renames the descriptor to its final name, durably. The content of all files that it names must be durable.
    pub fn commit(self) -> Result<()> {
        match self.rename() {
            Ok(()) => self.settle(),
            Err(error) => {
                self.abandon();
                Err(error)
            }
        }
    }

    /// The first half of [`Pending::commit`]: after an error nothing has changed, and the created files can be removed.
    pub fn rename(&self) -> Result<()> {
        self.directory
            .rename(&self.temporary, &self.name)
            .during(|| format!("renaming '{}' to '{}'", self.temporary, self.name))
    }

    /// The second half: after an error the rename may or may not be durable, so no file may be removed.
    pub fn settle(self) -> Result<()> {
        self.directory.sync().during(|| format!("making '{}' durable", self.name))
    }

    /// Undoes the creation. The files that it names must be removed already.
    pub fn abandon(self) {
        // Files that cannot be removed now are removed at the next opening.
        let _ = self.directory.remove(&self.temporary);
        let _ = self.directory.sync();
    }
}

/// Removes the files that crashed creations and replacements left in a folder, and returns their names. Only for the
/// process that owns the folder, because a creation in another process looks the same.
pub fn sweep(directory: &dyn Directory) -> Result<Vec<String>> {
    let names = directory.list().during(|| "listing the folder".to_owned())?;
    let unfinished: Vec<&String> = names.iter().filter(|name| name.ends_with(NEW_SUFFIX)).collect();
    let mut removed = Vec::new();
    if unfinished.is_empty() {
        return Ok(removed);
    }
    let kept = extents_in_use(directory, &names);
    for temporary in unfinished {
        for file in remains_of(directory, temporary, &names, &kept) {
            directory.remove(&file).during(|| format!("removing '{file}' of an unfinished disk"))?;
            removed.push(file);
        }
    }
    directory.sync().during(|| "making removals durable".to_owned())?;
    Ok(removed)
}

/// As [`sweep`] for the unfinished descriptor `name`, in a folder where other processes may have disks.
///
/// # Errors
/// `Busy` while another process creates the descriptor and holds the lock of its text, or has one of its extents open
/// for writing.
pub fn sweep_one(directory: &dyn Directory, name: &str) -> Result<Vec<String>> {
    let list = || directory.list().during(|| "listing the folder".to_owned());
    let temporary = format!("{name}{NEW_SUFFIX}");
    if !list()?.contains(&temporary) {
        return Ok(Vec::new());
    }
    let lock = |file: &str| {
        directory.lock(file).map_err(|error| match error.kind() {
            std::io::ErrorKind::WouldBlock => is_being_made(name),
            _ => Error::io(format!("locking '{file}' of an unfinished disk"), error),
        })
    };
    // The lock is held until all files are removed. If the descriptor was finished before the lock was taken, locking
    // has created an empty file, which names no other files.
    let _text = lock(&temporary)?;
    let names = list()?;
    let remains = remains_of(directory, &temporary, &names, &extents_in_use(directory, &names));
    let extents = remains.iter().filter(|file| **file != temporary);
    let _extents = extents.map(|file| lock(file)).collect::<Result<Vec<_>>>()?;
    for file in &remains {
        directory.remove(file).during(|| format!("removing '{file}' of an unfinished disk"))?;
    }
    directory.sync().during(|| "making removals durable".to_owned())?;
    Ok(remains)
}

/// The files that an unfinished text names and that may be removed, followed by the file with the text.
fn remains_of(directory: &dyn Directory, temporary: &str, names: &[String], kept: &BTreeSet<String>) -> Vec<String> {
    let descriptor_name = temporary.strip_suffix(NEW_SUFFIX).unwrap_or(temporary);
    let stem = stem_of(descriptor_name).unwrap_or(descriptor_name);
    let mut remains = Vec::new();
    // A text that does not parse was not durable at the crash, so none of its extents was created.
    if let Ok(descriptor) = load_named(directory, temporary) {
        let files = descriptor.extents.into_iter().filter_map(|extent| extent.file);
        remains.extend(files.filter(|file| is_extent_of(stem, file) && !kept.contains(file) && names.contains(file)));
    }
    remains.push(temporary.to_owned());
    remains
}

fn load_named(directory: &dyn Directory, name: &str) -> Result<Descriptor> {
    let file = directory
        .open_foreign(name, IoMode::Buffered, Access::Read)
        .during(|| format!("opening descriptor '{name}'"))?;
    load(&*file, name)
}

/// Every file that a finished descriptor in the folder names.
fn extents_in_use(directory: &dyn Directory, names: &[String]) -> BTreeSet<String> {
    let finished = names.iter().filter(|name| stem_of(name).is_some());
    let descriptors = finished.filter_map(|name| load_named(directory, name).ok());
    descriptors.flat_map(|descriptor| descriptor.extents).filter_map(|extent| extent.file).collect()
}

/// Whether `file` can be the name of an extent that lamina creates for the descriptor `STEM.vmdk`.
fn is_extent_of(stem: &str, file: &str) -> bool {
    let Some(tail) = file.strip_prefix(stem).and_then(|rest| rest.strip_suffix(".vmdk")) else { return false };
    match tail {
        "-flat" | "-delta" | "-sesparse" | "-vsan" => true,
        _ => {
            let digits = tail.strip_prefix("-f").or_else(|| tail.strip_prefix("-s"));
            digits.is_some_and(|digits| digits.len() >= 3 && digits.bytes().all(|byte| byte.is_ascii_digit()))
        }
    }
}

/// The part of a descriptor's name before `.vmdk`, in upper or lower case; `None` for a name with another ending.
fn stem_of(name: &str) -> Option<&str> {
    let (stem, ending) = name.split_at_checked(name.len().checked_sub(".vmdk".len())?)?;
    ending.eq_ignore_ascii_case(".vmdk").then_some(stem)
}

/// Checks the name of a new descriptor, and returns the part before `.vmdk`.
pub fn check_name(name: &str) -> Result<&str> {
    let stem = stem_of(name).filter(|stem| !stem.is_empty());
    let Some(stem) = stem else {
        let ova = if name.ends_with(".ova") { ", or 'lamina convert' for an archive" } else { "" };
        let name = name.escape_debug();
        return Err(invalid(format!("'{name}' is no name for a disk descriptor: use NAME.vmdk{ova}")));
    };
    if stem.len() > NAME_MAX {
        return Err(invalid(format!("the name '{}' is longer than {NAME_MAX} bytes", name.escape_debug())));
    }
    let refused = |c: char| c.is_control() || matches!(c, '/' | '\\' | '"');
    if stem.starts_with(['.', '-']) || stem.contains(refused) {
        return Err(invalid(format!(
            "'{}' cannot name a disk: no slash, backslash, quote or control character, no dot or dash in front",
            name.escape_debug()
        )));
    }
    Ok(stem)
}

/// The magic number of extents that may have an embedded descriptor.
const SPARSE_MAGIC: &[u8] = b"KDMV";
/// Where QEMU looks for an embedded descriptor, whatever the header states.
const EMBEDDED_USUAL: Range<u64> = SECTOR..21 * SECTOR;

/// The location of a hosted sparse extent's descriptor according to its header, in bytes; `None` if it has none.
///
/// # Errors
/// `Corrupt` if the file is no hosted sparse extent, or if its header states an impossible location.
pub fn embedded_place(file: &dyn File) -> Result<Option<Range<u64>>> {
    let mut header = [0; SECTOR as usize];
    file.read_at(&mut header, 0).during(|| "reading the header of a sparse extent".to_owned())?;
    if !header.starts_with(SPARSE_MAGIC) {
        return Err(corrupt("this is no hosted sparse extent"));
    }
    let field = |at: usize| header[at..at + 8].iter().rev().fold(0u64, |sum, byte| sum << 8 | u64::from(*byte));
    let (start, sectors) = (field(28), field(36));
    if start == 0 || sectors == 0 {
        return Ok(None);
    }
    let length = file.len().during(|| "querying the length of a sparse extent".to_owned())?;
    let place = start.checked_mul(SECTOR).zip(start.checked_add(sectors).and_then(|end| end.checked_mul(SECTOR)));
    match place {
        Some((from, to)) if to <= length && to - from <= TEXT_MAX as u64 => Ok(Some(from..to)),
        _ => Err(corrupt(format!("the sparse extent claims a descriptor of {sectors} sectors at sector {start}"))),
    }
}

/// Reads the descriptor embedded in a hosted sparse extent, and its location. `None` without one.
pub fn load_embedded(file: &dyn File) -> Result<Option<(Range<u64>, Descriptor)>> {
    let Some(place) = embedded_place(file)? else { return Ok(None) };
    let mut bytes = vec![0; (place.end - place.start) as usize];
    file.read_at(&mut bytes, place.start).during(|| "reading an embedded descriptor".to_owned())?;
    // Extents of split disks have space for a descriptor, and leave it empty.
    if bytes.iter().all(|byte| *byte == 0) {
        return Ok(None);
    }
    Ok(Some((place, Descriptor::parse(&bytes)?)))
}

/// The location of an embedded descriptor in new sparse extents, in bytes.
pub fn embedded_usual() -> Range<u64> {
    EMBEDDED_USUAL
}

/// Overwrites the CID of a descriptor embedded at `place`, digit for digit so that no other text moves, and makes it
/// durable. Returns the new descriptor.
pub fn renew_embedded(file: &dyn File, place: Range<u64>, random: &mut dyn FnMut() -> u64) -> Result<Descriptor> {
    let text = read_text(file, &place)?;
    let old = Descriptor::parse(&text)?.content;
    let Some(digits) = value_of(&text, b"CID") else { return Err(corrupt("the embedded descriptor has no CID")) };
    if digits.len() > DIGITS {
        return Err(corrupt("the CID of the embedded descriptor has more than 8 digits"));
    }
    // QEMU leaves leading zeros out, so the new CID has at most as many digits as the old one.
    let content = ContentId::after(old, digits.len(), random);
    let mut changed = text.clone();
    put_content(&mut changed, digits, content);
    overwrite(file, &place, &text, &changed)?;
    Descriptor::parse(&changed)
}

/// Overwrites CID and parentCID in the text at `place`, digit for digit, durably. If the text has fewer digits than the
/// new numbers, returns false without a change.
pub fn renumber(file: &dyn File, place: Range<u64>, content: ContentId, parent: Option<ContentId>) -> Result<bool> {
    let text = read_text(file, &place)?;
    let mut changed = text.clone();
    let fits = |digits: &Range<usize>, id: ContentId| {
        digits.len() <= DIGITS && u64::from(id.number()) >> (4 * digits.len() as u32) == 0
    };
    let Some(digits) = value_of(&text, b"CID").filter(|digits| fits(digits, content)) else { return Ok(false) };
    put_content(&mut changed, digits, content);
    if let Some(parent) = parent {
        let digits = value_of(&text, b"parentCID").filter(|digits| fits(digits, parent));
        let Some(digits) = digits else { return Ok(false) };
        let full = parent.to_string();
        let width = digits.len();
        changed[digits].copy_from_slice(&full.as_bytes()[DIGITS - width..]);
    }
    overwrite(file, &place, &text, &changed)?;
    Ok(true)
}

/// As [`replace`], for a descriptor that is now `old`. If there is no space for the new text and only CID and parentCID
/// differ, these are overwritten in place. If more differs, the error of kind `NoSpace` is returned.
pub fn replace_or_renumber(directory: &dyn Directory, name: &str, old: &Descriptor, new: &Descriptor) -> Result<()> {
    let refused = match replace(directory, name, new) {
        Err(error) if error.kind() == ErrorKind::NoSpace => error,
        outcome => return outcome,
    };
    let (file, place) = open_text(directory, name)?;
    let written = renumber(&*file, place, new.content, new.parent_content)?;
    let mut renumbered = Descriptor { content: new.content, parent_content: new.parent_content, ..old.clone() };
    renumbered.database.clone_from(&new.database);
    let database = old.database.differs_only_in_long_content(&new.database);
    if written && database && renumbered == *new { Ok(()) } else { Err(refused) }
}

/// Gives descriptor file `name` a new CID in place, as [`renew_embedded`] does for an embedded descriptor.
pub fn renew_in_place(directory: &dyn Directory, name: &str, random: &mut dyn FnMut() -> u64) -> Result<Descriptor> {
    let (file, place) = open_text(directory, name)?;
    renew_embedded(&*file, place, random)
}

fn open_text(directory: &dyn Directory, name: &str) -> Result<(Arc<dyn File>, Range<u64>)> {
    let during = || format!("opening descriptor '{name}'");
    let file = directory.open_foreign(name, IoMode::Buffered, Access::ReadWrite).during(during)?;
    let length = file.len().during(during)?;
    Ok((file, 0..length))
}

/// Digits of a CID.
const DIGITS: usize = 8;
/// Digits of `ddb.longContentID`, which ends with the CID.
const LONG_DIGITS: usize = 32;

fn read_text(file: &dyn File, place: &Range<u64>) -> Result<Vec<u8>> {
    let mut text = vec![0; (place.end - place.start).min(TEXT_MAX as u64) as usize];
    file.read_at(&mut text, place.start).during(|| "reading a descriptor".to_owned())?;
    Ok(text)
}

/// Overwrites the digits of a CID.
fn put_content(text: &mut [u8], digits: Range<usize>, content: ContentId) {
    let full = content.to_string();
    let width = digits.len();
    text[digits].copy_from_slice(&full.as_bytes()[DIGITS - width..]);
    if let Some(long) = value_of(text, b"ddb.longContentID").filter(|long| long.len() == LONG_DIGITS) {
        text[long.end - DIGITS..long.end].copy_from_slice(full.as_bytes());
    }
}

/// Writes the sectors in which two texts of the same length differ, durably.
fn overwrite(file: &dyn File, place: &Range<u64>, text: &[u8], changed: &[u8]) -> Result<()> {
    let context = || "overwriting the CID of a descriptor".to_owned();
    let sectors = text.chunks(SECTOR as usize).zip(changed.chunks(SECTOR as usize));
    for (at, (_, new)) in (place.start..).step_by(SECTOR as usize).zip(sectors).filter(|(_, (old, new))| old != new) {
        file.write_at(&[new], at, false).during(context)?;
    }
    file.sync().during(context)
}

/// Rewrites a descriptor embedded at `place`, durably. Not atomic: a crash may leave an invalid text. So the caller has
/// recorded the text for a repair, or the image may be lost in a crash, such as a new image that no record names yet.
pub fn write_embedded(file: &dyn File, place: Range<u64>, descriptor: &Descriptor) -> Result<()> {
    let size = usize::try_from(place.end - place.start).unwrap_or(0).min(TEXT_MAX);
    let text = descriptor.to_embedded_bytes(size)?;
    file.write_at(&[&text], place.start, false).during(|| "writing an embedded descriptor".to_owned())?;
    file.sync().during(|| "writing an embedded descriptor".to_owned())
}

/// The location of the value in the first line with that key.
fn value_of(text: &[u8], key: &[u8]) -> Option<Range<usize>> {
    let mut start = 0;
    for line in text.split(|byte| *byte == b'\n') {
        let equals = line.iter().position(|byte| *byte == b'=');
        if let Some(equals) = equals
            && line[..equals].trim_ascii().eq_ignore_ascii_case(key)
        {
            let plain = |byte: &u8| !byte.is_ascii_whitespace() && *byte != b'"';
            let from = line[equals + 1..].iter().position(plain)? + equals + 1;
            let to = line[from..].iter().position(|byte| !plain(byte)).map_or(line.len(), |end| from + end);
            return Some(start + from..start + to);
        }
        start += line.len() + 1;
    }
    None
}
