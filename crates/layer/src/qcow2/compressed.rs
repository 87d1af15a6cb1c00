//! Decompressing one cluster.

use super::Qcow2;
use super::header::Compression;
use crate::{IoContext, Result};
use ruzstd::decoding::{FrameDecoder, StreamingDecoder};
use std::io::Read;

/// The largest window of a zstd frame: four times the largest cluster.
const ZSTD_WINDOW_MAX: u64 = 8 << 20;

impl Qcow2 {
    /// Reads the compressed data of a cluster, at most `size` bytes at `offset`, into `out`, which is one cluster long.
    pub(super) fn inflate(&self, cluster: u64, offset: u64, size: u64, out: &mut [u8]) -> Result<()> {
        let context = || format!("{}: cannot read compressed cluster {cluster}", self.image);
        let length = self.files[0].len().during(context)?;
        // At the end of the file the data may be shorter than `size`; compressed data marks its own end.
        let size = size.min(length.saturating_sub(offset)).min(2 * self.header.cluster_size() + 512);
        let mut input = vec![0; size as usize];
        self.files[0].read_at(&mut input, offset).during(context)?;
        let written = match self.header.compression() {
            Compression::Deflate => self.inflaters.inflate(&input, out),
            Compression::Zstd => unzstd(&input, out),
        };
        match written {
            Ok(written) if written == out.len() => Ok(()),
            Ok(_) => Err(self.corrupt(format_args!("cluster {cluster} inflates to less than a cluster"))),
            Err(what) => Err(self.corrupt(format_args!("cluster {cluster} is damaged: {what}"))),
        }
    }
}

/// Decodes one zstd frame into `out`.
fn unzstd(input: &[u8], out: &mut [u8]) -> std::result::Result<usize, &'static str> {
    let mut decoder = FrameDecoder::new();
    decoder.set_max_window_size(ZSTD_WINDOW_MAX);
    let mut stream = StreamingDecoder::new_with_decoder(input, decoder).map_err(|_| "its compressed data are wrong")?;
    let mut written = 0;
    while written < out.len() {
        match stream.read(&mut out[written..]) {
            Ok(0) => break,
            Ok(read) => written += read,
            Err(_) => return Err("its compressed data are wrong"),
        }
    }
    match stream.read(&mut [0]) {
        Ok(0) => Ok(written),
        Ok(_) => Err("it inflates to more than a cluster"),
        Err(_) => Err("its compressed data are wrong"),
    }
}
