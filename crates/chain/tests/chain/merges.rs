//! Merges: under continuous writes, observed, throttled, interrupted, refused.

use crate::concurrent::{Cells, SECTOR, StopOnPanic};
use crate::mock::{Manner, MemoryFile, Mock, PATIENCE, Table};
use backend::File;
use chain::{Chain, Condition, Options, Place};
use error::ErrorKind;
use layer::Layer;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use testkit::Random;
use work::NoProgress;
use work::Progress;

/// A chain of `depth` levels with random content; returns that content too.
pub fn filled(depth: usize, capacity: u64, grain: u64, seed: u64) -> (Chain, Vec<Arc<Mock>>, Vec<u8>) {
    let mut random = Random::new(seed);
    let mut content = vec![0; capacity as usize];
    let mut layers = vec![Mock::new(Manner::new(capacity, grain))];
    let chain = Chain::open("filled", vec![layers[0].clone() as Arc<dyn Layer>], Options::default()).unwrap();
    for level in 0..depth {
        if level > 0 {
            let layer = Mock::new(Manner::new(capacity, grain));
            chain.push(layer.clone()).unwrap();
            layers.insert(0, layer);
        }
        for _ in 0..30 {
            let start = random.below(capacity) as usize;
            let end = (start + 1 + random.below(20_000) as usize).min(capacity as usize);
            random.fill(&mut content[start..end]);
            chain.write(start as u64, &content[start..end]).unwrap();
        }
    }
    (chain, layers, content)
}

fn assert_content(chain: &Chain, content: &[u8]) {
    let mut out = vec![0xee; content.len()];
    chain.read(0, &mut out).unwrap();
    assert!(out == content);
}

#[derive(Default)]
struct Watcher {
    at: AtomicU64,
    total: AtomicU64,
    checkpoint: AtomicU64,
    stop_at: Option<u64>,
    rate: AtomicU64,
}

impl Progress for Watcher {
    fn update(&self, done: u64, total: u64) {
        assert!(done >= self.at.swap(done, Ordering::SeqCst) && done <= total);
        self.total.store(total, Ordering::SeqCst);
    }
    fn cancelled(&self) -> bool {
        self.stop_at.is_some_and(|stop| self.at.load(Ordering::SeqCst) >= stop)
    }
    fn rate(&self) -> u64 {
        self.rate.load(Ordering::SeqCst)
    }
    fn durable(&self, position: u64) {
        self.checkpoint.store(position, Ordering::SeqCst);
    }
}

#[test]
fn consolidation_ends_under_continuous_writes() {
    for (seed, grain, moves) in [(1, 4096, false), (2, 512, true)] {
        // A busy machine can interrupt the thread while it holds off the writers, but hardly each time.
        let mut pauses = (0..5).map(|_| consolidate_under_writes(seed, grain, moves));
        assert!(pauses.any(|pause| pause < Duration::from_millis(50)));
    }
}

/// Consolidates a chain of 32 levels under continuous writes. Returns for how long writers were held off.
fn consolidate_under_writes(seed: u64, grain: u64, moves: bool) -> Duration {
    const CELLS: usize = 3 * 3 * 4000;
    let capacity = (CELLS * SECTOR) as u64;
    let make = || Mock::new(Manner { moves, ..Manner::new(capacity, grain) });
    let base = Mock::new(Manner { moves, ..Manner::new(capacity, 16384) });
    let chain = Chain::open("busy", vec![base.clone() as Arc<dyn Layer>], Options::default()).unwrap();
    let cells = Cells::new(CELLS);
    let mut random = Random::new(seed);
    for _ in 0..31 {
        for _ in 0..200 {
            cells.change(&chain, &mut random, 0, 3);
        }
        chain.push(make()).unwrap();
    }
    let (stop, slowest) = (AtomicBool::new(false), AtomicU64::new(0));
    let merged = std::thread::scope(|scope| {
        for thread in 0..3 {
            let (chain, cells, stop, slowest) = (&chain, &cells, &stop, &slowest);
            scope.spawn(move || {
                let _stop = StopOnPanic(stop);
                let mut random = Random::new(seed * 100 + thread as u64);
                while !stop.load(Ordering::Relaxed) {
                    let took = cells.change(chain, &mut random, thread, 3);
                    slowest.fetch_max(took.as_micros() as u64, Ordering::Relaxed);
                    cells.read(chain, random.below(CELLS as u64) as usize, 30);
                }
            });
        }
        let _stop = StopOnPanic(&stop);
        std::thread::sleep(Duration::from_millis(100));
        let mut commits = 0;
        let mut commit = || {
            commits += 1;
            Ok(())
        };
        let merged = chain.consolidate(&NoProgress, &mut commit).unwrap();
        assert_eq!(commits, 1);
        std::thread::sleep(Duration::from_millis(100));
        stop.store(true, Ordering::Relaxed);
        merged
    });
    assert_eq!((chain.keys().len(), merged.removed.len()), (1, 31));
    cells.read(&chain, 0, CELLS);
    println!(
        "{} bytes copied in {} passes, writers held off for {:?}, slowest write {} us",
        merged.copied,
        merged.passes,
        merged.pause,
        slowest.load(Ordering::Relaxed)
    );
    merged.pause
}

#[test]
fn an_interrupted_merge_changes_no_data_and_can_be_continued() {
    let capacity = 200 << 20;
    let (chain, layers, _) = filled(3, capacity, 4096, 5);
    let mut content = vec![0; capacity as usize];
    let mut random = Random::new(8);
    random.fill(&mut content);
    chain.write(0, &content).unwrap();
    chain.push(Mock::new(Manner::new(capacity, 4096))).unwrap();
    let keys = chain.keys();
    let watcher = Watcher { stop_at: Some(150 << 20), ..Watcher::default() };
    let mut commit = || panic!("the commit must not run");
    let error = chain.merge_down(keys[1], keys[3], 0, &watcher, &mut commit).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Interrupted);
    assert_eq!(chain.keys(), keys);
    assert_content(&chain, &content);
    let checkpoint = watcher.checkpoint.load(Ordering::SeqCst);
    assert!(checkpoint >= 64 << 20, "{checkpoint}");
    let written = layers[2].written.load(Ordering::SeqCst);
    let merged = chain.merge_down(keys[1], keys[3], checkpoint, &NoProgress, &mut || Ok(())).unwrap();
    assert_eq!(merged.removed.len(), 2);
    assert!(layers[2].written.load(Ordering::SeqCst) - written <= capacity - checkpoint);
    assert_eq!(chain.keys(), [keys[0], keys[3]]);
    assert_content(&chain, &content);
}

#[test]
fn a_merge_keeps_its_rate_limit_and_reports_progress() {
    let (chain, _, _) = filled(2, 4 << 20, 4096, 6);
    chain.write(0, &vec![7; 4 << 20]).unwrap();
    let watcher = Watcher::default();
    watcher.rate.store(8 << 20, Ordering::SeqCst);
    let begun = Instant::now();
    chain.consolidate(&watcher, &mut || Ok(())).unwrap();
    assert!(begun.elapsed() > Duration::from_millis(400), "{:?}", begun.elapsed());
    assert_eq!(watcher.at.load(Ordering::SeqCst), 4 << 20);
}

#[test]
fn a_failed_commit_of_a_merge_leaves_the_chain_unchanged() {
    let (chain, _, mut content) = filled(4, 1 << 20, 512, 7);
    let keys = chain.keys();
    for _ in 0..2 {
        let mut commit = || Err(error::Error::new(ErrorKind::NoSpace, "no space for the record"));
        assert_eq!(chain.consolidate(&NoProgress, &mut commit).err().unwrap().kind(), ErrorKind::NoSpace);
        assert_eq!(chain.keys(), keys);
        content[5000..6000].fill(9);
        chain.write(5000, &[9; 1000]).unwrap();
        assert_content(&chain, &content);
    }
    chain.consolidate(&NoProgress, &mut || Ok(())).unwrap();
    assert_content(&chain, &content);
}

/// Calls a function at each progress report of a merge, with the position.
struct Midway<F: Fn(u64) + Sync>(F);

impl<F: Fn(u64) + Sync> Progress for Midway<F> {
    fn update(&self, done: u64, _total: u64) {
        (self.0)(done);
    }
}

#[test]
fn a_snapshot_may_be_taken_while_a_merge_is_under_way() {
    let (chain, _, mut content) = filled(3, 2 << 20, 4096, 11);
    let snapshot = content.clone();
    let keys = chain.keys();
    let done = AtomicBool::new(false);
    let midway = Midway(|at| {
        if at >= 1 << 20 && !done.swap(true, Ordering::SeqCst) {
            chain.push(Mock::new(Manner::new(2 << 20, 4096))).unwrap();
            chain.write(100, &[1; 100_000]).unwrap();
            chain.write(1_500_000, &[2; 100_000]).unwrap();
            // Only one merge at a time is allowed.
            let second = chain.merge_up(keys[0], keys[1], 0, &NoProgress, &mut || Ok(()));
            assert_eq!(second.err().unwrap().kind(), ErrorKind::Busy);
        }
    });
    let merged = chain.consolidate(&midway, &mut || Ok(())).unwrap();
    content[100..100_100].fill(1);
    content[1_500_000..1_600_000].fill(2);
    assert_content(&chain, &content);
    let now = chain.keys();
    assert_eq!((now.len(), now[1], merged.removed.len()), (2, keys[2], 2));
    let below = Chain::open("below", vec![chain.layer(keys[2]).unwrap()], Options::default()).unwrap();
    assert_content(&below, &snapshot);
}

#[test]
fn impossible_merges_are_refused() {
    let (chain, layers, content) = filled(3, 1 << 20, 4096, 12);
    let keys = chain.keys();
    let kind = |result: error::Result<chain::Merged>| result.err().unwrap().kind();
    assert_eq!(kind(chain.merge_down(keys[2], keys[0], 0, &NoProgress, &mut || Ok(()))), ErrorKind::Invalid);
    assert_eq!(kind(chain.merge_up(keys[1], keys[1], 0, &NoProgress, &mut || Ok(()))), ErrorKind::Invalid);
    layers[2].seal();
    assert_eq!(kind(chain.merge_down(keys[0], keys[2], 0, &NoProgress, &mut || Ok(()))), ErrorKind::ReadOnly);
    chain.merge_down(keys[0], keys[1], 0, &NoProgress, &mut || Ok(())).unwrap();
    assert_eq!(kind(chain.merge_down(keys[0], keys[1], 0, &NoProgress, &mut || Ok(()))), ErrorKind::NotFound);
    assert_content(&chain, &content);
}

#[test]
fn a_level_can_be_opened_again_for_writing() {
    let (chain, layers, content) = filled(3, 1 << 20, 4096, 13);
    let keys = chain.keys();
    chain.flush().unwrap();
    layers[2].seal();
    let again = Mock::over(layers[2].manner(), layers[2].file(0).unwrap().clone(), layers[2].durable());
    chain.replace(keys[2], again).unwrap();
    assert_content(&chain, &content);
    chain.merge_down(keys[0], keys[2], 0, &NoProgress, &mut || Ok(())).unwrap();
    assert_content(&chain, &content);
    assert!(chain.replace(keys[2], layers[2].clone()).is_err(), "the top level is unchanged");
}

#[test]
fn a_merge_keeps_the_cache_warm() {
    let (chain, _, content) = filled(8, 1 << 20, 4096, 14);
    assert_content(&chain, &content);
    for block in 0..256 {
        chain.read(block * 4096, &mut [0; 4096]).unwrap();
    }
    let before = chain.statistics().metadata;
    chain.consolidate(&NoProgress, &mut || Ok(())).unwrap();
    let merged = chain.statistics().metadata;
    for block in 0..256 {
        let mut out = [0; 4096];
        chain.read(block * 4096, &mut out).unwrap();
        assert!(out[..] == content[block as usize * 4096..][..4096]);
    }
    let after = chain.statistics().metadata;
    assert!(after.misses - merged.misses < 8, "{before:?} {merged:?} {after:?}");
}

/// A layer moves its grains independently of the chain, as shrinking does: no reader gets another grain's bytes from a
/// file location that the cache had.
#[test]
fn extents_of_a_level_with_moving_grains_are_not_cached() {
    const CAPACITY: u64 = 1 << 20;
    const GRAIN: usize = 4096;
    for level in 0..2 {
        let mut random = Random::new(level);
        let moving = |moves| Mock::new(Manner { moves, ..Manner::new(CAPACITY, GRAIN as u64) });
        let layers = [moving(level == 0), moving(level == 1)];
        let mut contents = [vec![0; CAPACITY as usize], vec![0; CAPACITY as usize]];
        contents.iter_mut().for_each(|content| random.fill(content));
        layers[1].write(0, &[&contents[1]]).unwrap();
        // The top stores every second grain.
        let grains = 0..CAPACITY as usize / GRAIN;
        let ours: Vec<usize> = grains.filter(|grain| level == 1 || grain % 2 == 0).collect();
        let mut shown = contents[1].clone();
        for grain in (0..CAPACITY as usize / GRAIN).step_by(2) {
            let range = grain * GRAIN..(grain + 1) * GRAIN;
            layers[0].write(range.start as u64, &[&contents[0][range.clone()]]).unwrap();
            shown[range.clone()].copy_from_slice(&contents[0][range]);
        }
        let stack = layers.iter().map(|layer| layer.clone() as Arc<dyn Layer>).collect();
        let chain = Chain::open("moving", stack, Options::default()).unwrap();
        assert_content(&chain, &shown);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut random = Random::new(77);
                while !stop.load(Ordering::Relaxed) {
                    let start = random.below(CAPACITY - 9000) as usize;
                    let mut out = vec![0; 9000];
                    chain.read(start as u64, &mut out).unwrap();
                    assert!(out == shown[start..start + 9000], "at {start}");
                }
            });
            let key = chain.keys()[level as usize];
            chain
                .while_moving(key, || {
                    for _ in 0..4000 {
                        let grain = ours[random.below(ours.len() as u64) as usize];
                        let range = grain * GRAIN..(grain + 1) * GRAIN;
                        layers[level as usize].write(range.start as u64, &[&contents[level as usize][range]])?;
                    }
                    Ok(())
                })
                .unwrap();
            stop.store(true, Ordering::Relaxed);
            reader.join().unwrap();
        });
        assert_content(&chain, &shown);
    }
}

/// A plan for data in the lower of two levels; grains of that level are moved. Two snapshots were taken after the
/// planning. Returns the chain, the plan and the planned data.
fn plan_before_snapshots() -> (Chain, chain::Plan, Vec<u8>) {
    // The capacity needs several steps of a merge: grains that one step frees are reused by the next.
    const CAPACITY: u64 = 1 << 20;
    let make = || Mock::new(Manner { moves: true, ..Manner::new(CAPACITY, 4096) });
    let chain = Chain::open("planned", vec![make() as Arc<dyn Layer>], Options::default()).unwrap();
    let content: Vec<u8> = (0..CAPACITY).map(|at| (at / 4096) as u8).collect();
    chain.write(0, &content).unwrap();
    chain.push(make()).unwrap();
    let plan = chain.plan(0, content.len()).unwrap();
    chain.push(make()).unwrap();
    chain.push(make()).unwrap();
    (chain, plan, content)
}

fn read_planned(plan: &chain::Plan) -> Vec<u8> {
    let mut out = Vec::new();
    for part in &plan.parts {
        let mut bytes = vec![0xee; part.length];
        part.read(0, &mut bytes).unwrap();
        out.extend(bytes);
    }
    out
}

/// Waits some time, and checks that the work has not ended. On an idle machine, work that does not wait would end in
/// that time.
fn assert_waits<T>(work: &std::thread::ScopedJoinHandle<'_, T>) {
    let until = Instant::now() + Duration::from_millis(200);
    while Instant::now() < until && !work.is_finished() {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_merge_moves_no_grains_of_a_plan_made_several_snapshots_before() {
    let (chain, plan, content) = plan_before_snapshots();
    let new: Vec<u8> = content.iter().map(|byte| byte.wrapping_add(100)).collect();
    chain.write(0, &new).unwrap();
    std::thread::scope(|scope| {
        let merge = scope.spawn(|| chain.consolidate(&NoProgress, &mut || Ok(())).unwrap());
        assert_waits(&merge);
        let planned = read_planned(&plan);
        drop(plan);
        assert!(planned == content, "the merge reused grains that the plan refers to");
        merge.join().unwrap();
    });
    assert_content(&chain, &new);
}

#[test]
fn grains_are_moved_only_after_plans_made_several_snapshots_before() {
    let (chain, plan, _) = plan_before_snapshots();
    let (base, moving) = (*chain.keys().last().unwrap(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let work = scope.spawn(|| {
            chain.while_moving(base, || {
                moving.store(true, Ordering::SeqCst);
                Ok(())
            })
        });
        assert_waits(&work);
        let early = moving.load(Ordering::SeqCst);
        drop(plan);
        assert!(!early, "the plan holds no epoch of the level whose grains are moved");
        work.join().unwrap().unwrap();
    });
}

#[test]
fn a_level_is_replaced_only_after_plans_made_several_snapshots_before() {
    let (chain, plan, content) = plan_before_snapshots();
    let base = *chain.keys().last().unwrap();
    let layer = chain.layer(base).unwrap();
    std::thread::scope(|scope| {
        let work = scope.spawn(|| chain.replace(base, layer));
        assert_waits(&work);
        let early = work.is_finished();
        drop(plan);
        assert!(!early, "the plan uses the old opening");
        work.join().unwrap().unwrap();
    });
    assert_content(&chain, &content);
}

/// The caches lead reads to the copies that a merge has made. After a failed flush of the target, the device may have
/// the target's old content there.
#[test]
fn reads_of_copies_that_were_planned_before_a_failed_flush_of_the_target_are_refused() {
    let (chain, layers, mut content) = filled(2, 1 << 20, 4096, 15);
    content[..65_536].fill(7);
    chain.write(0, &[7; 65_536]).unwrap();
    chain.flush().unwrap();
    assert_content(&chain, &content);
    let planned = Mutex::new(None);
    let midway = Midway(|at| {
        let mut planned = planned.lock();
        if at > 0 && planned.is_none() {
            *planned = Some(chain.plan(0, 4096).unwrap());
        }
    });
    layers[1].faults.flush.store(true, Ordering::SeqCst);
    assert_eq!(chain.consolidate(&midway, &mut || Ok(())).err().unwrap().kind(), ErrorKind::Io);
    let plan = planned.lock().take().unwrap();
    let Place::Media { file, .. } = &plan.parts[0].place else { panic!("the range is stored") };
    assert!(Arc::ptr_eq(file, layers[1].file(0).unwrap()), "the plan refers to the copy");
    assert_eq!(chain.check_fetched(&plan).unwrap_err().kind(), ErrorKind::Io);
    // Reads that are planned now are made in the sources.
    assert_content(&chain, &content);
}

/// The top has a part of a large grain. A merge completes the grain in the base, which has the other parts from then
/// on.
#[test]
fn parts_of_grains_that_a_merge_completes_are_not_read_after_a_failed_flush_of_the_target() {
    const CAPACITY: u64 = 4 << 20;
    const FAR: u64 = 2 << 20;
    for mirrored in [false, true] {
        let base = Mock::new(Manner::new(CAPACITY, 65_536));
        let layers = vec![Mock::new(Manner::new(CAPACITY, 4096)) as Arc<dyn Layer>, base.clone() as Arc<dyn Layer>];
        let chain = Chain::open("completed", layers, Options::default()).unwrap();
        chain.write(if mirrored { 0 } else { FAR + 4096 }, &[7; 4096]).unwrap();
        chain.flush().unwrap();
        base.faults.flush.store(!mirrored, Ordering::SeqCst);
        let last = LastPass {
            chain: &chain,
            begun: AtomicBool::new(false),
            done: AtomicBool::new(!mirrored),
            work: || {
                chain.write(FAR + 4096, &[8; 4096]).unwrap();
                // This flush does not cover the target.
                chain.flush().unwrap();
                base.faults.flush.store(true, Ordering::SeqCst);
            },
        };
        assert_eq!(chain.consolidate(&last, &mut || Ok(())).err().unwrap().kind(), ErrorKind::Io);
        assert!(last.done.load(Ordering::SeqCst), "nothing was written in the last pass");
        let mut out = [0; 512];
        assert_eq!(chain.read(FAR, &mut out).unwrap_err().kind(), ErrorKind::Io, "mirrored: {mirrored}");
        chain.read(CAPACITY - 512, &mut out).unwrap();
    }
}

/// Calls `work` once in the last pass of a merge, in which every write is made in both levels.
struct LastPass<'a, F: Fn() + Sync> {
    chain: &'a Chain,
    begun: AtomicBool,
    done: AtomicBool,
    work: F,
}

impl<F: Fn() + Sync> Progress for LastPass<'_, F> {
    fn update(&self, done: u64, total: u64) {
        if done < total {
            // A range that the last pass has to copy.
            self.chain.write(0, &[9; 4096]).unwrap();
        }
        self.begun.store(done == total, Ordering::SeqCst);
    }
    fn rate(&self) -> u64 {
        if self.begun.load(Ordering::SeqCst) && !self.done.swap(true, Ordering::SeqCst) {
            (self.work)();
        }
        0
    }
}

/// A file that calls a function at each flush.
struct OnSync<F> {
    inner: MemoryFile,
    hook: F,
}

impl<F: Fn() -> std::io::Result<()> + Send + Sync> File for OnSync<F> {
    backend::forward_file!(inner: len, set_len, read_at, write_at, punch);

    fn sync(&self) -> std::io::Result<()> {
        (self.hook)()
    }
}

/// Waits until the flag is set, or until the time is over.
fn wait_for(flag: &AtomicBool, most: Duration) {
    let begun = Instant::now();
    while !flag.load(Ordering::SeqCst) && begun.elapsed() < most {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A client's flush begins before a merge, and flushes the top while the merge copies. It ends while the flush of the
/// target is under way, which then fails.
#[test]
fn a_flush_that_began_before_a_merge_forgets_no_copies_that_are_not_flushed() {
    let flags: [Arc<AtomicBool>; 4] = Default::default();
    let [begun, copied, released, ended] = flags.clone();
    let of_top = move || -> std::io::Result<()> {
        begun.store(true, Ordering::SeqCst);
        wait_for(&copied, PATIENCE);
        wait_for(&released, Duration::from_millis(300));
        Ok(())
    };
    let [begun, copied, released, _] = &flags;
    let (releases, merging) = (Arc::clone(released), std::thread::current().id());
    let of_target = move || -> std::io::Result<()> {
        releases.store(true, Ordering::SeqCst);
        if std::thread::current().id() == merging {
            wait_for(&ended, Duration::from_secs(2));
        }
        Err(std::io::Error::other("the device fails"))
    };
    let manner = Manner::new(1 << 20, 4096);
    let top = Mock::over(manner, Arc::new(OnSync { inner: MemoryFile::default(), hook: of_top }), Table::default());
    let file: Arc<dyn File> = Arc::new(OnSync { inner: MemoryFile::default(), hook: of_target });
    let target = Mock::over(manner, Arc::clone(&file), Table::default());
    let chain =
        Chain::open("flushes", vec![top as Arc<dyn Layer>, target as Arc<dyn Layer>], Options::default()).unwrap();
    chain.write(0, &[7; 65_536]).unwrap();
    let planned = Mutex::new(None);
    let midway = Midway(|at| {
        let mut planned = planned.lock();
        if at > 0 && planned.is_none() {
            *planned = Some(chain.plan(0, 4096).unwrap());
            copied.store(true, Ordering::SeqCst);
        }
    });
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _ = chain.flush();
            flags[3].store(true, Ordering::SeqCst);
        });
        wait_for(begun, PATIENCE);
        assert_eq!(chain.consolidate(&midway, &mut || Ok(())).err().unwrap().kind(), ErrorKind::Io);
    });
    let plan = planned.lock().take().unwrap();
    let Place::Media { file: planned, .. } = &plan.parts[0].place else { panic!("the range is stored") };
    assert!(Arc::ptr_eq(planned, &file), "the plan refers to the copy");
    assert_eq!(chain.check_fetched(&plan).unwrap_err().kind(), ErrorKind::Io);
}

#[test]
fn a_merge_of_a_level_that_stores_little_takes_few_lookups_whatever_its_capacity() {
    const CAPACITY: u64 = 64 << 40;
    const GRAIN: u64 = 64 << 20;
    let layers: Vec<Arc<Mock>> = (0..3).map(|_| Mock::new(Manner::new(CAPACITY, GRAIN))).collect();
    let zeroed = [0, 700_000 * GRAIN, CAPACITY - GRAIN];
    zeroed.iter().for_each(|start| layers[1].zero(*start..*start + GRAIN, false).unwrap());
    let stack = layers.iter().map(|layer| layer.clone() as Arc<dyn Layer>).collect();
    let chain = Chain::open("large", stack, Options::default()).unwrap();
    layers[1].maps.store(0, Ordering::SeqCst);
    let keys = chain.keys();
    let merged = chain.merge_down(keys[1], keys[2], 0, &Watcher::default(), &mut || Ok(())).unwrap();
    assert_eq!(merged.removed.len(), 1);
    let lookups = layers[1].maps.load(Ordering::SeqCst);
    assert!(lookups < 500, "{lookups} lookups");
    let spans = chain.status(0, CAPACITY, 10).unwrap();
    let zeros: Vec<u64> =
        spans.iter().filter(|span| span.condition == Condition::Zero).map(|span| span.start).collect();
    assert_eq!((zeros, spans.len()), (zeroed.to_vec(), 5));
}
