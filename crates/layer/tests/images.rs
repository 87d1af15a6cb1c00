//! Images on the host's file system: which files may be opened, and interoperation with QEMU in both directions.

#![allow(clippy::unwrap_used)]

mod scratch;

use backend::local::{LocalDirectory, LocalQueues};
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{Access, Directory, File, IoMode, LocalFolder, Lock};
use error::{Error, ErrorKind, Result};
use layer::Layer;
use layer::descriptor::{Adapter, ContentId, Descriptor, storage};
use layer::flat::{self, NewDisk, NewKind, Provisioning};
use layer::image::{Folder, Image, OpenOptions, Place, open_chain};
use scratch::{Random, folder, read, read_by_qemu, run, try_run};
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use work::NoProgress;

const MIB: u64 = 1 << 20;

fn make(path: &Path, name: &str, capacity: u64, kind: NewKind, provisioning: Provisioning) -> Descriptor {
    let directory = LocalDirectory::open(path, LocalQueues::Threads).unwrap();
    let disk = NewDisk { name, capacity, kind, provisioning, adapter: Adapter::LsiLogic, mode: IoMode::Buffered };
    let mut random = Random(capacity);
    flat::create(&directory, &disk, &mut || random.next(), &NoProgress).unwrap()
}

fn open(path: &Path, writable: bool) -> Result<Image> {
    Image::open(Place::local(path, &[])?, &OpenOptions { writable, ..OpenOptions::default() })
}

fn chain(path: &Path, permitted: &[PathBuf]) -> Result<Vec<String>> {
    let chain = open_chain(Place::local(path, permitted)?, &OpenOptions::default())?;
    Ok(chain.images().iter().map(|image| image.place().label()).collect())
}

fn error<T>(outcome: Result<T>) -> Error {
    outcome.err().unwrap()
}

fn text(extent: &str, parent: &str) -> String {
    let parent_content = if parent.is_empty() { "ffffffff" } else { "fffffffe" };
    let hint = if parent.is_empty() { String::new() } else { format!("parentFileNameHint=\"{parent}\"\n") };
    format!("version=1\nCID=1\nparentCID={parent_content}\ncreateType=\"custom\"\n{hint}{extent}\n")
}

#[test]
fn only_permitted_files_are_opened() {
    let outer = folder();
    let (own, other) = (outer.path().join("own"), outer.path().join("other"));
    for path in [&own, &own.join("below"), &other] {
        std::fs::create_dir(path).unwrap();
    }
    for path in [own.join("data"), own.join("below/data"), other.join("data")] {
        std::fs::write(path, [1; 512]).unwrap();
    }
    symlink(other.join("data"), own.join("link")).unwrap();
    symlink(&other, own.join("folder")).unwrap();
    symlink("data", own.join("inner")).unwrap();
    run(&own, "mkfifo", &["pipe"]);
    let try_open = |reference: &str, permitted: &[PathBuf]| {
        std::fs::write(own.join("disk.vmdk"), text(&format!("RW 1 FLAT \"{reference}\" 0"), "")).unwrap();
        let place = Place::local(&own.join("disk.vmdk"), permitted)?;
        Image::open(place, &OpenOptions::default())
    };
    let absolute = |path: PathBuf| path.canonicalize().unwrap().display().to_string();
    for good in ["data", "./data", "below/data", "below\\data", "below/../data", "inner", &absolute(own.join("data"))] {
        assert_eq!(try_open(good, &[]).unwrap().layer().capacity(), 512, "{good}");
    }
    let outside = [
        "../other/data",
        "..\\other\\data",
        "below/../../other/data",
        "link",
        "folder/data",
        &absolute(other.join("data")),
        "../own/../other/data",
    ];
    for bad in outside {
        let refused = error(try_open(bad, &[]));
        let permit = format!("--allow-folder '{}'", other.canonicalize().unwrap().display());
        assert!(refused.kind() == ErrorKind::Invalid && refused.to_string().contains(&permit), "{bad}: {refused}");
        // With permission the file opens, even through a link to the permitted folder.
        assert!(try_open(bad, std::slice::from_ref(&other)).is_ok(), "{bad}");
        assert!(try_open(bad, &[own.join("folder")]).is_ok(), "{bad}");
        assert!(try_open(bad, &[own.join("below")]).is_err(), "{bad}");
    }
    // The error does not reveal whether a refused file exists.
    let (missing, there) = (error(try_open("../other/gone", &[])), error(try_open("../other/data", &[])));
    assert_eq!(missing.to_string().replace("gone", "data"), there.to_string());
    for (bad, kind) in [
        ("gone", ErrorKind::NotFound),
        ("../../../../../../../../../../../../../../..", ErrorKind::Invalid),
        ("/", ErrorKind::Invalid),
        ("..", ErrorKind::Invalid),
        (".", ErrorKind::Io),
        ("below", ErrorKind::Io),
    ] {
        let refused = error(try_open(bad, &[]));
        assert!(
            refused.kind() == kind || refused.kind() == ErrorKind::Invalid,
            "{bad}: {:?} {refused}",
            refused.kind()
        );
    }
    // A permitted folder is not a file, and its parent folder is not permitted.
    symlink(".", own.join("self")).unwrap();
    let gate = Folder::local(&own, std::slice::from_ref(&other)).unwrap();
    for folder in [".", "self", "folder", "../other"] {
        assert_eq!(error(gate.resolve(folder)).kind(), ErrorKind::Invalid, "{folder}");
    }
    // Opening a pipe must not block, and a device is refused.
    assert!(error(try_open("pipe", &[])).to_string().contains("not a regular file"));
    let device = error(try_open("/dev/zero", &[PathBuf::from("/dev")]));
    assert!(device.to_string().contains("not a regular file"), "{device}");
    // For the path that the user names, links are followed, and the real folder of the file is the permitted one.
    symlink(own.join("disk.vmdk"), other.join("elsewhere.vmdk")).unwrap();
    try_open("below/data", &[]).unwrap();
    assert!(open(&other.join("elsewhere.vmdk"), false).is_ok());
}

#[test]
fn a_symbolic_link_exchanged_during_opening_does_not_escape() {
    let outer = folder();
    let (own, other) = (outer.path().join("own"), outer.path().join("other"));
    std::fs::create_dir(&own).unwrap();
    std::fs::create_dir(&other).unwrap();
    std::fs::write(own.join("data"), [1; 512]).unwrap();
    std::fs::write(other.join("data"), [2; 512]).unwrap();
    let place = Place::local(&own.join("data"), &[]).unwrap();
    std::fs::remove_file(own.join("data")).unwrap();
    symlink(other.join("data"), own.join("data")).unwrap();
    assert!(place.open(IoMode::Buffered, backend::Access::Read).is_err());
    std::fs::rename(&own, outer.path().join("moved")).unwrap();
    symlink(&other, &own).unwrap();
    let canonical = outer.path().canonicalize().unwrap().join("own");
    assert!(LocalDirectory::open_resolved(&canonical).is_err());
    LocalDirectory::open_resolved(outer.path().canonicalize().unwrap().join("moved")).unwrap().sync().unwrap();
}

#[test]
fn parents_are_found_by_hint_or_beside_the_child() {
    let outer = folder();
    for name in ["vm", "base", "clone"] {
        std::fs::create_dir(outer.path().join(name)).unwrap();
    }
    let root = outer.path().canonicalize().unwrap();
    make(&root.join("base"), "gold.vmdk", MIB, NewKind::Vmfs, Provisioning::Thin);
    let everything = std::slice::from_ref(&root);
    let gold = root.join("base/gold.vmdk").display().to_string();
    for (name, hint) in [
        ("absolute.vmdk", gold.as_str()),
        ("relative.vmdk", "../base/gold.vmdk"),
        ("windows.vmdk", "..\\base\\gold.vmdk"),
        ("moved.vmdk", "/vmfs/volumes/5f3c/base/gold.vmdk"),
        // Each pair has a child and its hint. A linked clone often has the same file name as its parent.
        ("gold.vmdk", "/vmfs/volumes/5f3c/base/gold.vmdk"),
    ] {
        let path = root.join("vm").join(name);
        std::fs::write(&path, text("RW 8 ZERO", hint)).unwrap();
        assert_eq!(chain(&path, everything).unwrap(), [path.display().to_string(), gold.clone()], "{hint}");
        let refused = error(chain(&path, &[])).to_string();
        assert!(refused.contains("--allow-folder"), "{hint}: {refused}");
    }
    // The file in the child's own folder is preferred, if its CID matches.
    make(&root.join("vm"), "gold2.vmdk", MIB, NewKind::Vmfs, Provisioning::Thin);
    std::fs::write(root.join("vm/near.vmdk"), text("RW 8 ZERO", "../base/gold2.vmdk")).unwrap();
    assert!(chain(&root.join("vm/near.vmdk"), &[]).unwrap()[1].ends_with("vm/gold2.vmdk"));
    std::fs::write(root.join("vm/gold2.vmdk"), text("RW 8 ZERO", "")).unwrap();
    std::fs::copy(root.join("base/gold.vmdk"), root.join("base/gold2.vmdk")).unwrap();
    assert!(chain(&root.join("vm/near.vmdk"), everything).unwrap()[1].ends_with("base/gold2.vmdk"));
    assert!(error(chain(&root.join("vm/near.vmdk"), &[])).to_string().contains("force"));
}

#[test]
fn images_without_write_permission_are_readable() {
    let folder = folder();
    make(folder.path(), "vm.vmdk", MIB, NewKind::Vmfs, Provisioning::Thin);
    for name in ["vm.vmdk", "vm-flat.vmdk"] {
        run(folder.path(), "chmod", &["400", name]);
    }
    assert_eq!(open(&folder.path().join("vm.vmdk"), false).unwrap().layer().capacity(), MIB);
    let before = std::fs::metadata(folder.path().join("vm.vmdk")).unwrap().modified().unwrap();
    drop(open(&folder.path().join("vm.vmdk"), false).unwrap());
    assert_eq!(std::fs::metadata(folder.path().join("vm.vmdk")).unwrap().modified().unwrap(), before);
}

#[test]
fn a_replaced_descriptor_keeps_its_permissions() {
    use std::os::unix::fs::PermissionsExt;
    let folder = folder();
    make(folder.path(), "vm.vmdk", MIB, NewKind::Vmfs, Provisioning::Thin);
    let path = folder.path().join("vm.vmdk");
    run(folder.path(), "chmod", &["664", "vm.vmdk"]);
    open(&path, true).unwrap().layer().write(0, &[&[1; 512]]).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o664);
}

/// Writes the same data to the layer and to the model, also across the boundaries of extents.
fn scribble(layer: &Arc<dyn Layer>, model: &mut [u8], seed: u64) {
    let mut random = Random(seed);
    let sectors = model.len() as u64 / 512;
    let mut starts: Vec<u64> = (0..20).map(|_| random.below(sectors)).collect();
    starts.extend([0, sectors - 1, (sectors / 2) & !7]);
    for start in starts {
        let count = (1 + random.below(300)).min(sectors - start);
        let data = random.bytes((count * 512) as usize);
        layer.write(start * 512, &[&data]).unwrap();
        model[(start * 512) as usize..][..data.len()].copy_from_slice(&data);
        let zeros = start..(start + count / 2);
        layer.zero(zeros.start * 512..zeros.end * 512, start % 2 == 0).unwrap();
        model[(zeros.start * 512) as usize..(zeros.end * 512) as usize].fill(0);
    }
    layer.close().unwrap();
}

#[test]
fn qemu_reads_images_made_by_lamina() {
    let types = [Provisioning::Thin, Provisioning::ZeroedThick, Provisioning::EagerZeroedThick];
    for (kind, name) in [(NewKind::Vmfs, "vmfs"), (NewKind::MonolithicFlat, "monolithicFlat")] {
        for (seed, provisioning) in types.into_iter().enumerate() {
            let folder = folder();
            let capacity = 24 * MIB + 512;
            make(folder.path(), "vm disk.vmdk", capacity, kind, provisioning);
            let image = open(&folder.path().join("vm disk.vmdk"), true).unwrap();
            assert_eq!(image.provisioning(), Some(provisioning));
            let mut model = vec![0; capacity as usize];
            scribble(image.layer(), &mut model, seed as u64);
            assert!(read(&**image.layer(), 0, capacity) == model);
            drop(image);
            assert!(read_by_qemu(folder.path(), "vm disk.vmdk") == model, "{name} {provisioning:?}");
            let info = run(folder.path(), "qemu-img", &["info", "--output=json", "vm disk.vmdk"]);
            assert!(
                info.contains("\"format\": \"vmdk\"") && info.contains(&format!("\"virtual-size\": {capacity}")),
                "{info}"
            );
            assert!(info.contains(&format!("\"create-type\": \"{name}\"")), "{info}");
            run(folder.path(), "qemu-img", &["check", "vm disk.vmdk"]);
            std::fs::write(folder.path().join("model"), &model).unwrap();
            run(folder.path(), "qemu-img", &["compare", "-f", "vmdk", "-F", "raw", "vm disk.vmdk", "model"]);
        }
    }
}

#[test]
fn qemu_and_lamina_write_split_disks_in_turn() {
    let folder = folder();
    let capacity = 5u64 << 30;
    make(folder.path(), "ours.vmdk", capacity, NewKind::TwoGbMaxExtentFlat, Provisioning::Thin);
    let create = ["create", "-f", "vmdk", "-o", "subformat=twoGbMaxExtentFlat", "theirs.vmdk", "5G"];
    run(folder.path(), "qemu-img", &create);
    for (name, piece) in [("ours.vmdk", 2047 * MIB), ("theirs.vmdk", 2048 * MIB)] {
        let path = folder.path().join(name);
        let border = (piece - 64 * 1024).to_string();
        let far = (2 * piece + 4096).to_string();
        let writes =
            [format!("write -P 17 {border} 128k"), format!("write -P 34 {far} 64k"), "write -P 51 0 512".to_owned()];
        let before = open(&path, false).unwrap().descriptor().unwrap();
        for command in &writes {
            run(folder.path(), "qemu-io", &["-f", "vmdk", "-c", command, name]);
        }
        let image = open(&path, true).unwrap();
        assert_eq!(image.layer().capacity(), capacity);
        assert_ne!(image.descriptor().unwrap().content, before.content, "QEMU changes the CID as lamina does");
        assert!(read(&**image.layer(), piece - 64 * 1024, 128 * 1024).iter().all(|byte| *byte == 17));
        assert!(read(&**image.layer(), 2 * piece, 4096).iter().all(|byte| *byte == 0));
        assert!(read(&**image.layer(), 2 * piece + 4096, 64 * 1024).iter().all(|byte| *byte == 34));
        assert!(read(&**image.layer(), 0, 512).iter().all(|byte| *byte == 51));
        let counters = image.counters().unwrap();
        assert_eq!((counters.nb, counters.tbz), (4, 0), "{counters:?}");
        // Writes across the border, and discards data written by QEMU.
        image.layer().write(piece - 4096, &[&[68; 8192]]).unwrap();
        image.layer().zero(2 * piece..2 * piece + 8 * MIB, false).unwrap();
        image.layer().close().unwrap();
        assert_eq!(image.counters().unwrap().nb, 3);
        drop(image);
        for command in [
            format!("read -P 17 {border} 60k"),
            format!("read -P 68 {} 8k", piece - 4096),
            format!("read -P 17 {} 60k", piece + 4096),
            format!("read -P 0 {far} 64k"),
            "read -P 51 0 512".to_owned(),
        ] {
            let told = run(folder.path(), "qemu-io", &["-f", "vmdk", "-c", &command, name]);
            assert!(!told.contains("failed"), "{command}: {told}");
        }
    }
    run(folder.path(), "qemu-img", &["compare", "theirs.vmdk", "theirs.vmdk"]);
}

#[test]
fn lamina_reads_and_writes_flat_disks_of_qemu() {
    let folder = folder();
    for (index, adapter) in ["ide", "lsilogic", "buslogic"].into_iter().enumerate() {
        let name = format!("{adapter}.vmdk");
        let options = format!("subformat=monolithicFlat,adapter_type={adapter}");
        run(folder.path(), "qemu-img", &["create", "-f", "vmdk", "-o", &options, &name, "3145728"]);
        run(folder.path(), "qemu-io", &["-f", "vmdk", "-c", "write -P 17 1M 64k", &name]);
        let image = open(&folder.path().join(&name), true).unwrap();
        assert_eq!(image.descriptor().unwrap().database.get("ddb.adapterType"), Some(adapter));
        let mut model = vec![0; 3 << 20];
        model[1 << 20..(1 << 20) + 65536].fill(17);
        assert!(read(&**image.layer(), 0, 3 * MIB) == model);
        scribble(image.layer(), &mut model, index as u64);
        drop(image);
        assert!(read_by_qemu(folder.path(), &name) == model, "{adapter}");
        // QEMU writes to an image with a descriptor that lamina wrote.
        run(folder.path(), "qemu-io", &["-f", "vmdk", "-c", "write -P 18 2M 64k", &name]);
        model[2 << 20..(2 << 20) + 65536].fill(18);
        assert!(read(&**open(&folder.path().join(&name), false).unwrap().layer(), 0, 3 * MIB) == model);
    }
}

#[test]
fn qemu_detects_a_parent_changed_by_lamina() {
    let folder = folder();
    let base = make(folder.path(), "base.vmdk", 4 * MIB, NewKind::Vmfs, Provisioning::Thin);
    run(folder.path(), "qemu-img", &["create", "-f", "vmdk", "-b", "base.vmdk", "-F", "vmdk", "child.vmdk"]);
    // The child that QEMU made records lamina's CID.
    let directory = LocalDirectory::open(folder.path(), LocalQueues::Threads).unwrap();
    let file = directory.open("child.vmdk", IoMode::Buffered).unwrap();
    let (place, child) = storage::load_embedded(&*file).unwrap().unwrap();
    assert_eq!(place, storage::embedded_usual());
    assert_eq!(child.parent_content, Some(base.content));
    assert_eq!((base.content, child.parent_hint.as_deref()), (ContentId::INITIAL, Some("base.vmdk")));
    let through = ["-f", "vmdk", "-c", "read -P 0 0 64k", "child.vmdk"];
    assert!(!run(folder.path(), "qemu-io", &through).contains("failed"));
    // lamina renews the CID of QEMU's child in place, and QEMU then finds the new CID.
    let mut random = Random(1);
    for _ in 0..20 {
        storage::renew_embedded(&*file, place.clone(), &mut || random.next()).unwrap();
        assert!(!run(folder.path(), "qemu-io", &through).contains("failed"));
    }
    let renewed = storage::load_embedded(&*file).unwrap().unwrap().1;
    let info = run(folder.path(), "qemu-img", &["info", "--output=json", "child.vmdk"]);
    assert!(info.contains(&format!("\"cid\": {}", renewed.content.number())), "{info}");
    let image = open(&folder.path().join("base.vmdk"), true).unwrap();
    image.layer().write(MIB, &[&[1; 512]]).unwrap();
    image.layer().close().unwrap();
    drop(image);
    let (good, told) = try_run(folder.path(), "qemu-io", &through);
    assert!(!good || told.contains("failed"), "QEMU read a child although its parent had changed: {told}");
}

/// A folder in which another process changes files just before a lock is taken.
struct Late<F> {
    inner: Arc<dyn Directory>,
    change: Mutex<Option<F>>,
}

impl<F: FnOnce() + Send> Directory for Late<F> {
    backend::forward_directory!(inner: remove, rename, list, sync, room, queue, queue_kind);

    fn open(&self, name: &str, mode: IoMode) -> io::Result<Arc<dyn File>> {
        self.inner.open(name, mode)
    }
    fn create(&self, name: &str, mode: IoMode) -> io::Result<Arc<dyn File>> {
        self.inner.create(name, mode)
    }
    fn lock(&self, name: &str) -> io::Result<Box<dyn Lock>> {
        if let Some(change) = self.change.lock().unwrap().take() {
            change();
        }
        self.inner.lock(name)
    }
    fn local(&self) -> Option<&dyn LocalFolder> {
        Some(self)
    }
}

impl<F: FnOnce() + Send> LocalFolder for Late<F> {
    fn open_foreign(&self, name: &str, mode: IoMode, access: Access) -> io::Result<Arc<dyn File>> {
        self.inner.open_foreign(name, mode, access)
    }
    fn copy_permissions(&self, from: &str, to: &str) -> io::Result<()> {
        self.inner.copy_permissions(from, to)
    }
    fn lock_folder(&self) -> io::Result<Option<Box<dyn Lock>>> {
        Ok(None)
    }
    fn is_at(&self, path: &std::path::Path) -> io::Result<bool> {
        self.inner.is_at(path)
    }
}

#[test]
fn a_descriptor_that_changes_before_the_lock_is_taken_is_not_overwritten_with_older_text() {
    let machine = SimulatedDisk::new(1, SimulatedOptions::default());
    let inner = machine.directory();
    let (kind, provisioning) = (NewKind::Vmfs, Provisioning::Thin);
    let adapter = Adapter::LsiLogic;
    let disk = NewDisk { name: "disk.vmdk", capacity: MIB, kind, provisioning, adapter, mode: IoMode::Buffered };
    let mut random = Random(1);
    flat::create(&*inner, &disk, &mut || random.next(), &NoProgress).unwrap();
    let load = |folder: &dyn Directory| {
        storage::load(&*folder.open("disk.vmdk", IoMode::Buffered).unwrap(), "disk.vmdk").unwrap()
    };
    let mut changed = load(&*inner);
    changed.content = ContentId::new(0x1234_5678).unwrap();
    changed.set_thin(false);
    let (other, text) = (Arc::clone(&inner), changed.clone());
    let change = move || storage::replace(&*other, "disk.vmdk", &text).unwrap();
    let late = Late { inner: Arc::clone(&inner), change: Mutex::new(Some(change)) };
    let place = Place { folder: Folder::plain(Arc::new(late)), name: "disk.vmdk".to_owned() };
    let image = Image::open(place, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
    assert_eq!(image.descriptor().unwrap(), changed);
    image.layer().write(0, &[&[1; 512]]).unwrap();
    let written = load(&*inner);
    assert!(!written.thin() && written.content != changed.content, "{written:?}");
}
