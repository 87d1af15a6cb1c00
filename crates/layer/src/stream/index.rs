//! The locations of the grains of a stream: from the directory of the header or footer, or by walking the markers.

use super::marker::{GRAIN_MARKER_SIZE, Kind, Marker};
use crate::hosted::directory::{Directories, ENTRY_ABSENT, ENTRY_BAD, Warnings};
use crate::hosted::header::{DIRECTORY_AT_END, FLAG_MARKERS, HEADER_SIZE, Header};
use crate::hosted::tables::Tables;
use crate::{Error, ErrorKind, IoContext, Result, SECTOR};
use backend::File;

/// Grains and their sectors, by grain.
type Grains = Vec<(u32, u32)>;

/// Bytes read per call while markers are walked.
const WALK_BYTES: usize = 64 << 10;

/// How the missing part of a truncated stream is treated.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Missing {
    /// The stream is not opened.
    Refused,
    /// The grains of the missing part are absent.
    Zeros,
    /// The grains of the missing part are invalid.
    Lost,
}

/// The index of a stream.
pub(super) enum Index {
    /// The tables in the file.
    Tables(Box<TableIndex>),
    /// Grain and sector of each marker found, sorted by grain: 8 bytes of memory for at least 512 of the file.
    Walked {
        grains: Grains,
        /// Grains from this one on may be in the missing part of the stream: if no marker was found for such a grain,
        /// its content is unknown.
        unknown_from: u64,
    },
}

/// The grain tables of the directory.
pub(super) struct TableIndex {
    tables: Tables,
    /// Entries per table.
    per_table: u64,
    /// For each table, whether it exists.
    present: Vec<bool>,
}

impl Index {
    /// Finds the index, and the valid header. A stream without its end is accepted, as far as it reaches, unless `cut`
    /// refuses that.
    pub(super) fn open(
        file: &dyn File,
        header: Header,
        image: &str,
        cut: Missing,
        warnings: &Warnings,
    ) -> Result<(Header, Self)> {
        let found = match header.directory_offset == DIRECTORY_AT_END {
            true => read_footer(file, &header),
            false => Ok(header.clone()),
        };
        let found = found.and_then(|header| Ok((Directories::read(file, &header, false, image, warnings)?, header)));
        match found {
            Ok((directories, header)) => {
                let present = (0..directories.len()).map(|index| directories.named(index) != [0, 0]).collect();
                let tables = Tables::new(image, directories, header.table_entries);
                let per_table = u64::from(header.table_entries);
                Ok((header, Self::Tables(Box::new(TableIndex { tables, per_table, present }))))
            }
            Err(error) if header.has(FLAG_MARKERS) && error.kind() == ErrorKind::Corrupt => {
                let (grains, stopped) = walk(file, &header)?;
                if let Some(why) = &stopped
                    && cut == Missing::Refused
                {
                    let text = format!(
                        "{error}, and its grains can be found only up to {why}: the file was truncated; get it \
                         again, or give --force-parent to save these grains"
                    );
                    return Err(Error::new(ErrorKind::Corrupt, text));
                }
                warnings.add(image, format!("{error}; its grains were found by walking the stream"));
                let unknown_from = match (&stopped, cut) {
                    (Some(_), Missing::Lost) => first_unknown(&grains),
                    _ => u64::MAX,
                };
                if let Some(why) = stopped {
                    warnings.add(image, format!("grains of the stream were found only up to {why}"));
                }
                Ok((header, Self::Walked { grains, unknown_from }))
            }
            Err(error) => Err(error),
        }
    }

    /// The entry of a grain, as in a grain table.
    pub(super) fn entry(&self, file: &dyn File, grain: u64, warnings: &Warnings) -> Result<u32> {
        match self {
            Self::Tables(index) => {
                let table = index.tables.get(file, (grain / index.per_table) as usize, warnings)?;
                Ok(table.map_or(ENTRY_ABSENT, |table| table.entry((grain % index.per_table) as usize)))
            }
            Self::Walked { grains, unknown_from } => {
                let at = grains.binary_search_by_key(&grain, |(grain, _)| u64::from(*grain));
                let missing = if grain < *unknown_from { ENTRY_ABSENT } else { ENTRY_BAD };
                Ok(at.map_or(missing, |at| grains[at].1))
            }
        }
    }

    /// The number of grains from `grain` on that are absent for certain, determined without reading a table; 0 if the
    /// grain may be present.
    pub(super) fn absent_from(&self, grain: u64) -> u64 {
        match self {
            Self::Tables(index) => match index.present.get((grain / index.per_table) as usize) {
                Some(true) => 0,
                _ => index.per_table - grain % index.per_table,
            },
            Self::Walked { grains, unknown_from } => {
                let next = grains.partition_point(|(at, _)| u64::from(*at) < grain);
                let end = grains.get(next).map_or(u64::MAX, |(at, _)| u64::from(*at)).min(*unknown_from);
                end.saturating_sub(grain)
            }
        }
    }

    /// The number of grains in the file.
    pub(super) fn mapped(&self, file: &dyn File, warnings: &Warnings) -> Result<u64> {
        match self {
            Self::Tables(index) => {
                let TableIndex { tables, present, .. } = index.as_ref();
                let directories = tables.directories();
                let mut count = 0;
                for index in (0..present.len()).filter(|index| present[*index]) {
                    if let Some(table) = tables.peek(file, &directories, index, warnings)? {
                        count += (0..table.len()).filter(|at| table.entry(*at) > 1).count() as u64;
                    }
                }
                Ok(count)
            }
            Self::Walked { grains, .. } => Ok(grains.len() as u64),
        }
    }
}

/// The first grain that may be in the missing part of a stream. If the grains that were found are in ascending order,
/// this is the grain after the last of them; otherwise it is the first grain of the disk.
fn first_unknown(grains: &Grains) -> u64 {
    let ascending = grains.windows(2).all(|pair| pair[0].1 < pair[1].1);
    grains.last().filter(|_| ascending).map_or(0, |(grain, _)| u64::from(*grain) + 1)
}

/// The footer, a second header with the location of the directory, before the last sector.
fn read_footer(file: &dyn File, head: &Header) -> Result<Header> {
    let corrupt = |what: &str| Error::new(ErrorKind::Corrupt, format!("the stream has no end: {what}"));
    let length = file.len().during(|| "cannot find out the length".to_owned())?;
    let tail = 3 * HEADER_SIZE as u64;
    // Bytes after the last whole sector do not belong to the stream.
    let end = length / SECTOR * SECTOR;
    let start = end.checked_sub(tail).ok_or_else(|| corrupt("it is shorter than a footer"))?;
    let mut bytes = [[0; HEADER_SIZE]; 3];
    for (at, sector) in bytes.iter_mut().enumerate() {
        file.read_at(sector, start + at as u64 * SECTOR).during(|| "cannot read the footer".to_owned())?;
    }
    let marker = |sector: &[u8; HEADER_SIZE]| Marker::decode(sector[..16].try_into().unwrap_or(&[0; 16]));
    if marker(&bytes[0]) != Some(Marker::Metadata { kind: Kind::Footer, sectors: 1 }) {
        return Err(corrupt("its footer is missing"));
    }
    let footer = Header::decode(&bytes[1]).map_err(|error| corrupt(&error.to_string()))?;
    if marker(&bytes[2]) != Some(Marker::End) {
        return Err(corrupt("its last sector is missing"));
    }
    let same = footer.capacity == head.capacity && footer.grain == head.grain && footer.flags == head.flags;
    if !same || footer.directory_offset == DIRECTORY_AT_END || footer.table_entries != head.table_entries {
        return Err(corrupt("its footer contradicts its header"));
    }
    Ok(footer)
}

/// Walks from marker to marker to the end of the stream or of the file. Returns the grains, and, if the walk ended
/// early, the place and the reason. An end marker is a sector of zeros, as is each sector that an incomplete transfer
/// has not written: so it ends the stream only after the directory, if the directory follows the grains.
fn walk(file: &dyn File, header: &Header) -> Result<(Grains, Option<String>)> {
    let length = file.len().during(|| "cannot find out the length".to_owned())?;
    let mut reader = Window { file, start: 0, bytes: Vec::new() };
    let mut grains = Vec::new();
    let mut sector = header.overhead.max(1);
    let mut indexed = header.directory_offset != DIRECTORY_AT_END;
    let stopped = loop {
        let start = sector.saturating_mul(SECTOR);
        if start.saturating_add(SECTOR) > length {
            break Some("the file ends");
        }
        let Some(marker) = Marker::decode(&reader.marker(start)?) else { break Some("there is no marker") };
        let next = match marker {
            Marker::End if indexed => break None,
            Marker::End => break Some("zeros begin before the directory"),
            Marker::Metadata { kind, sectors } => {
                indexed |= matches!(kind, Kind::Directory | Kind::Footer);
                sectors.saturating_add(1)
            }
            Marker::Grain { sector: first, size } => {
                let bytes = GRAIN_MARKER_SIZE as u64 + u64::from(size);
                if first >= header.capacity || !first.is_multiple_of(header.grain) {
                    break Some("a marker names no grain");
                }
                if start + bytes > length {
                    break Some("the last grain is incomplete");
                }
                match (u32::try_from(first / header.grain), u32::try_from(sector)) {
                    (Ok(grain), Ok(sector)) => grains.push((grain, sector)),
                    _ => break Some("sector numbers exceed 32 bits"),
                }
                bytes.div_ceil(SECTOR)
            }
        };
        sector = sector.saturating_add(next);
    };
    let stopped = stopped.map(|why| format!("sector {sector}, where {why}"));
    // If a grain is present twice, the later one is used, as it would be in a table.
    grains.sort_by_key(|(grain, _)| *grain);
    grains.reverse();
    grains.dedup_by_key(|(grain, _)| *grain);
    grains.reverse();
    Ok((grains, stopped))
}

/// A part of the file in memory, so that walking small grains does not need a read for each.
struct Window<'a> {
    file: &'a dyn File,
    start: u64,
    bytes: Vec<u8>,
}

impl Window<'_> {
    fn marker(&mut self, start: u64) -> Result<[u8; 16]> {
        let inside = |window: &Self| {
            let at = usize::try_from(start.checked_sub(window.start)?).ok()?;
            window.bytes.get(at..at.checked_add(16)?)?.try_into().ok()
        };
        if let Some(marker) = inside(self) {
            return Ok(marker);
        }
        self.bytes.resize(WALK_BYTES, 0);
        self.start = start;
        self.file.read_at(&mut self.bytes, start).during(|| format!("cannot read a marker at {start}"))?;
        Ok(inside(self).unwrap_or_default())
    }
}
