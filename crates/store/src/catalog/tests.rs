//! Compares the catalog with a plain map, through checkpoints and reopening.

#![allow(clippy::unwrap_used)]

use super::*;
use crate::testbed::{Random, page_files, reopened};

const CACHE: usize = 256 * 4096;

fn object(random: &mut Random, id: u64) -> Object {
    let state = *random.pick(&[ObjectState::Disk, ObjectState::Snapshot, ObjectState::Unsealed, ObjectState::Trash]);
    let length = *random.pick(&[1, 2, 20, 254]);
    let name: String = (0..length).map(|_| (b'a' + random.below(26) as u8) as char).collect();
    // Names are unique within their kind; the engine ensures that.
    let name = format!("{id}{name}");
    Object {
        id,
        state,
        provisioning: *random.pick(&[Provisioning::Thin, Provisioning::ZeroedThick, Provisioning::EagerZeroedThick]),
        incomplete: random.percent(20),
        root: random.percent(70).then(|| NodeId(random.scaled(1 << 48))),
        capacity: random.scaled(1 << 52),
        disk: random.scaled(1 << 62),
        parent: random.scaled(1 << 62),
        origin: random.scaled(1 << 62),
        created: random.next(),
        reserved: random.scaled(1 << 40),
        uuid: random.bytes(16).try_into().unwrap(),
        name: name[..name.len().min(NAME_MAX)].to_owned(),
    }
}

fn compare(catalog: &Catalog, model: &BTreeMap<u64, Object>) {
    let mut found: Vec<&Object> = catalog.objects().collect();
    found.sort_unstable_by_key(|object| object.id);
    assert!(found.into_iter().eq(model.values()));
    assert_eq!(catalog.reserved(), model.values().map(|object| object.reserved).sum::<u64>());
    let trash = model.values().filter(|object| object.state == ObjectState::Trash).map(|object| object.id);
    assert_eq!(catalog.first_trash(), trash.min());
    let mut disks: Vec<&str> =
        model.values().filter(|object| object.state == ObjectState::Disk).map(|object| object.name.as_str()).collect();
    disks.sort_unstable();
    assert!(catalog.disks().map(|disk| disk.name.as_str()).eq(disks));
    for object in model.values() {
        assert_eq!(catalog.get(object.id).unwrap(), object);
        let by_name = match object.state {
            ObjectState::Disk => catalog.disk(&object.name),
            ObjectState::Snapshot | ObjectState::Unsealed => {
                assert!(catalog.snapshots_of(object.disk).any(|snapshot| snapshot.id == object.id));
                catalog.snapshot(object.disk, &object.name)
            }
            ObjectState::Trash => continue,
        };
        assert_eq!(by_name, Some(object));
    }
}

#[test]
fn catalog_objects_equal_a_model_after_restarts() {
    for seed in 0..30 {
        let mut random = Random(seed);
        let files = page_files();
        let mut pages = Pages::new(files.clone(), CACHE);
        let mut catalog = Catalog::open(&mut pages, 0, 1).unwrap();
        let mut model: BTreeMap<u64, Object> = BTreeMap::new();
        for _ in 0..200 {
            let known: Vec<u64> = model.keys().copied().collect();
            match random.below(100) {
                0..45 => {
                    let id = catalog.allocate_id();
                    assert!(known.last().is_none_or(|last| *last < id), "an id given twice");
                    let object = object(&mut random, id);
                    catalog.put(object.clone());
                    model.insert(id, object);
                }
                45..60 if !known.is_empty() => {
                    let id = *random.pick(&known);
                    let next = object(&mut random, id);
                    catalog.update(id, |object| *object = next.clone()).unwrap();
                    model.insert(id, next);
                }
                60..75 if !known.is_empty() => {
                    let id = *random.pick(&known);
                    let root = random.percent(50).then(|| NodeId(random.scaled(1 << 48)));
                    catalog.set_root(id, root);
                    model.get_mut(&id).unwrap().root = root;
                }
                75..92 if !known.is_empty() => {
                    let id = *random.pick(&known);
                    catalog.remove(id);
                    model.remove(&id);
                }
                92..97 => {
                    catalog.store(&mut pages).unwrap();
                    reopened(&files, &mut pages, CACHE);
                    catalog = Catalog::open(&mut pages, catalog.slots(), catalog.next_id()).unwrap();
                }
                _ => assert!(catalog.update(u64::MAX, |_| ()).is_err()),
            }
            assert!(catalog.slots() >= model.len() as u64);
        }
        compare(&catalog, &model);
        catalog.store(&mut pages).unwrap();
        reopened(&files, &mut pages, CACHE);
        compare(&Catalog::open(&mut pages, catalog.slots(), catalog.next_id()).unwrap(), &model);
    }
}

#[test]
fn slots_of_deleted_objects_are_reused() {
    let mut pages = Pages::new(page_files(), CACHE);
    let mut random = Random(1);
    let mut catalog = Catalog::open(&mut pages, 0, 1).unwrap();
    for _ in 0..1000 {
        let id = catalog.allocate_id();
        catalog.put(object(&mut random, id));
        if id > 10 {
            catalog.remove(id - 10);
        }
    }
    assert!(catalog.slots() <= 11, "{} slots for 10 objects", catalog.slots());
}

#[test]
fn catalog_records_are_decoded_as_encoded_and_fit_a_slot() {
    let mut random = Random(2);
    for id in 1..500 {
        let object = object(&mut random, id);
        let bytes = object.encode();
        assert!(bytes.len() <= SLOT_SIZE);
        assert_eq!(Object::decode(&bytes).unwrap().unwrap(), object);
        let mut slot = [0; SLOT_SIZE];
        slot[..bytes.len()].copy_from_slice(&bytes);
        assert_eq!(Object::decode(&slot).unwrap().unwrap(), object);
        for length in 0..bytes.len() {
            assert_eq!(Object::decode(&bytes[..length]).unwrap_err().kind(), ErrorKind::Corrupt);
        }
    }
    assert_eq!(Object::decode(&[0; SLOT_SIZE]).unwrap(), None);
}

#[test]
fn damaged_records_are_refused_or_read_but_never_panic() {
    let mut refused = 0;
    for seed in 0..20_000 {
        let mut random = Random(seed);
        let mut bytes = object(&mut random, 7).encode();
        for _ in 0..1 + random.below(3) {
            let at = random.below(bytes.len() as u64) as usize;
            bytes[at] = random.next() as u8;
        }
        match Object::decode(&bytes) {
            // A record that decodes can be added to a catalog without an overflow.
            Ok(Some(object)) => Catalog::default().put(object),
            Ok(None) => {}
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Corrupt);
                refused += 1;
            }
        }
    }
    assert!(refused > 1000);
}

#[test]
fn two_catalog_slots_with_one_id_are_refused() {
    let files = page_files();
    let mut pages = Pages::new(files.clone(), CACHE);
    let mut random = Random(3);
    let mut catalog = Catalog::open(&mut pages, 0, 1).unwrap();
    for _ in 0..2 {
        let id = catalog.allocate_id();
        catalog.put(object(&mut random, id));
    }
    catalog.store(&mut pages).unwrap();
    let page = pages.get_mut(slot_page(0)).unwrap();
    page.0.copy_within(slot_offset(0)..slot_offset(1), slot_offset(1));
    assert_eq!(Catalog::open(&mut pages, 2, 3).err().unwrap().kind(), ErrorKind::Corrupt);
    // An id that the catalog has not allocated yet.
    assert_eq!(Catalog::open(&mut pages, 1, 1).err().unwrap().kind(), ErrorKind::Corrupt);
}
