//! Images of every kind that lamina can create: lamina and QEMU read the data written to them after they are opened
//! again, alone and above a parent; names and descriptors are VMware's; and an unfinished image leaves no files.

#![allow(clippy::unwrap_used)]

mod scratch;

use backend::local::{LocalDirectory, LocalQueues};
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{Directory, IoMode};
use error::ErrorKind;
use layer::descriptor::storage;
use layer::image::create::{Unfinished, begin};
use layer::image::{Folder, Image, ImageKind, Made, NewImage, NewParent, OpenOptions, Place, create, open_chain};
use layer::{Content, Layer};
use scratch::{Random, folder, read_by_qemu};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use work::NoProgress;

const MIB: u64 = 1 << 20;
/// A capacity that ends within a grain of every sparse format.
const ODD: u64 = 5 * MIB + 512;

fn writing() -> OpenOptions {
    OpenOptions { writable: true, ..OpenOptions::default() }
}

fn make(folder: &Folder, name: &str, capacity: u64, kind: ImageKind, parent: Option<&str>) -> Made {
    let mut new = NewImage::new(name, capacity, kind);
    if let Some(parent) = parent {
        let place = folder.resolve(parent).unwrap();
        let image = Image::open(place, &OpenOptions::default()).unwrap();
        new = new.above(NewParent::of(&image, folder).unwrap());
    }
    let mut random = Random(capacity + name.len() as u64);
    create(folder, &new, &mut || random.next(), &NoProgress).unwrap()
}

/// The content of a chain of layers.
fn read_chain(layers: &[Arc<dyn Layer>]) -> Vec<u8> {
    let capacity = layers[0].capacity();
    let mut bytes = vec![0; capacity as usize];
    let mut known = vec![false; (capacity / 512) as usize];
    for layer in layers {
        let mut at = 0;
        let mut extents = Vec::new();
        while at < capacity.min(layer.capacity()) {
            extents.clear();
            layer.map(at..capacity.min(layer.capacity()), 64, &mut extents).unwrap();
            for extent in &extents {
                for sector in extent.start / 512..(extent.start + extent.length) / 512 {
                    if extent.content == Content::Absent || std::mem::replace(&mut known[sector as usize], true) {
                        continue;
                    }
                    let out = &mut bytes[sector as usize * 512..][..512];
                    match extent.content {
                        Content::Data { file, offset } => {
                            let at = offset + sector * 512 - extent.start;
                            layer.file(file).unwrap().read_at(out, at).unwrap();
                        }
                        Content::Encoded => layer.read_encoded(sector * 512, out).unwrap(),
                        _ => out.fill(0),
                    }
                }
                at = extent.start + extent.length;
            }
        }
    }
    bytes
}

/// Writes random grains to the layer and to the model.
fn scribble(layer: &dyn Layer, model: &mut [u8], random: &mut Random) {
    let (grain, capacity) = (layer.grain().max(4096), layer.capacity());
    for _ in 0..20 {
        let start = random.below(capacity.div_ceil(grain)) * grain;
        let end = (start + (1 + random.below(4)) * grain).min(capacity);
        let bytes = random.bytes((end - start) as usize);
        layer.write(start, &[&bytes]).unwrap();
        model[start as usize..end as usize].copy_from_slice(&bytes);
    }
    // Writes the last grain, and zeros a range that may contain data.
    let last = (capacity - 1) / grain * grain;
    let bytes = random.bytes((capacity - last) as usize);
    layer.write(last, &[&bytes]).unwrap();
    model[last as usize..].copy_from_slice(&bytes);
    let start = random.below(capacity / grain) * grain;
    layer.zero(start..start + grain, false).unwrap();
    model[start as usize..(start + grain) as usize].fill(0);
}

#[test]
fn every_kind_of_image_returns_written_data() {
    for (number, kind) in ImageKind::ALL.into_iter().enumerate() {
        for capacity in [512, ODD, 64 * MIB] {
            let path = folder();
            let folder = Folder::local(path.path(), &[]).unwrap();
            make(&folder, "disk.vmdk", capacity, kind, None);
            let mut model = vec![0; capacity as usize];
            let mut random = Random(capacity + number as u64);
            let options =
                OpenOptions { format: (kind == ImageKind::Raw).then_some(layer::image::Format::Flat), ..writing() };
            let image = Image::open(folder.resolve("disk.vmdk").unwrap(), &options).unwrap();
            assert_eq!(ImageKind::of(&image), Some(kind), "{kind}");
            assert_eq!(image.layer().capacity(), capacity, "{kind}");
            if capacity > 512 {
                scribble(&**image.layer(), &mut model, &mut random);
            }
            image.layer().close().unwrap();
            drop(image);
            let image = Image::open(folder.resolve("disk.vmdk").unwrap(), &OpenOptions { writable: false, ..options });
            assert!(read_chain(&[Arc::clone(image.unwrap().layer())]) == model, "{kind} of {capacity}");
            // QEMU cannot read vsanSparse objects, and would read a raw file byte by byte.
            if !matches!(kind, ImageKind::VsanSparse | ImageKind::Raw) {
                assert!(read_by_qemu(path.path(), "disk.vmdk") == model, "{kind} of {capacity} by QEMU");
            }
        }
    }
}

#[test]
fn deltas_open_above_parents_of_every_kind() {
    for child in ImageKind::ALL.into_iter().filter(|kind| kind.can_have_parent()) {
        for parent in ImageKind::ALL.into_iter().filter(|kind| *kind != ImageKind::Raw) {
            let path = folder();
            let folder = Folder::local(path.path(), &[]).unwrap();
            make(&folder, "vm.vmdk", ODD, parent, None);
            let mut model = vec![0; ODD as usize];
            let mut random = Random(7);
            let image = Image::open(folder.resolve("vm.vmdk").unwrap(), &writing()).unwrap();
            scribble(&**image.layer(), &mut model, &mut random);
            image.layer().close().unwrap();
            drop(image);
            make(&folder, "vm-000001.vmdk", ODD, child, Some("vm.vmdk"));
            let open = |options: &OpenOptions| open_chain(folder.resolve("vm-000001.vmdk").unwrap(), options).unwrap();
            let chain = open(&writing());
            assert_eq!(chain.images().len(), 2);
            scribble(&**chain.images()[0].layer(), &mut model, &mut random);
            chain.images()[0].layer().close().unwrap();
            drop(chain);
            let chain = open(&OpenOptions::default());
            assert!(read_chain(&chain.layers()) == model, "{child} above {parent}");
            if parent != ImageKind::VsanSparse && child != ImageKind::VsanSparse {
                assert!(read_by_qemu(path.path(), "vm-000001.vmdk") == model, "{child} above {parent} by QEMU");
            }
            let hint = chain.images()[0].descriptor().unwrap().parent_hint;
            assert_eq!(hint.as_deref(), Some("vm.vmdk"));
        }
    }
}

fn names(path: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(path).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn files_have_the_names_that_vmware_uses() {
    let wanted: [(ImageKind, u64, &[&str]); 11] = [
        (ImageKind::Thin, MIB, &["vm-flat.vmdk", "vm.vmdk"]),
        (ImageKind::ZeroedThick, MIB, &["vm-flat.vmdk", "vm.vmdk"]),
        (ImageKind::EagerZeroedThick, MIB, &["vm-flat.vmdk", "vm.vmdk"]),
        (ImageKind::VmfsSparse, MIB, &["vm-delta.vmdk", "vm.vmdk"]),
        (ImageKind::SeSparse, MIB, &["vm-sesparse.vmdk", "vm.vmdk"]),
        (ImageKind::VsanSparse, MIB, &["vm-vsan.vmdk", "vm.vmdk"]),
        (ImageKind::MonolithicSparse, MIB, &["vm.vmdk"]),
        (ImageKind::MonolithicFlat, MIB, &["vm-flat.vmdk", "vm.vmdk"]),
        (ImageKind::SplitSparse, 4096 * MIB, &["vm-s001.vmdk", "vm-s002.vmdk", "vm-s003.vmdk", "vm.vmdk"]),
        (ImageKind::SplitFlat, 2048 * MIB, &["vm-f001.vmdk", "vm-f002.vmdk", "vm.vmdk"]),
        (ImageKind::Raw, MIB, &["vm.vmdk"]),
    ];
    for (kind, capacity, files) in wanted {
        let path = folder();
        let folder = Folder::local(path.path(), &[]).unwrap();
        let made = make(&folder, "vm.vmdk", capacity, kind, None);
        assert_eq!(names(path.path()), files, "{kind}");
        let mut listed = made.files.clone();
        assert_eq!(listed[0], "vm.vmdk");
        listed.sort();
        assert_eq!(listed, files, "{kind}");
        // Another image with this name, or with the name of an extent, is refused without a change.
        let new = NewImage::new("vm.vmdk", capacity, kind);
        let refused = create(&folder, &new, &mut || 1, &NoProgress).err().unwrap();
        assert_eq!(refused.kind(), ErrorKind::Exists, "{refused}");
        assert_eq!(names(path.path()), files, "{kind}");
        if files.len() > 1 {
            std::fs::rename(path.path().join("vm.vmdk"), path.path().join("kept")).unwrap();
            let refused = create(&folder, &new, &mut || 1, &NoProgress).err().unwrap();
            assert_eq!(refused.kind(), ErrorKind::Exists, "{refused}");
            assert_eq!(names(path.path()).len(), files.len(), "{kind}: {:?}", names(path.path()));
            std::fs::rename(path.path().join("kept"), path.path().join("vm.vmdk")).unwrap();
        }
        made.remove().unwrap();
        assert!(names(path.path()).is_empty());
        // After a cancellation no file is left.
        let stopped = create(&folder, &new, &mut || 1, &testkit::steps(|_, _| false)).err().unwrap();
        assert_eq!(stopped.kind(), ErrorKind::Interrupted, "{stopped}");
        assert!(names(path.path()).is_empty(), "{kind}");
    }
}

#[test]
fn impossible_images_are_refused() {
    let path = folder();
    let folder = Folder::local(path.path(), &[]).unwrap();
    make(&folder, "vm.vmdk", MIB, ImageKind::Thin, None);
    make(&folder, "file.raw", MIB, ImageKind::Raw, None);
    let parent = |name: &str| {
        let image = Image::open(folder.resolve(name).unwrap(), &OpenOptions::default()).unwrap();
        NewParent::of(&image, &folder)
    };
    assert_eq!(parent("file.raw").err().unwrap().kind(), ErrorKind::Unsupported);
    for kind in ImageKind::ALL.into_iter().filter(|kind| !kind.can_have_parent()) {
        let new = NewImage::new("child.vmdk", MIB, kind).above(parent("vm.vmdk").unwrap());
        assert_eq!(create(&folder, &new, &mut || 1, &NoProgress).err().unwrap().kind(), ErrorKind::Invalid, "{kind}");
    }
    let before = names(path.path());
    for (name, capacity, kind) in [
        ("large.vmdk", 2 << 40, ImageKind::VmfsSparse),
        ("large.vmdk", 2 << 40, ImageKind::MonolithicSparse),
        ("large.vmdk", 64 << 40, ImageKind::SplitFlat),
        ("large.vmdk", 64 << 40, ImageKind::SplitSparse),
        ("large.vmdk", 63 << 40, ImageKind::SeSparse),
        ("odd.vmdk", 1000, ImageKind::Thin),
        ("odd.vmdk", 0, ImageKind::SeSparse),
        ("disk", MIB, ImageKind::SeSparse),
        ("a/b", MIB, ImageKind::Raw),
        ("..", MIB, ImageKind::Raw),
    ] {
        let new = NewImage::new(name, capacity, kind);
        let refused = create(&folder, &new, &mut || 1, &NoProgress).err().unwrap();
        assert_eq!(refused.kind(), ErrorKind::Invalid, "{kind}: {refused}");
        assert_eq!(names(path.path()), before);
    }
}

#[test]
fn names_of_kinds_are_parsed_as_they_are_printed() {
    for kind in ImageKind::ALL {
        assert_eq!(kind.to_string().parse::<ImageKind>().unwrap(), kind);
        assert_eq!(kind.name().to_uppercase().parse::<ImageKind>().unwrap(), kind);
    }
    assert!("qcow2".parse::<ImageKind>().is_err());
}

/// Power cuts at every operation: the image is complete or its name does not exist, and sweeping removes all other
/// files.
#[test]
fn a_crash_leaves_an_image_or_temporary_files_that_sweep_removes() {
    for (number, kind) in ImageKind::ALL.into_iter().enumerate() {
        let mut finished = false;
        for cut in 0..200 {
            let disk = SimulatedDisk::new(number as u64 * 1000 + cut, SimulatedOptions::default());
            let directory = disk.directory();
            let folder = Folder::plain(Arc::clone(&directory));
            let model = vec![0x5a; 2 * MIB as usize];
            disk.cut_after(cut);
            let fill = |unfinished: Unfinished| {
                let image = unfinished.open(&writing())?;
                image.layer().write(0, &[&model])?;
                image.layer().close()?;
                drop(image);
                unfinished.finish()
            };
            let new = NewImage::new("vm.vmdk", 2 * MIB, kind);
            let made = begin(&folder, &new, &mut || 77, &NoProgress).and_then(fill);
            finished = made.is_ok();
            let directory = disk.crash().directory();
            storage::sweep(&*directory).unwrap();
            let names = directory.list().unwrap();
            if names.is_empty() {
                assert!(!finished, "{kind} after {cut}");
                continue;
            }
            let options = OpenOptions {
                format: (kind == ImageKind::Raw).then_some(layer::image::Format::Flat),
                ..OpenOptions::default()
            };
            let image = Image::open(Place::plain(directory, "vm.vmdk"), &options);
            let image = image.unwrap_or_else(|error| panic!("{kind} after {cut}: {names:?}: {error}"));
            assert!(read_chain(&[Arc::clone(image.layer())]) == model, "{kind} after {cut}");
            if finished {
                break;
            }
        }
        assert!(finished, "the creation of {kind} never completed");
    }
}

#[test]
fn a_plain_folder_cannot_open_other_folders() {
    let directory = SimulatedDisk::new(1, SimulatedOptions::default()).directory();
    let folder = Folder::plain(Arc::clone(&directory));
    let new = NewImage { mode: IoMode::Direct, ..NewImage::new("vm.vmdk", MIB, ImageKind::EagerZeroedThick) };
    create(&folder, &new, &mut || 3, &NoProgress).unwrap();
    assert_eq!(directory.list().unwrap(), ["vm-flat.vmdk", "vm.vmdk"]);
}

/// Creations and sweeps of one name run at once: after a creation that succeeds, the image is complete.
#[test]
fn threads_that_create_the_same_name_get_one_image() {
    let outer = tempfile::tempdir().unwrap();
    let (made, swept) = (AtomicU64::new(0), AtomicU64::new(0));
    let started = Instant::now();
    // On a busy medium a creation takes long.
    let is_over = |made: &AtomicU64, swept: &AtomicU64| {
        let enough = [made, swept].iter().all(|count| count.load(Ordering::Relaxed) > 10);
        started.elapsed() > Duration::from_secs(if enough { 2 } else { 60 })
    };
    let work = |number: u64| {
        let directory: Arc<dyn Directory> = Arc::new(LocalDirectory::open(outer.path(), LocalQueues::Threads).unwrap());
        let folder = Folder::plain(Arc::clone(&directory));
        for turn in number.. {
            if is_over(&made, &swept) {
                return;
            }
            let Ok(removed) = storage::sweep_one(&*directory, "vm.vmdk") else { continue };
            swept.fetch_add(removed.len() as u64, Ordering::Relaxed);
            let kind = [ImageKind::VmfsSparse, ImageKind::MonolithicSparse, ImageKind::Thin][turn as usize % 3];
            let new = NewImage::new("vm.vmdk", MIB, kind);
            let Ok(unfinished) = begin(&folder, &new, &mut || turn, &NoProgress) else { continue };
            let image = unfinished.open(&writing()).unwrap();
            image.layer().write(0, &[&[number as u8 + 1; 65536]]).unwrap();
            image.layer().close().unwrap();
            drop(image);
            match turn % 5 {
                // Dropping the value leaves the files as a kill of the process does.
                0 => drop(unfinished),
                1 => unfinished.abandon(),
                _ => {
                    let Ok(finished) = unfinished.finish() else { continue };
                    let image = Image::open(Place::plain(Arc::clone(&directory), "vm.vmdk"), &OpenOptions::default());
                    let read = read_chain(&[Arc::clone(image.unwrap().layer())]);
                    assert!(read[..65536].iter().all(|byte| *byte == number as u8 + 1), "{kind} of {number}");
                    made.fetch_add(1, Ordering::Relaxed);
                    // The descriptor is removed last: without it, a sweep of another process's unfinished descriptor
                    // could remove an extent of this image.
                    finished.files.iter().rev().for_each(|file| directory.remove(file).unwrap());
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for number in 0..4 {
            let work = &work;
            scope.spawn(move || work(number));
        }
    });
    let (made, swept) = (made.into_inner(), swept.into_inner());
    assert!(made > 10 && swept > 10, "{made} created, {swept} swept: too few of either");
}
