//! Disks that are used while their content arrives: from a source in memory that can be missing or damaged.

use super::super::background::Background;
use super::super::handover::Handover;
use super::super::import::Purpose;
use super::super::intent::{Copy, Intent, Intents, OVERLAY, Stage};
use super::super::live_source::{DataRun, LiveSource, LiveSourceKind, LiveSourceRecord, register_live_source};
use super::super::{NativeLayer, NewArrivingDisk, Overlay};
use crate::device::Device;
use crate::testbed::options;
use crate::{CheckOptions, Datastore, InitOptions, NewDisk, NoProgress, Provisioning, QueueChoice};
use backend::SharedSlice;
use chain::Chain;
use error::{Error, ErrorKind, Result};
use layer::Layer;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, Once};
use testkit::Random;

const MIB: u64 = 1 << 20;
/// A capacity that ends in the middle of a block.
const CAPACITY: u64 = 24 * MIB + 512;

/// A source in memory. A read fails if it touches a damaged range.
struct Memory {
    content: Vec<u8>,
    /// Every other piece of this length has data.
    piece: u64,
    /// Damage of a byte makes this many bytes unreadable.
    unit: u64,
    damaged: Mutex<Vec<Range<u64>>>,
    missing: AtomicBool,
    /// Whether the source is damaged so that it cannot be opened.
    unopenable: AtomicBool,
    opened: AtomicU64,
    read: AtomicU64,
    released: AtomicU64,
    /// A datastore that is copied when the source is released, and where to.
    copied: Mutex<Option<(PathBuf, PathBuf)>>,
}

/// The sources of all tests, by name.
static SOURCES: LazyLock<Mutex<BTreeMap<String, Arc<Memory>>>> = LazyLock::new(Mutex::default);

impl Memory {
    fn check(&self) -> Result<()> {
        match self.missing.load(Ordering::SeqCst) {
            true => Err(Error::new(ErrorKind::NotFound, "the source is gone")),
            false => Ok(()),
        }
    }

    /// Random data in every other piece.
    fn add(name: &str, seed: u64, piece: u64, unit: u64) -> Arc<Self> {
        static REGISTERED: Once = Once::new();
        REGISTERED.call_once(|| {
            register_live_source(LiveSourceKind { name: "memory", open, release }).unwrap();
        });
        let mut random = Random::new(seed);
        let mut content = vec![0; CAPACITY as usize];
        for data in content.chunks_mut(piece as usize).step_by(2) {
            data.copy_from_slice(&random.bytes(data.len()));
        }
        let (damaged, missing, unopenable) = (Mutex::default(), AtomicBool::new(false), AtomicBool::new(false));
        let (opened, read, released) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
        let copied = Mutex::default();
        let memory = Self { content, piece, unit, damaged, missing, unopenable, opened, read, released, copied };
        let memory = Arc::new(memory);
        SOURCES.lock().unwrap().insert(name.to_owned(), Arc::clone(&memory));
        memory
    }
}

fn find(name: &str) -> Arc<Memory> {
    Arc::clone(SOURCES.lock().unwrap().get(name).unwrap())
}

fn open(name: &str) -> Result<Arc<dyn LiveSource>> {
    let memory = find(name);
    memory.check()?;
    memory.opened.fetch_add(1, Ordering::SeqCst);
    match memory.unopenable.load(Ordering::SeqCst) {
        true => Err(Error::new(ErrorKind::Corrupt, "the source has no beginning")),
        false => Ok(memory),
    }
}

fn release(name: &str) -> Result<()> {
    let memory = find(name);
    memory.released.fetch_add(1, Ordering::SeqCst);
    if let Some((from, to)) = memory.copied.lock().unwrap().take() {
        assert!(Command::new("cp").arg("-a").args([from, to]).status().unwrap().success());
    }
    Ok(())
}

impl LiveSource for Memory {
    fn capacity(&self) -> u64 {
        self.content.len() as u64
    }

    fn runs(&self, range: Range<u64>, most: usize) -> Result<Vec<DataRun>> {
        self.check()?;
        let mut runs = Vec::new();
        let mut at = range.start;
        while at < range.end && runs.len() < most {
            let end = ((at / self.piece + 1) * self.piece).min(range.end);
            runs.push(DataRun { length: end - at, data: (at / self.piece).is_multiple_of(2) });
            at = end;
        }
        Ok(runs)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.check()?;
        let end = offset + out.len() as u64;
        if self.damaged.lock().unwrap().iter().any(|bad| bad.start < end && offset < bad.end) {
            return Err(Error::new(ErrorKind::Corrupt, format!("the source is damaged at {offset}")));
        }
        self.read.fetch_add(out.len() as u64, Ordering::SeqCst);
        out.copy_from_slice(&self.content[offset as usize..end as usize]);
        Ok(())
    }

    fn unit_end(&self, at: u64) -> u64 {
        (at / self.unit + 1) * self.unit
    }
}

/// Makes a disk whose content arrives from the source with that name.
fn begin(datastore: &Datastore, disk: &str, source: &str) {
    let record = LiveSourceRecord {
        kind: "memory".into(),
        title: format!("the source {source}"),
        place: source.into(),
        capacity: CAPACITY,
    };
    datastore.begin_arrival(&NewArrivingDisk { name: disk.into(), source: record, rate: 0 }).unwrap();
}

/// A datastore in a folder, and a disk `vm` whose content arrives.
struct Room {
    folder: tempfile::TempDir,
    path: PathBuf,
    /// `None` while it is opened again.
    open: Option<Arc<Datastore>>,
    source: Arc<Memory>,
    model: Vec<u8>,
}

fn opened(path: &Path) -> Arc<Datastore> {
    Datastore::open(path, options(QueueChoice::Threads)).unwrap()
}

impl Room {
    fn new(name: &str, seed: u64) -> Self {
        Self::of_pieces(name, seed, MIB, MIB)
    }

    fn of_pieces(name: &str, seed: u64, piece: u64, unit: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ds");
        Datastore::init(&path, InitOptions { journal_size: 8 << 20 }).unwrap();
        let (datastore, source) = (opened(&path), Memory::add(name, seed, piece, unit));
        begin(&datastore, "vm", name);
        let model = source.content.clone();
        Self { folder, path, open: Some(datastore), source, model }
    }

    fn datastore(&self) -> &Arc<Datastore> {
        self.open.as_ref().unwrap()
    }

    fn reopen(&mut self) {
        self.datastore().close().unwrap();
        self.open = None;
        self.open = Some(opened(&self.path));
    }

    fn overlay(&self) -> Overlay {
        Overlay::of(&self.datastore().foreign.find("vm").unwrap().disk.record()).unwrap().unwrap()
    }

    /// Begins the work of a server, and waits until the sources of removed disks are released and their folders gone.
    fn release_the_rest(&self, released: u64) {
        self.datastore().start_imports();
        let folders = || std::fs::read_dir(self.path.join("images")).map_or(0, Iterator::count);
        testkit::process::until("the source is released and its folder removed", || {
            self.source.released.load(Ordering::SeqCst) == released && folders() == 0
        });
    }

    fn attempt(&self, background: &Background) -> Result<()> {
        let uuid = self.datastore().uuid_of("vm").unwrap();
        self.datastore().move_in_once(&uuid, &self.overlay(), background).unwrap().map(drop)
    }

    fn device(&self) -> Arc<dyn Device> {
        self.datastore().device("vm", false).unwrap()
    }

    fn write(&mut self, at: u64, bytes: &[u8]) {
        self.device().write(at, SharedSlice::copy_of(bytes), false).unwrap();
        self.model[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
    }

    fn is_whole(&self) {
        let device = self.device();
        for at in (0..CAPACITY).step_by(MIB as usize) {
            let length = MIB.min(CAPACITY - at) as usize;
            let expected = &self.model[at as usize..at as usize + length];
            assert!(device.read(at, length).unwrap() == *expected, "the MiB at {at}");
        }
    }

    fn is_native_and_clean(&self) {
        assert_eq!(self.datastore().disk("vm").unwrap().format, "native");
        assert_eq!(self.datastore().native.hidden(OVERLAY), Vec::<String>::new());
        let report = self.datastore().check(CheckOptions { data: true, repair: false }, &NoProgress).unwrap();
        assert!(report.findings.is_empty(), "{:?}", report.findings);
    }
}

#[test]
fn a_disk_can_be_used_before_its_content_arrives_and_is_native_afterwards() {
    let mut room = Room::new("used", 1);
    let uuid = room.datastore().uuid_of("vm").unwrap();
    room.is_whole();
    // Parts of blocks, blocks without content, and the end of the disk.
    for (at, length) in [(100, 10), (MIB - 700, 1400), (3 * MIB + 5, 4096), (5 * MIB, 2 * MIB), (CAPACITY - 7, 7)] {
        room.write(at, &vec![0x5a; length as usize]);
    }
    room.device().discard(8 * MIB + 4096, MIB, false).unwrap();
    room.model[8 * MIB as usize + 4096..9 * MIB as usize + 4096].fill(0);
    room.is_whole();
    let info = room.datastore().disk("vm").unwrap();
    assert_eq!(info.image.unwrap().live.unwrap().source.as_deref(), Some("the source used"));
    let client = room.device();
    room.attempt(&Background::default()).unwrap();
    assert_eq!(room.source.released.load(Ordering::SeqCst), 1);
    room.source.missing.store(true, Ordering::SeqCst);
    // The client that had the disk open uses the native disk now.
    assert!(client.read(0, MIB as usize).unwrap() == room.model[..MIB as usize]);
    drop(client);
    assert_eq!(room.datastore().uuid_of("vm").unwrap(), uuid);
    room.is_whole();
    room.is_native_and_clean();
    room.reopen();
    room.is_whole();
    room.is_native_and_clean();
}

#[test]
fn what_has_arrived_needs_no_source_and_is_not_copied_again() {
    let mut room = Room::new("kept", 2);
    // The damage stops the first attempt from completing the disk.
    room.source.damaged.lock().unwrap().push(10 * MIB..10 * MIB + 1);
    let error = room.attempt(&Background::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.to_string().contains("1 MiB of disk 'vm' cannot be read from its source"), "{error}");
    room.reopen();
    room.source.missing.store(true, Ordering::SeqCst);
    let device = room.device();
    for at in (0..CAPACITY).step_by(MIB as usize) {
        let length = MIB.min(CAPACITY - at) as usize;
        match device.read(at, length) {
            Ok(bytes) => assert!(bytes == room.model[at as usize..at as usize + length], "the MiB at {at}"),
            // Ranges without data have not arrived, and only the source shows that they have none.
            Err(error) => assert!(error.kind() == ErrorKind::Io && (at == 10 * MIB || at / MIB % 2 == 1), "{error}"),
        }
    }
    drop(device);
    room.source.missing.store(false, Ordering::SeqCst);
    let before = room.source.read.load(Ordering::SeqCst);
    // A client writes the damaged range, after which nothing of it is needed.
    room.write(10 * MIB, &vec![0x77; MIB as usize]);
    room.attempt(&Background::default()).unwrap();
    assert_eq!(room.source.read.load(Ordering::SeqCst), before, "everything had arrived");
    room.source.missing.store(true, Ordering::SeqCst);
    room.is_whole();
    room.is_native_and_clean();
}

/// One step of the copy reads several units of the source, and only one of them is damaged.
#[test]
fn everything_beside_damage_arrives() {
    const UNIT: u64 = 64 << 10;
    for (piece, name) in [(MIB, "long"), (UNIT, "pieces")] {
        let mut room = Room::of_pieces(name, 21, piece, UNIT);
        room.source.damaged.lock().unwrap().push(2 * UNIT..2 * UNIT + 1);
        let error = room.attempt(&Background::default()).unwrap_err();
        assert!(error.to_string().contains("64 KiB of disk 'vm' cannot be read from its source"), "{error}");
        room.source.missing.store(true, Ordering::SeqCst);
        let device = room.device();
        for at in (0..CAPACITY).step_by(UNIT as usize).filter(|at| *at != 2 * UNIT && (at / piece).is_multiple_of(2)) {
            let length = UNIT.min(CAPACITY - at) as usize;
            assert!(device.read(at, length).unwrap() == room.model[at as usize..at as usize + length], "byte {at}");
        }
        drop(device);
        room.source.missing.store(false, Ordering::SeqCst);
        room.write(2 * UNIT, &[0x33; UNIT as usize]);
        room.attempt(&Background::default()).unwrap();
        room.is_whole();
        room.is_native_and_clean();
    }
}

/// The source has more damaged parts than could be listed, also in the last block, which the capacity cuts.
#[test]
fn any_number_of_damaged_parts_leaves_out_only_these() {
    const UNIT: u64 = 4096;
    const PARTS: u64 = 1500;
    let room = Room::of_pieces("shredded", 24, UNIT, UNIT);
    let is_damaged = |at: u64| (at / UNIT).is_multiple_of(4) && (at / UNIT / 4 < PARTS - 1 || at == 24 * MIB);
    let damaged = (0..CAPACITY).step_by(UNIT as usize).filter(|at| is_damaged(*at));
    room.source.damaged.lock().unwrap().extend(damaged.map(|at| at..at + 1));
    assert_eq!(room.source.damaged.lock().unwrap().len() as u64, PARTS);
    let error = room.attempt(&Background::default()).unwrap_err().to_string();
    assert!(error.contains("the first of 1500 parts at byte 0: "), "{error}");
    let missing = error::text::size((PARTS - 1) * UNIT + CAPACITY % UNIT);
    assert!(error.contains(&format!("{missing} of disk 'vm' cannot be read")), "{error}");
    let info = room.datastore().disk("vm").unwrap();
    assert!(info.image.unwrap().live.is_some(), "the disk keeps its source");
    room.source.missing.store(true, Ordering::SeqCst);
    let device = room.device();
    for at in (0..CAPACITY).step_by(2 * UNIT as usize) {
        let length = UNIT.min(CAPACITY - at) as usize;
        match device.read(at, length) {
            Ok(bytes) => assert!(bytes == room.model[at as usize..at as usize + length], "byte {at}"),
            Err(error) => assert!(is_damaged(at), "byte {at}: {error}"),
        }
    }
    drop(device);
    // The source comes back without the damage.
    room.source.missing.store(false, Ordering::SeqCst);
    room.source.damaged.lock().unwrap().clear();
    room.attempt(&Background::default()).unwrap();
    room.is_whole();
    room.is_native_and_clean();
}

/// An attempt that took it for damage would open it once for each block of the disk.
#[test]
fn a_source_that_cannot_be_opened_ends_the_attempt() {
    let room = Room::new("unopenable", 25);
    room.source.unopenable.store(true, Ordering::SeqCst);
    let error = room.attempt(&Background::default()).unwrap_err();
    assert!(error.kind() == ErrorKind::Io && error.to_string().contains("the source has no beginning"), "{error}");
    let opened = room.source.opened.load(Ordering::SeqCst);
    assert!(opened < 50, "opened {opened} times");
    room.source.unopenable.store(false, Ordering::SeqCst);
    room.attempt(&Background::default()).unwrap();
    room.is_whole();
    room.is_native_and_clean();
}

/// An attempt looks up the name of its disk, and uses the disk exclusively only after that.
#[test]
fn an_attempt_never_takes_another_disk_that_got_the_name() {
    let mut room = Room::new("renamed", 22);
    room.write(MIB, &[0x44; 4096]);
    let overlay = room.overlay();
    room.datastore().rename_disk("vm", "old").unwrap();
    Memory::add("another", 23, MIB, MIB);
    begin(room.datastore(), "vm", "another");
    let error = room.datastore().arrive("vm", &overlay, &NoProgress).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    room.datastore().delete_disk("vm", false).unwrap();
    room.datastore().rename_disk("old", "vm").unwrap();
    room.attempt(&Background::default()).unwrap();
    room.is_whole();
    room.is_native_and_clean();
}

#[test]
fn a_missing_source_fails_only_what_has_not_arrived() {
    let mut room = Room::new("missing", 3);
    room.write(2 * MIB, &vec![0x11; MIB as usize]);
    room.source.missing.store(true, Ordering::SeqCst);
    room.reopen();
    let error = room.attempt(&Background::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    assert!(error.to_string().contains("the source missing: the source is gone"), "{error}");
    let device = room.device();
    assert!(device.read(2 * MIB, MIB as usize).unwrap() == vec![0x11; MIB as usize]);
    assert_eq!(device.read(4 * MIB, 4096).unwrap_err().kind(), ErrorKind::Io);
    // The rest of a block is not known, so a part of it cannot be written; a whole block can.
    assert!(device.write(4 * MIB, SharedSlice::copy_of(&[1; 100]), false).is_err());
    drop(device);
    room.write(4 * MIB, &[2; 4096]);
    room.source.missing.store(false, Ordering::SeqCst);
    room.is_whole();
    room.attempt(&Background::default()).unwrap();
    room.is_whole();
    room.is_native_and_clean();
}

#[test]
fn writes_during_the_arrival_and_its_end_are_not_lost() {
    for seed in 0..4 {
        let mut room = Room::new(&format!("busy-{seed}"), 10 + seed);
        let stop = AtomicBool::new(false);
        let device = room.device();
        let mut models = Vec::new();
        std::thread::scope(|scope| {
            let writers: Vec<_> = (0..3u64)
                .map(|writer| {
                    let (device, stop) = (&device, &stop);
                    scope.spawn(move || {
                        let mut random = Random::new(seed * 10 + writer);
                        let mut written = Vec::new();
                        while !stop.load(Ordering::SeqCst) {
                            // Each writer has its own bytes of every block.
                            let block = random.below(CAPACITY / 4096) * 4096;
                            let (at, length) = (block + writer * 1300, 1 + random.index(1300));
                            let bytes = random.bytes(length);
                            device.write(at, SharedSlice::copy_of(&bytes), random.below(50) == 0).unwrap();
                            written.push((at, bytes));
                        }
                        written
                    })
                })
                .collect();
            std::thread::sleep(std::time::Duration::from_millis(20));
            room.attempt(&Background::default()).unwrap();
            std::thread::sleep(std::time::Duration::from_millis(20));
            stop.store(true, Ordering::SeqCst);
            models.extend(writers.into_iter().flat_map(|writer| writer.join().unwrap()));
        });
        for (at, bytes) in models {
            room.model[at as usize..at as usize + bytes.len()].copy_from_slice(&bytes);
        }
        drop(device);
        room.is_whole();
        room.is_native_and_clean();
    }
}

#[test]
fn a_committed_arrival_is_completed_when_the_datastore_is_opened() {
    let mut room = Room::new("committed", 4);
    room.source.damaged.lock().unwrap().push(0..1);
    room.attempt(&Background::default()).unwrap_err();
    room.write(0, &vec![0x42; MIB as usize]);
    // As a crash leaves it after the record was committed.
    let entry = room.datastore().foreign.find("vm").unwrap();
    let intent = Intent {
        id: room.overlay().native.trim_start_matches(OVERLAY).to_owned(),
        stage: Stage::Committed,
        disk: "vm".into(),
        source: Some(Copy::Images { folder: entry.folder.clone() }),
        target: Copy::Overlay {},
        uuid: entry.disk.uuid(),
        created: 7,
        peer: None,
    };
    drop(entry);
    Intents::new(Arc::clone(room.datastore().directory())).put(&intent).unwrap();
    room.source.missing.store(true, Ordering::SeqCst);
    room.reopen();
    room.is_whole();
    room.is_native_and_clean();
    assert_eq!(room.datastore().uuid_of("vm").unwrap(), intent.uuid);
    room.release_the_rest(1);
    assert!(Intents::new(Arc::clone(room.datastore().directory())).all().unwrap().0.is_empty());
}

#[test]
fn a_deleted_disk_leaves_nothing_and_releases_its_source() {
    let room = Room::new("deleted", 5);
    room.datastore().start_imports();
    room.datastore().delete_disk("vm", false).unwrap();
    assert_eq!(room.datastore().native.hidden("."), Vec::<String>::new());
    assert_eq!(room.source.released.load(Ordering::SeqCst), 1);
    assert!(room.datastore().disks().unwrap().is_empty());
}

/// Otherwise a kill between the removal of the record and the release would protect the source for ever.
#[test]
fn a_source_is_released_while_a_record_names_it() {
    for deleted in [false, true] {
        let mut room = Room::new(&format!("told-{deleted}"), 30);
        // What a kill would leave.
        let copy = room.folder.path().join("killed");
        *room.source.copied.lock().unwrap() = Some((room.path.clone(), copy.clone()));
        match deleted {
            true => room.datastore().delete_disk("vm", false).unwrap(),
            false => room.attempt(&Background::default()).unwrap(),
        }
        assert_eq!(room.source.released.load(Ordering::SeqCst), 1);
        room.path = copy;
        room.open = Some(opened(&room.path));
        // The source may not answer for minutes, so an opening does not wait for it.
        assert_eq!(room.source.released.load(Ordering::SeqCst), 1, "deleted: {deleted}");
        room.release_the_rest(2);
        match deleted {
            true => assert!(room.datastore().disks().unwrap().is_empty()),
            false => {
                room.is_whole();
                room.is_native_and_clean();
            }
        }
    }
}

#[test]
fn a_migrated_disk_releases_its_source() {
    let room = Room::new("migrated", 8);
    let target = super::super::MigrateOptions {
        format: crate::DiskFormat::Native,
        provisioning: Provisioning::Thin,
        delta: None,
    };
    room.datastore().migrate("vm", &target, &NoProgress).unwrap();
    assert_eq!(room.source.released.load(Ordering::SeqCst), 1);
    room.is_whole();
    room.is_native_and_clean();
}

/// A program that does not know disks whose content arrives must not open one: it would read zeros.
#[test]
fn the_record_of_an_arriving_disk_is_none_of_an_import() {
    let room = Room::new("record", 6);
    let overlay = room.overlay();
    assert!(matches!(&overlay.purpose, Purpose::Arrival(source) if source.place == "record"));
    let text: serde_json::Value = serde_json::from_str(&overlay.encode().unwrap()).unwrap();
    assert_eq!(text.as_object().unwrap().keys().collect::<Vec<_>>(), ["arrival"]);
    let page = include_str!("../../../../../docs/format/vmdk-disk.md");
    for member in text["arrival"].as_object().unwrap().keys() {
        assert!(page.contains(&format!("`{member}`")), "the page does not explain `{member}`");
    }
}

#[test]
fn changes_beside_a_chain_are_seen_by_its_writes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ds");
    Datastore::init(&path, InitOptions { journal_size: 8 << 20 }).unwrap();
    let datastore = opened(&path);
    datastore.create_disk("over", &NewDisk::native(MIB, Provisioning::Thin), &NoProgress).unwrap();
    let disk = datastore.device("over", false).unwrap();
    let layer: Arc<dyn Layer> = Arc::new(NativeLayer::new(Arc::clone(&disk)));
    let chain = Arc::new(Chain::open("over", vec![layer], chain::Options::default()).unwrap());
    let beside = Handover::new(Arc::clone(&chain), Arc::clone(&disk));
    // The chain caches that the block has no content.
    let mut before = [1; 4096];
    chain.read(0, &mut before).unwrap();
    assert_eq!(before, [0; 4096]);
    beside.write(2001, SharedSlice::copy_of(&[2; 99]), false).unwrap();
    chain.write(11, &[1; 7]).unwrap();
    beside.write_zeroes(2050, 10, false, false).unwrap();
    let bytes = disk.read(0, 4096).unwrap();
    assert_eq!((&bytes[11..18], &bytes[2001..2050], &bytes[2060..2100]), (&[1; 7][..], &[2; 49][..], &[2; 40][..]));
    assert_eq!(bytes.iter().filter(|byte| **byte != 0).count(), 7 + 49 + 40);
    assert!(beside.write(MIB - 1, SharedSlice::copy_of(&[1; 2]), false).is_err());
    assert!(beside.discard(0, 2 * MIB, false).is_err());
    assert!(disk.read(2001, 1).unwrap() == [2], "a range that is refused is not discarded in part");
}
