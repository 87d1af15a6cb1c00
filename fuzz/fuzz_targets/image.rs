//! A folder of images that refer to each other by descriptors, extents and parents. The target opens the folder's
//! images as a chain, reads and writes.

#![no_main]

use lamina_fuzz::files::Sectors;
use lamina_fuzz::layers::{look, quiet_disk};
use lamina_fuzz::{Input, images};
use layer::image::{Format, OpenOptions, Place, open_chain};
use libfuzzer_sys::fuzz_target;
use std::sync::{Arc, OnceLock};

/// File names that the descriptors below contain.
const NAMES: [&str; 8] =
    ["a.vmdk", "b.vmdk", "c.vmdk", "a-flat.vmdk", "a-delta.vmdk", "b-delta.vmdk", "c-sesparse.vmdk", "d.qcow2"];

fn text(kind: &str, extents: &str, content: u32, parent: Option<(&str, u32)>) -> Sectors {
    let (hint, above) = match parent {
        Some((name, content)) => (format!("parentFileNameHint=\"{name}\"\n"), content),
        None => (String::new(), u32::MAX),
    };
    let text = format!(
        "# Disk DescriptorFile\nversion=1\nCID={content:08x}\nparentCID={above:08x}\ncreateType=\"{kind}\"\n{hint}\
         {extents}\nddb.adapterType = \"lsilogic\"\n"
    );
    Sectors::from_bytes(text.as_bytes())
}

/// Descriptors that fit together, and an extent of every kind.
fn bases() -> Vec<Sectors> {
    let mut bases = vec![
        text("vmfs", "RW 2048 VMFS \"a-flat.vmdk\"", 1, None),
        text("vmfsSparse", "RW 10240 VMFSSPARSE \"b-delta.vmdk\"", 2, Some(("b.vmdk", 1))),
        text("seSparse", "RW 81921 SESPARSE \"c-sesparse.vmdk\"", 3, Some(("b.vmdk", 1))),
        text("vmfsSparse", "RW 10240 VMFSSPARSE \"a-delta.vmdk\"", 2, Some(("c.vmdk", 3))),
        text("custom", "RW 16 FLAT \"a-flat.vmdk\" 3\nRW 8 ZERO\nNOACCESS 5 FLAT \"gone\" 0", 1, Some(("d.qcow2", 1))),
        Sectors::from_bytes(&[0; 1 << 20]),
    ];
    for of_format in [images::vmfssparse(), images::sesparse(), images::hosted(), images::stream(), images::qcow2()] {
        bases.extend(of_format.into_iter().skip(1).take(3));
    }
    bases
}

fuzz_target!(|data: &[u8]| {
    static BASES: OnceLock<Vec<Sectors>> = OnceLock::new();
    let bases = BASES.get_or_init(bases);
    let mut input = Input(data);
    let flags = input.u8();
    let disk = quiet_disk();
    let directory = disk.directory();
    for _ in 0..1 + input.u8() % 8 {
        let name = NAMES[usize::from(input.u8()) % NAMES.len()];
        let file = Sectors::read(&mut input, bases);
        if directory.open(name, backend::IoMode::Buffered).is_err() {
            file.write(&directory, name);
        }
    }
    let format = match flags >> 3 & 7 {
        1 => Some(Format::Flat),
        2 => Some(Format::HostedSparse),
        3 => Some(Format::VmfsSparse),
        4 => Some(Format::SeSparse),
        5 => Some(Format::Qcow2),
        _ => None,
    };
    let random = Arc::new(|| 0x0123_4567_89ab_cdef);
    let options = OpenOptions { force: flags & 1 == 1, levels_max: 6, format, random, ..OpenOptions::default() };
    let before = disk.operations();
    let place = || Place::plain(Arc::clone(&directory), NAMES[0]);
    if let Ok(chain) = open_chain(place(), &options) {
        assert!((1..=7).contains(&chain.images().len()), "a chain of {} images", chain.images().len());
        for image in chain.images() {
            look(&**image.layer(), &mut input);
            let _ = (image.descriptor(), image.parent(), image.counters(), image.fragments());
        }
    }
    assert_eq!(disk.operations(), before, "opening for reading changed a file");
    if flags & 2 == 0 {
        return;
    }
    let Ok(chain) = open_chain(place(), &OpenOptions { writable: true, ..options.clone() }) else { return };
    let image = &chain.images()[0];
    let content = image.descriptor().map(|descriptor| descriptor.content);
    let layer = image.layer();
    let end = layer.grain().min(layer.capacity());
    if layer.grain() > 1 << 20 || layer.write(0, &[&vec![0xff; end as usize]]).is_err() {
        return;
    }
    assert!(
        content.is_none() || content != image.descriptor().map(|descriptor| descriptor.content),
        "content changed, but the CID is the same"
    );
    let closed = layer.close().is_ok();
    drop(chain);
    if closed && flags & 1 == 1 {
        let chain = open_chain(place(), &options).expect("a closed image opens again");
        look(&**chain.images()[0].layer(), &mut input);
    }
});
