//! A truncated stream returns its complete grains; mutated streams give an error or a result.

use super::*;
use crate::proving::{damages, memory_since, mutate, peak_memory};

#[test]
fn a_truncated_stream_gives_its_complete_grains() {
    let model = content(11, 40 << 20);
    let bytes = written(&model, 6, 2);
    let mut random = Random::new(1);
    // Table, directory and footer with their markers, and the end.
    let tail = bytes.len() as u64 - 10 * 512;
    for round in 0..300 {
        let end = if round % 3 == 0 { tail + random.below(10 * 512) } else { 65_536 + random.below(tail - 65_536) };
        // A truncated stream is opened only by `Stream::salvage`.
        let refused = Stream::open(memory_file(&bytes[..end as usize]), "disk.vmdk").err().unwrap();
        assert!(
            refused.kind() == ErrorKind::Corrupt && refused.to_string().contains("was truncated"),
            "cut at {end}: {refused}"
        );
        let layer = Stream::salvage(memory_file(&bytes[..end as usize]), "disk.vmdk").unwrap();
        assert!(!layer.warnings().is_empty(), "cut at {end}");
        let found = read_all(&layer, None);
        // Grains are in ascending order, so all grains before some point can be read, and none after it.
        let mut lost = false;
        for (number, (found, model)) in found.chunks(GRAIN).zip(model.chunks(GRAIN)).enumerate() {
            if model.iter().all(|byte| *byte == 0) {
                continue;
            }
            let here = found == model;
            assert!(
                here || found.iter().all(|byte| *byte == 0),
                "cut at {end}: grain {number} is neither data nor absent"
            );
            assert!(!(here && lost), "cut at {end}: grain {number} has data, but an earlier grain has not");
            lost |= !here;
        }
        if end >= tail {
            assert!(!lost, "cut at {end}: only the end of the stream is missing");
        }
    }
}

/// An incomplete transfer into a file of full length: the missing part is zeros, as is an end marker.
#[test]
fn a_stream_that_ends_with_zeros_instead_of_its_directory_is_truncated() {
    let model = content(13, 40 << 20);
    let bytes = written(&model, 6, 2);
    let mut random = Random::new(2);
    let tail = bytes.len() as u64 - 10 * 512;
    for _ in 0..20 {
        let mut cut = bytes.clone();
        let end = 65_536 + random.below(tail - 65_536);
        cut[end as usize..].fill(0);
        let refused = Stream::open(memory_file(&cut), "disk.vmdk").err().unwrap();
        assert!(refused.to_string().contains("was truncated"), "zeros from {end}: {refused}");
        let layer = Stream::open_incomplete(memory_file(&cut), "disk.vmdk").unwrap();
        for (number, model) in (0..).zip(model.chunks(GRAIN)) {
            let start = number * GRAIN as u64;
            if let Ok(found) = read(&layer, start..start + model.len() as u64, None) {
                assert!(found == model, "zeros from {end}: grain {number} reads as other data without an error");
            }
        }
    }
}

/// The directory cannot be found, but every marker is there, including the one at the end: the stream is complete.
#[test]
fn a_complete_stream_without_footer_opens_without_force() {
    let model = content(12, 20 << 20);
    let bytes = written(&model, 6, 1);
    let footer = bytes.len() - 2 * 512;
    let mut damaged = vec![bytes.clone(), [&bytes[..], &[0; 512]].concat(), [&bytes[..], &[0; 5 * 512 + 7]].concat()];
    // In the first stream the footer is damaged; the other streams have further bytes after their end.
    damaged[0][footer] ^= 1;
    for bytes in &damaged {
        let layer = Stream::open(memory_file(bytes), "disk.vmdk").unwrap();
        let warnings = layer.warnings();
        assert!(warnings.len() == 1 && warnings[0].contains("by walking the stream"), "{warnings:?}");
        assert!(read_all(&layer, None) == model);
        let grains = model.chunks(GRAIN).filter(|grain| grain.iter().any(|byte| *byte != 0)).count();
        assert_eq!(layer.usage().unwrap().mapped, (grains * GRAIN) as u64);
    }
    // Bytes after the last whole sector do not belong to the stream.
    let layer = Stream::open(memory_file(&[&bytes[..], &[1; 511]].concat()), "disk.vmdk").unwrap();
    assert_eq!(layer.warnings(), Vec::<String>::new());
    assert!(read_all(&layer, None) == model);
    // Without its last sector the stream is incomplete, wherever the directory is.
    let cut = &damaged[0][..bytes.len() - 1];
    let refused = Stream::open(memory_file(cut), "disk.vmdk").err().unwrap();
    assert!(refused.to_string().contains("the file ends: the file was truncated"), "{refused}");
    let layer = Stream::salvage(memory_file(cut), "disk.vmdk").unwrap();
    assert_eq!(layer.warnings().len(), 2, "{:?}", layer.warnings());
    assert!(read_all(&layer, None) == model);
}

#[test]
fn mutated_images_cause_errors_and_no_panic() {
    let mut model = vec![0; 36 << 20];
    model[..GRAIN].copy_from_slice(&compressible(1, GRAIN));
    model[5 * GRAIN..6 * GRAIN].fill(7);
    model[34 << 20..(34 << 20) + 1000].fill(9);
    let image = written(&model, 6, 1);
    let tail = image.len() - 10 * 512..image.len();
    let weak = [0..80, 128 * 512..image.len(), 128 * 512..128 * 512 + 64, tail.clone(), tail];
    let start = std::time::Instant::now();
    let memory = peak_memory();
    for seed in damages() {
        let mut random = Random::new(seed);
        let mut bytes = image.clone();
        mutate(&mut random, &mut bytes, &weak);
        let Ok(layer) = Stream::salvage(memory_file(&bytes), "disk.vmdk") else { continue };
        let capacity = layer.capacity();
        let _ = layer.map(0..capacity, 64, &mut Vec::new());
        for at in [0, 5 * GRAIN as u64, 34 << 20] {
            let _ = read(&layer, at.min(capacity)..(at + 4096).min(capacity), None);
        }
        let _ = layer.usage();
        let _ = layer.descriptor();
    }
    assert!(memory_since(memory) < 1 << 30, "{} bytes more", memory_since(memory));
    assert!(start.elapsed().as_secs() < 600, "{:?}", start.elapsed());
}
