//! An overlay over a folder that is never written: changes stay in memory, in blocks of 4 KiB.
//!
//! Invariants: no operation on the overlay changes the folder below, which is opened for reading only. Names and
//! lengths of the files below do not change while the overlay exists.

use crate::directory::renamed;
use crate::validate::{check_name, check_range};
use crate::{Access, BLOCK_SIZE, Directory, File, IoMode, Lock};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const BLOCK: u64 = BLOCK_SIZE as u64;

/// An overlay over a folder.
pub struct Overlay {
    below: Arc<dyn Directory>,
    names: Arc<Mutex<Names>>,
}

#[derive(Default)]
struct Names {
    /// Files that were opened or created through the overlay.
    known: BTreeMap<String, Arc<OverlayFile>>,
    /// Files of the folder below that are removed in the overlay.
    removed: BTreeSet<String>,
}

impl Overlay {
    /// An overlay over a folder, without changes.
    pub fn over(below: Arc<dyn Directory>) -> Self {
        Self { below, names: Arc::default() }
    }
}

impl Overlay {
    fn find(&self, name: &str) -> io::Result<Arc<OverlayFile>> {
        check_name(name)?;
        let mut names = self.names.lock();
        if let Some(file) = names.known.get(name) {
            return Ok(Arc::clone(file));
        }
        if names.removed.contains(name) {
            return Err(io::ErrorKind::NotFound.into());
        }
        let below = self.below.open_foreign(name, IoMode::Buffered, Access::Read)?;
        let length = below.len()?;
        let state = OverlayState { length, below: length, blocks: BTreeMap::new() };
        let file =
            Arc::new(OverlayFile { below: Some(below), state: Mutex::new(state), locked: AtomicBool::default() });
        names.known.insert(name.to_owned(), Arc::clone(&file));
        Ok(file)
    }
}

impl Directory for Overlay {
    crate::forward_directory!(below: room, queue, queue_kind);

    fn open(&self, name: &str, _: IoMode) -> io::Result<Arc<dyn File>> {
        Ok(self.find(name)?)
    }

    fn create(&self, name: &str, _: IoMode) -> io::Result<Arc<dyn File>> {
        check_name(name)?;
        if self.list()?.iter().any(|known| known == name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let file = Arc::new(OverlayFile::default());
        self.names.lock().known.insert(name.to_owned(), Arc::clone(&file));
        Ok(file)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.find(name)?;
        let mut names = self.names.lock();
        names.known.remove(name);
        names.removed.insert(name.to_owned());
        Ok(())
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.find(from)?;
        check_name(to)?;
        let mut names = self.names.lock();
        let file = names.known.remove(from).ok_or(io::ErrorKind::NotFound)?;
        names.known.insert(to.to_owned(), file);
        names.removed.insert(from.to_owned());
        Ok(())
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let names = self.names.lock();
        let mut all: BTreeSet<String> = self.below.list()?.into_iter().collect();
        all.retain(|name| !names.removed.contains(name));
        all.extend(names.known.keys().cloned());
        Ok(all.into_iter().collect())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn lock(&self, name: &str) -> io::Result<Box<dyn Lock>> {
        if self.find(name).is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            self.create(name, IoMode::Buffered)?;
        }
        let file = self.find(name)?;
        if file.locked.swap(true, Ordering::AcqRel) {
            return Err(io::Error::new(io::ErrorKind::WouldBlock, format!("'{name}' is locked by another owner")));
        }
        Ok(Box::new(OverlayLock { names: Arc::clone(&self.names), name: name.to_owned(), file }))
    }
}

struct OverlayLock {
    names: Arc<Mutex<Names>>,
    name: String,
    file: Arc<OverlayFile>,
}

impl Lock for OverlayLock {
    fn loss(&self) -> io::Result<Option<String>> {
        let names = self.names.lock();
        let held = names.known.get(&self.name).is_some_and(|file| Arc::ptr_eq(file, &self.file));
        Ok((!held).then(|| renamed(&self.name)))
    }
}

impl Drop for OverlayLock {
    fn drop(&mut self) {
        self.file.locked.store(false, Ordering::Release);
    }
}

#[derive(Default)]
struct OverlayState {
    length: u64,
    /// Length of the visible part of the file below: a truncation reduces it.
    below: u64,
    /// Changed blocks; `None` is a block of zeros.
    blocks: BTreeMap<u64, Option<Box<[u8; BLOCK_SIZE]>>>,
}

#[derive(Default)]
struct OverlayFile {
    below: Option<Arc<dyn File>>,
    state: Mutex<OverlayState>,
    locked: AtomicBool,
}

impl OverlayFile {
    /// Reads from the file below; bytes past its visible part read as zeros.
    fn read_below(&self, state: &OverlayState, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let count = state.below.saturating_sub(offset).min(buffer.len() as u64) as usize;
        let (held, rest) = buffer.split_at_mut(count);
        rest.fill(0);
        match &self.below {
            Some(file) if !held.is_empty() => file.read_at(held, offset),
            _ => Ok(()),
        }
    }

    fn read(&self, state: &OverlayState, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset + buffer.len() as u64;
        let mut at = offset;
        while at < end {
            let number = at / BLOCK;
            let changed = state.blocks.range(number..=(end - 1) / BLOCK).next();
            let (next, block) = changed.map_or((u64::MAX, &None), |(next, block)| (*next, block));
            let until = if next == number { (number + 1) * BLOCK } else { next.saturating_mul(BLOCK) }.min(end);
            let part = &mut buffer[(at - offset) as usize..(until - offset) as usize];
            match block {
                Some(bytes) if next == number => {
                    let from = (at % BLOCK) as usize;
                    part.copy_from_slice(&bytes[from..from + part.len()]);
                }
                None if next == number => part.fill(0),
                _ => self.read_below(state, part, at)?,
            }
            at = until;
        }
        Ok(())
    }
}

impl File for OverlayFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.state.lock().length)
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        let mut state = self.state.lock();
        if length < state.length {
            state.below = state.below.min(length);
            state.blocks.split_off(&length.div_ceil(BLOCK));
            if let Some(Some(last)) = state.blocks.get_mut(&(length / BLOCK)) {
                last[(length % BLOCK) as usize..].fill(0);
            }
        }
        state.length = length;
        Ok(())
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        check_range(offset, buffer.len() as u64)?;
        self.read(&self.state.lock(), buffer, offset)
    }

    fn write_at(&self, slices: &[&[u8]], offset: u64, _: bool) -> io::Result<()> {
        let total = slices.iter().map(|slice| slice.len() as u64).sum();
        check_range(offset, total)?;
        self.write(&mut self.state.lock(), slices, offset)
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        check_range(offset, length)?;
        let mut state = self.state.lock();
        let end = (offset + length).min(state.length);
        if offset >= end {
            return Ok(());
        }
        // Whole blocks, including the last block of the file, are noted as zeros and need no memory.
        let last = if end == state.length { end.div_ceil(BLOCK) } else { end / BLOCK };
        let whole = offset.div_ceil(BLOCK)..last.max(offset.div_ceil(BLOCK));
        let edges = [offset..end.min(whole.start * BLOCK), (whole.end * BLOCK).clamp(offset, end)..end];
        for edge in edges.into_iter().filter(|edge| !edge.is_empty()) {
            self.write(&mut state, &[&[0; BLOCK_SIZE][..(edge.end - edge.start) as usize]], edge.start)?;
        }
        state.blocks.extend(whole.map(|number| (number, None)));
        Ok(())
    }
}

impl OverlayFile {
    fn write(&self, state: &mut OverlayState, slices: &[&[u8]], offset: u64) -> io::Result<()> {
        let mut at = offset;
        for slice in slices {
            let mut rest = *slice;
            while !rest.is_empty() {
                let (number, from) = (at / BLOCK, (at % BLOCK) as usize);
                let (part, behind) = rest.split_at(rest.len().min(BLOCK_SIZE - from));
                let mut block = Box::new([0; BLOCK_SIZE]);
                if part.len() < BLOCK_SIZE {
                    self.read(state, &mut block[..], number * BLOCK)?;
                }
                block[from..from + part.len()].copy_from_slice(part);
                state.blocks.insert(number, Some(block));
                at += part.len() as u64;
                rest = behind;
            }
        }
        state.length = state.length.max(at);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::simulated::{SimulatedDisk, SimulatedOptions};

    #[test]
    fn changes_of_the_overlay_are_not_visible_in_the_layer_below() {
        let disk = SimulatedDisk::new(1, SimulatedOptions { reorder: false, ..SimulatedOptions::default() });
        let below = disk.directory();
        let file = below.create("a", IoMode::Buffered).unwrap();
        file.write_at(&[&[7; 3 * BLOCK_SIZE]], 0, false).unwrap();
        let overlay = Overlay::over(Arc::clone(&below));
        let above = overlay.open("a", IoMode::Direct).unwrap();
        let mut model = vec![7; 3 * BLOCK_SIZE];
        let compare = |model: &[u8]| {
            let mut found = vec![1; model.len() + 100];
            above.read_at(&mut found, 0).unwrap();
            assert!(found[..model.len()] == *model && found[model.len()..].iter().all(|byte| *byte == 0));
            assert_eq!(above.len().unwrap(), model.len() as u64);
        };
        compare(&model);
        above.write_at(&[&[1; 10], &[2; 5000]], 4000, true).unwrap();
        model[4000..4010].fill(1);
        model[4010..9010].fill(2);
        compare(&model);
        above.set_len(9000).unwrap();
        model.truncate(9000);
        compare(&model);
        above.reserve(9000, 10_000).unwrap();
        model.resize(19_000, 0);
        compare(&model);
        above.punch(0, 4096).unwrap();
        model[..4096].fill(0);
        compare(&model);
        overlay.create("b", IoMode::Buffered).unwrap();
        overlay.remove("a").unwrap();
        assert_eq!(overlay.list().unwrap(), ["b"]);
        assert!(overlay.open("a", IoMode::Buffered).is_err());
        assert_eq!(below.list().unwrap(), ["a"]);
        let mut found = vec![0; 3 * BLOCK_SIZE];
        file.read_at(&mut found, 0).unwrap();
        assert_eq!(found, [7; 3 * BLOCK_SIZE]);
    }
}
