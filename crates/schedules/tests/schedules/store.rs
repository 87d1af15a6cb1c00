//! The store of a schedule: how it is prepared, and the state that its threads share.

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

/// The initial disks and their sizes in blocks. Large writes to the second one bypass the buffer.
pub const DISKS: [(&str, u64); 2] = [("a", 12), ("b", 40)];
/// Number of prepared stores. Their journals end at different positions, the last ones shortly before the end of the
/// ring.
pub const BASES: usize = 4;
/// Blocks that one flush of a prepared store appends to the journal: not more than the payload limit of a flush.
const STEP: u64 = 32;
/// Flushes that bring the journal of the second prepared store close to the end of its ring.
const STEPS: u64 = 29;

/// The contents of the writes of a schedule that deduplicates.
const CONTENTS: u64 = 3;

/// Why a thread ends.
pub enum End {
    /// The power is off.
    Off,
    /// A description of the violation.
    Violation(String),
}

/// The result of a thread.
pub type Checked<T = ()> = std::result::Result<T, End>;

/// Counts over all schedules.
#[derive(Default)]
pub struct Statistics {
    /// Steps of the scheduler.
    pub steps: Arc<AtomicU64>,
    /// Operations of clients that succeeded.
    pub operations: AtomicU64,
    /// Flushes that succeeded.
    pub flushes: AtomicU64,
    /// Changes of the catalog that succeeded.
    pub changes: AtomicU64,
    /// Schedules that a power cut has ended.
    pub cuts: AtomicU64,
    /// Openings that a power cut has ended.
    pub cut_openings: AtomicU64,
    /// Checkpoints that were made.
    pub checkpoints: AtomicU64,
    /// Blocks that became free by compression.
    pub packed: AtomicU64,
    /// The most blocks of data of one schedule that were not written, because they were stored already.
    pub mapped: AtomicU64,
    /// Blocks that became free by deduplication.
    pub shared: AtomicU64,
}

/// The state that the threads of a schedule share.
pub struct Store {
    /// The engine under test.
    pub engine: Arc<Engine>,
    /// The medium of the engine.
    pub disk: SimulatedDisk,
    /// The contents that the store may have. The scheduler never switches threads while this lock is held.
    model: Mutex<Model>,
    /// Held while a disk is looked up, and while a disk is deleted or replaced. In a datastore, the layer above the
    /// engine keeps these operations apart.
    pub doors: shuttle::sync::Mutex<()>,
    /// Counts over all schedules.
    pub statistics: Arc<Statistics>,
    /// Whether the writes have only a few contents, so that blocks are equal.
    few_contents: bool,
    /// Whether events are printed, because a single schedule is repeated.
    traced: bool,
}

impl Store {
    /// The shared state for an engine on `disk`.
    pub fn new(
        engine: Arc<Engine>,
        disk: SimulatedDisk,
        model: Model,
        statistics: Arc<Statistics>,
        few_contents: bool,
    ) -> Self {
        let traced = std::env::var_os("LAMINA_SCHEDULE").is_some();
        let (model, doors) = (Mutex::new(model), shuttle::sync::Mutex::new(()));
        Self { engine, disk, model, doors, statistics, few_contents, traced }
    }

    /// The content of a write, as a number, from the number of the write.
    pub fn content_of(&self, write: u64) -> u64 {
        if self.few_contents { 1 + write % CONTENTS } else { write }
    }

    /// Locks the model. No other thread may run while it is locked.
    pub fn model(&self) -> MutexGuard<'_, Model> {
        self.model.lock().expect("no thread panics while it holds this lock")
    }

    /// Prints an event, if a single schedule is repeated.
    pub fn note(&self, text: impl FnOnce() -> String) {
        if self.traced {
            println!("{:>6} {}", self.statistics.steps.load(Ordering::Relaxed), text());
        }
    }

    /// Classifies an error: expected after a power cut, otherwise a violation.
    pub fn judge(&self, error: Error, what: &str) -> End {
        if self.disk.is_off() { End::Off } else { End::Violation(format!("{what}: {error}")) }
    }

    /// Flushes the engine, and then raises the floors of the model.
    pub fn flush(&self) -> Checked {
        let covered = self.model().covered();
        self.note(|| "flush ...".into());
        self.engine.flush().map_err(|error| self.judge(error, "flush"))?;
        self.note(|| "flush is done".into());
        self.model().flushed(&covered);
        count(&self.statistics.flushes);
        Ok(())
    }

    /// Runs a check, which must find nothing.
    pub fn check(&self) -> Checked {
        check(&self.engine).map_err(|violation| if self.disk.is_off() { End::Off } else { End::Violation(violation) })
    }

    /// The head of a disk, with the generation of its image, if the disk exists and no operation is changing it.
    pub fn enter(&self, disk: &str) -> Option<(Arc<Head>, u64)> {
        let _door = self.doors.lock().expect("no thread panics while it holds this lock");
        let (id, generation) = {
            let model = self.model();
            // The effect of an interrupted operation is not known.
            let object = model.objects.get(disk).filter(|object| matches!(object.fate, Fate::Stays))?;
            (object.id, object.image.generation)
        };
        Some((self.engine.head(id), generation))
    }
}

/// Runs a check that counts all references and verifies all checksums: it must find nothing.
pub fn check(engine: &Engine) -> std::result::Result<(), String> {
    let report = engine.check(CheckOptions { data: true, repair: false }, &|_, _| true);
    let report = report.map_err(|error| format!("check: {error}"))?;
    if report.findings.is_empty() && report.leaked == 0 {
        return Ok(());
    }
    Err(format!("check finds {:?}, and {} bytes leaked", report.findings, report.leaked))
}

/// Increments a counter.
pub fn count(number: &AtomicU64) {
    number.fetch_add(1, Ordering::Relaxed);
}

/// The content of blocks after `write`.
pub fn content(write: u64, first: u64, blocks: u64) -> SharedSlice {
    let mut buffer = Buffer::zeroed(blocks as usize);
    for (i, sector) in buffer.chunks_exact_mut(crate::model::SECTOR).enumerate() {
        fill(write, first as usize * SECTORS + i, sector);
    }
    let length = buffer.len();
    SharedSlice::new(Arc::new(buffer), 0..length)
}

/// Parameters of a disk.
pub fn new_disk(name: &str, blocks: u64) -> NewDisk {
    let capacity = blocks * BLOCK_SIZE as u64;
    NewDisk { name: name.into(), capacity, provisioning: Provisioning::Thin, uuid: [1; 16], incomplete: false }
}

/// The options of the engine of a schedule.
pub fn options(random: &mut Random) -> EngineOptions {
    let block = BLOCK_SIZE;
    EngineOptions {
        mode: if random.percent(60) { IoMode::Buffered } else { IoMode::Direct },
        metadata_cache: *random.pick(&[256 << 10, 16 << 20]),
        write_buffer: *random.pick(&[16 * block, 64 * block, 512 * block]),
        read_cache: 64 * block,
        cache_plain: true,
        commit_interval: *random.pick(&[Duration::from_millis(200), Duration::from_secs(1), Duration::from_secs(10)]),
        write_through: true,
        threads: true,
    }
}

/// A prepared store: closed, with durable content.
pub struct Base {
    /// The medium of the store.
    pub disk: SimulatedDisk,
    /// The content of the store.
    pub model: Model,
}

impl Base {
    /// Prepares the store with this number.
    pub fn new(number: usize) -> Result<Self> {
        let disk = SimulatedDisk::new(1, SimulatedOptions { reorder: false, ..SimulatedOptions::default() });
        Engine::init(&disk.directory(), InitParameters { uuid: [7; 16], journal_size: JOURNAL_SIZE_MIN })?;
        let options = EngineOptions { threads: false, write_through: false, ..EngineOptions::default() };
        let engine = Engine::open(disk.directory(), options)?;
        let mut model = Model::default();
        for (name, blocks) in DISKS {
            let id = engine.create_disk(new_disk(name, blocks))?;
            let write = model.number();
            // The last blocks of the disk are never written.
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
