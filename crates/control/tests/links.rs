//! Files that the description of a machine names, and that are replaced by links before they are imported: a user
//! who can write the folder of the description must not get the content of other files of the host.

#![allow(clippy::unwrap_used)]

use control::{OPEN_OPTIONS, Service, Target, disks};
use disk::{Datastore, InitOptions, NoProgress};
use error::ErrorKind;
use export::clients::Clients;
use std::fs;
use std::os::unix::fs::symlink;
use std::sync::Arc;
use vm::import::Content;
use vm::import::run::How;

#[test]
fn a_link_that_replaces_an_image_of_an_import_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().canonicalize().unwrap();
    let store = root.join("store");
    Datastore::init(&store, InitOptions { journal_size: 4 << 20 }).unwrap();
    let datastore = Datastore::open(&store, OPEN_OPTIONS).unwrap();
    let disks = disks(Target::Open(Service {
        clients: Arc::new(Clients::of_record(Arc::clone(datastore.directory()))),
        datastore: Arc::clone(&datastore),
        location: store.as_path().into(),
        served: None,
        jobs: None,
    }));
    for name in ["vm", "other"] {
        fs::create_dir(root.join(name)).unwrap();
        fs::write(root.join(name).join("disk.img"), vec![7; 8192]).unwrap();
    }
    let path = root.join("vm/disk.img");
    let content = Content::Image { path: path.clone(), format: Some("raw".to_owned()) };
    let how = How { live: false, permitted: Vec::new(), rate: 0 };
    let names = || datastore.disks().unwrap().into_iter().map(|disk| disk.name).collect::<Vec<_>>();
    disks.import("first", &content, &how, &NoProgress).unwrap();
    disks.image(&path, Some("raw"), &[]).unwrap();
    // The description was read, and the path permitted. Now a link to another file takes the place of the image.
    fs::remove_file(&path).unwrap();
    symlink(root.join("other/disk.img"), &path).unwrap();
    let error = disks.import("second", &content, &how, &NoProgress).unwrap_err();
    assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains("a link has replaced it"), "{error}");
    assert_eq!(disks.image(&path, Some("raw"), &[]).unwrap_err().kind(), ErrorKind::Invalid);
    // The same for a folder.
    fs::remove_dir_all(root.join("vm")).unwrap();
    symlink(root.join("other"), root.join("vm")).unwrap();
    assert_eq!(disks.import("second", &content, &how, &NoProgress).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(names(), ["first"]);
    drop(disks);
    datastore.close().unwrap();
}
