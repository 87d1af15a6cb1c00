//! Unsupported images are refused with the reason; mutated images give an error or a result.

use super::*;
use crate::proving::{damages, memory_since, mutate, peak_memory};

fn image(options: &str, compressed: bool) -> Vec<u8> {
    let folder = Folder::new();
    let mut model = vec![0; 1 << 20];
    model[..100_000].copy_from_slice(&crate::proving::compressible(1, 100_000));
    model[300_000..400_000].copy_from_slice(&pattern(2, 100_000));
    folder.write("in.raw", &model);
    let mut arguments = vec!["convert", "-O", "qcow2", "-o", options];
    if compressed {
        arguments.push("-c");
    }
    arguments.extend(["in.raw", "disk.qcow2"]);
    folder.run("qemu-img", &arguments);
    if !compressed {
        folder.run("qemu-io", &["-f", "qcow2", "-c", "write -z 512k 64k", "-c", "write 700k 512", "disk.qcow2"]);
    }
    let bytes = folder.read("disk.qcow2");
    let layer = Qcow2::open(memory_file(&bytes), None, "disk.qcow2").unwrap();
    read_all(&layer, None);
    bytes
}

#[test]
fn unknown_features_are_refused_and_named() {
    let bytes = image("cluster_size=4k", false);
    let with = |at: usize, field: &[u8]| {
        let mut bytes = bytes.clone();
        bytes[at..at + field.len()].copy_from_slice(field);
        Qcow2::open(memory_file(&bytes), None, "disk.qcow2").err().map(|e| (e.kind(), e.to_string())).unwrap()
    };
    let says = |(kind, text): (ErrorKind, String), expected: ErrorKind, words: &str| {
        assert!(kind == expected && text.contains(words), "{kind:?} {text}");
    };
    says(with(0, b"QFIx"), ErrorKind::Corrupt, "no qcow2 image");
    says(with(7, &[4]), ErrorKind::Unsupported, "version is 4");
    says(with(23, &[40]), ErrorKind::Corrupt, "2^40");
    says(with(35, &[1]), ErrorKind::Unsupported, "encrypted");
    says(with(24, &[0xff; 8]), ErrorKind::Corrupt, "64 TiB");
    says(with(24, &(1u64 << 40).to_be_bytes()), ErrorKind::Corrupt, "L1 table");
    says(with(40, &(1u64 << 50).to_be_bytes()), ErrorKind::Corrupt, "outside the file");
    says(with(72, &[0x40]), ErrorKind::Unsupported, "bit 62");
    says(with(79, &[8]), ErrorKind::Unsupported, "method 0");
    // The image has QEMU's feature name table. The test assigns a name of the table to an undefined bit.
    let bytes = image("cluster_size=64k", false);
    let name = bytes.windows(10).position(|w| w == b"dirty bit\0").unwrap();
    let mut renamed = bytes.clone();
    renamed[name - 1] = 40;
    renamed[72..80].copy_from_slice(&(1u64 << 40).to_be_bytes());
    let error = Qcow2::open(memory_file(&renamed), None, "disk.qcow2").err().unwrap();
    assert!(error.to_string().contains("dirty bit"), "{error}");
}

#[test]
fn a_cluster_that_decompresses_beyond_its_size_is_an_error() {
    // A frame with a window of 4 GiB, and one block that repeats a byte.
    let mut bytes = image("cluster_size=4k,compression_type=zstd", true);
    let frame = bytes.windows(4).position(|w| w == [0x28, 0xb5, 0x2f, 0xfd]).unwrap();
    bytes[frame + 4..frame + 6].copy_from_slice(&[0x00, 0xb0]);
    let layer = Qcow2::open(memory_file(&bytes), None, "disk.qcow2").unwrap();
    assert_eq!(read(&layer, 0..4096, None).unwrap_err().kind(), ErrorKind::Corrupt);
}

#[test]
fn mutated_images_cause_errors_and_no_panic() {
    let images = [
        image("cluster_size=4k", false),
        image("cluster_size=16k,extended_l2=on", false),
        image("cluster_size=4k", true),
        image("cluster_size=4k,compression_type=zstd", true),
        image("compat=0.10,cluster_size=512", false),
    ];
    let start = std::time::Instant::now();
    let memory = peak_memory();
    for seed in damages() {
        let mut random = Random::new(seed);
        let mut bytes = images[(seed % 5) as usize].clone();
        let header = Header::read(memory_file(&bytes).as_ref()).unwrap();
        let l1 = header.l1_offset() as usize;
        let l2 = u64::from_be_bytes(bytes[l1..l1 + 8].try_into().unwrap()) & super::super::OFFSET_MASK;
        let weak = [0..112, l1..l1 + 64, l2 as usize..l2 as usize + 512, l2 as usize..bytes.len()];
        mutate(&mut random, &mut bytes, &weak);
        let file = memory_file(&bytes);
        let data = Header::read(file.as_ref()).is_ok_and(|header| header.external_data());
        let Ok(layer) = Qcow2::open(file.clone(), data.then_some(file), "disk.qcow2") else { continue };
        let capacity = layer.capacity();
        let _ = layer.map(0..capacity, 64, &mut Vec::new());
        for start in [0, 299_520, 520_192] {
            let _ = read(&layer, start.min(capacity)..(start + 16_384).min(capacity), None);
        }
        let _ = layer.usage();
    }
    assert!(memory_since(memory) < 1 << 30, "{} bytes more", memory_since(memory));
    assert!(start.elapsed().as_secs() < 600, "{:?}", start.elapsed());
}
