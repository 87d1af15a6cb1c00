//! Salvage of damaged disks in VMware's formats, with the command line: what is not damaged is read to the byte, and
//! what is lost is named and never replaced by older data.

#![allow(clippy::unwrap_used)]

mod medium;

use medium::on_medium;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use testkit::nbd::Client;
use testkit::pattern;
use testkit::process::{Done, Store, run, tool};

const CAPACITY: usize = 48 << 20;
const MIB: u64 = 1 << 20;
const PAGE: usize = 4096;

/// Ranges of bytes: start and length.
type Lost = Vec<(u64, u64)>;

/// A stopped datastore with disk `vm1`: a base and two deltas, with the snapshots `s1` and `s2`.
struct Made {
    store: Store,
    contents: BTreeMap<&'static str, Vec<u8>>,
}

impl Made {
    fn new(folder: &Path, options: &str) -> Self {
        let store = Store::at(folder, "4M");
        store.run(&format!("disk create vm1 {CAPACITY} {options}")).ok();
        let mut contents = BTreeMap::new();
        let mut image = vec![0; CAPACITY];
        let mut server = store.serve("");
        let mut client = Client::connect(&store.socket(), "vm1").unwrap();
        let mut write = |seed: u64, at: u64, length: usize, image: &mut Vec<u8>| {
            let data = pattern::bytes(seed, length);
            client.write(at, &data).unwrap();
            image[at as usize..at as usize + length].copy_from_slice(&data);
        };
        (0..48).for_each(|n| write(1 + n, n * MIB, 256 << 10, &mut image));
        store.run("snapshot create vm1@s1").ok();
        contents.insert("s1", image.clone());
        (0..24).for_each(|n| write(100 + n, 2 * n * MIB + (64 << 10), 16 << 10, &mut image));
        store.run("snapshot create vm1@s2").ok();
        contents.insert("s2", image.clone());
        for n in 0..12 {
            write(200 + n, 4 * n * MIB + (72 << 10), 8 << 10, &mut image);
            write(300 + n, 4 * n * MIB + (512 << 10), PAGE, &mut image);
        }
        client.flush().unwrap();
        drop(client);
        assert_eq!(server.stop("TERM"), Some(0));
        contents.insert("", image);
        Self { store, contents }
    }

    /// A file of the disk.
    fn file(&self, name: &str) -> PathBuf {
        self.store.path().join("images/vm1").join(name)
    }

    /// The content of every file of the disk.
    fn files(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let entries = std::fs::read_dir(self.file("")).unwrap().map(|entry| entry.unwrap().path());
        entries.map(|path| (path.clone(), std::fs::read(&path).unwrap())).collect()
    }

    /// Salvages a state of the disk from the datastore, and compares the content; returns the report.
    fn salvaged(&self, snapshot: &str) -> (Lost, Value) {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("target.raw");
        let chosen = if snapshot.is_empty() { String::new() } else { format!("--snapshot {snapshot}") };
        let (from, to) = (self.store.path(), target.display());
        let done = run(&format!("salvage {} --disk vm1 {chosen} --to {to} --json", from.display()));
        compared(&self.contents[snapshot], &target, done)
    }

    /// Salvages or converts the newest image of the disk by its path, and compares the content; returns the report.
    fn salvaged_by_path(&self, verb: &str, name: &str, content: &[u8]) -> (Lost, Value) {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("target.raw");
        let (from, to) = (self.file(name).display().to_string(), target.display().to_string());
        let done = run(&match verb {
            "convert" => format!("convert {from} {to} -d raw --skip-damaged --json"),
            _ => format!("salvage {from} --to {to} --json"),
        });
        compared(content, &target, done)
    }

    /// Salvages every state in every way, and checks that the files do not change.
    fn all_salvaged(&self) -> BTreeMap<&'static str, Lost> {
        let before = self.files();
        let lost = ["s1", "s2", ""].into_iter().map(|snapshot| (snapshot, self.salvaged(snapshot).0)).collect();
        assert!(self.files() == before, "a salvage wrote to the source");
        lost
    }
}

/// Checks that a target has the content, and zeros in the ranges that the report lists as lost.
fn compared(content: &[u8], target: &Path, done: Done) -> (Lost, Value) {
    let report: Value = serde_json::from_str(&done.stdout).unwrap_or_else(|_| panic!("{done:?}"));
    let mut expected = content.to_vec();
    let mut lost = Lost::new();
    for range in report["lost"].as_array().unwrap() {
        let (start, length) = (range["start"].as_u64().unwrap(), range["length"].as_u64().unwrap());
        assert!(lost.last().is_none_or(|(last, before)| last + before < start), "not merged: {report}");
        expected[start as usize..(start + length) as usize].fill(0);
        lost.push((start, length));
    }
    assert!(std::fs::read(target).unwrap() == expected, "{report}");
    let proven = report.get("proven").is_none_or(|proven| proven == true);
    assert_eq!(done.code, if lost.is_empty() && proven { 0 } else { 6 }, "{done:?}");
    (lost, report)
}

fn word(path: &Path, at: u64) -> u64 {
    let mut bytes = [0; 8];
    File::open(path).unwrap().read_exact_at(&mut bytes, at).unwrap();
    u64::from_le_bytes(bytes)
}

fn put(path: &Path, at: u64, bytes: &[u8]) {
    OpenOptions::new().write(true).open(path).unwrap().write_all_at(bytes, at).unwrap();
}

/// The offset of the entry for a byte of the disk in a SEsparse table, and the offset of the entry for the same grain
/// in the backmap.
fn se_entry(path: &Path, at: u64) -> (u64, u64) {
    let area = |number: u64| word(path, 80 + 16 * number) * 512;
    let (directory, tables, backmap) = (area(3), area(4), area(6));
    let slot = word(path, directory + at / (16 * MIB) * 8);
    assert_eq!(slot >> 60, 1, "no table");
    let entry = tables + (slot & 0xffff_ffff) * 32768 + at % (16 * MIB) / 4096 * 8;
    let raw = word(path, entry);
    assert_eq!(raw >> 60, 3, "no data");
    let grain = (raw >> 48 & 0xfff) | (raw & ((1 << 48) - 1)) << 12;
    (entry, backmap + grain * 8)
}

#[test]
fn a_damaged_entry_of_sesparse_is_proven_by_the_backmap_or_lost_alone() {
    // The test does not damage the first grain: an entry of the first grain with a wrong byte may also be a damaged
    // entry that names no grain.
    const AT: u64 = 4 * MIB + (72 << 10);
    let made = Made::new(&std::env::temp_dir(), "--format vmdk --delta sesparse");
    let nothing: BTreeMap<_, _> = ["s1", "s2", ""].map(|name| (name, Lost::new())).into();
    assert_eq!(made.all_salvaged(), nothing);
    let delta = made.file("vm1-000002-sesparse.vmdk");
    let (entry, owner) = se_entry(&delta, AT);
    put(&delta, entry, &(word(&delta, entry) | 0xf << 60).to_le_bytes());
    assert_eq!(made.all_salvaged(), nothing);
    let (_, report) = made.salvaged("");
    assert!(report["notes"].to_string().contains("prove grain"), "{report}");
    // Without the entry of the backmap, nothing proves the table entry. The parent image has older data in this range.
    put(&delta, owner, &[0; 8]);
    let lost = vec![(AT, PAGE as u64)];
    assert_eq!(made.all_salvaged(), BTreeMap::from([("s1", vec![]), ("s2", vec![]), ("", lost.clone())]));
    for verb in ["salvage", "convert"] {
        assert_eq!(made.salvaged_by_path(verb, "vm1-000002.vmdk", &made.contents[""]).0, lost, "{verb}");
    }
    let folder = tempfile::tempdir().unwrap();
    let (target, from) = (folder.path().join("target.raw"), made.file("vm1-000002.vmdk"));
    run(&format!("convert {} {} -d raw", from.display(), target.display())).fails(6, "vm1-000002-sesparse.vmdk");
    assert!(!target.exists());
    // The list counts the range, and the output for humans names it.
    let list = run(&format!("salvage {} --list --json", made.store.path().display()));
    let list: Value = serde_json::from_str(&list.stdout).unwrap();
    let lost_of = |list: &Value, snapshot: Value| {
        let objects = list["objects"].as_array().unwrap().clone();
        objects.into_iter().find(|object| object["snapshot"] == snapshot).unwrap()["lost"].clone()
    };
    assert_eq!((lost_of(&list, Value::Null), lost_of(&list, json!("s2"))), (json!(4096), json!(0)), "{list}");
    let done = run(&format!("salvage {} --disk vm1 --to {}", made.store.path().display(), target.display()));
    assert!(done.code == 6 && done.stdout.contains(&format!("lost: bytes {AT} to {}\n", AT + 4096)), "{done:?}");
    // Two table entries name one grain: the backmap shows which entry is wrong. The range of the wrong entry must not
    // get the data of the other entry.
    let (other, _) = se_entry(&delta, 512 << 10);
    put(&delta, entry, &word(&delta, other).to_le_bytes());
    assert_eq!(made.salvaged("").0, lost);
}

#[test]
fn a_damaged_snapshot_of_a_datastore_is_converted_with_skip_damaged() {
    let made = Made::new(&std::env::temp_dir(), "--format vmdk --delta sesparse");
    let delta = made.file("vm1-000001-sesparse.vmdk");
    let (entry, owner) = se_entry(&delta, 68 << 10);
    put(&delta, entry, &[0xff; 8]);
    put(&delta, owner, &[0; 8]);
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("target.raw");
    made.store.run(&format!("convert disk:vm1@s2 {} -d raw", target.display())).fails(6, "table entry");
    let done = made.store.run(&format!("convert disk:vm1@s2 {} -d raw --skip-damaged --json", target.display()));
    assert_eq!(compared(&made.contents["s2"], &target, done).0, [(68 << 10, 4096)]);
}

#[test]
fn a_directory_of_hosted_damaged_in_both_copies_loses_the_range_of_its_table() {
    let made = Made::new(&std::env::temp_dir(), "--format monolithicsparse --delta vmfssparse");
    let base = made.file("vm1.vmdk");
    let mut header = vec![0; 512];
    File::open(&base).unwrap().read_exact_at(&mut header, 0).unwrap();
    let field = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().unwrap()) * 512;
    let (redundant, primary) = (field(48), field(56));
    put(&base, primary + 4, &[0xde; 4]);
    let nothing: BTreeMap<_, _> = ["s1", "s2", ""].map(|name| (name, Lost::new())).into();
    assert_eq!(made.all_salvaged(), nothing, "the second directory is used");
    put(&base, redundant + 4, &[0xde; 4]);
    let lost = made.all_salvaged();
    assert_eq!(lost["s1"], [(32 * MIB, 16 * MIB)]);
    // Data that the deltas have in the damaged range is not lost.
    let parts = |lost: &Lost| lost.iter().map(|(_, length)| length).sum::<u64>();
    assert_eq!(parts(&lost["s2"]), 16 * MIB - 8 * (16 << 10));
    assert_eq!(parts(&lost[""]), 16 * MIB - 8 * (16 << 10) - 4 * PAGE as u64);
    assert_eq!(run(&format!("image check {}", base.display())).code, 6);
}

#[test]
fn a_missing_image_of_a_chain_loses_what_the_images_above_lack() {
    let made = Made::new(&std::env::temp_dir(), "--format vmdk --delta vmfssparse");
    let (aside, path) = (made.file("aside"), made.file("vm1-000001-delta.vmdk"));
    std::fs::rename(&path, &aside).unwrap();
    let kept = |at: u64| at % (4 * MIB) / PAGE as u64;
    let is_head = |at: u64| matches!(kept(at), 18 | 19 | 128);
    let mut lost = Lost::new();
    for at in (0..CAPACITY as u64).step_by(PAGE).filter(|at| !is_head(*at)) {
        match lost.last_mut() {
            Some((start, length)) if *start + *length == at => *length += PAGE as u64,
            _ => lost.push((at, PAGE as u64)),
        }
    }
    let found = made.all_salvaged();
    assert_eq!((&found["s1"], &found["s2"]), (&Lost::new(), &Lost::from([(0, CAPACITY as u64)])));
    assert_eq!(found[""], lost);
    // The result is the same if the descriptor is missing too, and if the record is lost.
    std::fs::rename(made.file("vm1-000001.vmdk"), made.file("aside-2")).unwrap();
    assert_eq!(made.salvaged("").0, lost);
    assert_eq!(made.salvaged_by_path("salvage", "vm1-000002.vmdk", &made.contents[""]).0, lost);
    std::fs::rename(made.file("aside-2"), made.file("vm1-000001.vmdk")).unwrap();
    std::fs::rename(&aside, &path).unwrap();
    let record = std::fs::read(made.file("lamina.disk")).unwrap();
    put(&made.file("lamina.disk"), 40, &[0; 8]);
    let (nothing, report) = made.salvaged("");
    assert!(nothing.is_empty() && report["proven"] == false, "{report}");
    assert!(report["notes"].to_string().contains("the record of disk 'vm1' is lost"), "{report}");
    assert!(made.salvaged("s1").0.is_empty());
    std::fs::write(made.file("lamina.disk"), record).unwrap();
    // A parent that was changed since its child was made is not used, unless this is forced.
    let text = std::fs::read_to_string(made.file("vm1-000001.vmdk")).unwrap();
    let start = text.find("\nCID=").unwrap() + 5;
    let changed = format!("{}{}{}", &text[..start], "0badcafe", &text[start + 8..]);
    std::fs::write(made.file("vm1-000001.vmdk"), changed).unwrap();
    assert_eq!(made.salvaged("").0, lost);
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("target.raw");
    let (from, to) = (made.store.path().display().to_string(), target.display().to_string());
    let done = run(&format!("salvage {from} --disk vm1 --to {to} --force-parent --json"));
    assert!(compared(&made.contents[""], &target, done).0.is_empty());
}

#[test]
fn a_damaged_page_of_vsansparse_loses_its_range() {
    let made = Made::new(&std::env::temp_dir(), "--format vmdk --delta vsansparse");
    let delta = made.file("vm1-000002-vsan.vmdk");
    // The pages of the map follow two root blocks. The test damages both copies of the page for bytes 4 MiB to 6 MiB.
    let page = (260 + 2 * 2) * PAGE as u64;
    let mut magic = [0; 4];
    File::open(&delta).unwrap().read_exact_at(&mut magic, page).unwrap();
    assert_eq!(&magic, b"LVSM");
    put(&delta, page + 64, &[0x77; 8]);
    put(&delta, page + PAGE as u64 + 64, &[0x77; 8]);
    let found = made.all_salvaged();
    assert_eq!((&found["s2"], &found[""]), (&Lost::new(), &Lost::from([(4 * MIB, 2 * MIB)])));
    // The root block describes 16 GiB, so that the whole disk is lost.
    put(&delta, 258 * PAGE as u64 + 64, &[0x77; 8]);
    put(&delta, 259 * PAGE as u64 + 64, &[0x77; 8]);
    assert_eq!(made.salvaged("").0, [(0, CAPACITY as u64)]);
}

#[test]
fn disks_are_salvaged_from_a_datastore_of_which_nothing_else_is_left() {
    let made = Made::new(&std::env::temp_dir(), "--format vmdk --delta sesparse");
    for name in ["superblock", "journal", "checkpoint", "catalog", "map", "map.table", "map.summary", "data.table"] {
        std::fs::remove_file(made.store.path().join(name)).unwrap();
    }
    let other = Store::at(&std::env::temp_dir(), "4M");
    let (from, to) = (made.store.path().display().to_string(), other.path().display().to_string());
    let done = run(&format!("salvage {from} --disk vm1 --snapshot s2 --to {to} --format thin"));
    assert_eq!(done.code, 0, "{done:?}");
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("copy.raw");
    other.run(&format!("convert disk:vm1-s2 {} -d raw", copy.display())).ok();
    assert!(std::fs::read(copy).unwrap() == made.contents["s2"]);
    let list = run(&format!("salvage {from} --list"));
    assert!(list.code == 6 && list.stdout.contains("vm1@s1") && list.stdout.contains("native disks"), "{list:?}");
    run(&format!("salvage {from} --disk vm2 --to {from}/x.raw")).fails(3, "vm2");
    run(&format!("salvage {from} --to {from}/x.raw")).fails(2, "--disk");
}

/// The place on the device of a byte of a file.
fn place_of(path: &Path, at: u64) -> u64 {
    let text = tool("filefrag", &["-v", "-b1", path.to_str().unwrap()]);
    for line in text.lines() {
        let numbers: Vec<u64> =
            line.split(|c: char| !c.is_ascii_digit()).filter_map(|number| number.parse().ok()).collect();
        if let [_, first, last, physical, ..] = numbers[..]
            && line.contains("..")
            && (first..=last).contains(&at)
        {
            return physical + at - first;
        }
    }
    panic!("{} has nothing at {at}: {text}", path.display());
}

#[test]
fn unreadable_sectors_lose_their_blocks_or_the_range_of_their_table() {
    on_medium("unreadable_sectors_lose_their_blocks_or_the_range_of_their_table", 192, |medium| {
        medium.make_file_system(false);
        medium.mount("defaults");
        let made = Made::new(&medium.mounted.clone(), "--format vmdk --delta sesparse");
        let (base, delta) = (made.file("vm1-flat.vmdk"), made.file("vm1-000002-sesparse.vmdk"));
        // Data of the base that no delta hides; data of the newest delta; a page of a table, which maps 2 MiB.
        let (entry, _) = se_entry(&delta, 512 << 10);
        let grain = {
            let raw = word(&delta, entry);
            word(&delta, 80 + 16 * 7) * 512 + ((raw >> 48 & 0xfff) | (raw & ((1 << 48) - 1)) << 12) * 4096
        };
        let (page, _) = se_entry(&delta, 20 * MIB + (72 << 10));
        let bad = [(&base, 5 * MIB + (16 << 10)), (&base, 5 * MIB + (20 << 10)), (&delta, grain), (&delta, page)];
        for (path, at) in bad {
            let place = place_of(path, at);
            medium.spoil(place, 512);
        }
        medium.unmount();
        medium.mount("defaults");
        let lost = [(512 << 10, 4096), (5 * MIB + (16 << 10), 8192), (20 * MIB, 2 * MIB)];
        assert_eq!(made.salvaged("").0, lost);
        assert_eq!(made.salvaged("s2").0, lost[1..2]);
        assert_eq!(made.salvaged_by_path("convert", "vm1-000002.vmdk", &made.contents[""]).0, lost);
        let target = tempfile::tempdir().unwrap();
        let to = target.path().join("x.raw");
        let refused = run(&format!("convert {} {} -d raw", made.file("vm1-000002.vmdk").display(), to.display()));
        assert!(refused.code == 1 && !to.exists(), "{refused:?}");
        drop(made);
    });
}
