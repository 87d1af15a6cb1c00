//! Images and chains on the simulated disk: joined extents, parents, CIDs, locks, power cuts.

use super::concatenated::{Concatenated, Part};
use super::*;
use crate::descriptor::tests::Random;
use crate::descriptor::{Adapter, CreateType, ExtentKind};
use crate::flat::{self, FILE_BLOCK, NewDisk, NewKind};
use crate::{Content, Extent, Usage};
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{Directory, File};
use parking_lot::Mutex;
use work::NoProgress;

const MIB: u64 = FILE_BLOCK;

fn disk(seed: u64) -> SimulatedDisk {
    SimulatedDisk::new(seed, SimulatedOptions::default())
}

fn seeded(seed: u64) -> Entropy {
    let random = Mutex::new(Random(seed));
    Arc::new(move || random.lock().next())
}

fn writing() -> OpenOptions {
    OpenOptions { writable: true, random: seeded(5), ..OpenOptions::default() }
}

fn put(directory: &Arc<dyn Directory>, name: &str, bytes: &[u8]) {
    let file = directory.create(name, IoMode::Buffered).unwrap();
    file.write_at(&[bytes], 0, false).unwrap();
    file.sync().unwrap();
    directory.sync().unwrap();
}

/// A thin VMFS disk.
fn base(directory: &Arc<dyn Directory>, name: &str, capacity: u64) {
    let new = NewDisk {
        name,
        capacity,
        kind: NewKind::Vmfs,
        provisioning: Provisioning::Thin,
        adapter: Adapter::LsiLogic,
        mode: IoMode::Buffered,
    };
    flat::create(&**directory, &new, &mut || 9, &NoProgress).unwrap();
}

/// An image of flat kind with a parent: no product makes one, but the test then needs no other format.
fn child(directory: &Arc<dyn Directory>, name: &str, content: u32, parent: u32, hint: &str) {
    let mut descriptor = Descriptor::base(CreateType::Vmfs, vec![ExtentLine::whole(ExtentKind::Zero, 8, "unused")]);
    descriptor.extents[0].file = None;
    descriptor.content = ContentId::new(content).unwrap();
    descriptor.parent_content = ContentId::new(parent);
    descriptor.parent_hint = Some(hint.to_owned());
    put(directory, name, &descriptor.to_bytes().unwrap());
}

fn open(directory: &Arc<dyn Directory>, name: &str, options: &OpenOptions) -> Result<Image> {
    Image::open(Place::plain(Arc::clone(directory), name), options)
}

fn chain(directory: &Arc<dyn Directory>, name: &str, options: &OpenOptions) -> Result<Vec<String>> {
    let chain = open_chain(Place::plain(Arc::clone(directory), name), options)?;
    assert_eq!(chain.layers().len(), chain.images().len());
    Ok(chain.images().iter().map(|image| image.place().name.clone()).collect())
}

fn error<T>(outcome: Result<T>) -> (ErrorKind, String) {
    let error = outcome.err().unwrap();
    (error.kind(), error.to_string())
}

fn read(layer: &dyn Layer, start: u64, length: u64) -> Vec<u8> {
    let mut bytes = vec![0; length as usize];
    let mut at = start;
    let mut extents = Vec::new();
    while at < start + length {
        extents.clear();
        layer.map(at..start + length, 2, &mut extents).unwrap();
        assert!((1..=2).contains(&extents.len()));
        for extent in &extents {
            assert_eq!(extent.start, at);
            let within = (at - start) as usize..(at + extent.length - start) as usize;
            if let Content::Data { file, offset } = extent.content {
                layer.file(file).unwrap().read_at(&mut bytes[within], offset).unwrap();
            }
            at += extent.length;
        }
        assert!(at <= start + length);
    }
    bytes
}

#[test]
fn formats_are_recognised_by_the_first_bytes() {
    let cases: [(&[u8], Signature); 14] = [
        (b"KDMV\x01", Signature::HostedSparse),
        (b"COWD", Signature::VmfsSparse),
        (b"\xbe\xba\xfe\xca\0\0\0\0\x01", Signature::SeSparse),
        (b"\xbe\xba\xfe\xca\0\0\0\x01", Signature::Raw),
        (b"\xa2\x72\x19\xf6", Signature::ChangeTracking),
        (b"QFI\xfb\0\0\0\x03", Signature::Qcow2),
        (b"vhdxfile", Signature::Foreign("VHDX")),
        (b"conectix", Signature::Foreign("VHD")),
        (b"# Disk DescriptorFile\nversion=1\n", Signature::Descriptor),
        (b"\n  \r\n#x\nVersion = 3\r\n", Signature::Descriptor),
        (b"# Disk DescriptorFile\nversion=x\n", Signature::Raw),
        (b"#\0\nversion=1\n", Signature::Raw),
        (b"", Signature::Raw),
        (b"KDM", Signature::Raw),
    ];
    for (bytes, wanted) in cases {
        assert_eq!(probe(bytes), wanted, "{}", bytes.escape_ascii());
    }
    let mut random = Random(3);
    for _ in 0..20_000 {
        let bytes: Vec<u8> =
            (0..random.below(64)).map(|_| b"KDMVCOWversion=1#\n\0"[random.below(18) as usize]).collect();
        let _ = probe(&bytes);
    }
}

#[test]
fn a_written_disk_reads_the_same_after_reopening() {
    let world = disk(1);
    let directory = world.directory();
    base(&directory, "vm.vmdk", 8 * MIB);
    let image = open(&directory, "vm.vmdk", &writing()).unwrap();
    assert_eq!((image.layer().capacity(), image.layer().format()), (8 * MIB, "thin"));
    assert_eq!(image.descriptor().unwrap().content, ContentId::INITIAL);
    assert_eq!(error(open(&directory, "vm.vmdk", &writing())).0, ErrorKind::Busy);
    let reader = open(&directory, "vm.vmdk", &OpenOptions::default()).unwrap();
    assert_eq!(error(reader.layer().write(0, &[&[1; 512]])).0, ErrorKind::ReadOnly);
    assert_eq!(error(reader.inflate(&NoProgress)).0, ErrorKind::ReadOnly);
    image.layer().write(3 * MIB, &[&[1; 4096]]).unwrap();
    // The write above has changed the CID in the file.
    let renewed = open(&directory, "vm.vmdk", &OpenOptions::default()).unwrap().descriptor().unwrap();
    assert_ne!(renewed.content, ContentId::INITIAL);
    assert_eq!(image.descriptor().unwrap(), renewed);
    image.layer().zero(0..MIB, true).unwrap();
    assert_eq!(image.descriptor().unwrap(), renewed, "one new CID per opening");
    assert_eq!(image.counters().unwrap(), Counters { blocks: 8, nb: 2, tbz: 1 });
    image.inflate(&NoProgress).unwrap();
    assert_eq!(image.provisioning(), Some(Provisioning::EagerZeroedThick));
    assert!(!image.descriptor().unwrap().thin());
    assert_eq!(image.descriptor().unwrap().content, renewed.content, "writing zeros over zeros changes no content");
    image.layer().close().unwrap();
    drop(image);
    let image = open(&directory, "vm.vmdk", &writing()).unwrap();
    assert_eq!(image.provisioning(), Some(Provisioning::EagerZeroedThick));
    assert_eq!(image.punch_zeros(&NoProgress).unwrap(), 7);
    assert!(image.descriptor().unwrap().thin());
    assert_eq!(image.counters().unwrap(), Counters { blocks: 8, nb: 1, tbz: 0 });
    assert_eq!(read(&**image.layer(), 3 * MIB, 8192), [[1; 4096], [0; 4096]].concat());
    assert_eq!(image.descriptor().unwrap().content, renewed.content);
    image.layer().write(0, &[&[1; 512]]).unwrap();
    assert_ne!(image.descriptor().unwrap().content, renewed.content, "the next opening has a CID of its own");
}

#[test]
fn raw_files_need_no_descriptor() {
    let world = disk(1);
    let directory = world.directory();
    put(&directory, "disk.img", &[7; 4096]);
    let image = open(&directory, "disk.img", &writing()).unwrap();
    assert!(image.descriptor().is_none() && image.parent().is_none());
    image.layer().write(0, &[&[8; 512]]).unwrap();
    assert_eq!(read(&**image.layer(), 0, 1024), [[8; 512], [7; 512]].concat());
    assert_eq!(error(image.update_descriptor(|_| {})).0, ErrorKind::Invalid);
    image.inflate(&NoProgress).unwrap();
    drop(image);
    assert_eq!(
        error(open(&directory, "disk.img", &writing()).map(|_| open(&directory, "none", &writing())).unwrap()).0,
        ErrorKind::NotFound
    );
    // Opening a sparse extent without a descriptor takes its lock only once.
    put(&directory, "extent", &[&b"KDMV"[..], &[0; 508]].concat());
    assert_eq!(error(open(&directory, "extent", &writing())).0, ErrorKind::Invalid);
    let insisting = OpenOptions { format: Some(Format::HostedSparse), ..writing() };
    assert_ne!(error(open(&directory, "extent", &insisting)).0, ErrorKind::Busy);
    // The format that the user states overrules a signature that a guest may have written.
    put(&directory, "guest.img", b"# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\ncreateType=\"vmfs\"\n");
    let found = error(open(&directory, "guest.img", &OpenOptions::default()));
    assert!(found.0 == ErrorKind::Invalid && found.1.contains("--from raw"), "{found:?}");
    let raw = OpenOptions { format: Some(Format::Flat), ..OpenOptions::default() };
    assert_eq!(open(&directory, "guest.img", &raw).unwrap().layer().capacity(), 512);
    assert!(!directory.list().unwrap().contains(&"none".to_owned()));
}

#[test]
fn errors_about_other_files_say_what_the_file_is() {
    let world = disk(1);
    let directory = world.directory();
    let extent = |line: &str| {
        format!("# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\ncreateType=\"custom\"\n{line}\n")
    };
    let cases: [(Vec<u8>, ErrorKind, &str); 14] = [
        (b"COWD".to_vec(), ErrorKind::Invalid, "open the descriptor"),
        (b"\xbe\xba\xfe\xca\0\0\0\0".to_vec(), ErrorKind::Invalid, "open the descriptor"),
        (b"\xa2\x72\x19\xf6".to_vec(), ErrorKind::Invalid, "no disk"),
        (b"vhdxfile".to_vec(), ErrorKind::Unsupported, "VHDX"),
        (b"".to_vec(), ErrorKind::Invalid, "--from raw"),
        (extent("").into_bytes(), ErrorKind::Corrupt, "names no extents"),
        (extent("RW 8 VSANSPARSE \"vsan://1\"").into_bytes(), ErrorKind::Unsupported, "vSAN"),
        (extent("RW 8 VMFSRDM \"x-rdm.vmdk\"").into_bytes(), ErrorKind::Unsupported, "device"),
        (extent("RW 8 FLAT \"../other\" 0").into_bytes(), ErrorKind::Invalid, "'../other', which is outside"),
        (extent("RW 8 FLAT \"/etc/passwd\" 0").into_bytes(), ErrorKind::Invalid, "outside its folder"),
        (extent("RW 8 FLAT \"..\\other\" 0").into_bytes(), ErrorKind::Invalid, "outside its folder"),
        (extent("RW 8 FLAT \"missing\" 0").into_bytes(), ErrorKind::NotFound, "missing"),
        (extent("RW 8 FLAT \"small\" 1").into_bytes(), ErrorKind::Corrupt, "truncated"),
        (extent("RW 8 SPARSE \"small\" 1").into_bytes(), ErrorKind::Unsupported, "at an offset"),
    ];
    put(&directory, "small", &[1; 4096]);
    for (index, (bytes, kind, message)) in cases.into_iter().enumerate() {
        let name = format!("case{index}");
        put(&directory, &name, &bytes);
        let found = error(open(&directory, &name, &OpenOptions::default()));
        assert!(found.0 == kind && found.1.contains(message), "{index}: {found:?}");
        assert!(index < 6 || found.1.contains(&name) || kind == ErrorKind::NotFound, "{index}: {found:?}");
    }
    let native = extent("RW 8 ZERO").replace("parentCID=ffffffff", "parentCID=1\nisNativeSnapshot=\"yes\"");
    put(&directory, "native", native.as_bytes());
    assert!(error(open(&directory, "native", &OpenOptions::default())).1.contains("storage array"));
    for (parent, hint, wanted) in
        [("ffffffff", "parentFileNameHint=\"x\"", "says that it has none"), ("1", "", "not say where")]
    {
        let text = extent("RW 8 ZERO").replace("parentCID=ffffffff", &format!("parentCID={parent}\n{hint}"));
        put(&directory, &format!("parent{parent}"), text.as_bytes());
        assert!(error(open(&directory, &format!("parent{parent}"), &OpenOptions::default())).1.contains(wanted));
    }
}

#[test]
fn extents_of_every_kind_are_concatenated() {
    let world = disk(1);
    let directory = world.directory();
    put(&directory, "a", &[1; 6 * 512]);
    put(&directory, "b", &[2; 9 * 512]);
    put(&directory, "c", &[3; 4 * 512]);
    let text = "version=1\nCID=1\nparentCID=ffffffff\ncreateType=\"custom\"\nRW 4 FLAT \"a\" 2\nRW 3 ZERO\nRDONLY 5 FLAT \"b\" 4\n\
RW 2 FLAT \"b\" 0\nNOACCESS 2 FLAT \"gone\" 0\nRW 4 VMFS \"c\"\n";
    put(&directory, "disk.vmdk", text.as_bytes());
    let image = open(&directory, "disk.vmdk", &writing()).unwrap();
    let layer = image.layer();
    let mut model = [vec![1; 4 * 512], vec![0; 3 * 512], vec![2; 7 * 512], vec![0; 2 * 512], vec![3; 4 * 512]].concat();
    assert_eq!(layer.capacity(), 20 * 512);
    assert!(read(&**layer, 0, 20 * 512) == model);
    let mut random = Random(2);
    let writable = |sector: u64| matches!(sector, 0..4 | 12..14 | 16..20);
    for round in 0..2000 {
        let start = random.below(20);
        let end = start + 1 + random.below(20 - start);
        let bytes = start as usize * 512..end as usize * 512;
        let zero = random.percent(30);
        let allowed = (start..end).all(|sector| writable(sector) || zero && matches!(sector, 4..7 | 14..16));
        let data: Vec<u8> = (0..bytes.len()).map(|_| random.next() as u8).collect();
        let outcome = match zero {
            true => layer.zero(start * 512..end * 512, false),
            false => {
                let cut = random.below(data.len() as u64) as usize;
                layer.write(start * 512, &[&data[..cut], &[], &data[cut..]])
            }
        };
        assert_eq!(outcome.is_ok(), allowed, "round {round}: {start}..{end}");
        match (allowed, zero) {
            (true, true) => model[bytes.clone()].fill(0),
            (true, false) => model[bytes.clone()].copy_from_slice(&data),
            // Zeroing has stopped at an extent that cannot be changed, so earlier extents are zeroed.
            (false, true) => model = read(&**layer, 0, 20 * 512),
            (false, false) => assert_eq!(error(outcome).0, ErrorKind::ReadOnly),
        }
        assert!(read(&**layer, start * 512, (end - start) * 512) == model[bytes], "round {round}");
    }
    layer.flush().unwrap();
    assert!(layer.map(0..21 * 512, 1, &mut Vec::new()).is_err());
    assert!(layer.file(1).is_err() && layer.file(9).is_err());
    layer.close().unwrap();
    assert_eq!(error(layer.write(0, &[&[0; 512]])).0, ErrorKind::Invalid);
}

#[test]
fn a_disk_with_overlapping_extents_is_not_written() {
    let world = disk(1);
    let directory = world.directory();
    put(&directory, "a", &[1; 4096]);
    for (name, lines, shared) in [
        ("overlap", "RW 4 FLAT \"a\" 0\nRW 4 FLAT \"./a\" 3\n", true),
        ("apart", "RW 4 FLAT \"a\" 0\nRW 4 FLAT \"a\" 4\n", false),
        ("itself", "RW 1 FLAT \"itself\" 0\n", true),
    ] {
        let text = format!("version=1\nCID=1\nparentCID=ffffffff\ncreateType=\"custom\"\n{lines}{}", "#".repeat(600));
        put(&directory, name, text.as_bytes());
        open(&directory, name, &OpenOptions::default()).unwrap();
        match open(&directory, name, &writing()) {
            Ok(_) => assert!(!shared, "{name}"),
            Err(error) => assert!(shared && error.to_string().contains("twice"), "{name}: {error}"),
        }
    }
}

/// A mock layer with grains, with the methods that [`Concatenated`] calls.
struct Grained {
    capacity: u64,
    grain: u64,
    changes: Mutex<Vec<Range<u64>>>,
}

impl Layer for Grained {
    fn capacity(&self) -> u64 {
        self.capacity
    }
    fn grain(&self) -> u64 {
        self.grain
    }
    fn format(&self) -> &'static str {
        "grained"
    }
    fn writable(&self) -> bool {
        true
    }
    fn map(&self, range: Range<u64>, most: usize, out: &mut Vec<Extent>) -> Result<()> {
        assert!(most > 0);
        let middle = (range.start / self.grain * self.grain + self.grain).min(range.end);
        out.push(Extent { start: range.start, length: middle - range.start, content: Content::Absent });
        Ok(())
    }
    fn file(&self, _: u16) -> Result<&Arc<dyn File>> {
        Err(crate::read_only("grained"))
    }
    fn epoch(&self) -> Option<Arc<dyn std::any::Any + Send + Sync>> {
        Some(Arc::new(self.capacity))
    }
    fn read_encoded(&self, start: u64, out: &mut [u8]) -> Result<()> {
        out.iter_mut().zip(start..).for_each(|(byte, at)| *byte = (self.capacity + at) as u8);
        Ok(())
    }
    fn write(&self, start: u64, slices: &[&[u8]]) -> Result<()> {
        let end = start + slices.iter().map(|slice| slice.len() as u64).sum::<u64>();
        assert!(start.is_multiple_of(self.grain) && (end.is_multiple_of(self.grain) || end == self.capacity));
        self.changes.lock().push(start..end);
        Ok(())
    }
    fn usage(&self) -> Result<Usage> {
        Ok(Usage { allocated: 1, mapped: 2, dead: 3 })
    }
}

#[test]
fn zeroing_and_discards_keep_to_the_grain_of_each_extent() {
    let part = |length: u64, capacity, grain| {
        let layer = Arc::new(Grained { capacity, grain, changes: Mutex::new(Vec::new()) });
        (Part { length, layer: Some(Arc::<Grained>::clone(&layer)), name: format!("part of {length}") }, layer)
    };
    let (first, first_layer) = part(8192, 8192, 4096);
    let (second, second_layer) = part(8192, 16384, 512);
    let (third, third_layer) = part(4608, 4608, 4096);
    let whole = Concatenated::new(vec![first, second, third], true).unwrap();
    assert_eq!((whole.grain(), whole.capacity()), (4096, 8192 + 8192 + 4608));
    whole.write(4096, &[&vec![0; 16384 + 512]]).unwrap();
    assert_eq!(*first_layer.changes.lock(), vec![4096..8192]);
    assert_eq!(*second_layer.changes.lock(), vec![0..8192]);
    assert_eq!(*third_layer.changes.lock(), vec![0..4608]);
    assert_eq!(whole.usage().unwrap(), Usage { allocated: 3, mapped: 6, dead: 9 });
    assert!(whole.epoch().is_some());
    let mut bytes = [0; 1024];
    whole.read_encoded(8192 - 512, &mut bytes).unwrap();
    assert_eq!((bytes[0], bytes[512]), ((8192u64 + 8192 - 512) as u8, 16384u64 as u8));
    // A result ends where the result of a part ends early; otherwise it continues in the next part.
    let mut extents = Vec::new();
    whole.map(0..20000, 1000, &mut extents).unwrap();
    assert_eq!(extents, [Extent { start: 0, length: 4096, content: Content::Absent }]);
    extents.clear();
    whole.map(4096..9000, 1000, &mut extents).unwrap();
    assert_eq!(extents, [Extent { start: 4096, length: 4096 + 512, content: Content::Absent }]);
    for lengths in [[(512, 512, 512), (8192, 8192, 4096)], [(4608, 8192, 4096), (8192, 8192, 512)]] {
        let parts = || lengths.iter().map(|(length, capacity, grain)| part(*length, *capacity, *grain).0).collect();
        assert_eq!(error(Concatenated::new(parts(), true)).0, ErrorKind::Unsupported);
        assert!(Concatenated::new(parts(), false).is_ok());
    }
}

#[test]
fn parents_are_found_down_to_the_base() {
    let world = disk(1);
    let directory = world.directory();
    base(&directory, "vm.vmdk", 4096);
    child(&directory, "vm-000001.vmdk", 1, 0xffff_fffe, "vm.vmdk");
    child(&directory, "vm-000002.vmdk", 2, 1, "/vmfs/volumes/5f/vm/vm-000001.vmdk");
    child(&directory, "vm-000003.vmdk", 3, 2, "C:\\VMs\\vm-000002.vmdk");
    let names = chain(&directory, "vm-000003.vmdk", &OpenOptions::default()).unwrap();
    assert_eq!(names, ["vm-000003.vmdk", "vm-000002.vmdk", "vm-000001.vmdk", "vm.vmdk"]);
    assert_eq!(chain(&directory, "vm.vmdk", &OpenOptions::default()).unwrap(), ["vm.vmdk"]);
    child(&directory, "lost.vmdk", 3, 2, "gone.vmdk");
    let found = error(chain(&directory, "lost.vmdk", &OpenOptions::default()));
    assert!(found.0 == ErrorKind::NotFound && found.1.contains("gone.vmdk"), "{found:?}");
    child(&directory, "outside.vmdk", 3, 2, "../other/gone.vmdk");
    let found = error(chain(&directory, "outside.vmdk", &OpenOptions::default()));
    assert!(found.0 == ErrorKind::Invalid && found.1.contains("the parent of 'outside.vmdk'"), "{found:?}");
}

#[test]
fn a_changed_parent_is_refused_with_the_reason() {
    let world = disk(1);
    let directory = world.directory();
    base(&directory, "vm.vmdk", MIB);
    child(&directory, "vm-000001.vmdk", 1, 0xffff_fffe, "vm.vmdk");
    chain(&directory, "vm-000001.vmdk", &OpenOptions::default()).unwrap();
    let image = open(&directory, "vm.vmdk", &writing()).unwrap();
    image.layer().write(0, &[&[1; 512]]).unwrap();
    image.layer().close().unwrap();
    let found = error(chain(&directory, "vm-000001.vmdk", &OpenOptions::default()));
    let now = image.descriptor().unwrap().content.to_string();
    assert!(found.0 == ErrorKind::Corrupt, "{found:?}");
    for word in ["vm-000001.vmdk", "'vm.vmdk'", "fffffffe", &now, "force"] {
        assert!(found.1.contains(word), "{word}: {found:?}");
    }
    let forced = OpenOptions { force: true, ..OpenOptions::default() };
    assert_eq!(chain(&directory, "vm-000001.vmdk", &forced).unwrap(), ["vm-000001.vmdk", "vm.vmdk"]);
    // A parent without a CID cannot be the right one.
    put(&directory, "raw.img", &[0; 512]);
    child(&directory, "onraw.vmdk", 1, 2, "raw.img");
    assert!(error(chain(&directory, "onraw.vmdk", &OpenOptions::default())).1.contains("no CID"));
    assert_eq!(chain(&directory, "onraw.vmdk", &forced).unwrap().len(), 2);
}

#[test]
fn a_header_that_contradicts_its_descriptor_is_refused() {
    let world = disk(1);
    let directory = world.directory();
    let folder = Folder::plain(Arc::clone(&directory));
    let new = NewImage::new("vm.vmdk", 8 * MIB, ImageKind::MonolithicSparse);
    create(&folder, &new, &mut || 7, &NoProgress).unwrap();
    assert_eq!(open(&directory, "vm.vmdk", &OpenOptions::default()).unwrap().layer().capacity(), 8 * MIB);
    // One flipped bit of the capacity: a different size with which the rest of the header is still valid.
    let file = directory.open("vm.vmdk", IoMode::Buffered).unwrap();
    let mut sector = [0; 512];
    file.read_at(&mut sector, 0).unwrap();
    sector[12 + 1] ^= 0x20;
    file.write_at(&[&sector], 0, true).unwrap();
    let found = error(open(&directory, "vm.vmdk", &OpenOptions::default()));
    assert!(found.0 == ErrorKind::Corrupt && found.1.contains("by its descriptor"), "{found:?}");
    let forced = OpenOptions { force: true, ..OpenOptions::default() };
    assert_eq!(open(&directory, "vm.vmdk", &forced).unwrap().layer().capacity(), 12 * MIB);
}

#[test]
fn split_extents_have_the_sizes_that_workstation_uses() {
    for kind in [ImageKind::SplitSparse, ImageKind::SplitFlat] {
        let new = NewImage::new("vm.vmdk", 8 << 40, kind);
        let descriptor = new.descriptor(&mut || 7).unwrap().unwrap();
        let read = Descriptor::parse(&descriptor.to_bytes().unwrap()).unwrap();
        assert_eq!(read.extents.iter().map(ExtentLine::length).sum::<u64>(), 8 << 40, "{kind}");
    }
}

#[test]
fn a_raw_parent_is_accepted_if_the_child_records_the_initial_cid() {
    let world = disk(1);
    let directory = world.directory();
    // Guest data does not decide the format of the parent: neither another format's signature, nor a descriptor that
    // names files.
    let text = "# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\ncreateType=\"vmfs\"\n\
                RW 1 VMFS \"secret\"\n";
    put(&directory, "secret", &[9; 512]);
    for head in [&[0; 4][..], b"QFI\xfb", b"KDMV", text.as_bytes()] {
        let mut bytes = head.to_vec();
        bytes.resize(MIB as usize, 7);
        put(&directory, "raw.img", &bytes);
        child(&directory, "above.vmdk", 1, 0xffff_fffe, "raw.img");
        let opened = open_chain(Place::plain(Arc::clone(&directory), "above.vmdk"), &OpenOptions::default()).unwrap();
        let base = opened.images().last().unwrap();
        assert_eq!((opened.images().len(), base.layer().capacity()), (2, MIB));
        assert_eq!(read(&**base.layer(), 0, 512), bytes[..512].to_vec());
        directory.remove("raw.img").unwrap();
        directory.remove("above.vmdk").unwrap();
    }
    // A parent that is not named like a raw disk has to have the right CID.
    put(&directory, "raw.bin", &[0; 512]);
    child(&directory, "onbin.vmdk", 1, 0xffff_fffe, "raw.bin");
    assert!(error(chain(&directory, "onbin.vmdk", &OpenOptions::default())).1.contains("--from raw"));
}

#[test]
fn cyclic_and_too_long_chains_are_refused() {
    let world = disk(1);
    let directory = world.directory();
    child(&directory, "self.vmdk", 1, 1, "self.vmdk");
    child(&directory, "a.vmdk", 1, 2, "./b.vmdk");
    child(&directory, "b.vmdk", 2, 1, "a.vmdk");
    for name in ["self.vmdk", "a.vmdk"] {
        for force in [false, true] {
            let found = error(chain(&directory, name, &OpenOptions { force, ..OpenOptions::default() }));
            assert!(found.0 == ErrorKind::Corrupt && found.1.contains("has a cycle"), "{found:?}");
        }
    }
    base(&directory, "0.vmdk", 4096);
    for level in 1..=40u32 {
        let parent = if level == 1 { 0xffff_fffe } else { level - 1 };
        child(&directory, &format!("{level}.vmdk"), level, parent, &format!("{}.vmdk", level - 1));
    }
    assert_eq!(chain(&directory, "32.vmdk", &OpenOptions::default()).unwrap().len(), 33);
    let found = error(chain(&directory, "33.vmdk", &OpenOptions::default()));
    assert!(found.0 == ErrorKind::Unsupported && found.1.contains("32 levels"), "{found:?}");
    let deeper = OpenOptions { levels_max: 40, ..OpenOptions::default() };
    assert_eq!(chain(&directory, "40.vmdk", &deeper).unwrap().len(), 41);
}

#[test]
fn the_content_id_changes_before_the_content() {
    let world = disk(1);
    let directory = world.directory();
    base(&directory, "vm.vmdk", MIB);
    let image = open(&directory, "vm.vmdk", &writing()).unwrap();
    // The descriptor cannot be replaced, so no data is written.
    world.fail_operation(world.operations());
    assert_eq!(error(image.layer().write(0, &[&[1; 512]])).0, ErrorKind::Io);
    assert_eq!(read(&**image.layer(), 0, 512), [0; 512]);
    assert_eq!(image.descriptor().unwrap().content, ContentId::INITIAL);
    image.layer().write(0, &[&[1; 512]]).unwrap();
    assert_ne!(image.descriptor().unwrap().content, ContentId::INITIAL);
    drop(image);
    // After any power cut: if any content was changed, the CID was changed too.
    for seed in 0..60 {
        let world = disk(seed);
        let directory = world.directory();
        base(&directory, "vm.vmdk", MIB);
        let image = open(&directory, "vm.vmdk", &writing()).unwrap();
        world.cut_after(world.operations() + seed % 12);
        let _ = image.layer().write(0, &[&[1; 512]]).and_then(|()| image.layer().flush());
        let after = world.crash().directory();
        let image = open(&after, "vm.vmdk", &OpenOptions::default()).unwrap();
        let changed = read(&**image.layer(), 0, 512) != [0; 512];
        assert!(!changed || image.descriptor().unwrap().content != ContentId::INITIAL, "seed {seed}");
    }
}

#[test]
fn inflating_and_punching_images_survive_power_cuts() {
    for seed in 0..120u64 {
        let world = disk(seed);
        let directory = world.directory();
        base(&directory, "vm.vmdk", 4 * MIB);
        let image = open(&directory, "vm.vmdk", &writing()).unwrap();
        image.layer().write(MIB, &[&[5; 8192]]).unwrap();
        image.layer().flush().unwrap();
        if seed % 2 == 0 {
            image.inflate(&NoProgress).unwrap();
        }
        world.cut_after(world.operations() + seed / 2 % 16);
        let outcome = match seed % 2 {
            0 => image.punch_zeros(&NoProgress).map(drop),
            _ => image.inflate(&NoProgress),
        };
        let after = world.crash().directory();
        let options = OpenOptions { random: seeded(1), ..writing() };
        let image = open(&after, "vm.vmdk", &options).unwrap();
        assert_eq!(read(&**image.layer(), MIB - 512, 9216), [vec![0; 512], vec![5; 8192], vec![0; 512]].concat());
        let (thin, counters) = (image.descriptor().unwrap().thin(), image.counters().unwrap());
        // A disk without the thin mark has all its space.
        assert!(thin || counters.nb == counters.blocks, "seed {seed}: {counters:?}");
        if outcome.is_ok() {
            assert_eq!(thin, seed % 2 == 0, "seed {seed}");
        }
        image.inflate(&NoProgress).unwrap();
        assert_eq!(image.counters().unwrap(), Counters { blocks: 4, nb: 4, tbz: 0 });
    }
}
