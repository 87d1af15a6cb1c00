//! Inflating grains and clusters into memory of their own size and no more.

use flate2::{Decompress, FlushDecompress, Status};
use parking_lot::Mutex;

/// Inflaters kept for the next grain; each has a window of 32 KiB and its tables.
const KEPT_MAX: usize = 8;

/// Inflaters of one image, kept because making one costs as much as inflating some KiB.
pub(crate) struct Inflaters {
    zlib: bool,
    kept: Mutex<Vec<Decompress>>,
}

impl Inflaters {
    /// Inflaters of zlib streams, or of bare deflate.
    pub(crate) fn new(zlib: bool) -> Self {
        Self { zlib, kept: Mutex::new(Vec::new()) }
    }

    /// Inflates into `out` and says how much it was; what is longer than `out`, or has no end, is an error.
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
    // Takes the first byte too many, and lets the inflater see the end where there is none.
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
