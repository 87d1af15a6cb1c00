//! Split disks with small extents.
//!
//! A split disk has a second extent only if it is larger than 2047 MiB. Programs may make smaller extents, so this
//! module divides the only extent of a new, empty disk, and tests with small disks write across the borders of extents.

use crate::mounted;
use crate::process::{Store, tool};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// The number of extents.
const EXTENTS: u64 = 4;
const SECTOR: u64 = 512;

/// Runs `disk create NAME SIZE OPTIONS`, while the datastore is not served. The base of a split disk gets four extents.
pub fn create(store: &Store, name: &str, size: u64, options: &str) {
    store.run(&format!("disk create {name} {size} {options}")).ok();
    let sparse = options.contains("--format 2gbsparse");
    if !sparse && !options.contains("--format 2gbflat") {
        return;
    }
    let folder = store.path().join("images").join(name);
    let each = size / EXTENTS;
    let extent = |of: &str, number: u64| format!("{of}-{}{number:03}.vmdk", if sparse { 's' } else { 'f' });
    let line = |bytes: u64, number: u64| {
        let (sectors, file) = (bytes / SECTOR, extent(name, number));
        if sparse { format!("RW {sectors} SPARSE \"{file}\"\n") } else { format!("RW {sectors} FLAT \"{file}\" 0\n") }
    };
    if sparse {
        // Each extent equals the extent of an empty disk of this size.
        let part = format!("{name}-extent");
        store.run(&format!("disk create {part} {each} {options}")).ok();
        let made = store.path().join("images").join(&part).join(extent(&part, 1));
        let bytes = std::fs::read(&made).unwrap();
        for number in 1..=EXTENTS {
            let mut file = create_file(&folder.join(extent(name, number)));
            file.set_len(0).unwrap();
            file.write_all(&bytes).unwrap();
        }
        store.run(&format!("disk delete {part}")).ok();
    } else {
        for number in 1..=EXTENTS {
            create_file(&folder.join(extent(name, number))).set_len(each).unwrap();
        }
    }
    let path = folder.join(format!("{name}.vmdk"));
    let text = std::fs::read_to_string(&path).unwrap();
    let (whole, lines) = (line(size, 1), (1..=EXTENTS).map(|number| line(each, number)).collect::<String>());
    assert!(text.contains(&whole), "no line {whole} in {text}");
    std::fs::write(&path, text.replace(&whole, &lines)).unwrap();
}

/// Opens or creates an extent. Like lamina, it lets btrfs overwrite a new file in place, which is possible only while
/// the file is empty.
fn create_file(path: &Path) -> File {
    let file = File::options().write(true).create(true).truncate(false).mode(0o600).open(path).unwrap();
    if mounted::is_btrfs(path) && file.metadata().unwrap().len() == 0 {
        tool("chattr", &["+C", path.to_str().unwrap()]);
    }
    file
}
