//! Layers that fail: the error is returned, other ranges are unaffected, and the caches get no wrong extent.

use crate::merges::filled;
use crate::mock::{Manner, MemoryFile, Mock, Table};
use backend::File;
use chain::{Chain, Options};
use error::ErrorKind;
use layer::Layer;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use work::NoProgress;
use work::Progress;

fn read(chain: &Chain, start: usize, length: usize) -> error::Result<Vec<u8>> {
    let mut out = vec![0xee; length];
    chain.read(start as u64, &mut out).map(|()| out)
}

#[test]
fn a_read_fails_with_its_layer_and_recovers_with_it() {
    let (chain, layers, content) = filled(3, 1 << 20, 4096, 1);
    layers[1].faults.map.store(true, Ordering::SeqCst);
    let failed = (0..256).filter(|block| read(&chain, block * 4096, 4096).is_err()).count();
    assert!(failed > 0);
    layers[1].faults.map.store(false, Ordering::SeqCst);
    assert!(read(&chain, 0, 1 << 20).unwrap() == content);
}

#[test]
fn a_failed_prefetch_fails_no_read() {
    let (chain, layers, content) = filled(2, 1 << 20, 4096, 2);
    chain.set_tunables(chain.tunables()).unwrap();
    // One damaged table, which is within the prefetch window of all grains around it.
    layers[1].faults.map_at.store(1024, Ordering::SeqCst);
    let fresh =
        Chain::open("fresh", layers.iter().map(|layer| layer.clone() as Arc<dyn Layer>).collect(), Options::default())
            .unwrap();
    let mut failed = 0;
    for block in 0..256 {
        match read(&fresh, block * 4096, 4096) {
            Ok(bytes) => assert!(bytes == content[block * 4096..][..4096]),
            Err(error) => {
                assert_eq!((error.kind(), block), (ErrorKind::Corrupt, 128));
                failed += 1;
            }
        }
    }
    assert!(failed <= 1);
}

#[test]
fn a_failed_write_is_an_error_and_leaves_old_or_new_content() {
    let (chain, layers, mut content) = filled(3, 1 << 20, 4096, 3);
    content[..8192].fill(4);
    chain.write(0, &[4; 8192]).unwrap();
    assert!(read(&chain, 0, 1 << 20).unwrap() == content);
    layers[0].faults.write.store(true, Ordering::SeqCst);
    assert!(chain.write(5000, &[1; 10_000]).is_err());
    assert!(chain.zero(0, 8192, false).is_err());
    layers[0].faults.write.store(false, Ordering::SeqCst);
    assert!(read(&chain, 0, 1 << 20).unwrap() == content);
    // If the rest of a grain cannot be read, only a write to a part of that grain fails.
    let (chain, layers, _) = filled(1, 1 << 20, 4096, 4);
    chain.write(0, &[3; 65536]).unwrap();
    chain.push(Mock::new(Manner::new(1 << 20, 4096))).unwrap();
    chain.set_tunables(chain::Tunables { entries: 0, ..chain.tunables() }).unwrap();
    layers[0].faults.map.store(true, Ordering::SeqCst);
    assert!(chain.write(100, &[1; 100]).is_err());
    chain.write(4096, &[2; 4096]).unwrap();
    layers[0].faults.map.store(false, Ordering::SeqCst);
    assert_eq!(read(&chain, 0, 4096).unwrap(), [3; 4096]);
    assert_eq!(read(&chain, 4096, 4096).unwrap(), [2; 4096]);
}

#[test]
fn zeros_without_room_are_written_over_what_the_top_has() {
    const GRAIN: u64 = 4096;
    for overwrites in [false, true] {
        let (chain, _, content) = filled(1, 1 << 20, GRAIN, 7);
        let top = Mock::new(Manner { overwrites, ..Manner::new(1 << 20, GRAIN) });
        chain.push(top.clone()).unwrap();
        chain.write(0, &[7; 5 * GRAIN as usize]).unwrap();
        chain.zero(2 * GRAIN, GRAIN, false).unwrap();
        top.faults.zero_room.store(true, Ordering::SeqCst);
        // The top has data on both sides of a grain of zeros.
        chain.zero(0, 4 * GRAIN, false).unwrap();
        assert!(read(&chain, 0, 4 * GRAIN as usize).unwrap().iter().all(|byte| *byte == 0));
        assert_eq!(read(&chain, 4 * GRAIN as usize, GRAIN as usize).unwrap(), [7; GRAIN as usize]);
        // Zeros that should have space need free space.
        assert_eq!(chain.zero(2 * GRAIN, GRAIN, true).unwrap_err().kind(), ErrorKind::NoSpace);
        chain.zero(3 * GRAIN, 2 * GRAIN, true).unwrap();
        assert_eq!(read(&chain, 4 * GRAIN as usize, GRAIN as usize).unwrap(), [0; GRAIN as usize]);
        // The level below has the data of the next grain.
        assert_eq!(chain.zero(4 * GRAIN, 2 * GRAIN, false).unwrap_err().kind(), ErrorKind::NoSpace);
        let after = 5 * GRAIN as usize..6 * GRAIN as usize;
        assert!(read(&chain, after.start, after.len()).unwrap() == content[after]);
        chain.write(0, &[8; GRAIN as usize]).unwrap();
        chain.discard(0, GRAIN).unwrap();
        assert_eq!(read(&chain, 0, GRAIN as usize).unwrap(), [8; GRAIN as usize], "a discard writes no zeros");
    }
}

#[test]
fn after_a_failed_flush_nothing_is_written() {
    let (chain, layers, _) = filled(2, 1 << 20, 4096, 5);
    chain.write(0, &[5; 4096]).unwrap();
    layers[0].faults.flush.store(true, Ordering::SeqCst);
    assert_eq!(chain.flush().unwrap_err().kind(), ErrorKind::Io);
    layers[0].faults.flush.store(false, Ordering::SeqCst);
    assert_eq!(chain.flush().unwrap_err().kind(), ErrorKind::Stopped);
    assert_eq!(chain.write(0, &[6; 512]).unwrap_err().kind(), ErrorKind::Stopped);
    assert_eq!(chain.zero(0, 512, false).unwrap_err().kind(), ErrorKind::Stopped);
    // The device may have the old content, so the range cannot be read.
    assert_eq!(read(&chain, 0, 4096).unwrap_err().kind(), ErrorKind::Io);
}

#[test]
fn a_flush_that_failed_for_lack_of_space_succeeds_when_there_is_space() {
    let (chain, layers, _) = filled(2, 1 << 20, 4096, 5);
    chain.write(0, &[5; 4096]).unwrap();
    layers[0].faults.flush_room.store(true, Ordering::SeqCst);
    assert_eq!(chain.flush().unwrap_err().kind(), ErrorKind::NoSpace);
    chain.write(4096, &[6; 4096]).unwrap();
    assert_eq!(chain.close().unwrap_err().kind(), ErrorKind::NoSpace);
    chain.write(8192, &[7; 4096]).unwrap();
    layers[0].faults.flush_room.store(false, Ordering::SeqCst);
    chain.flush().unwrap();
    let manner = layers[0].manner();
    let again = Mock::over(manner, layers[0].file(0).unwrap().clone(), layers[0].durable());
    let durable = Chain::open("durable", vec![again as Arc<dyn Layer>], Options::default()).unwrap();
    for (block, byte) in [5u8, 6, 7].into_iter().enumerate() {
        assert_eq!(read(&durable, block * 4096, 4096).unwrap(), [byte; 4096]);
    }
    chain.close().unwrap();
    assert_eq!(chain.write(0, &[8; 512]).unwrap_err().kind(), ErrorKind::Stopped);
}

#[test]
fn a_discard_without_space_keeps_the_content() {
    let (chain, layers, content) = filled(3, 1 << 20, 4096, 7);
    layers[0].faults.write_in.store(1, Ordering::SeqCst);
    chain.discard(512, (1 << 20) - 1024).unwrap();
    assert!(read(&chain, 0, 1 << 20).unwrap() == content);
    assert_eq!(chain.zero(0, 1 << 20, false).unwrap_err().kind(), ErrorKind::NoSpace);
    layers[0].faults.write_in.store(0, Ordering::SeqCst);
    chain.discard(0, 1 << 20).unwrap();
    assert!(read(&chain, 0, 1 << 20).unwrap().iter().all(|byte| *byte == 0));
    layers[0].faults.write.store(true, Ordering::SeqCst);
    chain.write(0, &[1; 4096]).unwrap_err();
    assert_eq!(chain.discard(0, 1 << 20).unwrap_err().kind(), ErrorKind::Io, "a discard fails only with an I/O error");
}

#[test]
fn a_flush_covers_the_level_below_a_new_snapshot() {
    let (chain, layers, _) = filled(1, 1 << 20, 4096, 6);
    chain.write(0, &[1; 4096]).unwrap();
    chain.push(Mock::new(Manner::new(1 << 20, 4096))).unwrap();
    let again = Mock::over(layers[0].manner(), layers[0].file(0).unwrap().clone(), layers[0].durable());
    let below = Chain::open("below", vec![again as Arc<dyn Layer>], Options::default()).unwrap();
    assert_eq!(read(&below, 0, 4096).unwrap(), [1; 4096]);
    let flushes = layers[0].flushes.load(Ordering::SeqCst);
    chain.write(0, &[2; 4096]).unwrap();
    chain.flush().unwrap();
    assert_eq!(layers[0].flushes.load(Ordering::SeqCst), flushes, "nothing was written to that range");
}

#[test]
fn a_failed_merge_leaves_the_chain_unchanged() {
    for writes in [1, 2, 5] {
        let (chain, layers, content) = filled(4, 2 << 20, 4096, 7);
        let keys = chain.keys();
        layers[3].faults.write_in.store(writes, Ordering::SeqCst);
        let error = chain.consolidate(&NoProgress, &mut || Ok(())).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::NoSpace);
        assert_eq!(chain.keys(), keys);
        assert!(read(&chain, 0, 2 << 20).unwrap() == content);
        layers[3].faults.write_in.store(0, Ordering::SeqCst);
        chain.consolidate(&NoProgress, &mut || Ok(())).unwrap();
        assert!(read(&chain, 0, 2 << 20).unwrap() == content);
    }
}

/// Makes the target fail once the last pass has begun, when writes are made in top and target.
struct Late<'a> {
    chain: &'a Chain,
    target: &'a Mock,
    begun: AtomicBool,
}

impl Progress for Late<'_> {
    fn update(&self, done: u64, total: u64) {
        if done == total {
            self.begun.store(true, Ordering::SeqCst);
        }
    }
    fn rate(&self) -> u64 {
        // The merge calls this at each step, also in the last pass.
        if self.begun.load(Ordering::SeqCst) {
            self.target.faults.write.store(true, Ordering::SeqCst);
            self.chain.write(300_000, &[9; 10_000]).unwrap();
        }
        0
    }
}

#[test]
fn a_failing_target_during_mirroring_fails_the_merge_and_no_write() {
    let (chain, layers, mut content) = filled(3, 1 << 20, 4096, 8);
    let late = Late { chain: &chain, target: &layers[2], begun: AtomicBool::new(false) };
    // Writes that the last pass has to copy.
    struct Busy<'a>(&'a Late<'a>);
    impl Progress for Busy<'_> {
        fn update(&self, done: u64, total: u64) {
            if done < total {
                self.0.chain.write(0, &[8; 5000]).unwrap();
            }
            self.0.update(done, total);
        }
        fn rate(&self) -> u64 {
            self.0.rate()
        }
    }
    let error = chain.consolidate(&Busy(&late), &mut || Ok(())).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Io);
    content[..5000].fill(8);
    content[300_000..310_000].fill(9);
    assert!(read(&chain, 0, 1 << 20).unwrap() == content);
    layers[2].faults.write.store(false, Ordering::SeqCst);
    chain.consolidate(&NoProgress, &mut || Ok(())).unwrap();
    assert!(read(&chain, 0, 1 << 20).unwrap() == content);
}

/// Otherwise it would write its target to the end, and the disk could not be opened again meanwhile.
#[test]
fn a_merge_ends_when_a_flush_of_the_top_fails() {
    const SIZE: usize = 32 << 20;
    let (chain, layers, _) = filled(1, SIZE as u64, 4096, 9);
    chain.push(Mock::new(Manner::new(SIZE as u64, 4096))).unwrap();
    chain.write(0, &vec![3; SIZE]).unwrap();
    let top = Mock::new(Manner::new(SIZE as u64, 4096));
    chain.push(top.clone()).unwrap();
    struct Failing<'a>(&'a Chain, &'a Mock);
    impl Progress for Failing<'_> {
        fn update(&self, done: u64, _total: u64) {
            if done == 0 {
                self.0.write(0, &[4; 512]).unwrap();
                self.1.faults.flush.store(true, Ordering::SeqCst);
                assert_eq!(self.0.flush().unwrap_err().kind(), ErrorKind::Io);
            }
        }
    }
    let (keys, before) = (chain.keys(), layers[0].written.load(Ordering::SeqCst));
    let ended = chain.merge_down(keys[1], keys[2], 0, &Failing(&chain, &top), &mut || panic!("no commit"));
    assert_eq!(ended.err().unwrap().kind(), ErrorKind::Stopped);
    let copied = layers[0].written.load(Ordering::SeqCst) - before;
    assert!(copied <= 4 << 20, "{copied} bytes were copied after the failure");
}

/// A write that is under way while a flush begins and ends is not covered by that flush. The next flush must cover it.
#[test]
fn a_flush_during_a_write_does_not_cover_the_write() {
    let layer = Mock::new(Manner::new(1 << 20, 4096));
    let chain = Chain::open("slow", vec![layer.clone() as Arc<dyn Layer>], Options::default()).unwrap();
    for zero in [false, true] {
        layer.faults.writes.begin();
        std::thread::scope(|scope| {
            let write = || if zero { chain.zero(0, 65_536, false) } else { chain.write(0, &[1; 65_536]) };
            let write = scope.spawn(write);
            layer.faults.writes.wait_for(1);
            chain.flush().unwrap();
            layer.faults.writes.end();
            write.join().unwrap().unwrap();
        });
        let before = layer.flushes.load(Ordering::SeqCst);
        chain.flush().unwrap();
        assert_eq!(layer.flushes.load(Ordering::SeqCst), before + 1);
        chain.flush().unwrap();
        assert_eq!(layer.flushes.load(Ordering::SeqCst), before + 1, "nothing was written after the failure");
    }
}

/// The top records only a part of a discard while the owner of the chain replaces its record. The target gets the same
/// content before writes go to it.
#[test]
fn a_discard_executed_in_part_during_the_commit_of_a_merge_keeps_its_effect() {
    const HALF: usize = 2 << 20;
    let (chain, layers, _) = filled(2, 2 * HALF as u64, 4096, 9);
    chain.write(0, &vec![7; 2 * HALF]).unwrap();
    let mut expected = vec![7; 2 * HALF];
    expected[..HALF].fill(0);
    let mut commit = || {
        layers[0].faults.zero_end.store(HALF as u64, Ordering::SeqCst);
        chain.discard(0, 2 * HALF as u64).unwrap();
        assert!(read(&chain, 0, 2 * HALF).unwrap() == expected);
        Ok(())
    };
    chain.consolidate(&NoProgress, &mut commit).unwrap();
    assert!(read(&chain, 0, 2 * HALF).unwrap() == expected);
}

/// A write that succeeds in the top and fails in the target fails. Reads of its range return the same content before
/// and after the levels are exchanged, or fail.
#[test]
fn a_write_that_fails_in_the_target_during_the_commit_of_a_merge_does_not_revert_later() {
    for lasting in [false, true] {
        let (chain, layers, _) = filled(2, 1 << 20, 4096, 10);
        let target = &layers[1];
        let mut commit = || {
            target.faults.write_in.store(1, Ordering::SeqCst);
            assert_eq!(chain.write(8192, &[9; 4096]).unwrap_err().kind(), ErrorKind::NoSpace);
            assert!(read(&chain, 8192, 4096).unwrap() == [9; 4096]);
            chain.flush().unwrap();
            target.faults.write_in.store(u64::from(lasting), Ordering::SeqCst);
            Ok(())
        };
        chain.consolidate(&NoProgress, &mut commit).unwrap();
        assert_eq!(chain.keys().len(), 1);
        match lasting {
            false => assert!(read(&chain, 8192, 4096).unwrap() == [9; 4096]),
            true => assert_eq!(read(&chain, 8192, 4096).unwrap_err().kind(), ErrorKind::Io),
        }
        assert_eq!(chain.failure().is_some(), lasting);
        if !lasting {
            // The flush during the commit did not cover the copy in the target.
            target.faults.flush.store(true, Ordering::SeqCst);
            assert_eq!(chain.flush().unwrap_err().kind(), ErrorKind::Io);
            assert_eq!(read(&chain, 8192, 4096).unwrap_err().kind(), ErrorKind::Io);
        }
    }
}

/// A file that calls a function before a write.
struct Hooked {
    inner: Arc<dyn File>,
    hook: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl File for Hooked {
    backend::forward_file!(inner: len, set_len, read_at, sync, punch);

    fn write_at(&self, slices: &[&[u8]], offset: u64, durable: bool) -> std::io::Result<()> {
        let hook = self.hook.lock().take();
        if let Some(hook) = hook {
            hook();
        }
        self.inner.write_at(slices, offset, durable)
    }
}

/// A flush between the write to the top and the write to the target covers the former only. After the merge, reads are
/// made in the target.
#[test]
fn a_flush_between_both_writes_of_a_change_during_the_commit_of_a_merge_does_not_cover_the_second() {
    let manner = Manner::new(1 << 20, 4096);
    let file = Arc::new(Hooked { inner: Arc::new(MemoryFile::default()), hook: Mutex::default() });
    let target = Mock::over(manner, file.clone(), Table::default());
    let layers = vec![Mock::new(manner) as Arc<dyn Layer>, target.clone() as Arc<dyn Layer>];
    let chain = Arc::new(Chain::open("both", layers, Options::default()).unwrap());
    chain.write(0, &[1; 16_384]).unwrap();
    let mut commit = || {
        let flushed = Arc::clone(&chain);
        *file.hook.lock() = Some(Box::new(move || flushed.flush().unwrap()));
        chain.write(8192, &[9; 4096]).unwrap();
        assert!(file.hook.lock().is_none());
        Ok(())
    };
    chain.consolidate(&NoProgress, &mut commit).unwrap();
    assert_eq!(read(&chain, 8192, 4096).unwrap(), [9; 4096]);
    target.faults.flush.store(true, Ordering::SeqCst);
    assert_eq!(chain.flush().unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(read(&chain, 8192, 4096).unwrap_err().kind(), ErrorKind::Io);
    assert!(chain.abandon(), "the write may be lost");
}

#[test]
fn a_failed_close_closes_the_other_layers_and_can_be_repeated() {
    let (chain, layers, _) = filled(3, 1 << 20, 4096, 11);
    let closed = || [0, 1, 2].map(|index| layers[index].closed.load(Ordering::SeqCst));
    layers[0].faults.close_room.store(true, Ordering::SeqCst);
    for _ in 0..2 {
        assert_eq!(chain.close().unwrap_err().kind(), ErrorKind::NoSpace);
        assert_eq!(closed(), [false, true, true]);
        assert_eq!(chain.write(0, &[1; 512]).unwrap_err().kind(), ErrorKind::Stopped);
    }
    layers[0].faults.close_room.store(false, Ordering::SeqCst);
    chain.close().unwrap();
    assert_eq!((closed(), chain.failure()), ([true; 3], None));

    let (chain, layers, content) = filled(3, 1 << 20, 4096, 12);
    layers[0].faults.close_room.store(true, Ordering::SeqCst);
    layers[1].faults.close.store(true, Ordering::SeqCst);
    assert_eq!(chain.close().unwrap_err().kind(), ErrorKind::Io, "a failure of the device is reported first");
    assert!(layers[2].closed.load(Ordering::SeqCst) && chain.failure().is_some());
    assert!(read(&chain, 0, 1 << 20).unwrap() == content);
}
