//! Which files of a folder tree describe machines.
//!
//! Symbolic links are not followed, so the search stays within the tree and ends.

use super::Format;
use error::{Error, ErrorKind, IoContext, Result};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

/// Deepest folder that is searched.
const DEPTH_MAX: usize = 16;
/// Most entries of all folders together.
const ENTRIES_MAX: usize = 1 << 20;
/// Most machines in one tree.
const MACHINES_MAX: usize = 4096;
/// The element `domain` must begin within this many bytes from the beginning of an XML file.
const HEAD: u64 = 8 << 10;

/// The paths of the descriptions of machines at `path`: the file itself, or all in the folder and its subfolders.
pub fn sources(path: &Path) -> Result<Vec<PathBuf>> {
    let looking = || format!("looking at '{}'", path.display());
    if !fs::metadata(path).during(looking)?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let (mut found, mut entries) = (Vec::new(), 0);
    walk(path, 0, &mut entries, &mut found)?;
    if found.is_empty() {
        let text = format!(
            "no machine is described in '{}': a machine has a .vmx, .ovf, .ova or .vbox file, or a libvirt domain in \
             an .xml file",
            path.display()
        );
        return Err(Error::new(ErrorKind::NotFound, text));
    }
    found.sort();
    Ok(found)
}

fn walk(folder: &Path, depth: usize, entries: &mut usize, found: &mut Vec<PathBuf>) -> Result<()> {
    let listing = || format!("listing '{}'", folder.display());
    for entry in fs::read_dir(folder).during(listing)? {
        let entry = entry.during(listing)?;
        let (path, kind) = (entry.path(), entry.file_type().during(listing)?);
        *entries += 1;
        if *entries > ENTRIES_MAX || found.len() > MACHINES_MAX {
            let text = format!("'{}' has too many files or machines: import parts of it", folder.display());
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        if kind.is_dir() && depth < DEPTH_MAX {
            walk(&path, depth + 1, entries, found)?;
        } else if kind.is_file() {
            match Format::of(&path) {
                Format::Vmx | Format::Ovf | Format::Ova | Format::Vbox => found.push(path),
                Format::Libvirt if has_domain(&path) => found.push(path),
                Format::Libvirt | Format::Image => {}
            }
        }
    }
    Ok(())
}

/// Whether an XML file describes a domain of libvirt; false for a file that cannot be read.
fn has_domain(path: &Path) -> bool {
    let mut head = Vec::new();
    let read = File::open(path).and_then(|file| file.take(HEAD).read_to_end(&mut head));
    read.is_ok() && String::from_utf8_lossy(&head).contains("<domain")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn descriptions_in_a_tree_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        assert_eq!(sources(root).unwrap_err().kind(), ErrorKind::NotFound);
        for (name, text) in [
            ("a/web.vmx", ""),
            ("a/web.vmxf", ""),
            ("a/web.vmdk", ""),
            ("b/c/db.OVA", ""),
            ("b/c/db.ovf", ""),
            ("b/c/box.vbox", ""),
            ("b/c/box.vbox-prev", ""),
            ("b/dom.xml", "<?xml?>\n<domain type='kvm'>"),
            ("b/pool.xml", "<pool>"),
        ] {
            let path = root.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        symlink(root, root.join("a/again")).unwrap();
        let names = sources(root).unwrap();
        let names: Vec<_> = names.iter().map(|path| path.strip_prefix(root).unwrap().to_str().unwrap()).collect();
        assert_eq!(names, ["a/web.vmx", "b/c/box.vbox", "b/c/db.OVA", "b/c/db.ovf", "b/dom.xml"]);
        assert_eq!(sources(&root.join("a/web.vmdk")).unwrap(), [root.join("a/web.vmdk")]);
    }
}
