//! Forced races: another operation runs at the moment where an error in the locking would show.

use super::*;
use std::sync::atomic::AtomicU64;

/// A file that lets a test run code just before one of its calls.
struct Meddled {
    inner: Arc<dyn File>,
    /// How many reads pass before `before_read` is called.
    reads_left: AtomicU64,
    before_read: Meddling,
    before_punch: Meddling,
}

type Meddling = Mutex<Option<Box<dyn FnOnce() + Send>>>;

impl Meddled {
    fn new(inner: Arc<dyn File>) -> Arc<Self> {
        let reads_left = AtomicU64::new(u64::MAX);
        Arc::new(Self { inner, reads_left, before_read: Mutex::default(), before_punch: Mutex::default() })
    }
}

fn meddle(meddling: &Meddling) {
    let taken = meddling.lock().take();
    if let Some(meddle) = taken {
        meddle();
    }
}

impl File for Meddled {
    backend::forward_file!(inner: len, set_len, read_cached_at, write_at, sync, local);

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<()> {
        self.inner.read_at(buffer, offset)?;
        if self.reads_left.fetch_sub(1, Ordering::SeqCst) == 1 {
            meddle(&self.before_read);
        }
        Ok(())
    }
    fn punch(&self, offset: u64, length: u64) -> std::io::Result<()> {
        meddle(&self.before_punch);
        self.inner.punch(offset, length)
    }
}

/// A disk of eight blocks, all allocated and written, in a [`Meddled`] file.
fn meddled() -> (Arc<Meddled>, Arc<Flat>) {
    let world = disk(1);
    made(&*world.directory(), 8 * MIB, Provisioning::EagerZeroedThick);
    let file = Meddled::new(world.directory().open("disk", IoMode::Buffered).unwrap());
    let flat = Flat::open(Arc::<Meddled>::clone(&file), "disk", options(true)).unwrap();
    (file, flat)
}

#[test]
fn a_block_written_after_it_was_read_as_zeros_is_not_punched() {
    let (file, flat) = meddled();
    let guest = Arc::clone(&flat);
    *file.before_read.lock() = Some(Box::new(move || guest.write(4096, &[&[7; 4096]]).unwrap()));
    // The guest writes just before the last part of the first block is read; all earlier parts were read as zeros.
    file.reads_left.store(MIB / (64 << 10), Ordering::SeqCst);
    assert_eq!(flat.punch_zeros(&NoProgress).unwrap(), 7);
    assert!(file.before_read.lock().is_none());
    assert_eq!(read(&flat, 0, 3 * 4096), [[0; 4096], [7; 4096], [0; 4096]].concat());
    assert_eq!(flat.counters(), Counters { blocks: 8, nb: 1, tbz: 0 });
}

#[test]
fn filling_waits_for_discards_under_way() {
    let (file, flat) = meddled();
    let filler = Arc::new(Mutex::new(None));
    let (other, kept) = (Arc::clone(&flat), Arc::clone(&filler));
    // The discard has decided to punch. Just before the punch, filling is started, and runs until it ends or waits for
    // the block's lock.
    *file.before_punch.lock() = Some(Box::new(move || {
        let work = std::thread::spawn(move || other.fill(&NoProgress));
        let begin = std::time::Instant::now();
        while !work.is_finished() && begin.elapsed().as_millis() < 300 {
            std::thread::yield_now();
        }
        *kept.lock() = Some(work);
    }));
    flat.zero(3 * MIB..4 * MIB, false).unwrap();
    let work = filler.lock().take().unwrap();
    work.join().unwrap().unwrap();
    assert_eq!(flat.counters(), Counters { blocks: 8, nb: 8, tbz: 0 });
    assert_eq!(flat.look(3).unwrap(), BlockType::Written, "filled before the hole was punched");
}
