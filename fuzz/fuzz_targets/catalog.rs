//! A catalog page of arbitrary bytes is read, changed, stored and read again.

#![no_main]

use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{Block, IoMode};
use lamina_fuzz::Input;
use libfuzzer_sys::fuzz_target;
use store::catalog::{Catalog, Object, ObjectState, SLOT_SIZE, SLOTS_PER_PAGE};
use store::pages::{HEADER_SIZE, PageFile, PageKey, Pages, blank, sealed, verify};

fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    let next_id = input.word(8).clamp(1, 1 << 62);
    let key = PageKey::new(PageFile::Catalog, 0);
    let mut page = blank(key);
    for slot in 0..SLOTS_PER_PAGE {
        let length = input.word(2) as usize % (SLOT_SIZE + 1);
        let bytes = input.bytes(length);
        let _ = Object::decode(bytes);
        let at = HEADER_SIZE + slot * SLOT_SIZE;
        page.0[at..at + bytes.len()].copy_from_slice(bytes);
    }
    page = sealed(&page);
    verify(&mut Block(page.0), key).expect("the page has a valid checksum");
    let directory =
        SimulatedDisk::new(1, SimulatedOptions { reorder: false, ..SimulatedOptions::default() }).directory();
    let files = PageFile::ALL
        .map(|file| directory.create(file.name(), IoMode::Buffered).expect("a new disk accepts new files"));
    files[PageFile::Catalog as usize].write_at(&[&page.0], 0, false).expect("a new disk accepts writes");
    let mut pages = Pages::new(files, 1 << 20);
    let Ok(mut catalog) = Catalog::open(&mut pages, SLOTS_PER_PAGE as u64, next_id) else { return };
    let mut objects: Vec<Object> = catalog.objects().cloned().collect();
    objects.sort_unstable_by_key(|object| object.id);
    for object in &objects {
        let record = object.encode();
        assert_eq!(Object::decode(&record).expect("an encoded object can be decoded").as_ref(), Some(object));
        let _ = (catalog.disk(&object.name), catalog.snapshot(object.disk, &object.name));
        let _ = catalog.snapshots_of(object.disk).count() + catalog.disks().count();
    }
    if let Some(object) = objects.first() {
        catalog.update(object.id, |object| object.state = ObjectState::Trash).expect("the object exists");
        assert!(catalog.first_trash().is_some());
    }
    if let Some(object) = objects.get(1) {
        catalog.remove(object.id);
    }
    let id = catalog.allocate_id();
    catalog.set_root(id, None);
    let mut before: Vec<Object> = catalog.objects().cloned().collect();
    before.sort_unstable_by_key(|object| object.id);
    catalog.store(&mut pages).expect("memory returns no I/O errors");
    let again = Catalog::open(&mut pages, catalog.slots(), catalog.next_id()).expect("a stored catalog can be read");
    let mut after: Vec<Object> = again.objects().cloned().collect();
    after.sort_unstable_by_key(|object| object.id);
    assert_eq!(before, after);
});
