//! Checking an image: every table of every extent, and every compressed grain.
//!
//! The results of each format's own check are returned as text. With `repair` the image is opened for writing first,
//! which corrects the effects of a crash. Tables are then repaired as far as redundant data proves the right entry: the
//! second directory of a hosted sparse extent; bitmap and backmap of SEsparse, which afterwards are made equal to the
//! tables. Damage without such proof is reported by grain.

use super::extent::{ExtentOptions, Format, is_compressed, open_extent};
use super::maintain::Engine;
use super::probe::Signature;
use super::{Image, OpenOptions, Place, access, lock_for, parent_of, resolve_extents};
use crate::descriptor::{Access, storage};
use crate::flat::FlatOptions;
use crate::hosted::{self, Hosted};
use crate::sesparse::{self, SeSparse};
use crate::vmfssparse::{self, VmfsSparse};
use crate::vsansparse::{self, VsanSparse};
use crate::{Content, Error, ErrorKind, Layer, Result};
use backend::{File, IoMode};
use std::sync::Arc;
use work::{Progress, Throttle};

/// Bytes of compressed grains read per call.
const READ_PIECE: u64 = 1 << 20;
/// Extents requested per call.
const ASK_EXTENTS: usize = 1024;

/// The results for one extent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// The file of the extent.
    pub file: String,
    /// The name of the image's format.
    pub format: String,
    /// Damage, as text.
    pub problems: Vec<String>,
    /// Notes that are not about damage.
    pub notes: Vec<String>,
    /// Number of repairs.
    pub repaired: u64,
    /// Bytes in the file to which no entry refers.
    pub dead: u64,
}

/// Checks one image, without its parents. `options.writable` is ignored in favour of `repair`.
pub fn check(place: &Place, options: &OpenOptions, repair: bool, progress: &dyn Progress) -> Result<Vec<Checked>> {
    let options = OpenOptions { writable: repair, ..options.clone() };
    let signature = match options.format {
        None | Some(Format::Vmdk) => Image::probe(place)?,
        Some(_) => Signature::Raw,
    };
    let work = Work { options: &options, repair };
    match signature {
        Signature::Descriptor => {
            let file = place.open(IoMode::Buffered, backend::Access::Read)?;
            let descriptor = storage::load(&*file, &place.label())?;
            let parent = parent_of(&descriptor, &place.label(), &options)?.is_some();
            let resolved = resolve_extents(place, &descriptor, &options)?;
            let first = resolved.iter().flatten().find(|extent| extent.line.access == Access::ReadWrite);
            let _lock = first.map(|extent| lock_for(&extent.place, &options)).transpose()?;
            let mut out = Vec::new();
            for extent in resolved.iter().flatten() {
                let writable = repair && extent.line.access == Access::ReadWrite;
                let offset = extent.line.offset.saturating_mul(crate::SECTOR);
                let capacity = Some(extent.line.length());
                let flat = FlatOptions { offset, capacity, writable, thin: descriptor.thin() };
                out.push(work.check(extent.format, &extent.place, flat, parent, progress)?);
            }
            Ok(out)
        }
        Signature::HostedSparse => {
            let file = place.open(IoMode::Buffered, backend::Access::Read)?;
            let parent = match storage::load_embedded(&*file)? {
                Some((_, descriptor)) => parent_of(&descriptor, &place.label(), &options)?.is_some(),
                None => false,
            };
            work.check_alone(Format::HostedSparse, place, parent, progress)
        }
        _ => {
            // An extent that can only be opened through its descriptor makes this opening fail with the reason.
            let image = Image::open(place.clone(), &OpenOptions { writable: false, ..options.clone() })?;
            let format = match image.layer().format() {
                "vmfssparse" => Format::VmfsSparse,
                "sesparse" => Format::SeSparse,
                "vsansparse" => Format::VsanSparse,
                "qcow2" => Format::Qcow2,
                _ => Format::Flat,
            };
            work.check_alone(format, place, image.parent().is_some(), progress)
        }
    }
}

struct Work<'a> {
    options: &'a OpenOptions,
    repair: bool,
}

impl Work<'_> {
    fn check_alone(
        &self,
        format: Format,
        place: &Place,
        parent: bool,
        progress: &dyn Progress,
    ) -> Result<Vec<Checked>> {
        let flat = ExtentOptions::alone(self.options).flat;
        let _lock = lock_for(place, self.options)?;
        Ok(vec![self.check(format, place, flat, parent, progress)?])
    }

    /// Checks one extent, after a repair if the caller requested one.
    fn check(
        &self,
        format: Format,
        place: &Place,
        flat: FlatOptions,
        parent: bool,
        progress: &dyn Progress,
    ) -> Result<Checked> {
        let file = |writable| place.open(IoMode::Buffered, access(writable));
        let compressed = format == Format::HostedSparse && is_compressed(&*file(false)?, &place.label())?;
        let repairable =
            !compressed && matches!(format, Format::HostedSparse | Format::VmfsSparse | Format::VsanSparse);
        let mut checked = Checked { file: place.name.clone(), ..Checked::default() };
        if self.repair && repairable && flat.writable {
            let (journal, force) = (self.options.journal, self.options.force);
            let how = ExtentOptions { flat, parent, journal, force, salvage: false };
            let before = self.look(format, place, file(false)?, flat, parent, progress)?;
            let opened = match open_extent(format, place, file(true)?, how) {
                // The damage that prevents a repair is reported in detail, with the reason of the refusal.
                Err(refused) if refused.kind() == ErrorKind::Corrupt && !before.problems.is_empty() => {
                    let notes = before.notes.into_iter().chain([refused.to_string()]).collect();
                    return Ok(Checked { file: checked.file, notes, ..before });
                }
                opened => opened?,
            };
            if let Some(Engine::Hosted(layer)) = &opened.engine {
                layer.repair()?;
                checked.notes.extend(layer.check()?.mended.into_iter().map(|what| format!("{what}: mended")));
            }
            opened.layer.close()?;
            checked.repaired = before.problems.len() as u64;
        }
        let mut after = match format {
            Format::SeSparse => self.check_sesparse(place, file(flat.writable)?, flat.writable, progress)?,
            _ => self.look(format, place, file(false)?, FlatOptions { writable: false, ..flat }, parent, progress)?,
        };
        checked.repaired = checked.repaired.saturating_sub(after.problems.len() as u64) + after.repaired;
        checked.notes.append(&mut after.notes);
        Ok(Checked { repaired: checked.repaired, file: checked.file, notes: checked.notes, ..after })
    }

    /// Checks an extent without changing it.
    fn look(
        &self,
        format: Format,
        place: &Place,
        file: Arc<dyn File>,
        flat: FlatOptions,
        parent: bool,
        progress: &dyn Progress,
    ) -> Result<Checked> {
        let image = place.label();
        let flat = FlatOptions { writable: false, ..flat };
        let compressed = format == Format::HostedSparse && is_compressed(&*file, &image)?;
        match format {
            Format::HostedSparse if !compressed => {
                let options = hosted::OpenOptions { image, writable: false, parent, force: false };
                Ok(of_hosted(&Hosted::open(file, &options)?.check()?))
            }
            Format::VmfsSparse => {
                let options = vmfssparse::OpenOptions { parent, ..vmfssparse::OpenOptions::reading(image) };
                let layer = VmfsSparse::open(file, &options)?;
                let found = layer.check()?;
                let mut notes = layer.warnings();
                if found.zero_entries > 0 {
                    notes.push(format!("{} entries are 1: zeros for lamina, sector 1 for QEMU", found.zero_entries));
                }
                let problems = first_of(found.problems, found.problem_count);
                Ok(Checked { format: "vmfssparse".into(), problems, notes, dead: found.dead, ..Checked::default() })
            }
            Format::VsanSparse => {
                let options = vsansparse::OpenOptions { parent, ..vsansparse::OpenOptions::reading(image) };
                let found = VsanSparse::open(file, &options)?.check()?;
                let problems = first_of(found.problems, found.problem_count);
                let dead = found.dead.saturating_mul(vsansparse::BLOCK);
                Ok(Checked { format: "vsansparse".into(), problems, dead, ..Checked::default() })
            }
            _ => {
                let (journal, force) = (self.options.journal, self.options.force);
                let how = ExtentOptions { flat, parent, journal, force, salvage: false };
                let layer = open_extent(format, place, file, how)?.layer;
                let mut checked = Checked { format: layer.format().into(), ..Checked::default() };
                match walk(&*layer, progress) {
                    Err(error) if error.kind() == ErrorKind::Interrupted => return Err(error),
                    Err(error) => checked.problems.push(error.to_string()),
                    Ok(()) => {}
                }
                Ok(checked)
            }
        }
    }

    fn check_sesparse(
        &self,
        place: &Place,
        file: Arc<dyn File>,
        write: bool,
        progress: &dyn Progress,
    ) -> Result<Checked> {
        let options = sesparse::Options { write, repair: write, journal: self.options.journal, ..Default::default() };
        let layer = SeSparse::open(file, &place.label(), options)?;
        let capacity = layer.capacity();
        let found = match layer.check(write, progress) {
            Err(error) if error.kind() == ErrorKind::Interrupted => return Err(stopped_check()),
            found => found?,
        };
        layer.close()?;
        let mut checked = Checked { format: "sesparse".into(), repaired: found.repaired, ..Checked::default() };
        checked.notes.extend(layer.replayed().map(|replayed| replayed.to_string()));
        checked.dead = found.unnamed.saturating_mul(layer.grain()).min(capacity);
        let wrong = [
            (found.invalid, "invalid slots or entries", true),
            (found.outside, "grains that the file does not have", true),
            (found.overlapping, "grains named by more than one entry", true),
            (found.lost_tables, "tables in use that no slot of the directory names", true),
            (found.provable, "wrong entries, slots or headers that --repair can correct", true),
            (found.unallocated, "grains in use that the bitmap marks as free", false),
            (found.misowned, "grains with a wrong owner in the backmap", false),
        ];
        for (count, what, damage) in wrong.into_iter().filter(|(count, ..)| *count > 0) {
            match damage || found.repaired == 0 {
                true => checked.problems.push(format!("{count} {what}")),
                false => checked.notes.push(format!("{count} {what}: corrected")),
            }
        }
        let mended = if write { ": mended" } else { "" };
        checked.notes.extend(found.proven.into_iter().map(|what| format!("{what}{mended}")));
        checked.problems.extend(first_of(found.doubts, found.unproven));
        Ok(checked)
    }
}

fn of_hosted(found: &hosted::Check) -> Checked {
    let wrong = [
        (found.bad, "entries name sectors outside the file"),
        (found.unproven, "grains have different sectors in the two copies of their table"),
        (found.shared, "grains overlap other grains or tables"),
        (found.overlaps, "tables overlap"),
        (found.differing, "tables differ from their second copy"),
        (found.lost, "tables cannot be read in either copy"),
    ];
    let wrong = wrong.into_iter().filter(|(count, _)| *count > 0);
    let mut problems: Vec<String> = wrong.map(|(count, what)| format!("{count} {what}")).collect();
    problems.extend(found.doubts.iter().cloned());
    let mut notes = found.warnings.clone();
    notes.extend(found.proven.iter().cloned());
    if found.unclean {
        notes.push("it was not closed properly; flushed data is complete".to_owned());
    }
    Checked { format: "monolithicsparse".into(), problems, notes, dead: found.dead, ..Checked::default() }
}

/// The first problems, and a line with their number if there are more.
fn first_of(mut problems: Vec<String>, count: u64) -> Vec<String> {
    let told = problems.len() as u64;
    if count > told && told > 0 {
        problems.push(format!("{count} problems in all"));
    }
    problems
}

/// Maps all of the layer, and reads the compressed grains.
fn walk(layer: &dyn Layer, progress: &dyn Progress) -> Result<()> {
    let throttle = Throttle::new(progress);
    let capacity = layer.capacity();
    let mut extents = Vec::new();
    let mut memory = vec![0; READ_PIECE as usize];
    let mut at = 0;
    while at < capacity {
        extents.clear();
        layer.map(at..capacity, ASK_EXTENTS, &mut extents)?;
        let begun = at;
        for extent in &extents {
            at = extent.start.saturating_add(extent.length);
            let (mut from, mut moved) = (extent.start, 0);
            while extent.content == Content::Encoded && from < at {
                if throttle.step(from, capacity, moved).is_break() {
                    return Err(stopped_check());
                }
                let part = (at - from).min(READ_PIECE);
                layer.read_encoded(from, &mut memory[..part as usize])?;
                moved = part;
                from += part;
            }
        }
        if at <= begun {
            return Err(Error::new(ErrorKind::Corrupt, format!("the image's map has no answer for byte {at}")));
        }
        if throttle.step(at, capacity, 0).is_break() {
            return Err(stopped_check());
        }
    }
    Ok(())
}

fn stopped_check() -> Error {
    Error::new(ErrorKind::Interrupted, "the check was stopped")
}
