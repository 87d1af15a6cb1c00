//! Exchanging devices during reads, writes and flushes: no request is lost, is carried out on the wrong device or
//! becomes noticeably slower.

#![allow(clippy::unwrap_used)]

use super::*;
use crate::device::{Allocation, Segment};
use backend::{Buffer, SharedSlice};
use std::sync::atomic::AtomicBool;
use std::time::Instant;

const SECTOR: usize = 512;
const BLOCK: u64 = backend::BLOCK_SIZE as u64;

/// A disk in memory that counts the requests that use it.
struct Memory {
    bytes: Mutex<Vec<u8>>,
    finished: AtomicU64,
    flushed: AtomicU64,
    refuses: bool,
    /// Whether no request may begin on the device any more.
    gone: AtomicBool,
}

impl Memory {
    fn new(bytes: Vec<u8>) -> Arc<Self> {
        Arc::new(Self::build(bytes, false))
    }

    fn build(bytes: Vec<u8>, refuses: bool) -> Self {
        Self {
            bytes: Mutex::new(bytes),
            finished: AtomicU64::new(0),
            flushed: AtomicU64::new(0),
            refuses,
            gone: AtomicBool::new(false),
        }
    }

    fn come_in(&self) {
        assert!(!self.gone.load(Ordering::SeqCst), "a request reached a device that was no longer in use");
    }
}

impl Device for Memory {
    fn name(&self) -> &str {
        "memory"
    }
    fn capacity(&self) -> u64 {
        self.bytes.lock().len() as u64
    }
    fn read_only(&self) -> bool {
        self.refuses
    }
    fn plan_read(&self, offset: u64, length: usize) -> Result<ReadPlan> {
        self.come_in();
        let mut buffer = Buffer::recycled(length.div_ceil(BLOCK as usize).max(1));
        buffer[..length].copy_from_slice(&self.bytes.lock()[offset as usize..][..length]);
        let segments = vec![Segment::Memory(SharedSlice::new(Arc::new(buffer), 0..length))];
        Ok(ReadPlan { segments, skip: 0, length, offset, guard: Some(Box::new(7u32)) })
    }
    fn finish_read(&self, plan: &mut ReadPlan) -> Result<Verdict> {
        self.come_in();
        let own = plan.guard.take().and_then(|guard| guard.downcast::<u32>().ok());
        assert_eq!(own.as_deref(), Some(&7), "the device gets its plan back with the state that it stored");
        self.finished.fetch_add(1, Ordering::SeqCst);
        Ok(Verdict::Good)
    }
    fn write(&self, offset: u64, data: SharedSlice, _fua: bool) -> Result<()> {
        self.come_in();
        self.bytes.lock()[offset as usize..][..data.len()].copy_from_slice(&data);
        Ok(())
    }
    fn discard(&self, offset: u64, length: u64, fua: bool) -> Result<()> {
        self.write_zeroes(offset, length, false, fua)
    }
    fn write_zeroes(&self, offset: u64, length: u64, _allocate: bool, _fua: bool) -> Result<()> {
        self.come_in();
        self.bytes.lock()[offset as usize..][..length as usize].fill(0);
        Ok(())
    }
    fn finish_flush(&self, _ticket: FlushTicket) -> Result<()> {
        self.come_in();
        self.flushed.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
    fn prefetch(&self, _offset: u64, _length: u64) -> Result<()> {
        Ok(())
    }
    fn resize(&self, _capacity: u64) -> Result<()> {
        Ok(())
    }
    fn status(&self, _offset: u64, length: u64, _limit: usize) -> Result<Vec<StatusExtent>> {
        Ok(vec![StatusExtent { length, allocation: Allocation::Data }])
    }
    fn dirty_bases(&self) -> Vec<String> {
        Vec::new()
    }
    fn changed_since(&self, _base: &str, _offset: u64, _length: u64, _limit: usize) -> Result<Vec<DirtyExtent>> {
        Ok(Vec::new())
    }
}

/// Writes to both devices, as the mirror of a migration does.
struct Mirror(Arc<Memory>, Arc<Memory>);

impl Device for Mirror {
    fn name(&self) -> &str {
        "mirror"
    }
    fn capacity(&self) -> u64 {
        self.0.capacity()
    }
    fn read_only(&self) -> bool {
        false
    }
    fn plan_read(&self, offset: u64, length: usize) -> Result<ReadPlan> {
        self.0.plan_read(offset, length)
    }
    fn finish_read(&self, plan: &mut ReadPlan) -> Result<Verdict> {
        self.0.finish_read(plan)
    }
    fn write(&self, offset: u64, data: SharedSlice, fua: bool) -> Result<()> {
        self.0.write(offset, data.clone(), fua)?;
        self.1.write(offset, data, fua)
    }
    fn discard(&self, offset: u64, length: u64, fua: bool) -> Result<()> {
        self.write_zeroes(offset, length, false, fua)
    }
    fn write_zeroes(&self, offset: u64, length: u64, allocate: bool, fua: bool) -> Result<()> {
        self.0.write_zeroes(offset, length, allocate, fua)?;
        self.1.write_zeroes(offset, length, allocate, fua)
    }
    fn finish_flush(&self, _ticket: FlushTicket) -> Result<()> {
        self.0.flush()?;
        self.1.flush()
    }
    fn prefetch(&self, _offset: u64, _length: u64) -> Result<()> {
        Ok(())
    }
    fn resize(&self, _capacity: u64) -> Result<()> {
        Ok(())
    }
    fn status(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<StatusExtent>> {
        self.0.status(offset, length, limit)
    }
    fn dirty_bases(&self) -> Vec<String> {
        Vec::new()
    }
    fn changed_since(&self, _base: &str, _offset: u64, _length: u64, _limit: usize) -> Result<Vec<DirtyExtent>> {
        Ok(Vec::new())
    }
}

fn sector_of(number: u64) -> SharedSlice {
    let mut sector = [0; SECTOR];
    sector[..8].copy_from_slice(&number.to_le_bytes());
    SharedSlice::copy_of(&sector)
}

#[test]
fn exchanges_of_the_device_under_load_lose_no_write() {
    const WRITERS: u64 = 4;
    const EXCHANGES: usize = 40;
    let capacity = (WRITERS + 1) as usize * BLOCK as usize;
    let mut current = Memory::new(vec![0; capacity]);
    let switch = Switch::new(Arc::clone(&current) as Arc<dyn Device>);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let device = SwitchedDevice::new("disk", false, Arc::clone(&switch));
            let stop = &stop;
            scope.spawn(move || {
                let mut number = 0u64;
                while !stop.load(Ordering::SeqCst) {
                    number += 1;
                    device.write(writer * BLOCK, sector_of(number), false).unwrap();
                    if number.is_multiple_of(16) {
                        device.flush().unwrap();
                    }
                    let mut plan = device.plan_read(writer * BLOCK, SECTOR).unwrap();
                    if number.is_multiple_of(8) {
                        std::thread::yield_now();
                    }
                    assert!(device.finish_read(&mut plan).unwrap() == Verdict::Good);
                    let seen = plan.slices().concat();
                    assert_eq!(seen[..8], number.to_le_bytes(), "a writer reads its own last write");
                }
            });
        }
        for _ in 0..EXCHANGES {
            // The exchanges of a migration: to the mirror, then, after the copy, to the target.
            let target = Memory::new(vec![0; capacity]);
            let mirror = Arc::new(Mirror(Arc::clone(&current), Arc::clone(&target)));
            let before = switch.exchange(mirror);
            assert!(before.wait_unused(&|| false));
            {
                // This loop is the copier. The mirror writes to the source first, so a newer write reaches the target
                // after the copy.
                let source = current.bytes.lock();
                target.bytes.lock().copy_from_slice(&source);
            }
            std::thread::sleep(Duration::from_millis(2));
            let before = switch.exchange(Arc::clone(&target) as Arc<dyn Device>);
            assert!(before.wait_unused(&|| false));
            current.gone.store(true, Ordering::SeqCst);
            current = target;
        }
        stop.store(true, Ordering::SeqCst);
    });
}

#[test]
fn a_read_is_finished_by_the_device_that_planned_it() {
    let (old, new) = (Memory::new(vec![1; SECTOR]), Memory::new(vec![2; SECTOR]));
    let switch = Switch::new(Arc::clone(&old) as Arc<dyn Device>);
    let device = SwitchedDevice::new("disk", false, Arc::clone(&switch));
    let mut plan = device.plan_read(0, SECTOR).unwrap();
    let before = switch.exchange(Arc::clone(&new) as Arc<dyn Device>);
    assert_eq!(device.read(0, 1).unwrap(), [2], "a request that begins now uses the new device");
    let tries = AtomicU64::new(0);
    assert!(!before.wait_unused(&|| tries.fetch_add(1, Ordering::SeqCst) > 3), "the plan still uses the old device");
    assert!(device.finish_read(&mut plan).unwrap() == Verdict::Good);
    assert_eq!((old.finished.load(Ordering::SeqCst), new.finished.load(Ordering::SeqCst)), (1, 1));
    assert_eq!(plan.slices().concat(), vec![1; SECTOR]);
    assert!(before.wait_unused(&|| false));
}

#[test]
fn a_flush_completes_in_the_device_that_began_it() {
    let (old, new) = (Memory::new(vec![1; SECTOR]), Memory::new(vec![2; SECTOR]));
    let switch = Switch::new(Arc::clone(&old) as Arc<dyn Device>);
    let device = SwitchedDevice::new("disk", false, Arc::clone(&switch));
    let ticket = device.begin_flush().unwrap();
    let before = switch.exchange(Arc::clone(&new) as Arc<dyn Device>);
    assert!(!before.wait_unused(&|| true), "the flush still uses the old device");
    device.finish_flush(ticket).unwrap();
    assert_eq!((old.flushed.load(Ordering::SeqCst), new.flushed.load(Ordering::SeqCst)), (1, 0));
    assert!(before.wait_unused(&|| false));
}

#[test]
fn an_undone_exchange_waits_for_requests_in_the_old_device() {
    let switch = Switch::new(Memory::new(vec![1; SECTOR]));
    let device = SwitchedDevice::new("disk", false, Arc::clone(&switch));
    let plan = device.plan_read(0, SECTOR).unwrap();
    for _ in 0..2 {
        let before = switch.suspend(Memory::new(vec![2; SECTOR]));
        assert!(switch.is_suspended());
        assert!(!before.wait_unused(&|| true), "the plan uses the device");
        switch.restore(before);
        assert!(!switch.is_suspended());
        assert_eq!(device.read(0, 1).unwrap(), [1]);
    }
    drop(plan);
    assert!(switch.exchange(Memory::new(vec![2; SECTOR])).wait_unused(&|| true));
}

#[test]
fn a_dropped_read_plan_releases_the_old_device() {
    let switch = Switch::new(Memory::new(vec![1; SECTOR]));
    let device = SwitchedDevice::new("disk", false, Arc::clone(&switch));
    let plan = device.plan_read(0, SECTOR).unwrap();
    let before = switch.exchange(Memory::new(vec![2; SECTOR]));
    drop(plan);
    assert!(before.wait_unused(&|| false));
}

#[test]
fn clients_are_counted_and_see_their_own_access() {
    let switches = Switches::default();
    let identity = Identity::Native(7);
    let open = || -> Result<Arc<dyn Device>> { Ok(Memory::new(vec![0; 4 * SECTOR])) };
    let writer = SwitchedDevice::over("a", false, switches.attach(identity.clone(), open).unwrap());
    let reader = SwitchedDevice::over("a", true, switches.attach(identity.clone(), || panic!("is open")).unwrap());
    assert_eq!(switches.clients(&identity), 2);
    assert_eq!(reader.write(0, sector_of(1), false).unwrap_err().kind(), ErrorKind::ReadOnly);
    writer.write(0, sector_of(1), false).unwrap();
    assert_eq!(reader.read(0, 1).unwrap(), [1]);
    assert_eq!(switches.refuse_in_use(&identity, "disk 'a'").unwrap_err().kind(), ErrorKind::Busy);
    let moved = Identity::Native(8);
    let other = Switches::default();
    switches.hand_over(&identity, &other, moved.clone());
    assert_eq!((switches.clients(&identity), other.clients(&moved)), (0, 2));
    drop((writer, reader));
    assert!(other.refuse_in_use(&moved, "disk 'a'").is_ok());
}

/// A new device has no record of writes that were lost with the previous device.
#[test]
fn a_loss_is_reported_once_to_each_connected_client() {
    let switch = Switch::new(Memory::new(vec![0; SECTOR]));
    let client = |read_only| SwitchedDevice::new("disk", read_only, Arc::clone(&switch));
    let (first, second, reader) = (client(false), client(false), client(true));
    let put = |client: &SwitchedDevice, fua| client.write(0, sector_of(1), fua);
    let is_told = |result: Result<()>| {
        result.is_err_and(|error| error.kind() == ErrorKind::Io && error.to_string().contains("may be lost"))
    };
    put(&first, false).unwrap();
    let new = Memory::new(vec![0; SECTOR]);
    switch.note_loss();
    switch.exchange(Arc::clone(&new) as Arc<dyn Device>);
    let late = client(false);
    // A write without FUA succeeds, so that the next flush reports the error.
    put(&first, false).unwrap();
    assert!(is_told(first.flush()));
    first.flush().unwrap();
    // A failed FUA write reports the loss for this write only, so the next flush fails too.
    assert!(is_told(put(&second, true)));
    put(&second, true).unwrap();
    assert!(is_told(second.flush()));
    second.flush().unwrap();
    late.flush().unwrap();
    put(&late, true).unwrap();
    reader.flush().unwrap();
    assert_eq!(new.flushed.load(Ordering::SeqCst), 6);
    // An exchange without a loss causes no error. After another loss, every client receives one.
    switch.exchange(Memory::new(vec![0; SECTOR]));
    first.flush().unwrap();
    switch.note_loss();
    assert!(is_told(first.discard(0, SECTOR as u64, true)));
    assert!(is_told(second.write_zeroes(0, SECTOR as u64, false, true)));
    assert!(is_told(late.flush()));
}

#[test]
fn a_reader_flushes_a_device_that_others_write_and_not_one_that_never_changes() {
    for refuses in [false, true] {
        let memory = Arc::new(Memory::build(vec![0; SECTOR], refuses));
        let reader = SwitchedDevice::new("disk", true, Switch::new(Arc::clone(&memory) as Arc<dyn Device>));
        assert!(reader.begin_flush().unwrap().of_reader);
        reader.flush().unwrap();
        assert_eq!(memory.flushed.load(Ordering::SeqCst), u64::from(!refuses));
    }
}

/// The cost of the indirection, measured with the cheapest request: a read from memory.
#[test]
fn the_switch_adds_little_latency() {
    const ROUNDS: u32 = 20_000;
    let memory = Memory::new(vec![0; 1 << 20]);
    let direct: Arc<dyn Device> = Arc::clone(&memory) as Arc<dyn Device>;
    let switched: Arc<dyn Device> = Arc::new(SwitchedDevice::new("a", false, Switch::new(memory)));
    let time = |device: &Arc<dyn Device>| {
        let begun = Instant::now();
        for _ in 0..ROUNDS {
            let mut plan = device.plan_read(0, SECTOR).unwrap();
            assert!(device.finish_read(&mut plan).unwrap() == Verdict::Good);
        }
        begun.elapsed() / ROUNDS
    };
    let best = |device| (0..9).map(|_| time(device)).min().unwrap();
    let (direct, through) = (best(&direct), best(&switched));
    let cost = through.saturating_sub(direct);
    println!("a read of 512 bytes from memory: {direct:?}, through the switch {through:?}: {cost:?} more");
    // A request over a socket takes at least 10 us. The bound is high enough for unoptimized code and a busy machine.
    assert!(cost < Duration::from_micros(3), "{cost:?}");
}
