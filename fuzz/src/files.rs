//! Files of an input: spelled out in the input, or a base image with damage.
//!
//! An image with a few hundred bytes of metadata may have megabytes of zeros. So a file is kept as its nonzero sectors,
//! and damage goes mostly to these.

use crate::Input;
use backend::{Directory, File, IoMode};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Bytes of a sector.
pub const SECTOR: usize = 512;

/// The greatest length of a file of an input: 4 TiB.
const LENGTH_MAX: u64 = 4 << 40;

/// A file: its length, and its sectors that are not zeros.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Sectors {
    /// Length in bytes.
    pub length: u64,
    sectors: BTreeMap<u64, [u8; SECTOR]>,
}

impl Sectors {
    /// Reads a file from an input: one of `bases`, or a file spelled out; then damages it.
    pub fn read(input: &mut Input<'_>, bases: &[Self]) -> Self {
        let mut file = match usize::from(input.u8()) % (bases.len() + 1) {
            0 => Self::spelled(input),
            number => bases[number - 1].clone(),
        };
        for _ in 0..input.u8() % 16 {
            file.damage(input);
        }
        file
    }

    /// Reads a file that is spelled out: its length, then pieces with their first sector, length and bytes.
    fn spelled(input: &mut Input<'_>) -> Self {
        let mut file = Self { length: input.word(6).min(LENGTH_MAX), ..Self::default() };
        for _ in 0..input.u8() {
            let sector = input.word(4);
            let length = input.word(2) as usize;
            file.put(sector * SECTOR as u64, input.bytes(length));
        }
        file
    }

    /// The input from which [`Sectors::read`] makes this file, undamaged.
    ///
    /// # Panics
    /// When it has too many pieces.
    pub fn spell(&self) -> Vec<u8> {
        let mut pieces: Vec<(u64, Vec<u8>)> = Vec::new();
        for (sector, bytes) in &self.sectors {
            match pieces.last_mut() {
                Some((start, piece))
                    if *start + (piece.len() / SECTOR) as u64 == *sector && piece.len() < (1 << 16) - SECTOR =>
                {
                    piece.extend(bytes)
                }
                _ => pieces.push((*sector, bytes.to_vec())),
            }
        }
        let mut out = vec![0];
        out.extend(&self.length.to_le_bytes()[..6]);
        out.push(u8::try_from(pieces.len()).expect("a seed has few pieces"));
        for (sector, mut piece) in pieces {
            // The rest of the last sector is zeros anyway.
            piece.truncate(piece.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1));
            out.extend(&sector.to_le_bytes()[..4]);
            out.extend(&piece.len().to_le_bytes()[..2]);
            out.extend(piece);
        }
        out
    }

    /// The content of a file.
    ///
    /// # Panics
    /// If the file cannot be read.
    pub fn of(file: &dyn File) -> Self {
        let length = file.len().expect("the file can be read");
        let mut out = Self { length, ..Self::default() };
        let mut at = 0;
        while let Some(range) = file.next_allocated(at).expect("the file can be read") {
            let mut bytes = vec![0; (range.end.min(range.start + (1 << 20)) - range.start) as usize];
            file.read_at(&mut bytes, range.start).expect("the file can be read");
            out.put(range.start, &bytes);
            at = range.start + bytes.len() as u64;
        }
        out
    }

    /// A file of these bytes.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let mut out = Self { length: bytes.len() as u64, ..Self::default() };
        out.put(0, bytes);
        out
    }

    /// Writes bytes at `offset`, up to the length of the file.
    fn put(&mut self, mut offset: u64, mut bytes: &[u8]) {
        bytes = &bytes[..bytes.len().min(self.length.saturating_sub(offset) as usize)];
        while !bytes.is_empty() {
            let (sector, within) = (offset / SECTOR as u64, (offset % SECTOR as u64) as usize);
            let (now, later) = bytes.split_at(bytes.len().min(SECTOR - within));
            let target = self.sectors.entry(sector).or_insert([0; SECTOR]);
            target[within..within + now.len()].copy_from_slice(now);
            if target.iter().all(|byte| *byte == 0) {
                self.sectors.remove(&sector);
            }
            offset += now.len() as u64;
            bytes = later;
        }
    }

    fn get(&self, offset: u64, out: &mut [u8]) {
        for (at, byte) in (offset..).zip(out) {
            let sector = self.sectors.get(&(at / SECTOR as u64));
            *byte = sector.map_or(0, |sector| sector[(at % SECTOR as u64) as usize]);
        }
    }

    /// The offset of a random sector that is not zeros.
    fn pick(&self, input: &mut Input<'_>) -> u64 {
        let number = input.word(2) as usize % self.sectors.len().max(1);
        self.sectors.keys().nth(number).map_or(0, |sector| sector * SECTOR as u64)
    }

    fn damage(&mut self, input: &mut Input<'_>) {
        let kind = input.u8();
        let base = self.pick(input);
        let mut word = [0; 8];
        match kind % 9 {
            0 => self.put(base + u64::from(input.u8()) * 8 % 512, &input.word(8).to_le_bytes()),
            1 => self.put(base + u64::from(input.u8()) * 4 % 512, &input.word(4).to_le_bytes()[..4]),
            2 => {
                // A small change of a value: errors are likely at limits.
                let at = base + u64::from(input.u8()) * 4 % 512;
                self.get(at, &mut word);
                let change = i64::from(input.u8() as i8);
                self.put(at, &u64::from_le_bytes(word).wrapping_add_signed(change).to_le_bytes());
            }
            3 => self.put(base, &[0; SECTOR]),
            4 => {
                // Copies a sector over another one.
                let mut sector = [0; SECTOR];
                self.get(self.pick(input), &mut sector);
                self.put(base, &sector);
            }
            5 => {
                self.length = match kind / 9 % 3 {
                    0 => base + u64::from(input.u8()),
                    1 => self.length.saturating_add_signed(i64::from(input.word(4) as i32)),
                    _ => input.word(6),
                }
                .min(LENGTH_MAX);
                let end = self.length.div_ceil(SECTOR as u64);
                self.sectors.retain(|sector, _| *sector < end);
            }
            6 => {
                let length = usize::from(input.u8());
                self.put(base + u64::from(input.u8()) % 512, input.bytes(length));
            }
            7 => {
                // Repeats one word, as in tables with equal entries.
                let at = base + u64::from(input.u8()) * 8 % 512;
                let value = input.word(8);
                let step = u64::from(input.u8());
                for number in 0..u64::from(input.u8()) {
                    self.put(at + number * 8, &value.wrapping_add(number.wrapping_mul(step)).to_le_bytes());
                }
            }
            _ => {
                // Copies a field over another one.
                self.get(self.pick(input) + u64::from(input.u8()) * 4 % 512, &mut word);
                self.put(base + u64::from(input.u8()) * 4 % 512, &word[..if kind & 64 == 0 { 8 } else { 4 }]);
            }
        }
    }

    /// The nonzero sectors, for changes.
    pub fn sectors_mut(&mut self) -> &mut BTreeMap<u64, [u8; SECTOR]> {
        &mut self.sectors
    }

    /// Creates the file in a folder.
    ///
    /// # Panics
    /// When the folder has it already.
    pub fn write(&self, directory: &Arc<dyn Directory>, name: &str) -> Arc<dyn File> {
        let file = directory.create(name, IoMode::Buffered).expect("the name is new");
        file.set_len(self.length).expect("a new disk accepts writes");
        let whole = |sector: u64| self.length.saturating_sub(sector * SECTOR as u64).min(SECTOR as u64) as usize;
        for (sector, bytes) in &self.sectors {
            file.write_at(&[&bytes[..whole(*sector)]], sector * SECTOR as u64, false)
                .expect("a new disk accepts writes");
        }
        file
    }
}
