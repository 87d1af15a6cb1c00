//! Deltas as vSAN has them, with real files: an object for each snapshot, in any folder, with a map of its own and
//! space in units of 4 MiB. A chain may have as many levels as its limit allows; more are refused with a clear error.

use crate::formats::Format;
use backend::IoMode;
use backend::local::{LocalDirectory, LocalQueues};
use chain::{Chain, Options};
use error::ErrorKind;
use layer::{Content, Layer};
use std::sync::Arc;
use testkit::Random;
use work::NoProgress;

const MIB: u64 = 1 << 20;
const UNIT: u64 = 4 * MIB;
const CAPACITY: u64 = 64 * MIB;

fn folders() -> [(tempfile::TempDir, LocalDirectory); 2] {
    [(); 2].map(|()| {
        let path = tempfile::tempdir().unwrap();
        let directory = LocalDirectory::open(path.path(), LocalQueues::Threads).unwrap();
        (path, directory)
    })
}

#[test]
fn each_object_has_its_own_map_and_allocates_whole_units() {
    let [(_one, directory), _] = folders();
    let layer = Format::VsanSparse.create(&directory, "object", CAPACITY, IoMode::Buffered).unwrap();
    let empty = layer.usage().unwrap().allocated;
    assert!(empty < 2 * MIB, "an empty object allocates its log and its root: {empty}");
    let taken = |layer: &Arc<dyn Layer>| layer.usage().unwrap().allocated - empty;
    // The first grain allocates a unit, and two copies of a map page.
    layer.write(40 * MIB, &[&[1; 4096]]).unwrap();
    assert!((UNIT..UNIT + MIB / 4).contains(&taken(&layer)), "{}", taken(&layer));
    // Grains from all over the disk fill the rest of the unit, and allocate no further one.
    for grain in 1..UNIT / 4096 {
        layer.write(grain * 16384 % CAPACITY, &[&[2; 4096]]).unwrap();
    }
    assert!((UNIT..UNIT + MIB).contains(&taken(&layer)), "{}", taken(&layer));
    layer.write(4096, &[&[3; 4096]]).unwrap();
    assert!((2 * UNIT..2 * UNIT + MIB).contains(&taken(&layer)), "{}", taken(&layer));
    // The object reports ranges that it does not store as absent.
    let mut extents = Vec::new();
    layer.map(8192..12288, 1, &mut extents).unwrap();
    assert_eq!(extents[0].content, Content::Absent);
}

#[test]
fn forty_levels_in_two_folders_equal_a_model() {
    let folders = folders();
    let mut random = Random::new(40);
    let mut content = vec![0; CAPACITY as usize];
    let layer = |level: usize| {
        Format::VsanSparse.create(&folders[level % 2].1, &format!("object-{level}"), CAPACITY, IoMode::Buffered)
    };
    let base = Format::Flat.create(&folders[0].1, "base", CAPACITY, IoMode::Buffered).unwrap();
    let chain = Chain::open("objects", vec![base], Options { levels_max: 41, ..Options::default() }).unwrap();
    for level in 1..=40 {
        chain.push(layer(level).unwrap()).unwrap();
        for _ in 0..40 {
            let start = random.below(CAPACITY - 70_000) as usize;
            let end = start + 1 + random.below(70_000) as usize;
            match random.percent(80) {
                true => {
                    random.fill(&mut content[start..end]);
                    chain.write(start as u64, &content[start..end]).unwrap();
                }
                false => {
                    content[start..end].fill(0);
                    chain.zero(start as u64, (end - start) as u64, false).unwrap();
                }
            }
        }
    }
    let compare = |chain: &Chain| {
        let mut out = vec![0xee; CAPACITY as usize];
        chain.read(0, &mut out).unwrap();
        assert!(out == content);
    };
    compare(&chain);
    // The chain is closed, and opened again with its levels from both folders.
    chain.close().unwrap();
    drop(chain);
    let open = |level: usize, writable: bool| {
        Format::VsanSparse.open(&folders[level % 2].1, &format!("object-{level}"), IoMode::Buffered, writable).unwrap()
    };
    let mut layers: Vec<Arc<dyn Layer>> = (1..=40).rev().map(|level| open(level, level > 30)).collect();
    layers.push(Format::Flat.open(&folders[0].1, "base", IoMode::Buffered, true).unwrap());
    let chain = Chain::open("objects", layers, Options::default()).unwrap();
    compare(&chain);
    let keys = chain.keys();
    chain.merge_down(keys[0], keys[9], 0, &NoProgress, &mut || Ok(())).unwrap();
    compare(&chain);
    chain.consolidate(&NoProgress, &mut || Ok(())).unwrap();
    assert_eq!(chain.keys().len(), 1);
    compare(&chain);
}

#[test]
fn the_error_names_the_limit_of_levels_and_the_limit_can_be_raised() {
    let [(_one, directory), _] = folders();
    let layer = |name: &str| Format::VsanSparse.create(&directory, name, MIB, IoMode::Buffered).unwrap();
    let options = Options { levels_max: 32, ..Options::default() };
    let layers: Vec<Arc<dyn Layer>> = (0..32).map(|level| layer(&format!("level-{level}"))).collect();
    let chain = Chain::open("deep", layers.clone(), options).unwrap();
    let refused = chain.push(layer("one-more")).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid);
    let told = refused.to_string();
    assert!(told.contains("33 levels") && told.contains("limit of 32") && told.contains("consolidate"), "{told}");
    assert!(chain.set_levels_max(0).is_err() && chain.set_levels_max(129).is_err());
    chain.set_levels_max(33).unwrap();
    chain.push(layer("now")).unwrap();
    assert!(chain.push(layer("no")).is_err());
    let too_many = layers.into_iter().chain([layer("again")]).collect();
    assert!(Chain::open("deep", too_many, options).is_err());
}
