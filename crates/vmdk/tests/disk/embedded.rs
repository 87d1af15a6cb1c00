//! Adopted chains of images that have their descriptors inside the extents. Such a descriptor is overwritten in place,
//! so the record gets the complete new text before that.

use crate::world::{Random, options, read};
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{Access, IoMode};
use layer::descriptor::{Descriptor, storage};
use layer::image::{Folder, Image, ImageKind, NewImage, NewParent, OpenOptions, Place, create};
use std::sync::Arc;
use vmdk::{Adopt, Direction, Disk, NewSnapshot};
use work::NoProgress;

const PIECE: usize = 64 << 10;
const CAPACITY: u64 = 8 * PIECE as u64;
const NAMES: [&str; 4] = ["base.vmdk", "first.vmdk", "second.vmdk", "third.vmdk"];
/// A list with a snapshot of an image.
fn list_with(image: &str) -> String {
    format!(
        "snapshot0.uid = \"1\"\nsnapshot0.displayName = \"s\"\nsnapshot0.disk0.fileName = \"{image}\"\n\
         snapshot0.disk0.node = \"scsi0:0\"\n"
    )
}

fn place(machine: &SimulatedDisk, name: &str) -> Place {
    Place { folder: Folder::plain(machine.directory()), name: name.to_owned() }
}

/// Adds a comment, which lamina drops when it writes the text again, and a long entry, so that the text that lamina
/// writes differs from the old text in several sectors.
fn written_elsewhere(machine: &SimulatedDisk, name: &str) {
    let file = place(machine, name).open(IoMode::Buffered, Access::ReadWrite).unwrap();
    let range = storage::embedded_usual();
    let mut bytes = vec![0; (range.end - range.start) as usize];
    file.read_at(&mut bytes, range.start).unwrap();
    let length = bytes.iter().position(|byte| *byte == 0).unwrap();
    let text = String::from_utf8(bytes[..length].to_vec()).unwrap();
    let text = text.replacen("\nversion=", "\n# by another program\nversion=", 1);
    let text = format!("{text}ddb.comment = \"{}\"\n", "long ".repeat(100));
    bytes.fill(0);
    bytes[..text.len()].copy_from_slice(text.as_bytes());
    file.write_at(&[&bytes], range.start, false).unwrap();
    file.sync().unwrap();
}

fn descriptor(machine: &SimulatedDisk, name: &str) -> Descriptor {
    let file = place(machine, name).open(IoMode::Buffered, Access::Read).unwrap();
    storage::load_embedded(&*file).unwrap().unwrap().1
}

/// A disk with images of another program, and a snapshot of the first child. Returns the content of its head, too.
fn adopted(machine: &SimulatedDisk) -> (Arc<Disk>, Vec<u8>) {
    adopted_with(machine, NAMES[1])
}

/// As [`adopted`], with a snapshot of `image_of_snapshot`.
fn adopted_with(machine: &SimulatedDisk, image_of_snapshot: &str) -> (Arc<Disk>, Vec<u8>) {
    let folder = Folder::plain(machine.directory());
    let mut random = Random::new(7);
    let mut content = vec![0; CAPACITY as usize];
    let mut parent: Option<NewParent> = None;
    for (index, name) in NAMES.into_iter().enumerate() {
        let new = NewImage { parent: parent.take(), ..NewImage::new(name, CAPACITY, ImageKind::MonolithicSparse) };
        create(&folder, &new, &mut || random.next(), &NoProgress).unwrap();
        let writable = OpenOptions { writable: true, ..OpenOptions::default() };
        let image = Image::open(place(machine, name), &writable).unwrap();
        for start in [index, index + 2].map(|piece| piece * PIECE) {
            content[start..start + PIECE].fill(index as u8 + 1);
            image.layer().write(start as u64, &[&content[start..start + PIECE]]).unwrap();
        }
        image.layer().close().unwrap();
        drop(image);
        written_elsewhere(machine, name);
        let image = Image::open(place(machine, name), &OpenOptions::default()).unwrap();
        parent = Some(NewParent::of(&image, &folder).unwrap());
    }
    let list = machine.directory().create("vm.vmsd", IoMode::Buffered).unwrap();
    list.write_at(&[list_with(image_of_snapshot).as_bytes()], 0, false).unwrap();
    list.sync().unwrap();
    machine.directory().sync().unwrap();
    let how = Adopt::Head { writable: true };
    let disk = Disk::adopt(folder, "vm", &place(machine, NAMES[3]), how, &options(1)).unwrap();
    assert!(read(&disk.chain().unwrap()) == content);
    (disk, content)
}

/// A merge into the image below or above. Undoing the merge corrects the descriptor of the first or second child. That
/// child is not the head.
fn merge(disk: &Disk, side: Direction) -> Result<(), error::Error> {
    disk.snapshot(&NewSnapshot::named("top"))?;
    disk.delete_snapshot("s", Some(side), &NoProgress)
}

fn is_merging(machine: &SimulatedDisk) -> bool {
    record_has(machine, "\"merging\"")
}

/// Whether the record has the complete text of a descriptor that has to be corrected.
fn has_text(machine: &SimulatedDisk) -> bool {
    record_has(machine, "\"text\"")
}

fn record_has(machine: &SimulatedDisk, text: &str) -> bool {
    let file = machine.directory().open("lamina.disk", IoMode::Buffered).unwrap();
    let mut bytes = vec![0; file.len().unwrap() as usize];
    file.read_at(&mut bytes, 0).unwrap();
    String::from_utf8(bytes).unwrap().contains(text)
}

/// Opens the disk, and checks its content and the text of every descriptor.
fn is_whole(machine: &SimulatedDisk, content: &[u8], before: &[Descriptor], context: &str) -> Arc<Disk> {
    let disk = Disk::open(Folder::plain(machine.directory()), &options(2)).unwrap_or_else(|e| panic!("{context}: {e}"));
    let chain = disk.chain().unwrap_or_else(|error| panic!("{context}: {error}"));
    assert!(read(&chain) == content, "{context}");
    let names: Vec<String> = disk.record().nodes.iter().map(|node| node.descriptor.clone()).collect();
    for (name, before) in NAMES.iter().zip(before).filter(|(name, _)| names.iter().any(|known| known == *name)) {
        let now = descriptor(machine, name);
        let comment = |descriptor: &Descriptor| descriptor.database.get("ddb.comment").map(str::to_owned);
        assert_eq!((&now.extents, comment(&now)), (&before.extents, comment(before)), "{context}: {name}");
    }
    disk
}

/// Calls `act` with the state after each power cut in a merge, and a text that names the cut.
fn cut_merges(mut act: impl FnMut(&SimulatedDisk, &[u8], &[Descriptor], String)) {
    for (side, seed) in [Direction::Down, Direction::Up].into_iter().flat_map(|side| [(side, 0), (side, 1)]) {
        for cut in 0.. {
            let machine = SimulatedDisk::new(seed, SimulatedOptions::default());
            let (disk, content) = adopted(&machine);
            let before = NAMES.map(|name| descriptor(&machine, name));
            machine.cut_after(machine.operations() + cut);
            let merged = merge(&disk, side);
            drop(disk);
            let ended = !machine.is_off();
            assert!(!ended || merged.is_ok(), "{side:?}, seed {seed}, cut {cut}");
            act(&machine.crash(), &content, &before, format!("{side:?}, seed {seed}, cut {cut}"));
            if ended {
                break;
            }
        }
    }
}

#[test]
fn a_power_cut_while_a_merge_is_undone_leaves_no_torn_descriptor() {
    let mut merging = 0;
    cut_merges(|machine, content, before, context| {
        if !is_merging(machine) {
            drop(is_whole(machine, content, before, &context));
            return;
        }
        merging += 1;
        for cut in 0.. {
            let again = machine.copy_of_durable(cut, SimulatedOptions::default());
            again.cut_after(again.operations() + cut);
            drop(Disk::open(Folder::plain(again.directory()), &options(3)));
            let ended = !again.is_off();
            drop(is_whole(&again.crash(), content, before, &format!("{context}, then {cut}")));
            if ended {
                break;
            }
        }
    });
    assert!(merging > 20, "{merging}");
}

#[test]
fn a_merge_is_undone_on_a_full_file_system_as_far_as_the_chain_needs() {
    let mut merging = 0;
    cut_merges(|machine, content, before, context| {
        if !is_merging(machine) {
            return;
        }
        merging += 1;
        machine.set_capacity(4096);
        let disk = is_whole(machine, content, before, &context);
        assert!(is_merging(machine), "{context}: the record was replaced on a full file system");
        machine.set_capacity(1 << 40);
        let counted = disk.preview_delete_snapshots(&["s".to_owned()], None);
        assert_eq!(counted.unwrap_err().kind(), error::ErrorKind::Busy, "{context}");
        assert!(is_merging(machine), "{context}: a count finished the merge");
        disk.snapshot(&NewSnapshot::named("later")).unwrap_or_else(|error| panic!("{context}: {error}"));
        assert!(!is_merging(machine), "{context}");
        drop(disk);
        drop(is_whole(&machine.crash(), content, before, &context));
    });
    assert!(merging > 20, "{merging}");
}

/// Opens a disk whose record has a text for the head's descriptor, on a full file system: the text is written, and the
/// operation stays pending. Then the head is written, and the disk is opened again with space.
fn head_keeps_its_new_cid(machine: &SimulatedDisk, context: &str) {
    let open = |seed| {
        let opened = Disk::open(Folder::plain(machine.directory()), &options(seed));
        opened.unwrap_or_else(|error| panic!("{context}: {error}"))
    };
    machine.set_capacity(4096);
    let disk = open(4);
    let chain = disk.chain().unwrap_or_else(|error| panic!("{context}: {error}"));
    let before = descriptor(machine, NAMES[3]);
    // The head has grains for this range, so that the write needs no space.
    chain.write(3 * PIECE as u64, &[9; PIECE]).unwrap_or_else(|error| panic!("{context}: {error}"));
    chain.flush().unwrap_or_else(|error| panic!("{context}: {error}"));
    let written = descriptor(machine, NAMES[3]);
    assert_ne!(written.content, before.content, "{context}: a write gives the head a new CID");
    drop(chain);
    drop(disk);
    assert!(has_text(machine), "{context}: the record was replaced on a full file system");
    machine.set_capacity(1 << 40);
    drop(open(5));
    assert!(!has_text(machine), "{context}");
    assert_eq!(descriptor(machine, NAMES[3]), written, "{context}");
}

#[test]
fn a_head_that_is_written_before_a_merge_into_the_image_below_is_undone_again_keeps_its_new_cid() {
    let mut written = 0;
    for cut in 0.. {
        let machine = SimulatedDisk::new(2, SimulatedOptions::default());
        let (disk, _) = adopted_with(&machine, NAMES[2]);
        machine.cut_after(machine.operations() + cut);
        let merged = disk.delete_snapshot("s", Some(Direction::Down), &NoProgress);
        drop(disk);
        let ended = !machine.is_off();
        assert!(!ended || merged.is_ok(), "cut {cut}");
        let machine = machine.crash();
        let merging = is_merging(&machine);
        for second in (0..).take_while(|_| merging) {
            let again = machine.copy_of_durable(second, SimulatedOptions::default());
            again.cut_after(again.operations() + second);
            drop(Disk::open(Folder::plain(again.directory()), &options(3)));
            let undone = !again.is_off();
            let again = again.crash();
            if has_text(&again) && !is_merging(&again) && record_has(&again, NAMES[3]) {
                written += 1;
                head_keeps_its_new_cid(&again, &format!("cut {cut}, then {second}"));
            }
            if undone {
                break;
            }
        }
        if ended {
            break;
        }
    }
    assert!(written > 10, "{written}");
}
