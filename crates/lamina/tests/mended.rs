//! Damaged metadata of images in VMware's formats: `image check` and `check` find the damage, `--repair` repairs tables
//! of which the format has a second copy, and other damage is reported.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use testkit::process;
use testkit::process::{Done, Store, files, lamina};

const MIB: usize = 1 << 20;
/// Offsets of the directory and the tables in SEsparse images of up to 16 TiB.
const DIRECTORY: usize = 4096 * 512;
const TABLES: usize = 6144 * 512;

fn run_in(folder: &Path, arguments: &str) -> Done {
    process::output(lamina().current_dir(folder).args(arguments.split_whitespace())).into()
}

/// The JSON output of a command that also prints warnings.
fn json(done: Done) -> serde_json::Value {
    assert_eq!(done.code, 0, "{done:?}");
    serde_json::from_str(&done.stdout).unwrap()
}

/// A raw disk with data in every grain.
fn make_raw(path: &Path) -> Vec<u8> {
    let bytes: Vec<u8> = (0..20 * MIB as u32 / 4).flat_map(|at| at.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    std::fs::write(path, &bytes).unwrap();
    bytes
}

/// Changes bits of one byte of a file.
fn flip(path: &Path, at: usize, mask: u8) {
    let mut bytes = std::fs::read(path).unwrap();
    bytes[at] ^= mask;
    std::fs::write(path, bytes).unwrap();
}

fn word(path: &Path, at: usize) -> usize {
    let bytes = std::fs::read(path).unwrap();
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize
}

/// Offset of the first entries of a hosted extent's primary table.
fn primary_table(path: &Path) -> usize {
    word(path, word(path, 56) * 512) * 512
}

fn read_back(folder: &Path, image: &str) -> Vec<u8> {
    let out = folder.join("back.raw");
    let _ = std::fs::remove_file(&out);
    run_in(folder, &format!("convert {image} back.raw -d raw")).ok();
    std::fs::read(out).unwrap()
}

#[test]
fn images_are_repaired_from_metadata_that_is_stored_twice() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let bytes = make_raw(&path.join("a.raw"));
    run_in(path, "convert -f raw a.raw hosted.vmdk -d monolithicsparse").ok();
    run_in(path, "convert -f raw a.raw se.vmdk -d sesparse").ok();
    let (hosted, se) = (path.join("hosted.vmdk"), path.join("se-sesparse.vmdk"));
    assert!(files(path).contains(&"se-sesparse.vmdk".to_owned()), "{:?}", files(path));
    let table = primary_table(&hosted);
    let cases: [(&str, &Path, usize, u8); 6] = [
        ("hosted.vmdk", &hosted, table + 5 * 4, 0x80),
        ("hosted.vmdk", &hosted, word(&hosted, 48) * 512, 0x01),
        ("se.vmdk", &se, TABLES + 7 * 8 + 6, 0x01),
        ("se.vmdk", &se, TABLES + 9 * 8 + 7, 0x90),
        ("se.vmdk", &se, DIRECTORY + 7, 0x80),
        ("se.vmdk", &se, 16, 0x40),
    ];
    for (image, file, at, mask) in cases {
        flip(file, at, mask);
        let context = format!("{image}, byte {at}");
        let damaged = std::fs::read(file).unwrap();
        let found = run_in(path, &format!("image check {image}"));
        assert_eq!(found.code, 6, "{context}: {found:?}");
        assert!(std::fs::read(file).unwrap() == damaged, "{context}: checking changes nothing");
        let mended = json(run_in(path, &format!("image check --repair {image} --json")));
        assert_eq!(mended["problems"], 0, "{context}: {mended}");
        assert!(mended["repaired"].as_u64().unwrap() > 0, "{context}: {mended}");
        run_in(path, &format!("image check {image}")).ok();
        assert!(read_back(path, image) == bytes, "{context}: the content has changed");
    }
}

#[test]
fn unprovable_damage_is_reported_for_each_grain() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    make_raw(&path.join("a.raw"));
    run_in(path, "convert -f raw a.raw hosted.vmdk -d monolithicsparse").ok();
    let hosted = path.join("hosted.vmdk");
    // Both copies of the entry of grain 5 are invalid.
    let redundant = word(&hosted, word(&hosted, 48) * 512) * 512;
    for table in [primary_table(&hosted), redundant] {
        flip(&hosted, table + 5 * 4 + 3, 0x70);
    }
    let told = "grain 5 (bytes 327680 to 393216 of its disk)";
    for verb in ["image check hosted.vmdk", "image check --repair hosted.vmdk", "image check hosted.vmdk"] {
        let done = run_in(path, verb);
        assert!(done.code == 6 && done.stdout.contains(told), "{verb}: {done:?}");
        // The file cannot grow to the sector that the entry names without new grains at this sector.
        let refused = done.stdout.contains("--skip-damaged, which lists the lost parts");
        assert_eq!(refused, verb.contains("--repair"), "{verb}: {done:?}");
    }
}

/// The only file with this suffix in the folder of the only disk in a VMware format.
fn file_of(store: &Path, end: &str) -> PathBuf {
    let folders = std::fs::read_dir(store.join("images")).unwrap().map(|entry| entry.unwrap().path());
    let files = folders.flat_map(|folder| std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()));
    files.into_iter().find(|path| path.to_str().unwrap().ends_with(end)).unwrap()
}

#[test]
fn disks_of_a_datastore_are_repaired() {
    for (format, end) in [("monolithicsparse", ".vmdk"), ("sesparse", "-sesparse.vmdk")] {
        let store = Store::new();
        let folder = tempfile::tempdir().unwrap();
        let bytes = make_raw(&folder.path().join("a.raw"));
        let on = |arguments: &str| {
            let mut command = store.command(arguments);
            Done::from(process::output(command.current_dir(folder.path())))
        };
        on(&format!("convert -f raw a.raw disk:vm -d {format}")).ok();
        let file = file_of(&store.path(), end);
        let places = match format {
            "sesparse" => vec![TABLES + 7 * 8 + 6, DIRECTORY + 7, DIRECTORY + 5],
            _ => vec![primary_table(&file) + 5 * 4 + 1],
        };
        for at in places {
            flip(&file, at, 0x01);
            let context = format!("{format}, byte {at}");
            let mended = json(on("check --repair --json"));
            let findings = mended["findings"].as_array().unwrap();
            assert!(!findings.is_empty(), "{context}: {mended}");
            assert!(findings.iter().all(|finding| !finding["repaired"].is_null()), "{context}: {mended}");
            let again = on("check --json").json();
            assert_eq!(again["findings"].as_array().unwrap().len(), 0, "{context}: {again}");
            let _ = std::fs::remove_file(folder.path().join("back.raw"));
            on("convert disk:vm back.raw -d raw").ok();
            assert!(
                std::fs::read(folder.path().join("back.raw")).unwrap() == bytes,
                "{context}: the content has changed"
            );
        }
    }
}
