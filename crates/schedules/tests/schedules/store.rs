//! The store of a schedule: how it is set up, and what all its threads share.

use crate::model::{Fate, Image, Model, Object, SECTORS, Sector, fill};
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{BLOCK_SIZE, Buffer, IoMode, SharedSlice};
use error::{Error, Result};
use scheduled_store::catalog::Provisioning;
use scheduled_store::engine::{CheckOptions, Head, InitParameters, JOURNAL_SIZE_MIN, NewDisk};
use scheduled_store::{Engine, EngineOptions};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use testkit::Random;

/// The disks that there are from the start, and their blocks: the second takes writes that go past the buffer.
pub const DISKS: [(&str, u64); 2] = [("a", 12), ("b", 40)];
/// Stores to begin with, each with its journal ending elsewhere, the last ones shortly before the end of the ring.
pub const BASES: usize = 4;
/// Blocks journalled by one flush of a base: what one flush may journal at most, or less.
const STEP: u64 = 32;
/// Flushes that bring the journal of the second base close to the end of its ring.
const STEPS: u64 = 29;

/// Why a thread ends.
pub enum End {
    /// The power is off.
    Off,
    /// A rule is broken.
    Violation(String),
}

/// What a thread has to say.
pub type Checked<T = ()> = std::result::Result<T, End>;

/// Counted over all schedules.
#[derive(Default)]
pub struct Statistics {
    /// Choices of the scheduler.
    pub steps: Arc<AtomicU64>,
    /// Operations of clients that succeeded.
    pub operations: AtomicU64,
    /// Flushes that succeeded.
    pub flushes: AtomicU64,
    /// Changes of the catalog that succeeded.
    pub changes: AtomicU64,
    /// Schedules that a power cut ended in the middle.
    pub cuts: AtomicU64,
    /// Openings that a power cut ended.
    pub cut_openings: AtomicU64,
    /// Checkpoints.
    pub checkpoints: AtomicU64,
}

/// What the threads of a schedule share.
pub struct Store {
    /// The engine under test.
    pub engine: Arc<Engine>,
    /// Its medium.
    pub disk: SimulatedDisk,
    /// What it may hold. No thread goes on to another while it holds this.
    model: Mutex<Model>,
    /// Held while a disk is found, and while one ends or is exchanged: clients of a datastore have that from the layer
    /// above the engine.
    pub doors: shuttle::sync::Mutex<()>,
    /// See [`Statistics`].
    pub statistics: Arc<Statistics>,
    /// Only this schedule is run.
    traced: bool,
}

impl Store {
    /// On a medium that `engine` has open.
    pub fn new(engine: Arc<Engine>, disk: SimulatedDisk, model: Model, statistics: Arc<Statistics>) -> Self {
        let traced = std::env::var_os("LAMINA_SCHEDULE").is_some();
        Self { engine, disk, model: Mutex::new(model), doors: shuttle::sync::Mutex::new(()), statistics, traced }
    }

    /// The model, for as long as no other thread can go on.
    pub fn model(&self) -> MutexGuard<'_, Model> {
        self.model.lock().expect("no thread panics under it")
    }

    /// Tells what goes on, when one schedule is run again.
    pub fn note(&self, text: impl FnOnce() -> String) {
        if self.traced {
            println!("{:>6} {}", self.statistics.steps.load(Ordering::Relaxed), text());
        }
    }

    /// What a failure means.
    pub fn judge(&self, error: Error, what: &str) -> End {
        if self.disk.is_off() { End::Off } else { End::Violation(format!("{what}: {error}")) }
    }

    /// Makes everything acknowledged durable.
    pub fn flush(&self) -> Checked {
        let covered = self.model().covered();
        self.note(|| "flush ...".into());
        self.engine.flush().map_err(|error| self.judge(error, "flush"))?;
        self.note(|| "flush is done".into());
        self.model().flushed(&covered);
        count(&self.statistics.flushes);
        Ok(())
    }

    /// Nothing may be found.
    pub fn check(&self) -> Checked {
        check(&self.engine).map_err(|violation| if self.disk.is_off() { End::Off } else { End::Violation(violation) })
    }

    /// The head of a disk with its id and the generation of its image, if there is one.
    pub fn enter(&self, disk: &str) -> Option<(Arc<Head>, u64)> {
        let _door = self.doors.lock().expect("no thread panics under it");
        let (id, generation) = {
            let model = self.model();
            // An operation that the power cut interrupted may have taken effect or not.
            let object = model.objects.get(disk).filter(|object| matches!(object.fate, Fate::Stays))?;
            (object.id, object.image.generation)
        };
        Some((self.engine.head(id), generation))
    }
}

/// Every reference counted, every checksum verified: nothing may be found.
pub fn check(engine: &Engine) -> std::result::Result<(), String> {
    let report = engine.check(CheckOptions { data: true, repair: false }, &|_, _| true);
    let report = report.map_err(|error| format!("check: {error}"))?;
    if report.findings.is_empty() && report.leaked == 0 {
        return Ok(());
    }
    Err(format!("check finds {:?}, and {} bytes leaked", report.findings, report.leaked))
}

/// One more.
pub fn count(number: &AtomicU64) {
    number.fetch_add(1, Ordering::Relaxed);
}

/// Memory with what `write` leaves in blocks.
pub fn content(write: u64, first: u64, blocks: u64) -> SharedSlice {
    let mut buffer = Buffer::zeroed(blocks as usize);
    for (i, sector) in buffer.chunks_exact_mut(crate::model::SECTOR).enumerate() {
        fill(write, first as usize * SECTORS + i, sector);
    }
    let length = buffer.len();
    SharedSlice::new(Arc::new(buffer), 0..length)
}

/// A disk to be made.
pub fn new_disk(name: &str, blocks: u64) -> NewDisk {
    let capacity = blocks * BLOCK_SIZE as u64;
    NewDisk { name: name.into(), capacity, provisioning: Provisioning::Thin, uuid: [1; 16], incomplete: false }
}

/// How the engine of a schedule behaves.
pub fn options(random: &mut Random) -> EngineOptions {
    let block = BLOCK_SIZE;
    EngineOptions {
        mode: if random.percent(60) { IoMode::Buffered } else { IoMode::Direct },
        metadata_cache: *random.pick(&[256 << 10, 16 << 20]),
        write_buffer: *random.pick(&[16 * block, 64 * block, 512 * block]),
        commit_interval: *random.pick(&[Duration::from_millis(200), Duration::from_secs(1), Duration::from_secs(10)]),
        write_through: true,
        threads: true,
    }
}

/// A store that was closed, all of it durable, and what it holds.
pub struct Base {
    /// Its medium.
    pub disk: SimulatedDisk,
    /// Its content.
    pub model: Model,
}

impl Base {
    /// The base of this number.
    pub fn new(number: usize) -> Result<Self> {
        let disk = SimulatedDisk::new(1, SimulatedOptions { reorder: false, ..SimulatedOptions::default() });
        Engine::init(&disk.directory(), InitParameters { uuid: [7; 16], journal_size: JOURNAL_SIZE_MIN })?;
        let options = EngineOptions { threads: false, write_through: false, ..EngineOptions::default() };
        let engine = Engine::open(disk.directory(), options)?;
        let mut model = Model::default();
        for (name, blocks) in DISKS {
            let id = engine.create_disk(new_disk(name, blocks))?;
            let write = model.number();
            // A part of it has never been written.
            engine.write_blocks(&engine.head(id), 0, content(write, 0, blocks - 3))?;
            engine.settle(&engine.head(id))?;
            engine.flush()?;
            let mut sectors = vec![Sector::default(); blocks as usize * SECTORS];
            let mut image = Image { generation: model.number(), sectors: std::mem::take(&mut sectors) };
            let written = 0..(blocks - 3) as usize * SECTORS;
            image.begin(written.clone(), write);
            image.end(written);
            image.pin();
            model.objects.insert(name.into(), Object { id, of: None, image, fate: Fate::Stays });
        }
        if number > 0 {
            let id = engine.create_disk(new_disk("journal", STEP))?;
            for _ in 0..STEPS + number as u64 - 1 {
                engine.write_blocks(&engine.head(id), 0, content(1, 0, STEP))?;
                engine.flush()?;
            }
            engine.delete_disk(id, &[])?;
            engine.reclaim()?;
        }
        engine.close()?;
        Ok(Self { disk, model })
    }
}
