//! Folders in which other processes create disks, too.

use super::*;

/// A descriptor under creation is locked from its first moment to its last, so that no sweep treats it as left by a
/// crash.
fn check_that_a_sweep_keeps_an_image_being_created(directory: &dyn Directory) {
    let descriptor = parsed(BASE);
    let busy = || {
        let error = storage::sweep_one(directory, "web.vmdk").unwrap_err();
        assert!(error.kind() == ErrorKind::Busy && error.to_string().contains("being made"), "{error}");
    };
    // A sweep is refused before any extent exists, after one exists, and between suspending and resuming the creation.
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

    // Two cases after a kill of the creating process, which releases the lock and keeps the files: the text is still
    // empty, or complete.
    let held = storage::create_unfinished(directory, "web.vmdk", IoMode::Buffered).unwrap();
    busy();
    drop(held);
    assert_eq!(storage::sweep_one(directory, "web.vmdk").unwrap(), ["web.vmdk.lamina-new"]);
    drop(Pending::begin(directory, "web.vmdk", &descriptor).unwrap().suspend());
    write_plain(directory, "web-flat.vmdk", b"x");
    // An extent that a process has open is not removed.
    let open = directory.lock("web-flat.vmdk").unwrap();
    busy();
    drop(open);
    assert_eq!(storage::sweep_one(directory, "web.vmdk").unwrap(), ["web-flat.vmdk", "web.vmdk.lamina-new"]);
    assert!(directory.list().unwrap().is_empty());
}

#[test]
fn an_image_being_created_is_not_swept() {
    check_that_a_sweep_keeps_an_image_being_created(&*SimulatedDisk::new(1, SimulatedOptions::default()).directory());
    let folder = tempfile::tempdir().unwrap();
    let local = backend::local::LocalDirectory::open(folder.path(), backend::local::LocalQueues::Threads).unwrap();
    check_that_a_sweep_keeps_an_image_being_created(&local);
}

#[test]
fn a_link_with_the_temporary_name_is_named() {
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink("nowhere", folder.path().join("web.vmdk.lamina-new")).unwrap();
    let local = backend::local::LocalDirectory::open(folder.path(), backend::local::LocalQueues::Threads).unwrap();
    let error = storage::create_unfinished(&local, "web.vmdk", IoMode::Buffered).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Exists);
    assert!(error.to_string().ends_with("remove 'web.vmdk.lamina-new', and try again"), "{error}");
}
