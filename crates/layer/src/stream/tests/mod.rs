//! Streams against a copy in memory and against QEMU; truncated streams, variants of other programs, and invalid ones.

mod damage;
mod qemu;
mod variants;

use super::{Stream, StreamOptions, StreamWriter};
use crate::proving::{Random, compressible, memory_file, pattern, read, read_all};
use crate::{ErrorKind, Layer, SECTOR};

const GRAIN: usize = 65_536;

/// The smallest descriptor that QEMU accepts.
fn descriptor(capacity: u64) -> Vec<u8> {
    format!(
        "# Disk DescriptorFile\nversion=1\nCID=12345678\nparentCID=ffffffff\ncreateType=\"streamOptimized\"\n\n\
         # Extent description\nRW {} SPARSE \"disk.vmdk\"\n\n# The Disk Data Base\n#DDB\n\nddb.virtualHWVersion = \"4\"\n\
         ddb.geometry.cylinders = \"20\"\nddb.geometry.heads = \"16\"\nddb.geometry.sectors = \"63\"\n\
         ddb.adapterType = \"ide\"\n",
        capacity / SECTOR
    )
    .into_bytes()
}

/// Accepts only a few bytes per write, as a pipe may.
struct Pipe(Vec<u8>);

impl std::io::Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let part = bytes.len().min(4096);
        self.0.extend_from_slice(&bytes[..part]);
        Ok(part)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Content with holes, compressible data and incompressible data.
fn content(seed: u64, capacity: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut bytes = vec![0; capacity];
    let mut at = 0;
    while at < capacity {
        let length = (1 + random.below(6) as usize * GRAIN / 2).min(capacity - at);
        match random.below(4) {
            0 => bytes[at..at + length].copy_from_slice(&pattern(seed ^ at as u64, length)),
            1 => bytes[at..at + length].copy_from_slice(&compressible(seed ^ at as u64, length)),
            2 => {}
            _ if random.percent(30) => at += 64 * GRAIN,
            _ => {}
        }
        at += length;
    }
    bytes
}

fn written(model: &[u8], level: u32, threads: usize) -> Vec<u8> {
    let descriptor = descriptor(model.len() as u64);
    let options = StreamOptions { capacity: model.len() as u64, descriptor: &descriptor, level, threads };
    let mut writer = StreamWriter::new(Pipe(Vec::new()), &options).unwrap();
    let mut random = Random::new(level as u64);
    let mut at = 0;
    while at < model.len() {
        let end = (at + (1 + random.below(9) as usize) * GRAIN).min(model.len());
        if !model[at..end].iter().all(|byte| *byte == 0) || random.percent(50) {
            writer.write(at as u64, &model[at..end]).unwrap();
        }
        at = end;
    }
    writer.finish().unwrap().0
}

#[test]
fn a_written_stream_reads_back() {
    for (seed, capacity, level, threads) in
        [(1, 70 << 20, 6, 1), (2, (33 << 20) + 512, 1, 3), (3, 512, 9, 0), (4, (3 << 20) + 65_024, 0, 2)]
    {
        let model = content(seed, capacity);
        let bytes = written(&model, level, threads);
        assert_eq!(bytes, written(&model, level, 5), "any number of threads makes the same stream");
        let layer = Stream::open(memory_file(&bytes), "disk.vmdk").unwrap();
        assert_eq!(layer.descriptor().unwrap().unwrap(), descriptor(capacity as u64));
        assert!(read_all(&layer, None) == model, "seed {seed}");
        assert!(layer.warnings().is_empty());
        let mut random = Random::new(seed);
        for _ in 0..300 {
            let start = random.below(capacity as u64 / SECTOR) * SECTOR;
            let end = (start + (1 + random.below(300)) * SECTOR).min(capacity as u64);
            let found = read(&layer, start..end, None).unwrap();
            assert!(found == model[start as usize..end as usize], "seed {seed} {start}..{end}");
        }
        assert_eq!(layer.write(0, &[]).unwrap_err().kind(), ErrorKind::ReadOnly);
        let grains = model.chunks(GRAIN).filter(|grain| grain.iter().any(|byte| *byte != 0)).count();
        assert_eq!(layer.usage().unwrap().mapped, (grains * GRAIN) as u64);
    }
}

#[test]
fn a_stream_is_written_only_in_ascending_order() {
    let options = StreamOptions { capacity: 4 * GRAIN as u64, descriptor: b"text", level: 9, threads: 1 };
    let mut writer = StreamWriter::new(Vec::new(), &options).unwrap();
    let grain = vec![1; GRAIN];
    writer.write(GRAIN as u64, &grain).unwrap();
    for (start, data) in [
        (0, &grain[..]),
        (GRAIN as u64, &grain),
        (100_000, &grain),
        (4 * GRAIN as u64, &grain),
        (2 * GRAIN as u64, &grain[..512]),
    ] {
        assert_eq!(writer.write(start, data).unwrap_err().kind(), ErrorKind::Invalid, "{start}");
    }
    writer.write(3 * GRAIN as u64, &grain).unwrap();
    let bytes = writer.finish().unwrap();
    let layer = Stream::open(memory_file(&bytes), "disk.vmdk").unwrap();
    assert_eq!(read_all(&layer, None), [vec![0; GRAIN], grain.clone(), vec![0; GRAIN], grain].concat());
    // The example on the format's page: all bytes except the descriptor and the compressed data.
    let mut bytes = bytes;
    assert_eq!(bytes.len(), 140 * 512);
    bytes[512..516].fill(0);
    for sector in [128, 129] {
        bytes[sector * 512 + 8..(sector + 1) * 512].fill(0);
    }
    let lines = bytes.chunks(16).enumerate().filter(|(_, line)| line.iter().any(|byte| *byte != 0));
    let hex = |line: &[u8]| line.iter().map(|byte| format!(" {byte:02x}")).collect::<String>();
    let dump: String = lines.map(|(at, line)| format!("\n{:05x} {}", at * 16, hex(line))).collect();
    assert!(bytes == crate::proving::shown("stream.md", "two grains", 140 * 512), "docs/format/stream.md: {dump}");
}

#[test]
fn a_stream_writer_stays_failed_after_an_error() {
    struct Full(usize);
    impl std::io::Write for Full {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 = self.0.checked_sub(bytes.len()).ok_or(std::io::ErrorKind::StorageFull)?;
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    for threads in [1, 3] {
        let options = StreamOptions { capacity: 1 << 30, descriptor: b"text", level: 1, threads };
        let mut writer = StreamWriter::new(Full(1 << 20), &options).unwrap();
        let error = (0..1000).map(|at| writer.write(at * GRAIN as u64, &pattern(at, GRAIN))).find_map(Result::err);
        assert_eq!(error.unwrap().kind(), ErrorKind::NoSpace);
        assert_eq!(writer.write(1 << 29, &pattern(1, GRAIN)).unwrap_err().kind(), ErrorKind::Stopped);
        assert!(writer.finish().is_err());
    }
}
