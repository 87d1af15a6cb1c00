//! Properties of a layer that must hold for any bytes of the image.
//!
//! 1. Every call returns a result or an error, in bounded time and memory.
//! 2. Opening for reading changes nothing.
//! 3. The extents of the map are adjacent, within the requested range, and refer to bytes that the files have.
//! 4. If the image is sound (its check finds no error), or if the format refuses to write unsound images, a write
//!    changes only its own range, now and after closing and opening again; and the image stays sound.

use crate::Input;
use crate::files::{SECTOR, Sectors};
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{File, IoMode};
use error::{ErrorKind, Result};
use layer::{CAPACITY_MAX, Content, Extent, Layer};
use std::sync::Arc;

/// The most calls to walk through a map, and the most extents per call.
const QUESTIONS_MAX: usize = 64;
const EXTENTS_MAX: usize = 64;
/// The most sectors that are watched while others are changed.
const PROBES_MAX: usize = 48;
/// The largest grain of images that are written.
const GRAIN_MAX: u64 = 1 << 20;

/// The functions of a format that the targets use.
pub struct Format<'a, L> {
    /// Opens an image, for writing if the flag is set.
    pub open: &'a dyn Fn(Arc<dyn File>, bool) -> Result<L>,
    /// Whether the format's own check finds no error.
    pub sound: &'a dyn Fn(&L) -> bool,
    /// Maintenance that must not change the content.
    pub maintain: &'a dyn Fn(&L, u8),
    /// Whether the format refuses to open an unsound image for writing.
    pub strict: bool,
    /// Whether there is a parent: without one, zero and absent grains read the same.
    pub parent: bool,
}

/// A simulated disk without faults and reordering.
pub fn quiet_disk() -> SimulatedDisk {
    SimulatedDisk::new(1, SimulatedOptions { reorder: false, ..SimulatedOptions::default() })
}

/// A sector with its content: `None` if it is read from the parent.
pub struct Probe {
    at: u64,
    found: Option<[u8; SECTOR]>,
}

/// Opens an image for reading and for writing, and runs all operations on it.
pub fn exercise<L: Layer>(file: &Sectors, input: &mut Input<'_>, format: &Format<'_, L>) {
    let disk = quiet_disk();
    let file = file.write(&disk.directory(), "image");
    let again = || disk.directory().open("image", IoMode::Buffered).expect("the image file exists");
    let before = disk.operations();
    let mut sound = false;
    if let Ok(layer) = (format.open)(Arc::clone(&file), false) {
        look(&layer, input);
        sound = (format.sound)(&layer);
        assert!(layer.write(0, &[&[0; SECTOR]]).is_err(), "an image opened for reading was written");
        let _ = layer.close();
    }
    assert_eq!(disk.operations(), before, "opening for reading changed the image");
    let Ok(layer) = (format.open)(file, true) else { return };
    // Recovery may have repaired what the check found.
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
        let layer = (format.open)(again(), false).expect("a closed image opens again");
        compare(&layer, &probes, format.parent);
        assert!(!(sound && good) || (format.sound)(&layer), "the image was sound before the writes");
    }
}

/// Walks through the map, reads some of the data, and returns sectors to watch.
pub fn look(layer: &dyn Layer, input: &mut Input<'_>) -> Vec<Probe> {
    let capacity = layer.capacity();
    assert!(capacity <= CAPACITY_MAX && layer.grain() > 0 && layer.grain().is_multiple_of(SECTOR as u64));
    let mut places = Vec::new();
    let mut at = 0;
    for _ in 0..QUESTIONS_MAX {
        let extents = match ask(layer, at, capacity, EXTENTS_MAX) {
            Ok(extents) => extents,
            // There may be more extents after the damage.
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
    // Requests that must be refused.
    let mut none = Vec::new();
    assert!(layer.map(0..capacity + SECTOR as u64, 1, &mut none).is_err(), "a range beyond the capacity was accepted");
    let _ = layer.usage();
    probes
}

/// Calls the map for a range, and checks the properties of every result.
fn ask(layer: &dyn Layer, start: u64, end: u64, most: usize) -> Result<Vec<Extent>> {
    let mut extents = Vec::new();
    if start == end {
        return Ok(extents);
    }
    layer.map(start..end, most, &mut extents)?;
    assert!(!extents.is_empty() && extents.len() <= most, "{} extents, at most {most} requested", extents.len());
    let mut at = start;
    for extent in &extents {
        assert!(
            extent.start == at && extent.length > 0 && extent.length <= end - at,
            "extents are adjacent: {extents:?}"
        );
        at += extent.length;
    }
    Ok(extents)
}

/// Data begins within the file, and ends there, except for a partial last grain.
fn check_place(layer: &dyn Layer, extent: &Extent) {
    if let Content::Data { file, offset } = extent.content {
        let length =
            layer.file(file).expect("the layer has each file that its map names").len().expect("the file is open");
        let end = offset.checked_add(extent.length).expect("the offset lies in a file");
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
        Content::Data { file, offset } => {
            layer.file(file)?.read_at(&mut bytes, offset).expect("the simulated disk has no faults")
        }
        Content::Encoded => layer.read_encoded(at, &mut bytes)?,
    }
    Ok(Some(bytes))
}

/// Makes a change, and updates the expected content of the watched sectors; returns false if the change failed.
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
            assert!(error.kind() != ErrorKind::Io, "the simulated disk has no faults: {error}");
            // After a failed change the content of the range is unknown.
            probes.retain(|probe| !(start..end).contains(&probe.at));
            false
        }
    }
}

fn compare(layer: &dyn Layer, probes: &[Probe], parent: bool) {
    let seen = |found: &Option<[u8; SECTOR]>| if parent { *found } else { Some(found.unwrap_or([0; SECTOR])) };
    for Probe { at, found } in probes {
        let now = read_sector(layer, *at).expect("a sector that was readable is still readable");
        assert!(seen(&now) == seen(found), "sector at {at} has {:?}, before it had {:?}", short(&now), short(found));
    }
}

fn short(found: &Option<[u8; SECTOR]>) -> Option<&[u8]> {
    found.as_ref().map(|bytes| &bytes[..16])
}
