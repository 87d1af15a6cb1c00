//! Random histories of writes, discards, snapshots, clones, deletions, packing, sharing and restarts, compared with a
//! model.
//!
//! `LAMINA_PACKED` sets the number of random histories, `LAMINA_PACKED_FROM` the first seed.

use super::super::cut::Features;
use super::super::shared::share_with;
use super::*;
use std::collections::BTreeMap;
use testkit::environment::number;

/// The content of a block of a disk or snapshot.
type Content = BTreeMap<u64, u8>;

#[test]
fn random_histories_with_packs_keep_every_content() {
    let from = number("LAMINA_PACKED_FROM", 0);
    for seed in from..from + number("LAMINA_PACKED", 6) {
        history(seed, Features::default());
        history(seed, Features { packs_writes: true, ..Features::default() });
    }
}

/// A random history. With `shares`, equal blocks are shared, the contents are few, and restarts may be power cuts.
/// Returns how many blocks were shared, and the version that the datastore has at the end.
pub(in crate::engine::tests) fn history(seed: u64, features: Features) -> (u64, u32) {
    const DISK_BLOCKS: u64 = 600;
    let shares = features.shares;
    let mut disk = if shares { format(SimulatedDisk::new(seed, SimulatedOptions::default())) } else { formatted() };
    let mut shared = 0;
    let mut engine = open(&disk).unwrap();
    let mut random = Random(seed);
    let mut model: BTreeMap<u64, Content> = BTreeMap::new();
    let mut names = 0;
    let mut name = || {
        names += 1;
        format!("o{names}")
    };
    for _ in 0..3 {
        model.insert(add_disk(&engine, &name(), DISK_BLOCKS, Provisioning::Thin), Content::new());
    }
    for step in 0..700 {
        let is_snapshot = |id: u64| engine.with_catalog(|catalog| catalog.get(id).unwrap().is_snapshot());
        let all: Vec<u64> = model.keys().copied().collect();
        let disks: Vec<u64> = all.iter().copied().filter(|id| !is_snapshot(*id)).collect();
        let snapshots: Vec<u64> = all.iter().copied().filter(|id| is_snapshot(*id)).collect();
        if features.packs_writes && step % 10 == 0 {
            let packed: Vec<_> = disks.iter().map(|disk| (*disk, Codec::Lz4)).collect();
            engine.pack_writes_of(&packed).unwrap();
        }
        if features.maps_writes && step % 10 == 0 {
            let mapped: Vec<_> = disks.iter().map(|disk| (*disk, "d".into())).collect();
            engine.share_writes_of(&mapped, 1 << 16);
        }
        let on = disks[random.index(disks.len())];
        let start = random.below(DISK_BLOCKS);
        let length = if random.percent(30) { 1 + random.below(200) } else { 1 + random.below(4) };
        let range = start..(start + length).min(DISK_BLOCKS);
        match random.below(100) {
            0..=3 if all.len() < 12 => {
                let taken = take(&engine, on, &name());
                model.insert(taken, model[&on].clone());
            }
            4..=5 if all.len() < 12 && !snapshots.is_empty() => {
                let origin = snapshots[random.index(snapshots.len())];
                let clone = engine.clone_snapshot(origin, &[new_disk(&name(), DISK_BLOCKS)]).unwrap()[0];
                engine.detach(clone).unwrap();
                model.insert(clone, model[&origin].clone());
            }
            6 if !snapshots.is_empty() => {
                let gone = snapshots[random.index(snapshots.len())];
                engine.delete_snapshot(gone).unwrap();
                model.remove(&gone);
            }
            7..=14 => {
                engine.discard_blocks(&engine.head(on), range.clone()).unwrap();
                model.get_mut(&on).unwrap().retain(|block, _| !range.contains(block));
            }
            15..=26 if shares => {
                if random.percent(70) {
                    quiet(&engine);
                }
                let some: Vec<u64> = all.iter().copied().filter(|_| random.percent(60)).collect();
                let prints = if random.percent(10) { 400 } else { PRINTS_MAX };
                shared += share_with(&engine, &some, prints);
            }
            15..=30 => {
                engine.flush().unwrap();
                let object = all[random.index(all.len())];
                if is_snapshot(object) {
                    engine.wait_sealed(object).unwrap();
                }
                let from = random.below(DISK_BLOCKS);
                pack(&engine, object, from..DISK_BLOCKS);
            }
            31..=33 => engine.checkpoint().unwrap(),
            34..=36 => {
                engine.drop_all_trash().unwrap();
            }
            37..=38 => {
                engine.flush().unwrap();
                drop(engine);
                if shares && random.percent(70) {
                    disk = disk.crash();
                }
                engine = open(&disk).unwrap();
            }
            39..=45 => {
                engine.pump().unwrap();
            }
            46..=50 => engine.settle(&engine.head(on)).unwrap(),
            _ if features.maps_writes && random.percent(70) => {
                // Whole windows are stored in packs first, and found later at other places.
                let value = random.below(240);
                let values = range.clone().map(|block| 1 + ((value + block - start) % 250) as u8);
                engine.write_blocks(&engine.head(on), start, super::mixed(values.clone())).unwrap();
                model.get_mut(&on).unwrap().extend(range.clone().zip(values));
            }
            _ if shares => {
                let value = 1 + random.below(3) as u8;
                let content = |block: u64| value + (block % 7) as u8 * 8;
                let data = if random.percent(50) {
                    super::mixed(range.clone().map(content))
                } else {
                    let bytes = range.clone().map(|block| [content(block); BLOCK_SIZE]).collect::<Vec<_>>().concat();
                    let length = bytes.len();
                    SharedSlice::new(Arc::new(Buffer::copy_of(&bytes)), 0..length)
                };
                engine.write_blocks(&engine.head(on), range.start, data).unwrap();
                model.get_mut(&on).unwrap().extend(range.map(|block| (block, content(block))));
            }
            _ => {
                let value = 1 + random.below(255) as u8;
                let blocks = (range.end - range.start) as usize;
                // The packs of content of one byte have one block, and those of mixed content have more.
                let mixed = random.percent(60);
                let data = if mixed { super::mixed(std::iter::repeat_n(value, blocks)) } else { slice(value, blocks) };
                engine.write_blocks(&engine.head(on), range.start, data).unwrap();
                model.get_mut(&on).unwrap().extend(range.map(|block| (block, value)));
            }
        }
        if step % 100 == 99 {
            for (object, content) in &model {
                for block in (0..DISK_BLOCKS).filter(|block| block % 7 == step % 7) {
                    let expected = content.get(&block).copied().unwrap_or(0);
                    let found = holds(&engine, *object, block).unwrap();
                    assert_eq!(found, expected, "seed {seed}, step {step}, object {object}, block {block}");
                }
            }
            is_whole(&engine);
        }
    }
    (shared, engine.log.version())
}
