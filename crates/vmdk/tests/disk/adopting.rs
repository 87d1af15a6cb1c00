//! Adopting images made by other programs: their chains, their snapshot trees, and operations on them.

use crate::world::{DELTAS, Random, leaked, local, options, read, scratch};
use error::ErrorKind;
use layer::descriptor::Adapter;
use layer::image::{Image, ImageKind, NewImage, OpenOptions, Place, create};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use vmdk::{Adopt, DeltaFormat, Disk, NewDisk, NewSnapshot, Options};
use work::NoProgress;

/// Fills a folder as an ESXi host leaves it: a tree with two branches, its list of snapshots, and no record. Returns
/// the content of the snapshots and of the head, and the file name of the head.
fn foreign(folder: &Path, delta: DeltaFormat) -> (BTreeMap<String, Vec<u8>>, Vec<u8>, String) {
    let new = NewDisk {
        name: "web".to_owned(),
        capacity: 1 << 20,
        kind: ImageKind::Thin,
        delta: Some(delta),
        adapter: Adapter::BusLogic,
    };
    let disk = Disk::create(local(folder), &new, &options(1), &NoProgress).unwrap();
    let mut random = Random::new(5);
    let mut snapshots = BTreeMap::new();
    let mut snapshot = |name: &str| {
        let chain = disk.chain().unwrap();
        for _ in 0..5 {
            let mut bytes = vec![0; 20_000];
            random.fill(&mut bytes);
            chain.write(random.below((1 << 20) - 20_000), &bytes).unwrap();
        }
        disk.snapshot(&NewSnapshot { description: format!("about {name}"), ..NewSnapshot::named(name) }).unwrap();
        snapshots.insert(name.to_owned(), read(&disk.chain().unwrap()));
    };
    snapshot("a");
    snapshot("b");
    disk.revert("a").unwrap();
    snapshot("c");
    snapshot("d");
    let chain = disk.chain().unwrap();
    chain.write(777, &[7; 5000]).unwrap();
    let content = read(&chain);
    let record = disk.record();
    let head = record.nodes.iter().find(|node| node.id == record.head).unwrap().descriptor.clone();
    disk.close().unwrap();
    std::fs::remove_file(folder.join("lamina.disk")).unwrap();
    std::fs::remove_file(folder.join("lamina.lock")).unwrap();
    (snapshots, content, head)
}

fn bytes_of(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    entries.map(|entry| (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap())).collect()
}

fn adopt(home: &Path, folder: &Path, head: &str, how: Adopt) -> Result<Arc<Disk>, error::Error> {
    let place = Place::local(&folder.join(head), &[]).unwrap();
    Disk::adopt(local(home), "adopted", &place, how, &options(3))
}

fn check_all(disk: &Disk, snapshots: &BTreeMap<String, Vec<u8>>, content: &[u8]) {
    assert!(read(&disk.chain().unwrap()) == content);
    for (name, content) in snapshots {
        assert!(read(&disk.snapshot_chain(name).unwrap()) == *content, "{name}");
    }
}

#[test]
fn snapshots_have_different_numbers_after_a_list_with_the_largest_one() {
    let (home, folder) = (scratch(), scratch());
    let (_, _, head) = foreign(folder.path(), DELTAS[0]);
    let list = folder.path().join("web.vmsd");
    let before = std::fs::read_to_string(&list).unwrap();
    let after = before.replace("snapshot.lastUID = \"4\"", "snapshot.lastUID = \"4294967295\"");
    assert_ne!(before, after);
    std::fs::write(&list, after).unwrap();
    let disk = adopt(home.path(), folder.path(), &head, Adopt::Head { writable: true }).unwrap();
    for name in ["e", "f", "g"] {
        disk.snapshot(&NewSnapshot::named(name)).unwrap();
    }
    disk.close().unwrap();
    drop(disk);
    let disk = Disk::open(local(home.path()), &options(4)).unwrap();
    assert_eq!(disk.snapshots().len(), 7);
}

#[test]
fn a_tree_of_snapshots_is_adopted_and_read() {
    for delta in DELTAS {
        for how in [Adopt::ReadOnly, Adopt::Head { writable: false }, Adopt::Head { writable: true }] {
            let (home, folder) = (scratch(), scratch());
            let (snapshots, mut content, head) = foreign(folder.path(), delta);
            let before = bytes_of(folder.path());
            let disk = adopt(home.path(), folder.path(), &head, how).unwrap();
            check_all(&disk, &snapshots, &content);
            let shown: Vec<_> = disk
                .snapshots()
                .into_iter()
                .map(|s| (s.name, s.parent.unwrap_or_default(), s.description, s.current))
                .collect();
            let wanted = [("a", "", false), ("b", "a", false), ("c", "a", false), ("d", "c", true)];
            assert_eq!(
                shown,
                wanted.map(|(name, parent, current)| (
                    name.to_owned(),
                    parent.to_owned(),
                    format!("about {name}"),
                    current
                ))
            );
            assert!(disk.record().last_uid >= 4);
            assert_eq!(disk.record().adapter, "buslogic");
            if how == Adopt::ReadOnly {
                assert!(disk.chain().unwrap().read_only());
                assert_eq!(disk.snapshot(&NewSnapshot::named("x")).unwrap_err().kind(), ErrorKind::ReadOnly);
            } else {
                disk.chain().unwrap().write(100, &[9; 9000]).unwrap();
                content[100..9100].fill(9);
                disk.snapshot(&NewSnapshot::named("e")).unwrap();
                disk.delete_snapshot("c", None, &NoProgress).unwrap();
                disk.delete_snapshot("b", None, &NoProgress).unwrap();
            }
            disk.close().unwrap();
            drop(disk);
            let disk = Disk::open(local(home.path()), &options(4)).unwrap();
            let left: BTreeMap<_, _> = snapshots
                .clone()
                .into_iter()
                .filter(|(name, _)| how == Adopt::ReadOnly || !["b", "c"].contains(&name.as_str()))
                .collect();
            check_all(&disk, &left, &content);
            assert_eq!(leaked(&disk), Vec::<String>::new());
            if how != (Adopt::Head { writable: true }) {
                assert!(bytes_of(folder.path()) == before, "a foreign file was changed");
            }
            if how != Adopt::ReadOnly {
                disk.consolidate(&NoProgress).unwrap();
                assert!(read(&disk.chain().unwrap()) == content);
            }
            let in_place = how == Adopt::Head { writable: true };
            assert_eq!(bytes_of(folder.path()) == before, !in_place);
            disk.delete().unwrap();
            // Adopted images stay, with their last content.
            assert!(folder.path().join("web.vmdk").exists());
            assert_eq!(bytes_of(home.path()).len(), 0);
        }
    }
}

#[test]
fn wrong_entries_of_a_snapshot_list_are_ignored() {
    let (home, folder) = (scratch(), scratch());
    let (snapshots, content, head) = foreign(folder.path(), DELTAS[0]);
    // The list has snapshots with another disk of the machine, paths outside the folder, missing files, a file that is
    // no disk, and a name that occurs twice.
    let directory = local(folder.path());
    let other = NewImage::new("data.vmdk", 1 << 20, ImageKind::Thin);
    let mut number = 0;
    create(
        &directory,
        &other,
        &mut || {
            number += 1;
            number
        },
        &NoProgress,
    )
    .unwrap();
    std::fs::write(folder.path().join("notes.vmdk"), b"nothing").unwrap();
    let mut text = std::fs::read_to_string(folder.path().join("web.vmsd")).unwrap();
    for (index, file) in
        ["../../etc/passwd", "/etc/passwd", "gone.vmdk", "notes.vmdk", "data.vmdk", "web.vmdk"].iter().enumerate()
    {
        let index = index + 10;
        text += &format!(
            "snapshot{index}.uid = \"{index}\"\nsnapshot{index}.displayName = \"a\"\nsnapshot{index}.parent = \"999\"\n"
        );
        text += &format!("snapshot{index}.disk0.fileName = \"{file}\"\nsnapshot{index}.disk0.node = \"scsi0:0\"\n");
    }
    std::fs::write(folder.path().join("web.vmsd"), text).unwrap();
    std::fs::write(folder.path().join("a.vmsd"), vec![b'x'; 5 << 20]).unwrap();
    let disk = adopt(home.path(), folder.path(), &head, Adopt::Head { writable: false }).unwrap();
    check_all(&disk, &snapshots, &content);
    let names: Vec<String> = disk.snapshots().into_iter().map(|snapshot| snapshot.name).collect();
    assert_eq!(names, ["a", "b", "c", "d", "a-2"]);
    // Two snapshots name one image: after one is deleted, the other still exists.
    disk.delete_snapshot("a", None, &NoProgress).unwrap();
    assert!(read(&disk.snapshot_chain("a-2").unwrap()) == snapshots["a"]);
}

#[test]
fn a_written_list_has_the_names_of_the_adopted_list() {
    let (home, folder) = (scratch(), scratch());
    let (_, _, head) = foreign(folder.path(), DELTAS[0]);
    let list = folder.path().join("web.vmsd");
    let text = std::fs::read_to_string(&list).unwrap().replace("displayName = \"a\"", "displayName = \"Before 1/2\"");
    std::fs::write(&list, text.replace("displayName = \"c\"", "displayName = \"b\"")).unwrap();
    let disk = adopt(home.path(), folder.path(), &head, Adopt::Head { writable: false }).unwrap();
    let names: Vec<String> = disk.snapshots().into_iter().map(|snapshot| snapshot.name).collect();
    assert_eq!(names, ["Before-1-2", "b", "b-2", "d"]);
    disk.snapshot(&NewSnapshot::named("mine")).unwrap();
    let written = std::fs::read_to_string(home.path().join("adopted.vmsd")).unwrap();
    let shown = |line: &str| Some(line.split_once("displayName = ")?.1.to_owned());
    let names: Vec<String> = written.lines().filter_map(shown).collect();
    assert_eq!(names, ["\"Before 1/2\"", "\"b\"", "\"b\"", "\"d\"", "\"mine\""]);
}

#[test]
fn a_head_with_children_is_not_written() {
    let (home, folder) = (scratch(), scratch());
    let (snapshots, ..) = foreign(folder.path(), DELTAS[1]);
    let before = bytes_of(folder.path());
    let disk = adopt(home.path(), folder.path(), "web.vmdk", Adopt::Head { writable: true }).unwrap();
    disk.chain().unwrap().write(0, &[1; 4096]).unwrap();
    disk.chain().unwrap().flush().unwrap();
    assert!(read(&disk.snapshot_chain("a").unwrap()) == snapshots["a"]);
    assert!(bytes_of(folder.path()) == before);
}

#[test]
fn chains_without_a_list_can_be_consolidated() {
    let (home, folder) = (scratch(), scratch());
    let (_, content, head) = foreign(folder.path(), DELTAS[0]);
    std::fs::remove_file(folder.path().join("web.vmsd")).unwrap();
    let disk = adopt(home.path(), folder.path(), &head, Adopt::Head { writable: true }).unwrap();
    let info = disk.info().unwrap();
    assert_eq!((info.levels, info.redundant, disk.snapshots().len()), (4, 3, 0));
    disk.consolidate(&NoProgress).unwrap();
    assert_eq!(disk.info().unwrap().levels, 1);
    assert!(read(&disk.chain().unwrap()) == content);
}

#[test]
fn with_an_overlay_the_adopted_images_are_not_written() {
    let (home, folder, above) = (scratch(), scratch(), scratch());
    let (_, mut content, head) = foreign(folder.path(), DELTAS[0]);
    let before = bytes_of(folder.path());
    let top = NewImage::new("top.vmdk", 1 << 20, ImageKind::SeSparse);
    let mut number = 0;
    create(
        &local(above.path()),
        &top,
        &mut || {
            number += 1;
            number
        },
        &NoProgress,
    )
    .unwrap();
    let place = Place::local(&above.path().join("top.vmdk"), &[]).unwrap();
    let image = Image::open(place, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
    let options = Options { overlay: vec![Arc::clone(image.layer())], ..options(1) };
    let place = Place::local(&folder.path().join(&head), &[]).unwrap();
    let disk = Disk::adopt(local(home.path()), "live", &place, Adopt::ReadOnly, &options).unwrap();
    disk.set_overlay(Some("where it is".to_owned())).unwrap();
    disk.chain().unwrap().write(1000, &[4; 10_000]).unwrap();
    content[1000..11_000].fill(4);
    assert!(read(&disk.chain().unwrap()) == content);
    assert_eq!(disk.snapshot(&NewSnapshot::named("x")).unwrap_err().kind(), ErrorKind::Busy);
    disk.close().unwrap();
    assert!(bytes_of(folder.path()) == before);
}

fn write_base(folder: &Path, byte: u8) {
    let place = Place::local(&folder.join("web.vmdk"), &[]).unwrap();
    let image = Image::open(place, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
    image.layer().write(0, &[&[byte; 512]]).unwrap();
    image.layer().close().unwrap();
}

/// Makes a SEsparse extent as an ESXi host leaves it after a crash between two transactions: marked as in use, with one
/// transaction and its changes already in place.
fn make_dirty(extent: &Path) {
    const TABLE: usize = 6144;
    const SLOT: usize = 2048 * 512;
    let mut bytes = std::fs::read(extent).unwrap();
    let table = bytes[TABLE * 512..][..512].to_vec();
    let mut word = |at: usize, word: u64| bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
    for (index, value) in [0x00c0_ffee, 1, 0, 2, 0x1234, 7, u64::MAX, 99].into_iter().enumerate() {
        word(SLOT + index * 8, value);
    }
    word(SLOT + 128, TABLE as u64);
    word(SLOT + 136, 1);
    word(512 + 16, 7);
    word(512 + 24, 1);
    bytes[SLOT + 512..][..512].copy_from_slice(&table);
    std::fs::write(extent, &bytes).unwrap();
}

#[test]
fn a_journal_replay_that_was_allowed_once_is_repeated_at_later_openings() {
    let (home, folder) = (scratch(), scratch());
    let (_, content, head) = foreign(folder.path(), DELTAS[1]);
    make_dirty(&folder.path().join(head.replace(".vmdk", "-sesparse.vmdk")));
    let before = bytes_of(folder.path());
    let refused = adopt(home.path(), folder.path(), &head, Adopt::Head { writable: false }).err().unwrap();
    assert!(refused.to_string().contains("journal"), "{refused}");
    let home = scratch();
    let place = Place::local(&folder.path().join(&head), &[]).unwrap();
    let replaying = Options { replay_journal: true, ..options(3) };
    let disk = Disk::adopt(local(home.path()), "x", &place, Adopt::Head { writable: false }, &replaying).unwrap();
    assert!(read(&disk.chain().unwrap()) == content);
    disk.close().unwrap();
    drop(disk);
    let disk = Disk::open(local(home.path()), &options(3)).unwrap();
    assert!(read(&disk.chain().unwrap()) == content);
    disk.snapshot(&NewSnapshot::named("mine")).unwrap();
    disk.close().unwrap();
    assert!(bytes_of(folder.path()) == before, "foreign images were changed");
}

#[test]
fn changed_parents_are_refused_unless_forced() {
    let (home, folder) = (scratch(), scratch());
    let (_, content, head) = foreign(folder.path(), DELTAS[0]);
    let disk = adopt(home.path(), folder.path(), &head, Adopt::Head { writable: false }).unwrap();
    disk.close().unwrap();
    drop(disk);
    // Another program writes the base.
    write_base(folder.path(), 1);
    let disk = Disk::open(local(home.path()), &options(1)).unwrap();
    let refused = disk.chain().err().unwrap();
    assert!(refused.kind() == ErrorKind::Corrupt && refused.to_string().contains("web.vmdk"), "{refused}");
    drop(disk);
    let forced = Options { force_parent: true, ..options(1) };
    let disk = Disk::open(local(home.path()), &forced).unwrap();
    assert_eq!(read(&disk.chain().unwrap()).len(), content.len());
    disk.close().unwrap();
    drop(disk);

    // A parent forced at adoption is accepted from then on, also for the disk's snapshots and clones.
    let (home, clone_home) = (scratch(), scratch());
    let place = Place::local(&folder.path().join(&head), &[]).unwrap();
    assert!(adopt(home.path(), folder.path(), &head, Adopt::Head { writable: false }).is_err());
    let disk = Disk::adopt(local(home.path()), "x", &place, Adopt::Head { writable: false }, &forced).unwrap();
    let content = read(&disk.chain().unwrap());
    disk.close().unwrap();
    drop(disk);
    let disk = Disk::open(local(home.path()), &options(1)).unwrap();
    assert!(read(&disk.chain().unwrap()) == content);
    for snapshot in disk.snapshots() {
        disk.snapshot_chain(&snapshot.name).unwrap();
    }
    disk.snapshot(&NewSnapshot::named("mine")).unwrap();
    let clone = disk.linked_clone("mine", local(clone_home.path()), "clone", &options(2)).unwrap();
    assert!(read(&clone.chain().unwrap()) == content);
    clone.close().unwrap();
    disk.close().unwrap();
    drop((disk, clone));
    let clone = Disk::open(local(clone_home.path()), &options(2)).unwrap();
    assert!(read(&clone.chain().unwrap()) == content);
    clone.close().unwrap();
    drop(clone);

    // Only the CID present at adoption was accepted.
    write_base(folder.path(), 2);
    let disk = Disk::open(local(home.path()), &options(1)).unwrap();
    let refused = disk.chain().err().unwrap();
    assert!(refused.kind() == ErrorKind::Corrupt && refused.to_string().contains("web.vmdk"), "{refused}");
}
