//! A datastore that lamina 0.1.0 filled: version 0.1.0 journalled the pages of a checkpoint, so a change of more pages
//! than the journal has room for made its datastore impossible to open. This version opens it.
//!
//! The datastore is kept in `golden/v1-overflowed.gz`, which is never made anew: for each file a line `NAME LENGTH
//! BYTES` and the file's first bytes, without the zeros at its end.

#![allow(clippy::unwrap_used)]

use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{BLOCK_SIZE, Buffer, IoMode, SharedSlice};
use flate2::Compression;
use flate2::bufread::GzDecoder;
use flate2::write::GzEncoder;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use store::engine::CheckOptions;
use store::{Engine, EngineOptions};
use testkit::nbd::Client;
use testkit::process::{Serving, files, output};

/// The program of version 0.1.0, for [`make`].
const OLD: &str = "LAMINA_OLD";
/// Blocks that are written and flushed, each twice: the second time while the journal fills.
const KEPT: u64 = 100;
/// Distance of the blocks, so that each is an extent of its own.
const STEP: u64 = 37;

fn golden() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/v1-overflowed.gz")
}

/// The content of a block after `round`.
fn block(number: u64, round: u64) -> Vec<u8> {
    let mut bytes = format!("block {number}, written in round {round}").into_bytes();
    bytes.resize(BLOCK_SIZE, 0);
    bytes
}

fn store_files(folder: &Path) {
    let mut out = GzEncoder::new(std::fs::File::create(golden()).unwrap(), Compression::best());
    let names = files(folder);
    for name in names.iter().filter(|name| *name != "lock") {
        let mut file = std::fs::File::open(folder.join(name)).unwrap();
        let length = file.metadata().unwrap().len();
        let mut bytes = Vec::new();
        // Past the first blocks, the data file has only space that was reserved.
        (&mut file).take(8 << 20).read_to_end(&mut bytes).unwrap();
        let mut rest = vec![0; 1 << 20];
        loop {
            let count = file.read(&mut rest).unwrap();
            if count == 0 {
                break;
            }
            if rest[..count].iter().any(|byte| *byte != 0) {
                assert_ne!(name, "data.0000", "data far behind the first blocks");
                bytes.extend(&rest[..count]);
            }
        }
        bytes.truncate(bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1));
        writeln!(out, "{name} {length} {}", bytes.len()).unwrap();
        out.write_all(&bytes).unwrap();
    }
    out.finish().unwrap();
}

fn restored() -> SimulatedDisk {
    let disk = SimulatedDisk::new(1, SimulatedOptions { capacity: 16 << 30, ..SimulatedOptions::default() });
    let directory = disk.directory();
    let packed = std::fs::read(golden()).unwrap();
    let mut files = BufReader::new(GzDecoder::new(&packed[..]));
    let mut line = String::new();
    while files.read_line(&mut line).unwrap() > 0 {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [name, length, count] = words[..] else { panic!("{line}") };
        let mut bytes = vec![0; count.parse().unwrap()];
        files.read_exact(&mut bytes).unwrap();
        let file = directory.create(name, IoMode::Buffered).unwrap();
        file.reserve(0, length.parse().unwrap()).unwrap();
        file.write_at(&[&bytes], 0, false).unwrap();
        file.sync().unwrap();
        line.clear();
    }
    directory.sync().unwrap();
    disk
}

#[test]
#[ignore = "makes the datastore anew, with the program of version 0.1.0"]
fn make() {
    let program = std::env::var_os(OLD).unwrap_or_else(|| panic!("{OLD} is the path of lamina 0.1.0"));
    let folder = tempfile::tempdir().unwrap();
    let (store, socket) = (folder.path().join("ds"), folder.path().join("nbd"));
    let run = |arguments: &str| {
        let mut command = Command::new(&program);
        output(command.arg("--datastore").arg(&store).args(arguments.split(' ')))
    };
    let succeeds = |arguments: &str| assert!(run(arguments).status.success(), "{arguments}");
    assert!(output(Command::new(&program).arg("init").arg(&store).args(["--journal-size", "4M"])).status.success());
    succeeds("disk create kept 64M");
    let serve = || {
        let mut command = Command::new(&program);
        command.arg("serve").arg(&store).arg("--socket").arg(&socket);
        Serving::start(command)
    };
    let write = |client: &mut Client, round: u64| {
        (0..KEPT).for_each(|number| client.write(number * STEP * BLOCK_SIZE as u64, &block(number, round)).unwrap());
        client.flush().unwrap();
    };
    let mut server = serve();
    write(&mut Client::connect(&socket, "kept").unwrap(), 1);
    // The table entries of the blocks of this disk take more pages than the journal can hold, and its deletion changes
    // all of them.
    succeeds("disk create large 2560M --provisioning zeroedthick");
    succeeds("disk delete large");
    write(&mut Client::connect(&socket, "kept").unwrap(), 2);
    assert_ne!(server.stop("TERM"), Some(0), "{}", server.log());
    let refused = run("check");
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && text.contains("the journal has no room for"), "{text}");
    store_files(&store);
}

#[test]
fn a_datastore_whose_journal_version_0_1_0_has_filled_opens_with_its_content() {
    let disk = restored();
    let options = EngineOptions { metadata_cache: 2 << 20, threads: false, ..EngineOptions::default() };
    for round in 2..4 {
        let engine = Engine::open(disk.directory(), options).unwrap();
        let report = engine.check(CheckOptions { data: true, repair: false }, &|_, _| true).unwrap();
        assert_eq!((report.findings, report.leaked), (vec![], 0));
        let names = engine.with_catalog(|catalog| catalog.disks().map(|disk| disk.name.clone()).collect::<Vec<_>>());
        assert_eq!(names, ["kept"], "the deletion was acknowledged");
        let kept = engine.head(engine.with_catalog(|catalog| catalog.disk("kept").unwrap().id));
        for number in 0..KEPT {
            let at = number * STEP;
            let found = engine.read_blocks("kept", at..at + 1, &|range| engine.plan_head(&kept, range)).unwrap();
            assert!(found[..] == block(number, round)[..], "block {number} in round {round}");
        }
        // The blocks of the deleted disk can be used.
        for number in 0..KEPT {
            let buffer = Buffer::copy_of(&block(number, round + 1));
            let data = SharedSlice::new(Arc::new(buffer), 0..BLOCK_SIZE);
            engine.write_blocks(&kept, number * STEP, data).unwrap();
        }
        engine.flush().unwrap();
        engine.close().unwrap();
    }
}

#[test]
fn the_page_of_the_format_names_the_version_that_0_1_0_writes() {
    let file = restored().directory().open("superblock", IoMode::Buffered).unwrap();
    let mut copies = Buffer::zeroed(2);
    file.read_at(&mut copies, 0).unwrap();
    let version = |copy: &[u8]| u32::from_le_bytes(copy[8..12].try_into().unwrap());
    let written: Vec<u32> = copies.chunks(BLOCK_SIZE).map(version).filter(|version| *version > 0).collect();
    assert!(!written.is_empty() && written.iter().all(|version| *version == 1), "{written:?}");
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/format/native.md");
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.contains("\n| 1 | 0.1.0 |") && page.contains("\n| 2 | after 0.1.0 |"));
}
