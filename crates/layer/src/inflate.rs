//! Decompressing grains and clusters, with memory limited to their size.

use flate2::{Decompress, FlushDecompress, Status};
use parking_lot::Mutex;

/// The most idle decompressors kept for later grains; each has a window of 32 KiB and its tables.
const KEPT_MAX: usize = 8;

/// Decompressors of one image, kept because creating one costs as much as decompressing some KiB.
pub(crate) struct Inflaters {
    zlib: bool,
    kept: Mutex<Vec<Decompress>>,
}

impl Inflaters {
    /// Decompressors for zlib streams, or for raw deflate.
    pub(crate) fn new(zlib: bool) -> Self {
        Self { zlib, kept: Mutex::new(Vec::new()) }
    }

    /// Decompresses into `out` and returns the length; data longer than `out`, or without an end, is an error.
    pub(crate) fn inflate(&self, input: &[u8], out: &mut [u8]) -> std::result::Result<usize, &'static str> {
        let kept = self.kept.lock().pop();
        let mut inflater = kept.unwrap_or_else(|| Decompress::new(self.zlib));
        inflater.reset(self.zlib);
        let written = inflate(&mut inflater, input, out);
        let mut kept = self.kept.lock();
        if kept.len() < KEPT_MAX {
            kept.push(inflater);
        }
        written
    }
}

fn inflate(inflater: &mut Decompress, input: &[u8], out: &mut [u8]) -> std::result::Result<usize, &'static str> {
    // One byte of room after `out` detects data that is too long, and lets the decompressor reach the end of the
    // stream.
    let mut probe = [0; 1];
    loop {
        let (read, written) = (inflater.total_in() as usize, inflater.total_out() as usize);
        let input = input.get(read..).unwrap_or_default();
        let full = written >= out.len();
        let target = if full { &mut probe[..] } else { &mut out[written..] };
        let status = inflater.decompress(input, target, FlushDecompress::Finish);
        let progress = inflater.total_in() as usize > read || inflater.total_out() as usize > written;
        match status {
            Ok(_) if inflater.total_out() as usize > out.len() => return Err("it inflates to more than a grain"),
            Ok(Status::StreamEnd) => return Ok(inflater.total_out() as usize),
            Ok(_) if progress => {}
            Ok(_) => return Err("its compressed data have no end"),
            Err(_) => return Err("its compressed data are wrong"),
        }
    }
}
