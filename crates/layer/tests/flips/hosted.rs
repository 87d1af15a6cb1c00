//! Hosted sparse extents: two directories, each with its own tables.

use super::super::*;
use layer::hosted::{CreateOptions, Hosted, OpenOptions, create, header::Header};

const MIB: u64 = 1 << 20;
const GRAIN: u64 = 64 << 10;

fn open(file: Arc<dyn File>, writable: bool, parent: bool) -> Result<Hosted> {
    Hosted::open(file, &OpenOptions { image: NAME.to_owned(), writable, parent, force: false })
}

/// An image with a history: writes, zeros, and reused grains. Some images are left without closing them.
fn world(seed: u64) -> World {
    let mut random = Random(seed);
    let disk = new_disk(seed);
    let file = new_file(&disk);
    let capacity = 100 * MIB + 3 * SECTOR;
    let (parent, zero_grains, closed) = (random.below(2) == 0, random.below(2) == 0, random.below(3) > 0);
    let descriptor = Some(&b"# Disk DescriptorFile\nversion=1\n"[..]);
    create(file.as_ref(), NAME, &CreateOptions { capacity, descriptor, zero_grains }).unwrap();
    let layer = open(Arc::clone(&file), true, parent).unwrap();
    let mut world = World { disk, capacity, grain: GRAIN, model: BTreeMap::new(), parent, killed: !closed };
    let grains = capacity.div_ceil(GRAIN);
    for number in 1..20 + random.below(20) as u32 {
        let first = match random.below(8) {
            0 => grains - 1,
            _ => random.below(4) * 512 + 500 - random.below(20),
        };
        let count = (1 + random.below(3)).min(grains.saturating_sub(first)).max(1);
        let first = first.min(grains - count);
        world.change(&layer, &mut random, number, first..first + count);
    }
    layer.flush().unwrap();
    if closed {
        layer.close().unwrap();
    }
    world
}

/// The undamaged header.
fn header_of(world: &World) -> Header {
    open(open_file(&world.copy()), false, true).unwrap().header().clone()
}

/// The offset of a byte in a directory or table, mostly in an entry that is not zero.
fn place(world: &World, header: &Header, random: &mut Random) -> u64 {
    let mut bytes = vec![0; (header.overhead * SECTOR) as usize];
    open_file(&world.copy()).read_at(&mut bytes, 0).unwrap();
    let tables = header.directory_entries() * header.table_sectors() * SECTOR;
    let copy = [header.redundant_offset, header.directory_offset][random.below(2) as usize] * SECTOR;
    let directory = header.directory_sectors() * SECTOR;
    loop {
        let at = match random.below(12) {
            0..3 => copy + random.below(header.directory_entries() * 4),
            _ => copy + directory + random.below(tables),
        };
        let entry = at as usize / 4 * 4;
        let says = bytes[entry..entry + 4].iter().any(|byte| *byte != 0);
        if says || random.below(200) == 0 {
            return at;
        }
    }
}

fn flip(world: &World, random: &mut Random, figures: &mut Figures) {
    let header = header_of(world);
    let (offset, mask) = (place(world, &header, random), 1 + random.below(255) as u8);
    let context = format!("byte {offset} by {mask:#x}");
    figures.tried += 1;

    let reader = open(open_file(&world.damaged(offset, mask)), false, world.parent).unwrap();
    let check = reader.check().unwrap();
    let (lost, wrong) = world.compare(&reader);
    let found = !check.is_sound();
    figures.found += u64::from(found);
    figures.harmless += u64::from(!found);
    assert!(
        found || (lost.is_empty() && wrong.is_empty()),
        "{context}: lost {lost:?}, wrong {wrong:?}, not found by the check"
    );
    // In a crashed image the copies may be old and new: then one is chosen, with a warning.
    assert!(wrong.is_empty() || (check.unclean && !reader.warnings().is_empty()), "{context}: wrong {wrong:?}");
    let told = |doubts: &[String], grain: u64| {
        doubts.iter().any(|doubt| doubt.contains(&format!("grain {grain} ")) || doubt.contains("cannot be read"))
    };

    let disk = world.damaged(offset, mask);
    let layer = match open(open_file(&disk), true, world.parent) {
        Ok(layer) => layer,
        Err(error) => {
            assert!(error.kind() == ErrorKind::Corrupt && found, "{context}: {error}");
            println!("{context}: {error}");
            figures.refused += 1;
            return;
        }
    };
    layer.repair().unwrap();
    let check = layer.check().unwrap();
    let (lost, wrong) = world.compare(&layer);
    for grain in &lost {
        assert!(told(&check.doubts, *grain), "{context}: grain {grain} is lost and not reported: {check:?}");
    }
    for (grain, holds) in &wrong {
        let told = check.mended.iter().any(|sentence| sentence.contains(&format!("grain {grain} ")));
        assert!(
            reader.header().unclean && told,
            "{context}: grain {grain} holds {holds:?} and is not reported: {check:?}"
        );
    }
    assert!(!found || check.repaired > 0 || !check.is_sound(), "{context}: found, but neither repaired nor reported");
    if check.is_sound() {
        figures.mended += u64::from(found && wrong.is_empty());
        assert!(lost.is_empty(), "{context}: {lost:?}");
    }
    figures.unproven += (lost.len() + wrong.len()) as u64;
    // The image stays usable, and new grains do not overwrite existing ones.
    let (mut after, first) = (world.model.clone(), 3 * 512 / 2);
    if layer.write(first * GRAIN, &[&content(77, GRAIN)]).is_ok() {
        after.insert(first, 77);
    }
    layer.close().unwrap();
    let again = World { disk, model: after, ..*world };
    let reader = open(open_file(&again.disk), false, world.parent).unwrap();
    let (left, wrong_after) = again.compare(&reader);
    assert_eq!((left, wrong_after), (lost, wrong), "{context}: after a repair and a write");
    assert_eq!(reader.check().unwrap().is_sound(), check.is_sound(), "{context}: checked again");
}

#[test]
fn a_hosted_extent_is_repaired_from_its_second_directory() {
    let count = from_environment("LAMINA_FLIPS", 300);
    flips(from_environment("LAMINA_SEED", 1), count, world, flip);
}
