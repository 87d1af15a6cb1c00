//! Folders that others make disks in too.

use super::*;

/// What is being made is locked from its first moment to its last, so that no sweep takes it for what a crash left.
fn one_that_is_being_made_is_not_swept(directory: &dyn Directory) {
    let descriptor = parsed(BASE);
    let busy = || {
        let error = storage::sweep_one(directory, "web.vmdk").unwrap_err();
        assert!(error.kind() == ErrorKind::Busy && error.to_string().contains("being made"), "{error}");
    };
    // Before there is any extent, with one, and between the two halves of a creation that was laid aside.
    let pending = Pending::begin(directory, "web.vmdk", &descriptor).unwrap();
    busy();
    write_plain(directory, "web-flat.vmdk", b"x");
    busy();
    let lock = pending.suspend();
    busy();
    assert_eq!(directory.list().unwrap(), ["web-flat.vmdk", "web.vmdk.lamina-new"]);
    Pending::resume(directory, "web.vmdk", lock).commit().unwrap();
    assert!(storage::sweep_one(directory, "web.vmdk").unwrap().is_empty());
    assert_eq!(directory.list().unwrap(), ["web-flat.vmdk", "web.vmdk"]);
    directory.remove("web.vmdk").unwrap();
    directory.remove("web-flat.vmdk").unwrap();

    // A file without a text, and one whose maker was killed: its lock went with it, and nothing else.
    let held = storage::create_unfinished(directory, "web.vmdk", IoMode::Buffered).unwrap();
    busy();
    drop(held);
    assert_eq!(storage::sweep_one(directory, "web.vmdk").unwrap(), ["web.vmdk.lamina-new"]);
    drop(Pending::begin(directory, "web.vmdk", &descriptor).unwrap().suspend());
    write_plain(directory, "web-flat.vmdk", b"x");
    // A process that has the extent open is not disturbed either.
    let open = directory.lock("web-flat.vmdk").unwrap();
    busy();
    drop(open);
    assert_eq!(storage::sweep_one(directory, "web.vmdk").unwrap(), ["web-flat.vmdk", "web.vmdk.lamina-new"]);
    assert!(directory.list().unwrap().is_empty());
}

#[test]
fn one_that_is_being_made_is_not_swept_here_nor_on_a_file_system() {
    one_that_is_being_made_is_not_swept(&*SimulatedDisk::new(1, SimulatedOptions::default()).directory());
    let folder = tempfile::tempdir().unwrap();
    let local = backend::local::LocalDirectory::open(folder.path(), backend::local::LocalQueues::Threads).unwrap();
    one_that_is_being_made_is_not_swept(&local);
}
