//! SEsparse: a grain in a table is also recorded in the backmap and the bitmap.

use super::super::*;
use layer::sesparse::{CheckReport, Options, SeSparse};
use work::NoProgress;

const MIB: u64 = 1 << 20;
const GRAIN: u64 = 4096;
const CAPACITY: u64 = 100 * MIB;
const DIRECTORY: u64 = 4096 * 512;
const TABLES: u64 = 6144 * 512;
const BITMAP: u64 = 8192 * 512;
const BACKMAP: u64 = 10240 * 512;

fn open(file: Arc<dyn File>, options: Options) -> Result<SeSparse> {
    SeSparse::open(file, NAME, options)
}

fn check(layer: &SeSparse, repair: bool) -> CheckReport {
    layer.check(repair, &NoProgress).unwrap()
}

/// An image with a history. Its tables are in another order than the ranges that they map. Some images are not closed.
fn world(seed: u64) -> World {
    let mut random = Random(seed);
    let disk = new_disk(seed);
    let layer = SeSparse::create(new_file(&disk), NAME, CAPACITY, Options::default()).unwrap();
    let parent = random.below(2) == 0;
    let mut world = World { disk, capacity: CAPACITY, grain: GRAIN, model: BTreeMap::new(), parent, killed: false };
    for number in 1..30 + random.below(40) as u32 {
        let count = 1 + random.below(12);
        let first = random.below(6) * 4096 + 500 + random.below(40);
        world.change(&layer, &mut random, number, first..first + count);
    }
    layer.flush().unwrap();
    world.killed = random.below(3) == 0;
    if !world.killed {
        layer.close().unwrap();
    }
    world
}

fn word(file: &dyn File, at: u64) -> u64 {
    let mut bytes = [0; 8];
    file.read_at(&mut bytes, at).unwrap();
    u64::from_le_bytes(bytes)
}

/// The offset of a metadata byte, mostly in a word that is not zero.
fn place(file: &dyn File, random: &mut Random) -> u64 {
    let tables = word(file, 520);
    loop {
        let at = match random.below(40) {
            0 => random.below(208),
            1 => 512 + random.below(40),
            2 => 1024 + random.below(72),
            3 => 1536 + random.below(8),
            4..8 => BITMAP + random.below(64),
            8..16 => DIRECTORY + random.below(7 * 8),
            16..24 => BACKMAP + random.below(500 * 8),
            _ => TABLES + random.below(tables) * 32_768 + (498 + random.below(54)) * 8 + random.below(8),
        };
        if at < DIRECTORY || word(file, at / 8 * 8) != 0 || random.below(60) == 0 {
            return at;
        }
    }
}

/// Whether a change of a word cannot be proven: an entry that names no grain before and after the change is recorded
/// nowhere else, and some changes look like an interrupted write or deletion.
fn is_unprovable(at: u64, before: u64, after: u64) -> bool {
    let kind = |word: u64| word >> 60;
    let says_nothing = |word: u64| word == 0 || kind(word) == 1 || kind(word) == 2;
    match at {
        DIRECTORY..TABLES => after == 0,
        TABLES..BITMAP => says_nothing(after) && (says_nothing(before) || after << 4 == 0),
        _ => false,
    }
}

fn flip(world: &World, random: &mut Random, figures: &mut Figures) {
    let sound = open_file(&world.copy());
    let (offset, mask) = (place(&*sound, random), 1 + random.below(255) as u8);
    let at = offset / 8 * 8;
    let before = word(&*sound, at);
    let after = before ^ u64::from(mask) << (offset % 8 * 8);
    let context = format!("left unclosed: {}, byte {offset}: {before:#018x} changed to {after:#018x}", world.killed);
    let unprovable = is_unprovable(at, before, after);
    figures.tried += 1;

    let mut found = true;
    match open(open_file(&world.damaged(offset, mask)), Options::default()) {
        Ok(reader) => {
            let report = check(&reader, false);
            let (lost, wrong) = world.compare(&reader);
            // Space lost in a crash is not damage.
            found = !(report.is_clean() || world.killed && report.is_lost_space_only());
            let right = lost.is_empty() && wrong.is_empty();
            assert!(
                found || right || unprovable,
                "{context}: lost {lost:?}, wrong {wrong:?}, not found by the check: {report:?}"
            );
        }
        Err(error) => assert!(is_refusal(&error), "{context}: {error}"),
    }
    figures.found += u64::from(found);
    figures.harmless += u64::from(!found);

    let disk = world.damaged(offset, mask);
    let layer = match open(open_file(&disk), Options { write: true, repair: true, ..Options::default() }) {
        Ok(layer) => layer,
        Err(error) => {
            assert!(is_refusal(&error) && at < DIRECTORY, "{context}: {error}");
            figures.refused += 1;
            return;
        }
    };
    let report = check(&layer, true);
    let told = |grain: u64| {
        let sentences =
            [format!("grain {grain} of the disk"), format!("slot {} of the directory is wrong", grain / 4096)];
        report.doubts.iter().any(|doubt| sentences.iter().any(|sentence| doubt.contains(sentence)))
    };
    let (lost, wrong) = world.compare(&layer);
    for grain in lost.iter().chain(wrong.iter().map(|(grain, _)| grain)) {
        assert!(told(*grain) || unprovable, "{context}: grain {grain} is wrong and not reported: {report:?}");
    }
    let again = check(&layer, false);
    assert!(!report.is_damaged() || !again.is_clean(), "{context}: {report:?} then {again:?}");
    assert!(report.is_damaged() || again.is_clean(), "{context}: {report:?} then {again:?}");
    if lost.is_empty() && wrong.is_empty() {
        figures.mended += u64::from(found && !report.is_damaged());
    }
    figures.unproven += (lost.len() + wrong.len()) as u64;
    // The image stays usable, and new grains do not overwrite existing ones.
    let mut model = world.model.clone();
    for first in [3 * 4096 + 600, 5 * 4096 + 1000] {
        if layer.write(first * GRAIN, &[&content(7777, 20 * GRAIN)]).is_ok() {
            (first..first + 20).for_each(|grain| _ = model.insert(grain, 7777));
        }
    }
    layer.close().unwrap();
    let written = World { disk, model, ..*world };
    let reader = open(open_file(&written.disk), Options::default()).unwrap();
    assert_eq!(written.compare(&reader), (lost, wrong), "{context}: after a repair and a write");
}

/// Writes `grains` grains in two ranges of an image with a damaged byte and closes it: all written content must read
/// back.
fn write_and_compare(world: &World, disk: SimulatedDisk, layer: SeSparse, grains: u64, context: &str) {
    let mut model = world.model.clone();
    for first in [700, 2 * 4096 + 700] {
        layer.write(first * GRAIN, &[&content(7777, grains * GRAIN)]).unwrap();
        (first..first + grains).for_each(|grain| _ = model.insert(grain, 7777));
    }
    layer.close().unwrap();
    let written = World { disk, model, ..*world };
    let reader = open(open_file(&written.disk), Options::default()).unwrap();
    assert_eq!(written.compare(&reader), (Vec::new(), Vec::new()), "{context}");
    assert_eq!(check(&reader, false).overlapping, 0, "{context}");
}

/// A damaged image is used without a check, and closed: no grain in use may be allocated again.
fn use_unaware(world: &World, random: &mut Random, figures: &mut Figures) {
    let offset = BITMAP + random.below(64);
    let mask = 1 + random.below(255) as u8;
    let context = format!("left unclosed: {}, byte {offset} changed by {mask:#x}", world.killed);
    figures.tried += 1;
    let disk = world.damaged(offset, mask);
    let layer = open(open_file(&disk), Options { write: true, ..Options::default() }).unwrap();
    write_and_compare(world, disk, layer, 100, &context);
}

/// An image that was not closed, with a wrong byte in the owner of a grain, is opened and used: no grain that a table
/// names may be allocated again.
fn use_after_crash(world: &World, random: &mut Random, figures: &mut Figures) {
    let sound = open_file(&world.copy());
    let offset = loop {
        let at = BACKMAP + random.below(600) * 8;
        if word(&*sound, at) != 0 {
            break at + random.below(8);
        }
    };
    let mask = 1 << random.below(8) | (random.below(256) & random.below(256)) as u8;
    let context = format!("left unclosed: {}, byte {offset} changed by {mask:#x}", world.killed);
    figures.tried += 1;
    let disk = world.damaged(offset, mask);
    let layer = open(open_file(&disk), Options { write: true, ..Options::default() }).unwrap();
    let report = check(&layer, false);
    assert_eq!(report.unallocated, 0, "{context}: {report:?}");
    write_and_compare(world, disk, layer, 300, &context);
}

fn is_refusal(error: &error::Error) -> bool {
    [ErrorKind::Corrupt, ErrorKind::Unsupported].contains(&error.kind())
}

#[test]
fn entries_proven_by_bitmap_and_backmap_are_repaired() {
    let count = from_environment("LAMINA_FLIPS", 400);
    flips(from_environment("LAMINA_SEED", 1), count, world, flip);
}

#[test]
fn a_wrong_bitmap_allocates_no_grain_twice() {
    let count = from_environment("LAMINA_FLIPS", 400) / 4;
    flips(from_environment("LAMINA_SEED", 1), count, world, use_unaware);
}

#[test]
fn a_wrong_owner_frees_no_grain_that_a_table_names() {
    let count = from_environment("LAMINA_FLIPS", 400);
    flips(from_environment("LAMINA_SEED", 1), count, world, use_after_crash);
}
