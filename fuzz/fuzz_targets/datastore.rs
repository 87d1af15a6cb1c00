//! Arbitrary changes to the files of a small datastore, which is then opened and used.

#![no_main]

use backend::{BLOCK_SIZE, Buffer, Directory, IoMode, SharedSlice};
use lamina_fuzz::{Image, Input, options, overwrite, seal, seal_batches};
use libfuzzer_sys::fuzz_target;
use std::sync::Arc;
use store::Engine;
use store::catalog::Provisioning;
use store::engine::{CheckOptions, NewDisk, NewSnapshot};

/// Gives every structure in a file the right checksum.
fn seal_file(directory: &Arc<dyn Directory>, name: &str) {
    if name.starts_with("data.0") || name == "lock" {
        return;
    }
    let Ok(file) = directory.open(name, IoMode::Buffered) else { return };
    let mut bytes = vec![0; file.len().unwrap_or(0).min(8 << 20) as usize / BLOCK_SIZE * BLOCK_SIZE];
    if file.read_at(&mut bytes, 0).is_err() {
        return;
    }
    if name == "journal" {
        seal_batches(&mut bytes);
    } else {
        for page in bytes.chunks_exact_mut(BLOCK_SIZE).filter(|page| page.iter().any(|byte| *byte != 0)) {
            seal(page, 12);
        }
    }
    let _ = file.write_at(&[&bytes], 0, false);
}

/// Written blocks contain a text that names them; all other blocks must be zeros.
fn plausible(block: &[u8]) -> bool {
    let end = block.iter().position(|byte| *byte == 0).unwrap_or(block.len());
    block[end..].iter().all(|byte| *byte == 0)
        && block[..end].iter().all(|byte| byte.is_ascii_graphic() || *byte == b' ')
}

fn use_it(directory: &Arc<dyn Directory>, input: &mut Input<'_>, trusted: bool) {
    let Ok(engine) = Engine::open(Arc::clone(directory), options()) else { return };
    let (disks, snapshots): (Vec<_>, Vec<_>) = engine.with_catalog(|catalog| {
        let disks: Vec<_> = catalog.disks().map(|disk| (disk.id, disk.name.clone(), disk.capacity)).collect();
        let snapshots = disks.iter().flat_map(|(id, ..)| catalog.snapshots_of(*id)).map(|object| object.id).collect();
        (disks, snapshots)
    });
    let read = |name: &str, plan: &dyn Fn(std::ops::Range<u64>) -> error::Result<store::engine::Planned>| {
        for logical in [0, 1, 2, 3, 4, 7, 256] {
            if let Ok(block) = engine.read_blocks(name, logical..logical + 1, plan) {
                assert!(!trusted || plausible(&block), "block {logical} of {name} differs from the written data");
            }
        }
    };
    for (id, name, capacity) in &disks {
        let head = engine.head(*id);
        read(name, &|range| engine.plan_head(&head, range));
        let _ = engine.spans_head(&head, 0..capacity.div_ceil(4096).min(1 << 20), 64);
        let _ = engine.count_blocks(*id);
    }
    for id in &snapshots {
        read("a snapshot", &|range| engine.plan_snapshot(*id, range));
        if let Some((disk, ..)) = disks.first() {
            let _ = engine.diff(*id, *disk, 0..512, &mut |_| Ok(true));
        }
    }
    for _ in 0..4 {
        let Some((id, name, _)) = disks.get(usize::from(input.u8()) % disks.len().max(1)) else { break };
        let head = engine.head(*id);
        let logical = input.word(1);
        let result = match input.u8() % 8 {
            0 | 1 => {
                let mut buffer = Buffer::zeroed(2);
                buffer[..5].copy_from_slice(b"fresh");
                engine.write_blocks(&head, logical, SharedSlice::new(Arc::new(buffer), 0..2 * BLOCK_SIZE))
            }
            2 => engine.discard_blocks(&head, logical..logical + 20),
            3 => engine.zero_blocks(&head, logical..logical + 5),
            4 => {
                let new = NewSnapshot { disk: *id, name: "new".into(), uuid: [1; 16], incomplete: false };
                engine.snapshot(&[new]).map(|_| ())
            }
            5 => {
                let provisioning = Provisioning::Thin;
                let new = NewDisk { name: "d".into(), capacity: 4096, provisioning, uuid: [2; 16], incomplete: false };
                engine.create_disk(new).map(|_| ())
            }
            6 => snapshots.first().map_or(Ok(()), |id| engine.delete_snapshot(*id)),
            _ => engine.settle(&head),
        };
        let _ = (result, engine.flush(), engine.pump(), name);
    }
    let _ = engine.check(CheckOptions { data: true, repair: false }, &|_, _| true);
    let _ = engine.check(CheckOptions { data: true, repair: true }, &|_, _| true);
    let _ = engine.reclaim();
    let _ = engine.close();
}

fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    let flags = input.u8();
    let sealed = flags & 1 == 1;
    let image = if flags & 2 == 0 { Image::closed() } else { Image::crashed() };
    let disk = image.restore();
    let directory = disk.directory();
    let files: Vec<(&str, u64)> = image.files().collect();
    for _ in 0..1 + flags as usize / 4 % 8 {
        let (name, length) = files[usize::from(input.u8()) % files.len()];
        let kind = input.u8();
        let page = u64::from(input.u8()) * BLOCK_SIZE as u64;
        let at = (page + input.word(2) % BLOCK_SIZE as u64) % length.max(1);
        match kind % 8 {
            0 => drop(disk.flip_bit(name, at, kind >> 5)),
            1 => {
                // Lost blocks read as zeros, as after a lost write.
                overwrite(&directory, name, at / 4096 * 4096, &[0; BLOCK_SIZE]);
            }
            2 => {
                if let Ok(file) = directory.open(name, IoMode::Buffered) {
                    let _ = file.set_len(at);
                }
            }
            3 => drop(directory.remove(name)),
            4 => overwrite(&directory, name, at / 8 * 8, &input.word(8).to_le_bytes()),
            5 => {
                // Copies a page over another one.
                if let Ok(file) = directory.open(name, IoMode::Buffered) {
                    let mut block = [0; BLOCK_SIZE];
                    let _ = file.read_at(&mut block, u64::from(input.u8()) * BLOCK_SIZE as u64);
                    overwrite(&directory, name, at / 4096 * 4096, &block);
                }
            }
            6 => drop(disk.fail_reads(name, at..at + 512)),
            _ => {
                let length = usize::from(kind >> 3);
                overwrite(&directory, name, at, input.bytes(length));
            }
        }
        if sealed {
            seal_file(&directory, name);
        }
    }
    for _ in 0..2 {
        use_it(&directory, &mut input, !sealed);
    }
});
