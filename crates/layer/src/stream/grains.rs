//! Reading one compressed grain: at most two grains of input, and one of output.

use super::marker::{GRAIN_MARKER_SIZE, Marker};
use crate::hosted::header::{FLAG_MARKERS, Header};
use crate::inflate::Inflaters;
use crate::{Error, ErrorKind, IoContext, Result, SECTOR};
use backend::File;

/// Bytes read first: most grains that compress well fit completely.
const FIRST_READ: usize = 16 << 10;

/// The parameters for reading the grains of a stream.
pub(super) struct Grains {
    image: String,
    sectors: u64,
    capacity: u64,
    markers: bool,
    inflaters: Inflaters,
}

impl Grains {
    pub(super) fn new(image: &str, header: &Header) -> Self {
        let markers = header.has(FLAG_MARKERS);
        let inflaters = Inflaters::new(true);
        Self { image: image.to_owned(), sectors: header.grain, capacity: header.capacity, markers, inflaters }
    }

    /// Size of a grain in bytes.
    pub(super) fn size(&self) -> u64 {
        self.sectors * SECTOR
    }

    fn corrupt(&self, grain: u64, what: &str) -> Error {
        Error::new(ErrorKind::Corrupt, format!("{}: grain {grain} is damaged: {what}", self.image))
    }

    /// Decompresses grain `grain` into `out`, which is one grain long. The marker of the grain is at `sector`.
    pub(super) fn read(&self, file: &dyn File, sector: u64, grain: u64, out: &mut [u8]) -> Result<()> {
        let context = || format!("{}: cannot read grain {grain}", self.image);
        let start = sector * SECTOR;
        let length = file.len().during(context)?.saturating_sub(start);
        let most = (2 * self.size()).saturating_add(SECTOR).min(length) as usize;
        let mut input = vec![0; most.min(FIRST_READ)];
        file.read_at(&mut input, start).during(context)?;
        let (skip, size) = self.locate(&input, grain, most)?;
        if skip + size > input.len() {
            let have = input.len();
            input.resize(skip + size, 0);
            file.read_at(&mut input[have..], start + have as u64).during(context)?;
        }
        let written = self.inflaters.inflate(&input[skip..skip + size], out);
        let written = match (written, self.markers) {
            // In streams without markers some programs write the size before the data. So if decompression fails, the
            // first bytes are taken as the size, and decompression is tried on the data after them.
            (Err(_), false) => match sized(&input) {
                Some(data) => self.inflaters.inflate(data, out),
                None => written,
            },
            (written, _) => written,
        };
        let written = written.map_err(|what| self.corrupt(grain, what))?;
        let valid = (self.capacity - grain * self.sectors).min(self.sectors) * SECTOR;
        if (written as u64) < valid {
            return Err(self.corrupt(grain, "it inflates to less than a grain"));
        }
        out[written..].fill(0);
        Ok(())
    }

    /// Offset and length of the compressed data in `input`; the length may exceed `input`, but not `most`.
    fn locate(&self, input: &[u8], grain: u64, most: usize) -> Result<(usize, usize)> {
        if !self.markers {
            // The length is not recorded, but compressed data marks its own end.
            return Ok((0, most));
        }
        let head = input.get(..16).and_then(|head| head.try_into().ok());
        match head.and_then(Marker::decode) {
            Some(Marker::Grain { sector, size }) => {
                if sector != grain * self.sectors {
                    return Err(self.corrupt(grain, "its marker names another grain"));
                }
                match usize::try_from(size) {
                    Ok(size) if size as u64 <= 2 * self.size() && GRAIN_MARKER_SIZE + size <= most => {
                        Ok((GRAIN_MARKER_SIZE, size))
                    }
                    _ => Err(self.corrupt(grain, "its compressed size is impossible, or the file was truncated")),
                }
            }
            _ => Err(self.corrupt(grain, "it has no marker")),
        }
    }
}

/// The data after a size field.
fn sized(input: &[u8]) -> Option<&[u8]> {
    let size = u32::from_le_bytes(input.get(..4)?.try_into().ok()?);
    input.get(4..)?.get(..usize::try_from(size).ok()?)
}
