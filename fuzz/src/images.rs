//! Images of every format, as bases for damage: made by lamina, or by other programs for formats that lamina only
//! reads.

use crate::Input;
use crate::files::Sectors;
use crate::layers::quiet_disk;
use backend::{File, IoMode};
use layer::{Layer, hosted, sesparse, stream, vmfssparse, vsansparse};
use std::sync::Arc;

/// Writes the same data to every image: a few scattered grains, zeros, and a grain that is written twice.
fn fill(layer: &dyn Layer) {
    let (capacity, grain) = (layer.capacity(), layer.grain());
    let bytes = |value: u8, length: u64| vec![value; length as usize];
    for (at, count, value) in [(0, 3, 1), (5, 1, 2), (40, 8, 3), (1, 1, 4), (4096, 2, 5)] {
        let start = (at * grain).min((capacity - 1) / grain * grain);
        let length = (count * grain).min(capacity - start);
        layer.write(start, &[&bytes(value, length)]).expect("a new image accepts writes");
    }
    layer.zero(41 * grain..43 * grain, false).expect("a new image accepts zeros");
    layer.zero(60 * grain..62 * grain, false).expect("a new image accepts zeros");
}

/// An image in four states: new; with data, closed; with data, left open; left open with more unflushed data.
fn states<L: Layer>(create: &dyn Fn(Arc<dyn File>), open: &dyn Fn(Arc<dyn File>) -> L) -> Vec<Sectors> {
    let disk = quiet_disk();
    let file = disk.directory().create("image", IoMode::Buffered).expect("a new disk accepts new files");
    create(Arc::clone(&file));
    let mut out = vec![Sectors::of(&*file)];
    let layer = open(Arc::clone(&file));
    fill(&layer);
    layer.flush().expect("the simulated disk has no faults");
    out.push(Sectors::of(&*file));
    layer.write(layer.grain() * 90, &[&vec![6; layer.grain() as usize]]).expect("the disk has space");
    out.push(Sectors::of(&*file));
    layer.close().expect("the simulated disk has no faults");
    out.push(Sectors::of(&*file));
    out
}

/// Redo logs with small grains, and one with larger grains.
pub fn vmfssparse() -> Vec<Sectors> {
    let open = |file: Arc<dyn File>| {
        vmfssparse::VmfsSparse::open(file, &vmfssparse::OpenOptions::writing("image")).expect("a new image opens")
    };
    let with = |capacity, grain_sectors| {
        let options = vmfssparse::CreateOptions { capacity, grain_sectors };
        let create =
            |file: Arc<dyn File>| vmfssparse::create(file, "image", &options).expect("a new disk accepts writes");
        states(&create, &open)
    };
    [with(5 << 20, 1), with((33 << 20) + 512, 8)].concat()
}

/// SEsparse images in every state.
pub fn sesparse() -> Vec<Sectors> {
    let options = |write| sesparse::Options { write, cache: 1 << 20, ..sesparse::Options::default() };
    let create = |file: Arc<dyn File>| {
        let made = sesparse::SeSparse::create(file, "image", (40 << 20) + 512, options(true));
        made.expect("a new disk accepts writes").close().expect("the simulated disk has no faults");
    };
    let open = |file: Arc<dyn File>| {
        sesparse::SeSparse::open(file, "image", options(true)).expect("a new image opens") //
    };
    let mut images = states(&create, &open);
    images.push(journalled(images[3].clone()));
    images
}

/// An image as ESXi leaves it in a crash: two transactions in the journal, with the content that is in place already.
fn journalled(mut image: Sectors) -> Sectors {
    let word = |sector: &mut [u8; 512], at: usize, value: u64| {
        sector[at..at + 8].copy_from_slice(&value.to_le_bytes());
    };
    let header = image.sectors_mut().get(&0).copied().unwrap_or([0; 512]);
    let area = |index: usize| {
        let bytes = header[80 + 16 * index..].first_chunk().expect("eight bytes of a header");
        u64::from_le_bytes(*bytes)
    };
    // Areas in the order of the constant header: volatile header, journal header, journal, directory, tables.
    let (volatile, journal, targets) = (area(0), area(2), [area(3), area(4)]);
    let sectors = image.sectors_mut();
    for (slot, target) in (0..).zip(targets) {
        let payload = sectors.get(&target).copied().unwrap_or([0; 512]);
        let mut first = [0; 512];
        word(&mut first, 0, 0x00c0_ffee);
        word(&mut first, 16, slot);
        word(&mut first, 24, 2);
        word(&mut first, 40, 7 + slot);
        word(&mut first, 128, target);
        word(&mut first, 136, 1);
        sectors.insert(journal + slot * 25, first);
        sectors.insert(journal + slot * 25 + 1, payload);
    }
    let volatile = sectors.entry(volatile).or_insert([0; 512]);
    word(volatile, 16, 9);
    word(volatile, 24, 1);
    image
}

/// vsanSparse objects in every state.
pub fn vsansparse() -> Vec<Sectors> {
    let options = vsansparse::CreateOptions { capacity: (40 << 20) + 512, id: *b"0123456789abcdef" };
    let create = |file: Arc<dyn File>| vsansparse::create(file, "image", &options).expect("a new disk accepts writes");
    let open = |file: Arc<dyn File>| {
        vsansparse::VsanSparse::open(file, &vsansparse::OpenOptions::writing("image")).expect("a new image opens")
    };
    states(&create, &open)
}

/// Gives every structure of a vsanSparse object the right checksum.
pub fn seal_vsansparse(image: &mut Sectors) {
    let sectors = image.sectors_mut();
    let blocks: std::collections::BTreeSet<u64> = sectors.keys().map(|sector| sector / 8).collect();
    let read = |sectors: &std::collections::BTreeMap<u64, [u8; 512]>, block: u64, count: u64| -> Vec<u8> {
        let all = block * 8..(block + count) * 8;
        all.flat_map(|sector| sectors.get(&sector).copied().unwrap_or([0; 512])).collect()
    };
    for block in blocks {
        let mut bytes = read(sectors, block, 1);
        let field = match &bytes[..4] {
            b"LMVS" => 12,
            b"LVSL" => {
                let records = u64::from_le_bytes(*bytes[48..].first_chunk().expect("eight bytes of a block"));
                let count = (64 + records.min(4092) * 16).div_ceil(4096);
                bytes = read(sectors, block, count);
                4
            }
            b"LVSM" => 4,
            _ => continue,
        };
        crate::seal(&mut bytes, field);
        let first = sectors.entry(block * 8).or_insert([0; 512]);
        first[..64].copy_from_slice(&bytes[..64]);
    }
}

const DESCRIPTOR: &[u8] = b"# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\n\
createType=\"monolithicSparse\"\nRW 81921 SPARSE \"image\"\n";

/// Sparse extents of VMware Workstation, with and without zero grains, and one made by qemu-img.
pub fn hosted() -> Vec<Sectors> {
    let open = |file: Arc<dyn File>| {
        let options = hosted::OpenOptions { image: "image".into(), writable: true, parent: true, force: false };
        hosted::Hosted::open(file, &options).expect("a new image opens")
    };
    let with = |zero_grains, descriptor| {
        let options = hosted::CreateOptions { capacity: (40 << 20) + 512, descriptor, zero_grains };
        let create =
            |file: Arc<dyn File>| hosted::create(&*file, "image", &options).expect("a new disk accepts writes");
        states(&create, &open)
    };
    let mut images = with(true, Some(DESCRIPTOR));
    images.truncate(3);
    images.extend(with(false, None).into_iter().skip(1).take(1));
    images.push(kept(include_bytes!("../seeds/hosted/qemu-sparse")));
    images
}

/// Compressed streams from lamina and from qemu-img.
pub fn stream() -> Vec<Sectors> {
    let options = stream::StreamOptions { capacity: (40 << 20) + 512, descriptor: DESCRIPTOR, level: 6, threads: 1 };
    let mut writer = stream::StreamWriter::new(Vec::new(), &options).expect("memory accepts writes");
    let grain = writer.grain();
    for (at, count, value) in [(0, 3, 1u8), (40, 2, 3), (600, 1, 4)] {
        let bytes: Vec<u8> = (0..count * grain).map(|at| value.wrapping_mul((at % 251) as u8)).collect();
        writer.write(at * grain, &bytes).expect("memory accepts writes");
    }
    let own = writer.finish().expect("memory accepts writes");
    vec![Sectors::from_bytes(&own), Sectors::read(&mut Input(include_bytes!("../seeds/stream/qemu-stream")), &[])]
}

/// An archive of one machine with one disk.
pub fn ova() -> Vec<Sectors> {
    use layer::ova::{Algorithm, Controller, Machine, Network, OvaOptions, OvaWriter, PlannedDisk};
    let archive = |algorithm| {
        let machine = Machine {
            name: "vm".into(),
            processors: 2,
            memory_mib: 512,
            hardware: "vmx-13".into(),
            system: 101,
            controller: Controller::ParaVirtual,
            networks: vec![Network { name: "net".into(), adapter: "VmxNet3".into(), mac: None }],
            settings: Vec::new(),
        };
        let disk = PlannedDisk { file: "vm-disk1.vmdk".into(), capacity: 1 << 20, descriptor: DESCRIPTOR.to_vec() };
        let options = OvaOptions { algorithm, level: 6, threads: 1, time: 1_700_000_000 };
        let out = std::io::Cursor::new(Vec::new());
        let mut writer = OvaWriter::new(out, "vm", machine, vec![disk], options).expect("memory accepts writes");
        writer.add_disk(|stream| stream.write(0, &vec![7; 1 << 16])).expect("memory accepts writes");
        Sectors::from_bytes(writer.finish().expect("memory accepts writes").get_ref())
    };
    vec![archive(Algorithm::Sha256), archive(Algorithm::Sha1)]
}

/// qcow2 images of versions 2 and 3, with compressed clusters, extended tables and a backing file.
pub fn qcow2() -> Vec<Sectors> {
    vec![
        kept(include_bytes!("../seeds/qcow2/qemu-v3")),
        kept(include_bytes!("../seeds/qcow2/qemu-v2")),
        kept(include_bytes!("../seeds/qcow2/qemu-compressed")),
        kept(include_bytes!("../seeds/qcow2/qemu-zstd")),
        kept(include_bytes!("../seeds/qcow2/qemu-extended")),
        kept(include_bytes!("../seeds/qcow2/qemu-backing")),
    ]
}

/// The image in a seed file, which begins after the byte of options of the seed.
fn kept(seed: &[u8]) -> Sectors {
    Sectors::read(&mut Input(seed.get(1..).unwrap_or_default()), &[])
}
