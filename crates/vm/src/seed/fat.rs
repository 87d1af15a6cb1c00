//! A file system with a few files: FAT12 with long names, as Microsoft's specification of FAT describes it (version
//! 1.03). Every image has the same size and geometry.
//!
//! ```text
//! sector 0        boot sector with the parameters
//!        1, 7     two copies of the table, of 6 sectors each
//!        13       the root folder, 32 entries of 32 bytes
//!        15       clusters of one sector, numbered from 2
//! ```

use error::{Error, ErrorKind, Result};

const SECTOR: usize = 512;
const SECTORS: usize = 2048;
const TABLE: usize = 1;
const TABLE_SECTORS: usize = 6;
const ROOT: usize = TABLE + 2 * TABLE_SECTORS;
const ROOT_ENTRIES: usize = 32;
const ENTRY: usize = 32;
const DATA: usize = ROOT + ROOT_ENTRIES * ENTRY / SECTOR;
/// The number of the first cluster.
const FIRST: usize = 2;
/// The entry of the last cluster of a file.
const END: u16 = 0xfff;
/// Characters of a name in one entry for long names.
const NAME_PART: usize = 13;
/// The date in all entries, the first that FAT can store, so that images of the same files are equal.
const DATE: u16 = 1 << 5 | 1;

/// An image with a label, a serial number, and files in the root folder. Names have at most 13 ASCII characters.
pub fn image(label: &str, number: u32, files: &[(&str, &str)]) -> Result<Vec<u8>> {
    let mut image = vec![0; SECTORS * SECTOR];
    image[..SECTOR].copy_from_slice(&boot_sector(label, number));
    let mut table: Vec<u16> = vec![0xff8, END];
    let mut root = vec![short_entry(&padded(label, 11), 0x08, 0, 0)];
    for (index, (name, text)) in files.iter().enumerate() {
        let first = table.len();
        let clusters = text.len().div_ceil(SECTOR);
        if first + clusters - FIRST > SECTORS - DATA {
            let text = format!("'{name}' has {} bytes: too many for an image of cloud-init's seed", text.len());
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        for next in first + 1..=first + clusters {
            table.push(if next == first + clusters { END } else { next as u16 });
        }
        let at = (DATA + first - FIRST) * SECTOR;
        image[at..at + text.len()].copy_from_slice(text.as_bytes());
        let short = padded(&format!("FILE~{}", index + 1), 11);
        root.push(long_entry(name, &short));
        root.push(short_entry(&short, 0x01, if clusters == 0 { 0 } else { first as u16 }, text.len() as u32));
    }
    for copy in 0..2 {
        let at = (TABLE + copy * TABLE_SECTORS) * SECTOR;
        for (index, value) in table.iter().enumerate() {
            // Two entries share three bytes.
            let (byte, shift) = (at + index * 3 / 2, if index % 2 == 0 { 0 } else { 4 });
            let pair = u16::from_le_bytes([image[byte], image[byte + 1]]) | value << shift;
            image[byte..byte + 2].copy_from_slice(&pair.to_le_bytes());
        }
    }
    for (index, entry) in root.iter().enumerate() {
        let at = ROOT * SECTOR + index * ENTRY;
        image[at..at + ENTRY].copy_from_slice(entry);
    }
    Ok(image)
}

fn boot_sector(label: &str, number: u32) -> [u8; SECTOR] {
    let mut sector = [0; SECTOR];
    let mut put = |at: usize, bytes: &[u8]| sector[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &[0xeb, 0x3c, 0x90]);
    put(3, b"MSDOS5.0");
    put(11, &(SECTOR as u16).to_le_bytes());
    put(13, &[1]); // sectors of a cluster
    put(14, &(TABLE as u16).to_le_bytes());
    put(16, &[2]); // copies of the table
    put(17, &(ROOT_ENTRIES as u16).to_le_bytes());
    put(19, &(SECTORS as u16).to_le_bytes());
    put(21, &[0xf8]); // a disk that is not a floppy
    put(22, &(TABLE_SECTORS as u16).to_le_bytes());
    put(24, &[32, 0, 2, 0]); // sectors of a track, heads
    put(36, &[0x80, 0, 0x29]);
    put(39, &number.to_le_bytes());
    put(43, &padded(label, 11));
    put(54, b"FAT12   ");
    put(510, &[0x55, 0xaa]);
    sector
}

fn padded(text: &str, length: usize) -> Vec<u8> {
    format!("{text:length$}").into_bytes()
}

fn short_entry(name: &[u8], attributes: u8, cluster: u16, length: u32) -> [u8; ENTRY] {
    let mut entry = [0; ENTRY];
    entry[..11].copy_from_slice(name);
    entry[11] = attributes;
    for date in [16, 18, 24] {
        entry[date..date + 2].copy_from_slice(&DATE.to_le_bytes());
    }
    entry[26..28].copy_from_slice(&cluster.to_le_bytes());
    entry[28..].copy_from_slice(&length.to_le_bytes());
    entry
}

/// The entry with the long name of the file whose short name follows.
fn long_entry(name: &str, short: &[u8]) -> [u8; ENTRY] {
    let sum = short.iter().fold(0_u8, |sum, byte| sum.rotate_right(1).wrapping_add(*byte));
    let mut entry = [0; ENTRY];
    // This entry is the last part of the name, and also the first part.
    (entry[0], entry[11], entry[13]) = (0x41, 0x0f, sum);
    let places = (1..11).step_by(2).chain((14..26).step_by(2)).chain((28..32).step_by(2));
    let end = std::iter::once(0).chain(std::iter::repeat(0xffff));
    for (at, unit) in places.zip(name.bytes().take(NAME_PART).map(u16::from).chain(end)) {
        entry[at..at + 2].copy_from_slice(&unit.to_le_bytes());
    }
    entry
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::process::Command;

    fn tool(program: &str, arguments: &[&str]) -> Vec<u8> {
        let done = Command::new(program).args(arguments).output().unwrap();
        assert!(done.status.success(), "{program}: {}", String::from_utf8_lossy(&done.stderr));
        done.stdout
    }

    #[test]
    fn other_programs_read_the_same_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("seed.img");
        let long = "0123456789abcdef".repeat(8192);
        let files =
            [("meta-data", "{}\n"), ("user-data", long.as_str()), ("empty", ""), ("vendor-data", "#!/bin/sh\n")];
        std::fs::write(&path, image("CIDATA", 0x1234_abcd, &files).unwrap()).unwrap();
        let image = path.to_str().unwrap();
        let listed = String::from_utf8(tool("mdir", &["-i", image, "-b", "::"])).unwrap();
        let names: Vec<&str> = listed.lines().map(|line| line.trim_start_matches("::/")).collect();
        assert_eq!(names, files.map(|(name, _)| name));
        for (name, text) in files {
            let read = tool("mtype", &["-i", image, &format!("::{name}")]);
            assert!(read == text.as_bytes(), "{name}");
        }
        let info = String::from_utf8(tool("minfo", &["-i", image, "::"])).unwrap();
        assert!(info.contains("CIDATA") && info.contains("1234ABCD"), "{info}");
        let found = String::from_utf8(tool("blkid", &["-p", "-o", "export", image])).unwrap();
        assert!(found.contains("LABEL=CIDATA\n") && found.contains("TYPE=vfat\n"), "{found}");
    }

    #[test]
    fn files_that_are_too_large_are_refused() {
        let most = "a".repeat((SECTORS - DATA) * SECTOR);
        assert_eq!(image("X", 0, &[("a", &most)]).unwrap().len(), SECTORS * SECTOR);
        assert!(image("X", 0, &[("a", &most), ("b", "b")]).is_err());
    }
}
