//! What must hold of a layer, whatever the bytes it was opened on.
//!
//! 1. It answers or says what is wrong, in bounded time and memory.
//! 2. Opened for reading it changes nothing.
//! 3. Its map adjoins, stays within what was asked for, and names bytes that its files have.
//! 4. Where the image is sound, or the format refuses to write unsound ones, a write changes what it is meant to change
//!    and nothing else, now and after closing and opening again; and the image stays sound.

use crate::Input;
use crate::files::{SECTOR, Sectors};
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{File, IoMode};
use error::{ErrorKind, Result};
use layer::{CAPACITY_MAX, Content, Extent, Layer};
use std::sync::Arc;

/// Questions asked to walk through a map, and extents of each answer.
const QUESTIONS_MAX: usize = 64;
const EXTENTS_MAX: usize = 64;
/// Sectors that are watched while others are changed.
const PROBES_MAX: usize = 48;
/// Largest grain that is written.
const GRAIN_MAX: u64 = 1 << 20;

/// A format, as the targets drive it.
pub struct Format<'a, L> {
    /// Opens an image, for writing if that is asked for.
    pub open: &'a dyn Fn(Arc<dyn File>, bool) -> Result<L>,
    /// Whether the image is in order, by its own check.
    pub sound: &'a dyn Fn(&L) -> bool,
    /// Something that must not change what is read.
    pub maintain: &'a dyn Fn(&L, u8),
    /// Whether what is not sound is not opened for writing.
    pub strict: bool,
    /// Whether there is a parent: without one, zeros and nothing are the same.
    pub parent: bool,
}

/// A disk without surprises.
pub fn quiet_disk() -> SimulatedDisk {
    SimulatedDisk::new(1, SimulatedOptions { reorder: false, ..SimulatedOptions::default() })
}

/// A sector, and what was found there: `None` where the parent shows through.
pub struct Probe {
    at: u64,
    found: Option<[u8; SECTOR]>,
}

/// Opens an image of these bytes for reading and for writing, and does everything to it.
pub fn exercise<L: Layer>(file: &Sectors, input: &mut Input<'_>, format: &Format<'_, L>) {
    let disk = quiet_disk();
    let file = file.write(&disk.directory(), "image");
    let again = || disk.directory().open("image", IoMode::Buffered).expect("it is there");
    let before = disk.operations();
    let mut sound = false;
    if let Ok(layer) = (format.open)(Arc::clone(&file), false) {
        look(&layer, input);
        sound = (format.sound)(&layer);
        assert!(layer.write(0, &[&[0; SECTOR]]).is_err(), "written, and opened for reading");
        let _ = layer.close();
    }
    assert_eq!(disk.operations(), before, "opening for reading changed the image");
    let Ok(layer) = (format.open)(file, true) else { return };
    // Recovery may have put right what a reader found wrong.
    let trusted = format.strict || sound || (format.sound)(&layer);
    let mut probes = look(&layer, input);
    let mut good = true;
    for _ in 0..input.u8() % 8 {
        good &= change(&layer, input, format, &mut probes);
        if trusted {
            compare(&layer, &probes, format.parent);
        }
    }
    let closed = layer.close().is_ok();
    drop(layer);
    if closed && trusted {
        let layer = (format.open)(again(), false).expect("what was closed opens");
        compare(&layer, &probes, format.parent);
        assert!(!(sound && good) || (format.sound)(&layer), "it was sound, and was only written");
    }
}

/// Walks through the map, reads some of what it names, and gives back sectors to watch.
pub fn look(layer: &dyn Layer, input: &mut Input<'_>) -> Vec<Probe> {
    let capacity = layer.capacity();
    assert!(capacity <= CAPACITY_MAX && layer.grain() > 0 && layer.grain().is_multiple_of(SECTOR as u64));
    let mut places = Vec::new();
    let mut at = 0;
    for _ in 0..QUESTIONS_MAX {
        let extents = match ask(layer, at, capacity, EXTENTS_MAX) {
            Ok(extents) => extents,
            // Behind the damage there may be more.
            Err(_) => {
                at = at.saturating_add(layer.grain().max(1 << 20)) / layer.grain() * layer.grain();
                if at >= capacity { break } else { continue }
            }
        };
        for extent in &extents {
            check_place(layer, extent);
            at = extent.start + extent.length;
            places.extend([extent.start, at - SECTOR as u64]);
        }
        if at >= capacity {
            break;
        }
    }
    for _ in 0..input.u8() % 4 {
        places.push(input.word(6) % (capacity / SECTOR as u64).max(1) * SECTOR as u64);
    }
    places.push(capacity.saturating_sub(SECTOR as u64));
    places.retain(|at| at.is_multiple_of(SECTOR as u64) && at + SECTOR as u64 <= capacity);
    places.sort_unstable();
    places.dedup();
    let step = places.len().div_ceil(PROBES_MAX).max(1);
    let places = places.into_iter().step_by(step);
    let probes = places.filter_map(|at| read_sector(layer, at).ok().map(|found| Probe { at, found })).collect();
    // What cannot be asked for.
    let mut none = Vec::new();
    assert!(layer.map(0..capacity + SECTOR as u64, 1, &mut none).is_err(), "asked for more than there is");
    let _ = layer.usage();
    probes
}

/// The answer of the map for a range, checked for what every answer must be.
fn ask(layer: &dyn Layer, start: u64, end: u64, most: usize) -> Result<Vec<Extent>> {
    let mut extents = Vec::new();
    if start == end {
        return Ok(extents);
    }
    layer.map(start..end, most, &mut extents)?;
    assert!(!extents.is_empty() && extents.len() <= most, "{} extents, asked for {most}", extents.len());
    let mut at = start;
    for extent in &extents {
        assert!(extent.start == at && extent.length > 0 && extent.length <= end - at, "extents adjoin: {extents:?}");
        at += extent.length;
    }
    Ok(extents)
}

/// Data begins in the file, and ends there but for a last grain that was cut.
fn check_place(layer: &dyn Layer, extent: &Extent) {
    if let Content::Data { file, offset } = extent.content {
        let length = layer.file(file).expect("a file that the map names").len().expect("it is open");
        let end = offset.checked_add(extent.length).expect("an offset in a file");
        assert!(offset < length && end <= length + layer.grain(), "{extent:?} in a file of {length} bytes");
    }
}

fn read_sector(layer: &dyn Layer, at: u64) -> Result<Option<[u8; SECTOR]>> {
    let _epoch = layer.epoch();
    let extents = ask(layer, at, at + SECTOR as u64, 2)?;
    let [Extent { length: 512, content, .. }] = extents[..] else { panic!("a sector in parts: {extents:?}") };
    let mut bytes = [0; SECTOR];
    match content {
        Content::Absent => return Ok(None),
        Content::Zero => {}
        Content::Data { file, offset } => layer.file(file)?.read_at(&mut bytes, offset).expect("the medium is whole"),
        Content::Encoded => layer.read_encoded(at, &mut bytes)?,
    }
    Ok(Some(bytes))
}

/// Changes something, and what is expected of the sectors watched; false when it could not be done.
fn change<L: Layer>(layer: &L, input: &mut Input<'_>, format: &Format<'_, L>, probes: &mut Vec<Probe>) -> bool {
    let (capacity, grain) = (layer.capacity(), layer.grain());
    let kind = input.u8();
    if kind % 8 == 6 {
        return layer.flush().is_ok();
    }
    if kind % 8 == 7 {
        (format.maintain)(layer, input.u8());
        return true;
    }
    let near = probes.get(usize::from(input.u8()) % probes.len().max(1)).map_or(0, |probe| probe.at);
    let start = if kind & 64 == 0 { near } else { input.word(6) % capacity.max(1) } / grain * grain;
    let end = (start + (1 + u64::from(kind / 8 % 4)) * grain).min(capacity);
    if grain > GRAIN_MAX || start >= end {
        return true;
    }
    let (value, result) = match kind % 8 {
        0..4 => {
            let value = [input.u8() | 1; SECTOR];
            let bytes = value.repeat(((end - start) / SECTOR as u64) as usize);
            (Some(value), layer.write(start, &[&bytes]))
        }
        4 => (Some([0; SECTOR]), layer.zero(start..end, kind & 128 == 0)),
        _ => {
            let value = [input.u8() | 2; SECTOR];
            match layer.overwrite(start, &[&value]) {
                Ok(true) => {
                    probes.iter_mut().filter(|probe| probe.at == start).for_each(|probe| probe.found = Some(value));
                    return true;
                }
                Ok(false) => return true,
                Err(error) => (None, Err(error)),
            }
        }
    };
    match result {
        Ok(()) => {
            probes.retain(|probe| !(start..end).contains(&probe.at));
            probes.push(Probe { at: start, found: value });
            probes.push(Probe { at: end - SECTOR as u64, found: value });
            true
        }
        Err(error) => {
            assert!(error.kind() != ErrorKind::Io, "the medium is whole: {error}");
            // Nothing is known of what was to be changed.
            probes.retain(|probe| !(start..end).contains(&probe.at));
            false
        }
    }
}

fn compare(layer: &dyn Layer, probes: &[Probe], parent: bool) {
    let seen = |found: &Option<[u8; SECTOR]>| if parent { *found } else { Some(found.unwrap_or([0; SECTOR])) };
    for Probe { at, found } in probes {
        let now = read_sector(layer, *at).expect("what was read before is read again");
        assert!(seen(&now) == seen(found), "sector at {at} holds {:?}, and held {:?}", short(&now), short(found));
    }
}

fn short(found: &Option<[u8; SECTOR]>) -> Option<&[u8]> {
    found.as_ref().map(|bytes| &bytes[..16])
}
