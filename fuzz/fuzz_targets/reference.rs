//! A file name in an image, resolved in a real folder with links: the resolved path is never outside the permitted
//! folders.

#![no_main]

use backend::{Access, IoMode};
use layer::image::Folder;
use libfuzzer_sys::fuzz_target;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The content of files that must not be opened.
const SECRET: &[u8] = b"secret";

/// `in` is the image's folder, `allowed` is permitted too, `out` is not.
fn tree() -> PathBuf {
    let root = std::env::temp_dir().join("lamina-fuzz-reference");
    let _ = fs::remove_dir_all(&root);
    for (path, bytes) in [
        ("in/a", &b"inside"[..]),
        ("in/b/a", b"inside"),
        ("allowed/a", b"inside"),
        ("out/a", SECRET),
        ("out/b/a", SECRET),
        ("inner/a", SECRET),
        ("a", SECRET),
    ] {
        fs::create_dir_all(root.join(path).parent().unwrap_or(&root))
            .expect("a temporary folder accepts folders and files");
        fs::write(root.join(path), bytes).expect("a temporary folder accepts folders and files");
    }
    for (to, link) in [
        ("../out", "in/c"),
        ("../out/a", "in/d"),
        (".", "in/e"),
        ("..", "in/f"),
        ("a", "in/g"),
        ("../allowed", "in/h"),
        ("h", "in/h2"),
        ("loop", "in/loop"),
        ("/", "in/i"),
        ("../in/c", "allowed/c"),
    ] {
        symlink(to, root.join(link)).expect("a temporary folder accepts links");
    }
    root
}

fuzz_target!(|reference: &str| {
    static FOLDER: OnceLock<(PathBuf, Folder)> = OnceLock::new();
    let (root, folder) = FOLDER.get_or_init(|| {
        let root = tree();
        let folder = Folder::local(&root.join("in"), &[root.join("allowed")]).expect("the folder exists");
        (root.canonicalize().expect("the folder exists"), folder)
    });
    // Replaces `$` by the absolute path of the tree.
    let reference = reference.replace('$', &root.to_string_lossy());
    let Ok(place) = folder.resolve(&reference) else { return };
    let path = place.folder.path().map(Path::to_owned).expect("a folder of the file system");
    let within = ["in", "allowed"].iter().any(|own| path.starts_with(root.join(own)));
    assert!(within, "{reference:?} leads to {}", path.display());
    if let Ok(file) = place.open(IoMode::Buffered, Access::Read) {
        let mut bytes = [0; SECRET.len()];
        file.read_at(&mut bytes, 0).expect("a regular file");
        assert!(bytes != SECRET, "{reference:?} opens a file that is not permitted");
    }
});
