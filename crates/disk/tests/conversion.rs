//! Conversions between every pair of formats, of chains and of archives, compared byte for byte with a model, and with
//! QEMU if it can read the format. Conversions that are refused must leave no files.

#![allow(clippy::unwrap_used)]

#[path = "conversion/refusals.rs"]
mod refusals;
#[path = "../src/testbed.rs"]
mod testbed;

use chain::Chain;
use disk::convert::{Address, Conversion, Converted, ImageOptions, SourceFormat, TargetFormat};
use disk::images::{self, ImageKind, NewImage};
use disk::{Datastore, InitOptions, NoProgress, Progress, QueueChoice};
use error::{Error, ErrorKind, Result};
use layer::image::{Format, Place, open_chain};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use testkit::Random;

const MIB: u64 = 1 << 20;
/// A capacity that ends within a block and within every larger grain.
const ODD: u64 = 9 * MIB + 512;

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Writes random data to some ranges of sectors, and zeros to others.
fn scribble(model: &mut [u8], random: &mut Random, mut write: impl FnMut(u64, &[u8])) {
    let sectors = model.len() as u64 / 512;
    for turn in 0..24 {
        let start = random.below(sectors);
        let length = (1 + random.below(if turn % 3 == 0 { 4096 } else { 40 })).min(sectors - start);
        let bytes: Vec<u8> = match turn % 5 {
            4 => vec![0; (length * 512) as usize],
            _ => {
                let seed = random.next();
                (0..length * 512).map(|at| (seed >> (at % 57)) as u8 ^ (at / 512) as u8).collect()
            }
        };
        write(start * 512, &bytes);
        model[(start * 512) as usize..][..bytes.len()].copy_from_slice(&bytes);
    }
    let end = [0xe5; 512];
    write((sectors - 1) * 512, &end);
    model[((sectors - 1) * 512) as usize..].copy_from_slice(&end);
}

fn run(program: &str, folder: &Path, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).current_dir(folder).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{program} {arguments:?}: {text}");
}

/// Content of the disk as QEMU reads it.
fn by_qemu(path: &Path, format: &str) -> Vec<u8> {
    let raw = path.with_extension("by-qemu");
    let (from, to) = (path.to_str().unwrap(), raw.to_str().unwrap());
    run("qemu-img", path.parent().unwrap(), &["convert", "-f", format, "-O", "raw", from, to]);
    let bytes = std::fs::read(&raw).unwrap();
    std::fs::remove_file(raw).unwrap();
    bytes
}

/// Content of the disk as its chain reads it, without a conversion.
fn content(path: &Path, format: Option<Format>) -> Vec<u8> {
    let options = layer::image::OpenOptions { format, ..Default::default() };
    let opened = open_chain(Place::local(path, &[]).unwrap(), &options).unwrap();
    let options = chain::Options { read_only: true, ..Default::default() };
    let chain = Chain::open("read back", opened.layers(), options).unwrap();
    let mut bytes = vec![0; chain.capacity() as usize];
    chain.read(0, &mut bytes).unwrap();
    bytes
}

fn conversion(from: &Path, to: &Path, format: TargetFormat) -> Conversion {
    Conversion {
        from: Address::Path(from.into()),
        to: Address::Path(to.into()),
        format,
        options: ImageOptions::default(),
        rate: 0,
        skip_damaged: false,
    }
}

fn convert(from: &Path, to: &Path, format: TargetFormat) -> Result<Converted> {
    conversion(from, to, format).run(None, &NoProgress)
}

fn store(path: &Path) -> Arc<Datastore> {
    Datastore::init(path, InitOptions { journal_size: 4 << 20 }).unwrap();
    Datastore::open(path, testbed::options(QueueChoice::Threads)).unwrap()
}

fn disk_content(store: &Datastore, name: &str) -> Vec<u8> {
    let device = store.device(name, true).unwrap();
    device.read(0, device.capacity() as usize).unwrap()
}

fn names(path: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(path).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// A file name for a format.
fn file_of(format: TargetFormat, stem: &str) -> String {
    match format {
        TargetFormat::Ova => format!("{stem}.ova"),
        TargetFormat::Image(ImageKind::Raw) => format!("{stem}.raw"),
        _ => format!("{stem}.vmdk"),
    }
}

/// Compares a target with the model, with every available reader.
fn check_target(path: &Path, format: TargetFormat, model: &[u8], what: &str) {
    match format {
        TargetFormat::Image(ImageKind::Raw) => assert!(std::fs::read(path).unwrap() == model, "{what}"),
        TargetFormat::Ova => {
            let raw = path.with_extension("unpacked");
            convert(path, &raw, TargetFormat::Image(ImageKind::Raw)).unwrap();
            assert!(std::fs::read(&raw).unwrap() == model, "{what}");
            std::fs::remove_file(raw).unwrap();
            // The archive is also unpacked with tar and read with QEMU.
            let folder = path.parent().unwrap().join("unpacked");
            std::fs::create_dir(&folder).unwrap();
            run("tar", &folder, &["-xf", path.to_str().unwrap()]);
            let member = names(&folder).into_iter().find(|name| name.ends_with(".vmdk")).unwrap();
            assert!(by_qemu(&folder.join(member), "vmdk") == model, "{what} by QEMU");
            std::fs::remove_dir_all(folder).unwrap();
        }
        _ => {
            assert!(content(path, None) == model, "{what}");
            if format != TargetFormat::Image(ImageKind::VsanSparse) {
                assert!(by_qemu(path, "vmdk") == model, "{what} by QEMU");
            }
            let check = images::check(path, &ImageOptions::default(), false, &NoProgress).unwrap();
            assert_eq!(check.problems, 0, "{what}: {check:?}");
        }
    }
}

#[test]
fn every_format_converts_to_every_other() {
    let outer = folder();
    let path = outer.path();
    let store = store(&path.join("store"));
    let mut model = vec![0; ODD as usize];
    scribble(&mut model, &mut Random(1), |_, _| {});
    let raw = path.join("model.raw");
    std::fs::write(&raw, &model).unwrap();
    run("qemu-img", path, &["convert", "-f", "raw", "-O", "qcow2", "model.raw", "source.qcow2"]);
    run("qemu-img", path, &["convert", "-c", "-f", "raw", "-O", "qcow2", "model.raw", "packed.qcow2"]);

    let mut sources: Vec<(String, Address)> =
        ["source.qcow2", "packed.qcow2"].map(|name| (name.to_owned(), Address::Path(path.join(name)))).to_vec();
    let mut made = 0;
    // The first round converts the raw disk to every format, the second round every format to every format.
    let formats: Vec<TargetFormat> = TargetFormat::all().collect();
    for format in &formats {
        let target = match format {
            TargetFormat::Native => Address::Disk("source".into()),
            _ => {
                let name = format!("{}-{}", format, file_of(*format, "source"));
                Address::Path(path.join(name))
            }
        };
        let first = Conversion {
            from: Address::Path(raw.clone()),
            to: target.clone(),
            format: *format,
            options: ImageOptions { format: Some(SourceFormat::Raw), ..ImageOptions::default() },
            rate: 0,
            skip_damaged: false,
        };
        let converted = first.run(Some(&store), &NoProgress).unwrap();
        assert_eq!((converted.capacity, converted.format), (ODD, *format));
        assert!(converted.copied > 0 && converted.copied < ODD, "zeros are not copied: {converted:?}");
        sources.push((format.to_string(), target));
    }
    for (name, from) in &sources {
        for format in &formats {
            let to = match format {
                TargetFormat::Native => Address::Disk("target".into()),
                _ => Address::Path(path.join("out").join(file_of(*format, "target"))),
            };
            std::fs::create_dir(path.join("out")).unwrap();
            let options =
                ImageOptions { format: (name == "raw").then_some(SourceFormat::Raw), ..ImageOptions::default() };
            let conversion = Conversion {
                from: from.clone(),
                to: to.clone(),
                format: *format,
                options,
                rate: 0,
                skip_damaged: false,
            };
            let what = format!("{name} to {format}");
            let converted = conversion.run(Some(&store), &NoProgress).unwrap_or_else(|e| panic!("{what}: {e}"));
            match &to {
                Address::Disk(name) => {
                    assert!(disk_content(&store, name) == model, "{what}");
                    store.delete_disk(name, false).unwrap();
                }
                Address::Path(target) => {
                    let mut listed: Vec<String> = converted
                        .files
                        .iter()
                        .map(|file| file.file_name().unwrap().to_str().unwrap().to_owned())
                        .collect();
                    listed.sort();
                    assert_eq!(names(&path.join("out")), listed, "{what}");
                    check_target(target, *format, &model, &what);
                }
            }
            std::fs::remove_dir_all(path.join("out")).unwrap();
            made += 1;
        }
    }
    assert_eq!(made, (formats.len() + 2) * formats.len());
    // The temporary snapshots of the conversions are deleted.
    assert!(store.snapshots(None).unwrap().is_empty());
    let report = store.check(disk::CheckOptions { data: true, repair: false }, &NoProgress).unwrap();
    assert!(report.findings.is_empty(), "{report:?}");
    store.close().unwrap();
}

/// A chain of `depth` deltas of one kind above a base, with random data written at every level. Returns the path and
/// the model of each level.
fn make_chain(path: &Path, base: ImageKind, delta: ImageKind, depth: usize, seed: u64) -> Vec<(PathBuf, Vec<u8>)> {
    let mut model = vec![0; ODD as usize];
    let mut random = Random(seed);
    let mut out = Vec::new();
    let mut parent: Option<PathBuf> = None;
    for level in 0..=depth {
        let name = if level == 0 { "vm.vmdk".to_owned() } else { format!("vm-{level:06}.vmdk") };
        let new = NewImage {
            path: path.join(name),
            capacity: (level == 0).then_some(ODD),
            format: if level == 0 { base } else { delta }.name().to_owned(),
            parent: parent.clone(),
            adapter: None,
        };
        images::create(&new, &ImageOptions::default(), &NoProgress).unwrap();
        let options = layer::image::OpenOptions { writable: true, ..Default::default() };
        let opened = open_chain(Place::local(&new.path, &[]).unwrap(), &options).unwrap();
        let chain = Chain::open("written", opened.layers(), chain::Options::default()).unwrap();
        scribble(&mut model, &mut random, |start, bytes| {
            // Zeros are sometimes written as data, and sometimes with the zero operation.
            match bytes.iter().all(|byte| *byte == 0) && bytes.len() > 512 {
                true => chain.zero(start, bytes.len() as u64, false).unwrap(),
                false => chain.write(start, bytes).unwrap(),
            }
        });
        chain.close().unwrap();
        out.push((new.path.clone(), model.clone()));
        parent = Some(new.path);
    }
    out
}

#[test]
fn a_chain_converts_to_one_image() {
    let deltas = ImageKind::ALL.into_iter().filter(|kind| kind.can_have_parent());
    for (number, delta) in deltas.enumerate() {
        let base = [ImageKind::Thin, ImageKind::MonolithicSparse, ImageKind::SplitFlat][number % 3];
        let outer = folder();
        let levels = make_chain(outer.path(), base, delta, 4, number as u64);
        let info = images::show(&levels[4].0, &ImageOptions::default()).unwrap();
        assert_eq!((info.levels.len(), info.problem), (5, None));
        assert!(info.levels[..4].iter().all(|level| level.format == delta.name()), "{:?}", info.levels);
        assert_eq!(info.levels[4].format, base.name());
        for pair in info.levels.windows(2) {
            assert_eq!(pair[0].parent_content_id, pair[1].content_id);
            assert!(pair[1].path.ends_with(pair[0].parent.as_deref().unwrap()));
        }
        for (path, model) in [&levels[4], &levels[2]] {
            for format in [TargetFormat::Image(ImageKind::SeSparse), TargetFormat::Image(ImageKind::Thin)] {
                let to = outer.path().join("out.vmdk");
                let converted = convert(path, &to, format).unwrap();
                check_target(&to, format, model, &format!("{delta} above {base} to {format}"));
                for file in converted.files {
                    std::fs::remove_file(file).unwrap();
                }
            }
            if delta != ImageKind::VsanSparse {
                assert!(by_qemu(path, "vmdk") == *model, "{delta} above {base} by QEMU");
            }
        }
    }
}

/// Removes the backing format from a qcow2 header, because old versions of QEMU did not write it.
fn forget_backing_format(path: &Path) {
    let mut bytes = std::fs::read(path).unwrap();
    let tag = [0xe2, 0x79, 0x2a, 0xca];
    let at = bytes[..4096].windows(4).position(|word| word == tag).unwrap();
    // The extension is replaced by one of an unknown type, which readers skip.
    bytes[at..at + 4].copy_from_slice(&[0x11, 0x22, 0x33, 0x44]);
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn qcow2_is_read_with_its_backing_files() {
    let outer = folder();
    let path = outer.path();
    let qemu = |arguments: &[&str]| run("qemu-img", path, arguments);
    let mut model = vec![0; 8 * MIB as usize];
    scribble(&mut model, &mut Random(3), |_, _| {});
    std::fs::write(path.join("base.raw"), &model).unwrap();
    qemu(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.raw", "middle.qcow2"]);
    qemu(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", "middle.qcow2", "top.qcow2", "12M"]);
    run("qemu-io", path, &["-f", "qcow2", "-c", "write -P 5 1M 70k", "middle.qcow2"]);
    run("qemu-io", path, &["-f", "qcow2", "-c", "write -P 6 1100k 3k", "-c", "write -z 2M 1M", "top.qcow2"]);
    let wanted = by_qemu(&path.join("top.qcow2"), "qcow2");
    let to = path.join("out.vmdk");
    convert(&path.join("top.qcow2"), &to, TargetFormat::Image(ImageKind::VmfsSparse)).unwrap();
    assert!(content(&to, None) == wanted && by_qemu(&to, "vmdk") == wanted);
    let info = images::show(&path.join("top.qcow2"), &ImageOptions::default()).unwrap();
    let formats: Vec<&str> = info.levels.iter().map(|level| level.format.as_str()).collect();
    assert_eq!(formats, ["qcow2", "qcow2", "raw"]);

    // A qcow2 image above a VMDK.
    convert(&path.join("base.raw"), &path.join("base.vmdk"), TargetFormat::Image(ImageKind::MonolithicSparse)).unwrap();
    qemu(&["create", "-q", "-f", "qcow2", "-F", "vmdk", "-b", "base.vmdk", "above.qcow2"]);
    let raw = path.join("above.raw");
    convert(&path.join("above.qcow2"), &raw, TargetFormat::Image(ImageKind::Raw)).unwrap();
    assert!(std::fs::read(&raw).unwrap() == model);

    // If the backing format is missing, it is not guessed. A backing file in another folder must be permitted
    // explicitly.
    forget_backing_format(&path.join("middle.qcow2"));
    let refused = convert(&path.join("top.qcow2"), &path.join("no.vmdk"), TargetFormat::Image(ImageKind::Thin));
    let error = refused.err().unwrap();
    assert!(error.kind() == ErrorKind::Unsupported && error.to_string().contains("rebase"), "{error}");
    let inner = path.join("inner");
    std::fs::create_dir(&inner).unwrap();
    qemu(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "../base.raw", "inner/top.qcow2"]);
    let mut outside = conversion(&inner.join("top.qcow2"), &path.join("no.vmdk"), TargetFormat::Image(ImageKind::Thin));
    let error = outside.run(None, &NoProgress).err().unwrap();
    assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains("--allow-folder"), "{error}");
    // A file with the same name in the image's own folder is not used as the backing file.
    std::fs::write(inner.join("base.raw"), vec![1; MIB as usize]).unwrap();
    outside.options.permitted = vec![path.to_path_buf()];
    outside.run(None, &NoProgress).unwrap();
    assert!(content(&path.join("no.vmdk"), None) == model);
    for name in ["nbd://localhost/x", "json:{}", "ssh:host"] {
        qemu(&["rebase", "-u", "-f", "qcow2", "-F", "raw", "-b", name, "middle.qcow2"]);
        let error = images::show(&path.join("middle.qcow2"), &ImageOptions::default()).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    }
}

/// A progress that is cancelled after a number of calls.
struct Patience(AtomicU64);

impl Progress for Patience {
    fn update(&self, done: u64, total: u64) {
        assert!(done <= total, "{done} of {total}");
    }

    fn cancelled(&self) -> bool {
        self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| Some(left.saturating_sub(1))).unwrap() == 0
    }
}

#[test]
fn a_cancelled_conversion_leaves_no_files() {
    let outer = folder();
    let path = outer.path();
    let store = store(&path.join("store"));
    let mut model = vec![0; ODD as usize];
    scribble(&mut model, &mut Random(8), |_, _| {});
    std::fs::write(path.join("a.raw"), &model).unwrap();
    let out = path.join("out");
    std::fs::create_dir(&out).unwrap();
    for format in TargetFormat::all() {
        let mut ended = false;
        for patience in 0..200 {
            let to = match format {
                TargetFormat::Native => Address::Disk("vm".into()),
                _ => Address::Path(out.join(file_of(format, "vm"))),
            };
            let from = Address::Path(path.join("a.raw"));
            let conversion =
                Conversion { from, to, format, options: ImageOptions::default(), rate: 0, skip_damaged: false };
            match conversion.run(Some(&store), &Patience(AtomicU64::new(patience))) {
                Ok(_) => {
                    ended = true;
                    break;
                }
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Interrupted, "{format}: {error}");
                    assert!(names(&out).is_empty(), "{format} after {patience}: {:?}", names(&out));
                    assert!(store.disks().unwrap().is_empty());
                }
            }
        }
        assert!(ended, "the operation on {format} never ends");
        if format == TargetFormat::Native {
            store.delete_disk("vm", false).unwrap();
        }
        for name in names(&out) {
            std::fs::remove_file(out.join(name)).unwrap();
        }
    }
    store.engine().reclaim().unwrap();
    let report = store.check(disk::CheckOptions { data: true, repair: false }, &NoProgress).unwrap();
    assert!(report.findings.is_empty() && report.leaked == 0, "{report:?}");
}

#[test]
fn the_next_conversion_removes_files_left_by_a_crash() {
    let outer = folder();
    let path = outer.path();
    std::fs::write(path.join("a.raw"), vec![7; MIB as usize]).unwrap();
    for kind in ImageKind::ALL {
        let format = TargetFormat::Image(kind);
        let to = path.join(file_of(format, "vm"));
        // The state after a power cut shortly before the end: the target is complete but still has its temporary name.
        let made = convert(&path.join("a.raw"), &to, format).unwrap();
        let unfinished = path.join(format!("{}.lamina-new", to.file_name().unwrap().to_str().unwrap()));
        std::fs::rename(&to, &unfinished).unwrap();
        convert(&path.join("a.raw"), &to, format).unwrap();
        assert!(!unfinished.exists(), "{kind}");
        for file in made.files {
            std::fs::remove_file(file).unwrap();
        }
        assert_eq!(names(path), ["a.raw"], "{kind}");
    }
}

/// A progress that writes to the disk while the disk is read.
struct Meanwhile<F: Fn(u64) + Sync>(F);

impl<F: Fn(u64) + Sync> Progress for Meanwhile<F> {
    fn update(&self, done: u64, _: u64) {
        (self.0)(done);
    }

    fn cancelled(&self) -> bool {
        false
    }
}

#[test]
fn a_conversion_reads_the_disk_as_of_its_beginning() {
    for format in ["native", "vmdk", "sesparse"] {
        let outer = folder();
        let path = outer.path();
        let store = store(&path.join("store"));
        let native = disk::NewDisk::native(64 * MIB, disk::Provisioning::Thin);
        let new = disk::NewDisk { format: format.parse().unwrap(), ..native };
        store.create_disk("vm", &new, &NoProgress).unwrap();
        let device = store.device("vm", false).unwrap();
        let write = |byte: u8, at: u64| {
            device.write(at, backend::SharedSlice::copy_of(&[byte; 4096]), false).unwrap();
        };
        (0..64).for_each(|number| write(1, number * MIB));
        let to = path.join("out.raw");
        let conversion = Conversion {
            from: Address::Disk("vm".into()),
            to: Address::Path(to.clone()),
            format: TargetFormat::Image(ImageKind::Raw),
            options: ImageOptions::default(),
            rate: 0,
            skip_damaged: false,
        };
        let writing = Meanwhile(|done| (0..64).for_each(|number| write(2, number * MIB + done % MIB / 4096 * 4096)));
        conversion.run(Some(&store), &writing).unwrap();
        let bytes = std::fs::read(&to).unwrap();
        for number in 0..64 {
            let at = (number * MIB) as usize;
            let rest = &bytes[at + 4096..at + MIB as usize];
            assert!(bytes[at..at + 4096] == [1; 4096] && rest.iter().all(|byte| *byte == 0), "{format}");
        }
        assert!(store.snapshots(None).unwrap().is_empty(), "{format}");
        assert_eq!(device.read(0, 4096).unwrap(), [2; 4096], "{format}: writes during the operation are kept");
    }
}

#[test]
fn disks_in_vmwares_formats_are_sources_and_targets() {
    let outer = folder();
    let path = outer.path();
    let store = store(&path.join("store"));
    let mut model = vec![0; ODD as usize];
    scribble(&mut model, &mut Random(12), |_, _| {});
    std::fs::write(path.join("a.raw"), &model).unwrap();
    for kind in ImageKind::ALL.into_iter().filter(|kind| *kind != ImageKind::Raw) {
        let ends = [
            (Address::Path(path.join("a.raw")), Address::Disk("vm".into()), TargetFormat::Image(kind)),
            (Address::Disk("vm".into()), Address::Disk("back".into()), TargetFormat::Native),
            (Address::Disk("back".into()), Address::Path(path.join("b.raw")), TargetFormat::Image(ImageKind::Raw)),
        ];
        for (from, to, format) in ends {
            let options = ImageOptions {
                format: matches!(from, Address::Path(_)).then_some(SourceFormat::Raw),
                ..Default::default()
            };
            let conversion = Conversion { from, to, format, options, rate: 0, skip_damaged: false };
            conversion.run(Some(&store), &NoProgress).unwrap_or_else(|error| panic!("{kind}: {error}"));
        }
        assert!(disk_content(&store, "vm") == model, "{kind}");
        assert!(std::fs::read(path.join("b.raw")).unwrap() == model, "{kind}");
        // A cancelled conversion leaves no files.
        for patience in [0, 2, 5] {
            let conversion = Conversion {
                from: Address::Disk("back".into()),
                to: Address::Disk("other".into()),
                format: TargetFormat::Image(kind),
                options: ImageOptions::default(),
                rate: 0,
                skip_damaged: false,
            };
            let error = conversion.run(Some(&store), &Patience(AtomicU64::new(patience))).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Interrupted, "{kind}: {error}");
        }
        assert_eq!(names(&path.join("store/images")), ["vm"], "{kind}");
        assert!(store.snapshots(None).unwrap().is_empty());
        store.delete_disk("vm", false).unwrap();
        store.delete_disk("back", false).unwrap();
        std::fs::remove_file(path.join("b.raw")).unwrap();
    }
    for format in [TargetFormat::Ova, TargetFormat::StreamOptimized] {
        let (from, to) = (Address::Path(path.join("a.raw")), Address::Disk("vm".into()));
        let conversion =
            Conversion { from, to, format, options: ImageOptions::default(), rate: 0, skip_damaged: false };
        assert_eq!(conversion.run(Some(&store), &NoProgress).err().unwrap().kind(), ErrorKind::Unsupported);
    }
    store.close().unwrap();
}
