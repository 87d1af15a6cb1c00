//! A disk of images with a damaged record or a damaged file: opened, used, recovered, checked, opened again.

#![no_main]

use backend::{Directory, IoMode};
use chain::Chain;
use lamina_fuzz::Input;
use lamina_fuzz::files::Sectors;
use lamina_fuzz::layers::quiet_disk;
use layer::descriptor::Adapter;
use layer::image::{Folder, ImageKind};
use libfuzzer_sys::fuzz_target;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use vmdk::{DeltaFormat, Direction, Disk, NewDisk, NewSnapshot, Options};
use work::NoProgress;

const RECORD: &str = "lamina.disk";
const MAGIC_LENGTH: usize = "lamina disk 1 crc32c=".len();

/// Options with the same identities in every run.
fn options() -> Options {
    let number = AtomicU64::new(0x1234_5678_9abc);
    Options {
        random: Arc::new(move || number.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed)),
        ..Options::default()
    }
}

/// A closed disk with three snapshots in two branches; or the same disk with an interrupted deletion of a snapshot.
fn make(delta: DeltaFormat, interrupted: bool) -> Vec<(String, Sectors)> {
    let world = quiet_disk();
    let directory = world.directory();
    let new = NewDisk {
        name: "vm".into(),
        capacity: 4 << 20,
        kind: ImageKind::Thin,
        delta: Some(delta),
        adapter: Adapter::LsiLogic,
    };
    let disk = Disk::create(Folder::plain(Arc::clone(&directory)), &new, &options(), &NoProgress).expect("a new disk");
    let put = |at: u64, value: u8| {
        let chain = disk.chain().expect("a new disk");
        chain.write(at, &[value; 4096]).expect("the disk has space");
    };
    put(0, 1);
    for (name, at) in [("a", 0), ("b", 8192), ("c", 1 << 20)] {
        disk.snapshot(&NewSnapshot::named(name)).expect("a new disk");
        put(at, name.as_bytes()[0]);
    }
    disk.revert("a").expect("the snapshot exists");
    put(4096, 9);
    let mut world = world;
    if interrupted {
        world.cut_after(world.operations() + 30);
        let _ = disk.delete_snapshot("b", None, &NoProgress);
        world = world.crash();
    } else {
        disk.close().expect("the simulated disk has no faults");
    }
    let directory = world.directory();
    let names =
        directory.list().expect("the simulated disk has no faults").into_iter().filter(|name| name != "lamina.lock");
    let file = |name: &str| directory.open(name, IoMode::Buffered).expect("the file exists");
    names.map(|name| (name.clone(), Sectors::of(&*file(&name)))).collect()
}

/// Sets the right checksum in a record.
fn seal(directory: &Arc<dyn Directory>) {
    let Ok(file) = directory.open(RECORD, IoMode::Buffered) else { return };
    let mut bytes = vec![0; file.len().unwrap_or(0).min(1 << 20) as usize];
    if file.read_at(&mut bytes, 0).is_err() {
        return;
    }
    if let Some(end) = bytes.iter().position(|byte| *byte == b'\n').filter(|end| *end == MAGIC_LENGTH + 8) {
        let sum = format!("{:08X}", checksums::checksum(&bytes[end + 1..]));
        let _ = file.write_at(&[sum.as_bytes()], MAGIC_LENGTH as u64, false);
    }
}

fn read(chain: &Chain) {
    let mut bytes = vec![0; 8192];
    for at in [0, 8192, 1 << 20] {
        if at + bytes.len() as u64 <= chain.capacity() {
            let _ = chain.read(at, &mut bytes);
        }
    }
}

fuzz_target!(|data: &[u8]| {
    static BASES: OnceLock<Vec<Vec<(String, Sectors)>>> = OnceLock::new();
    let bases = BASES.get_or_init(|| {
        vec![
            make(DeltaFormat::VmfsSparse, false),
            make(DeltaFormat::SeSparse, false),
            make(DeltaFormat::VsanSparse, false),
            make(DeltaFormat::VmfsSparse, true),
        ]
    });
    let mut input = Input(data);
    let flags = input.u8();
    let files = &bases[usize::from(input.u8()) % bases.len()];
    let world = quiet_disk();
    let directory = world.directory();
    let victim = usize::from(input.u8());
    for (number, (name, file)) in files.iter().enumerate() {
        let hit = if flags & 2 == 0 { name == RECORD } else { number == victim % files.len() };
        match hit {
            // The input damages a base: the list of bases has only this undamaged file.
            true => drop(
                Sectors::read(&mut Input(&[&[1], input.0].concat()), std::slice::from_ref(file))
                    .write(&directory, name),
            ),
            false => drop(file.write(&directory, name)),
        }
    }
    if flags & 1 == 0 {
        seal(&directory);
    }
    let mut input = Input(&data[data.len().saturating_sub(8)..]);
    let options = Options { force_parent: flags & 4 != 0, ..options() };
    let open = || Disk::open(Folder::plain(Arc::clone(&directory)), &options);
    let Ok(disk) = open() else { return };
    let names: Vec<String> = disk.snapshots().into_iter().map(|snapshot| snapshot.name).collect();
    let _ = disk.chain().map(|chain| read(&chain));
    for name in &names {
        let _ = disk.snapshot_chain(name).map(|chain| read(&chain));
    }
    let _ = disk.info();
    for _ in 0..1 + input.u8() % 4 {
        let name = names.get(usize::from(input.u8()) % names.len().max(1)).map_or("a", String::as_str);
        let _ = match input.u8() % 8 {
            0 => disk.snapshot(&NewSnapshot::named("new")).map(drop),
            1 => disk.revert(name),
            2 => disk.delete_snapshot(name, None, &NoProgress),
            3 => disk.delete_snapshot(name, Some(Direction::Up), &NoProgress),
            4 => disk.consolidate(&NoProgress),
            5 => disk.check(false, &NoProgress).map(drop),
            6 => disk.rename("other"),
            _ => disk.chain().and_then(|chain| chain.write(4096, &[7; 4096])),
        };
    }
    let closed = disk.close().is_ok();
    drop(disk);
    if closed {
        // The record names complete operations only, so the disk must open.
        let disk = open().expect("a closed disk opens again");
        let _ = disk.chain().map(|chain| read(&chain));
        let _ = disk.delete();
    }
});
