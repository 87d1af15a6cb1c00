//! Free maps of file systems that their own tools made, compared with what these tools report, and after damage.

#![allow(clippy::unwrap_used)]

use error::{Error, ErrorKind, Result};
use freemap::{Content, Source, Summary, Volume, examine};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use testkit::Random;
use testkit::process::tool;

const MIB: u64 = 1 << 20;

/// An image in a file, with changed bytes. Notes which ranges are read.
struct Image {
    file: File,
    changed: BTreeMap<u64, u8>,
    read: RefCell<Vec<Range<u64>>>,
}

impl Image {
    fn open(path: &Path) -> Self {
        Self { file: File::open(path).unwrap(), changed: BTreeMap::new(), read: RefCell::default() }
    }

    fn length(&self) -> u64 {
        self.file.metadata().unwrap().len()
    }
}

impl Source for Image {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let end = offset + buffer.len() as u64;
        assert!(end <= self.length(), "read beyond the volume");
        self.file.read_exact_at(buffer, offset).map_err(|error| Error::io("reading an image", error))?;
        for (at, change) in self.changed.range(offset..end) {
            buffer[(at - offset) as usize] ^= change;
        }
        self.read.borrow_mut().push(offset..end);
        Ok(())
    }
}

/// The name of the file system, its free ranges in order, and the summary; the reason if it is refused.
fn look(image: &Image) -> std::result::Result<(&'static str, Vec<Range<u64>>, Summary), String> {
    let volume = Volume::new(image, 0, image.length());
    match examine(&volume).unwrap() {
        Content::Other { reason, .. } => Err(reason),
        Content::FileSystem(file_system) => {
            let mut free: Vec<Range<u64>> = Vec::new();
            let summary = file_system
                .free_ranges(&mut |range| {
                    assert!(range.start < range.end && range.end <= file_system.size());
                    assert!(free.last().is_none_or(|last| last.end <= range.start), "the ranges ascend");
                    free.push(range);
                    Ok(())
                })
                .unwrap();
            assert_eq!(summary.free, free.iter().map(|range| range.end - range.start).sum::<u64>());
            Ok((file_system.name(), merged(free), summary))
        }
    }
}

fn merged(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_by_key(|range| range.start);
    let mut out: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match out.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => out.push(range),
        }
    }
    out
}

/// Whether every byte of `some` is in `all`, which are merged.
fn is_within(some: &[Range<u64>], all: &[Range<u64>]) -> bool {
    some.iter().all(|range| {
        let at = all.partition_point(|one| one.end <= range.start);
        all.get(at).is_some_and(|one| one.start <= range.start && range.end <= one.end)
    })
}

/// Overwrites ranges of an image.
fn overwrite(path: &Path, ranges: &[Range<u64>]) {
    let file = File::options().write(true).open(path).unwrap();
    for range in ranges {
        let mut at = range.start;
        while at < range.end {
            let length = MIB.min(range.end - at);
            file.write_all_at(&vec![0xA5; length as usize], at).unwrap();
            at += length;
        }
    }
}

/// A folder with a tree of files.
fn tree(folder: &Path) -> PathBuf {
    let tree = folder.join("tree");
    std::fs::create_dir_all(tree.join("inner")).unwrap();
    let mut random = Random::new(3);
    for number in 0..60 {
        let length = random.scaled(700_000) as usize;
        std::fs::write(tree.join(format!("inner/f{number}")), random.bytes(length)).unwrap();
    }
    tree
}

fn path(folder: &Path, name: &str) -> (PathBuf, String) {
    let path = folder.join(name);
    let text = path.display().to_string();
    (path, text)
}

/// The free blocks that `dumpe2fs` lists, in bytes.
fn of_dumpe2fs(image: &str) -> Vec<Range<u64>> {
    let output = Command::new("dumpe2fs").arg(image).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let fact =
        |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().parse::<u64>().unwrap();
    let block = fact("Block size:");
    let mut free = Vec::new();
    for line in text.lines().filter_map(|line| line.strip_prefix("  Free blocks: ")) {
        for run in line.split(", ").filter(|run| !run.is_empty()) {
            let (from, to) = run.split_once('-').unwrap_or((run, run));
            free.push(from.parse::<u64>().unwrap() * block..(to.parse::<u64>().unwrap() + 1) * block);
        }
    }
    let free = merged(free);
    assert_eq!(free.iter().map(|range| (range.end - range.start) / block).sum::<u64>(), fact("Free blocks:"));
    free
}

/// Makes a file system of the ext family with files, of which some are deleted again.
fn make_ext(folder: &Path, name: &str, options: &str, megabytes: u64) -> String {
    let tree = tree(folder).display().to_string();
    let (_, image) = path(folder, name);
    let size = format!("{megabytes}M");
    let mut arguments: Vec<&str> = vec!["-q", "-F", "-d", &tree];
    arguments.extend(options.split_whitespace());
    arguments.extend([image.as_str(), size.as_str()]);
    tool("mke2fs", &arguments);
    for number in (0..60).step_by(3) {
        tool("debugfs", &["-w", "-R", &format!("rm inner/f{number}"), &image]);
    }
    image
}

#[test]
fn free_blocks_of_ext_are_those_of_dumpe2fs() {
    let folder = tempfile::tempdir().unwrap();
    let kinds = [
        ("ext2", "-t ext2", 96),
        ("ext2", "-t ext2 -r 0 -O none -b 1024", 40),
        ("ext3", "-t ext3 -b 1024", 96),
        ("ext4", "-t ext4", 600),
        ("ext4", "-t ext4 -b 1024", 200),
        ("ext4", "-t ext4 -O ^metadata_csum,uninit_bg", 600),
        ("ext4", "-t ext4 -O ^64bit -b 2048", 200),
        ("ext4", "-t ext4 -O ^flex_bg -b 1024", 200),
        ("ext4", "-t ext4 -O meta_bg,^resize_inode -b 1024", 600),
        ("ext4", "-t ext4 -O sparse_super2 -b 1024", 200),
        ("ext4", "-t ext4 -O metadata_csum_seed -G 4 -b 1024", 200),
    ];
    for (index, (name, options, megabytes)) in kinds.into_iter().enumerate() {
        let image = make_ext(folder.path(), &format!("image-{index}"), options, megabytes);
        let (found, free, summary) =
            look(&Image::open(Path::new(&image))).unwrap_or_else(|why| panic!("{options}: {why}"));
        assert_eq!(found, name, "{options}");
        assert_eq!((summary.doubted, &summary.doubts[..]), (0, &[][..]), "{options}");
        assert!(free == of_dumpe2fs(&image), "{options}");
        overwrite(Path::new(&image), &free);
        tool("e2fsck", &["-fn", &image]);
        let out = folder.path().join(format!("out-{index}"));
        std::fs::create_dir(&out).unwrap();
        tool("debugfs", &["-R", &format!("rdump inner {}", out.display()), &image]);
        for number in (0..60).filter(|number| number % 3 != 0) {
            let file = |root: &Path| std::fs::read(root.join(format!("inner/f{number}"))).unwrap();
            assert!(file(&out) == file(&folder.path().join("tree")), "{options}: f{number}");
        }
        std::fs::remove_file(&image).unwrap();
    }
}

#[test]
fn ext_that_is_not_clean_or_not_known_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |name: &str, options: &str, command: &str, words: &str| {
        let image = make_ext(folder.path(), name, options, 64);
        if !command.is_empty() {
            tool("debugfs", &["-w", "-R", command, &image]);
        }
        let why = look(&Image::open(Path::new(&image))).unwrap_err();
        assert!(why.contains(words), "{name}: {why}");
    };
    refused("recover", "-t ext4", "feature needs_recovery", "journal needs recovery");
    refused("errors", "-t ext4", "ssv state 3", "has errors");
    refused("mounted", "-t ext2", "ssv state 0", "not cleanly unmounted");
    refused("orphans", "-t ext4", "ssv last_orphan 12", "deleted files");
    refused("bigalloc", "-t ext4 -O bigalloc", "", "bigalloc");
    let (journal, text) = path(folder.path(), "journal");
    tool("mke2fs", &["-q", "-F", "-O", "journal_dev", &text, "16M"]);
    assert!(look(&Image::open(&journal)).unwrap_err().contains("journal of another"));
}

/// Makes an empty XFS of 320 MiB.
fn mkfs_xfs(folder: &Path, name: &str, options: &str) -> String {
    let (_, image) = path(folder, name);
    File::create(&image).unwrap().set_len(320 * MIB).unwrap();
    let mut arguments: Vec<&str> = vec!["-q", "-f"];
    arguments.extend(options.split_whitespace());
    arguments.push(&image);
    tool("mkfs.xfs", &arguments);
    image
}

/// As [`mkfs_xfs`]. As root, the file system is used through a mount, so that its log is longer than that of a new one.
fn make_xfs(folder: &Path, name: &str, options: &str) -> (String, bool) {
    let tree = tree(folder);
    let image = mkfs_xfs(folder, name, options);
    let is_root = tool("id", &["-u"]).trim() == "0";
    if is_root {
        let script = "set -e; mkdir -p $1/mounted; mount -o loop $2 $1/mounted; cp -r $3/inner $1/mounted/; \
                      for n in $(seq 0 3 59); do rm $1/mounted/inner/f$n; done; sync; umount $1/mounted";
        mounted(script, folder, &image, &tree);
    }
    (image, is_root)
}

/// Runs a script in a mount namespace.
fn mounted(script: &str, folder: &Path, image: &str, tree: &Path) {
    let (folder, tree) = (folder.display().to_string(), tree.display().to_string());
    tool("unshare", &["--mount", "sh", "-c", script, "sh", &folder, image, &tree]);
}

fn xfs_db(image: &str, command: &str) -> String {
    tool("xfs_db", &["-r", "-c", command, image])
}

/// Compares free ranges with those that `xfs_db` lists, which also contain the blocks of the free list of each group.
fn compare_xfs(image: &str, free: &[Range<u64>]) {
    let number = |commands: [&str; 2]| {
        let text = tool("xfs_db", &["-r", "-c", commands[0], "-c", commands[1], image]);
        text.trim().rsplit(' ').next().unwrap().parse::<u64>().unwrap()
    };
    let block = number(["sb 0", "p blocksize"]);
    let (blocks, groups) = (number(["sb 0", "p agblocks"]), number(["sb 0", "p agcount"]));
    let listed: Vec<Range<u64>> = xfs_db(image, "freesp -d")
        .lines()
        .filter_map(|line| {
            let numbers: Vec<u64> = line.split_whitespace().map_while(|word| word.parse().ok()).collect();
            <[u64; 3]>::try_from(numbers).ok()
        })
        .map(|[group, at, length]| (group * blocks + at) * block..(group * blocks + at + length) * block)
        .collect();
    let sum = |ranges: &[Range<u64>]| ranges.iter().map(|range| (range.end - range.start) / block).sum::<u64>();
    let kept: u64 = (0..groups).map(|group| number([&format!("agf {group}"), "p flcount"])).sum();
    assert!(!listed.is_empty() && sum(free) + kept == sum(&listed), "{} + {kept}, {}", sum(free), sum(&listed));
    assert!(is_within(free, &merged(listed)));
}

#[test]
fn free_blocks_of_xfs_are_those_of_xfs_db() {
    let folder = tempfile::tempdir().unwrap();
    let kinds = ["", "-b size=1024", "-m rmapbt=1", "-s size=4096", "-m reflink=0 -l su=32768"];
    for (index, options) in kinds.into_iter().enumerate() {
        let (image, is_used) = make_xfs(folder.path(), &format!("image-{index}"), options);
        let (name, free, summary) =
            look(&Image::open(Path::new(&image))).unwrap_or_else(|why| panic!("{options}: {why}"));
        assert_eq!((name, summary.doubted, &summary.doubts[..]), ("xfs", 0, &[][..]), "{options}");
        compare_xfs(&image, &free);
        overwrite(Path::new(&image), &free);
        tool("xfs_repair", &["-n", &image]);
        if is_used {
            let script = "set -e; mount -o ro,loop $2 $1/mounted; \
                          for n in 1 2 4 5 7 58 59; do cmp $1/mounted/inner/f$n $3/inner/f$n; done; umount $1/mounted";
            mounted(script, folder.path(), &image, &folder.path().join("tree"));
        }
        std::fs::remove_file(&image).unwrap();
    }
}

#[test]
fn xfs_that_is_not_clean_or_not_known_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let old = mkfs_xfs(folder.path(), "old", "-m crc=0 -n ftype=1");
    assert!(look(&Image::open(Path::new(&old))).unwrap_err().contains("version"));
    let (image, is_root) = make_xfs(folder.path(), "image", "");
    if is_root {
        // A copy while the file system is mounted is as the disk after a power cut.
        let script = "set -e; mount -o loop $2 $1/mounted; mkdir $1/mounted/new; sync; cp --sparse=always $2 $1/cut; \
                      umount $1/mounted";
        mounted(script, folder.path(), &image, folder.path());
        let why = look(&Image::open(&folder.path().join("cut"))).unwrap_err();
        assert!(why.contains("log"), "{why}");
        look(&Image::open(Path::new(&image))).unwrap();
    }
    let repair = ["-x", "-c", "sb 0", "-c", "write features_incompat 0x1b", &image];
    tool("xfs_db", &repair);
    assert!(look(&Image::open(Path::new(&image))).unwrap_err().contains("needs a repair"));
}

fn make_ntfs(folder: &Path, name: &str, options: &str) -> String {
    let tree = tree(folder);
    let (_, image) = path(folder, name);
    File::create(&image).unwrap().set_len(64 * MIB).unwrap();
    let mut arguments: Vec<&str> = vec!["-q", "-F", "-Q", "-p", "0", "-H", "0", "-S", "0"];
    arguments.extend(options.split_whitespace());
    arguments.push(&image);
    tool("mkntfs", &arguments);
    for number in 1..12 {
        let file = tree.join(format!("inner/f{number}")).display().to_string();
        tool("ntfscp", &["-q", &image, &file, &format!("f{number}")]);
    }
    image
}

/// Replaces the journal that the tools left empty by one that Windows has closed. Returns its place: nothing else in
/// the image is as long a run of ones.
fn close_journal(image: &str) -> u64 {
    let length = bytes_of("ntfscat", &["-f", image, "$LogFile"]).len();
    let bytes = std::fs::read(image).unwrap();
    let is_empty = |at: &usize| bytes.get(*at..at + length).is_some_and(|run| run.iter().all(|byte| *byte == 0xFF));
    let at = (0..bytes.len()).step_by(512).find(is_empty).unwrap() as u64;
    let page = restart_page(5, (1, 1), 0xFFFF, 0);
    File::options().write(true).open(image).unwrap().write_all_at(&[&page[..], &page].concat(), at).unwrap();
    at
}

/// As [`look`], with a closed journal. Afterwards the journal is empty again, as the tools expect it.
fn look_closed(image: &str) -> std::result::Result<(&'static str, Vec<Range<u64>>, Summary), String> {
    let at = close_journal(image);
    let found = look(&Image::open(Path::new(image)));
    File::options().write(true).open(image).unwrap().write_all_at(&[0xFF; 8192], at).unwrap();
    found
}

fn bytes_of(program: &str, arguments: &[&str]) -> Vec<u8> {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

#[test]
fn free_clusters_of_ntfs_are_those_of_its_bitmap() {
    let folder = tempfile::tempdir().unwrap();
    for (options, cluster) in [("", 4096), ("-c 512", 512), ("-c 65536", 65_536)] {
        let image = make_ntfs(folder.path(), "image", options);
        let (name, free, _) = look_closed(&image).unwrap_or_else(|why| panic!("{options}: {why}"));
        assert_eq!(name, "ntfs");
        // The tool reads the bitmap in its own way; bits behind the last cluster are set.
        let bitmap = bytes_of("ntfscat", &["-f", &image, "$Bitmap"]);
        let clear = |at: &u64| bitmap[(at / 8) as usize] >> (at % 8) & 1 == 0;
        let expected = (0..bitmap.len() as u64 * 8).filter(clear).map(|at| at * cluster..(at + 1) * cluster).collect();
        assert!(free == merged(expected), "{options}");
        overwrite(Path::new(&image), &free);
        tool("ntfsfix", &["-n", &image]);
        for number in 1..12 {
            let file = std::fs::read(folder.path().join(format!("tree/inner/f{number}"))).unwrap();
            assert!(bytes_of("ntfscat", &["-f", &image, &format!("f{number}")]) == file, "f{number}");
        }
    }
}

/// Replaces the only occurrence of some bytes in a range of an image.
fn patch(image: &str, range: Range<u64>, from: &[u8], to: &[u8]) {
    let file = File::options().read(true).write(true).open(image).unwrap();
    let mut bytes = vec![0; (range.end - range.start) as usize];
    file.read_exact_at(&mut bytes, range.start).unwrap();
    let found: Vec<usize> = (0..bytes.len() - from.len()).filter(|at| bytes[*at..].starts_with(from)).collect();
    assert_eq!(found.len(), 1, "{from:x?}");
    file.write_all_at(to, range.start + found[0] as u64).unwrap();
}

#[test]
fn ntfs_that_windows_may_still_use_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    // The MFT of a volume that mkntfs made begins with cluster 4, and its record 3 is $Volume.
    let volume = 4 * 4096 + 3 * 1024..4 * 4096 + 4 * 1024;
    let image = make_ntfs(folder.path(), "dirty", "");
    let version = [0, 0, 0, 0, 0, 0, 0, 0, 3, 1, 0, 0];
    patch(&image, volume, &version, &[0, 0, 0, 0, 0, 0, 0, 0, 3, 1, 1, 0]);
    assert!(look(&Image::open(Path::new(&image))).unwrap_err().contains("dirty"));

    let image = make_ntfs(folder.path(), "hibernated", "");
    let file = folder.path().join("hiberfil.sys");
    let text = file.display().to_string();
    std::fs::write(&file, vec![0; 100_000]).unwrap();
    tool("ntfscp", &["-q", &image, &text, "hiberfil.sys"]);
    look_closed(&image).unwrap();
    // A second file, whose name differs in case only.
    std::fs::write(&file, [&b"HIBR"[..], &[7; 100_000]].concat()).unwrap();
    tool("ntfscp", &["-q", &image, &text, "HIBERFIL.SYS"]);
    assert!(look_closed(&image).unwrap_err().contains("hiber"));
}

#[test]
fn ntfs_with_shadow_copies_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let image = make_ntfs(folder.path(), "image", "");
    let file = File::options().write(true).open(&image).unwrap();
    // The identifier {3808876b-c176-4e48-b7ae-04046e6cc752}, version 1, type 1, and no catalog.
    let mut header = vec![0; 512];
    let (first, rest) = (0x3808_876B_u32.to_le_bytes(), [0xB7, 0xAE, 0x04, 0x04, 0x6E, 0x6C, 0xC7, 0x52]);
    header[..16].copy_from_slice(&[&first[..], &[0x76, 0xC1, 0x48, 0x4E], &rest].concat());
    (header[16], header[20]) = (1, 1);
    file.write_all_at(&header, 0x1E00).unwrap();
    look_closed(&image).unwrap();
    // A catalog; then no catalog, and another volume that stores the copies.
    for (at, bytes) in [(48, (8 * MIB).to_le_bytes()), (80, [7; 8])] {
        let mut header = header.clone();
        header[at..at + 8].copy_from_slice(&bytes);
        file.write_all_at(&header, 0x1E00).unwrap();
        assert!(look_closed(&image).unwrap_err().contains("shadow copies"));
    }
}

/// A restart page of a journal of NTFS.
fn restart_page(sequence: u64, version: (u16, u16), clients: u16, flags: u16) -> Vec<u8> {
    let mut page = vec![0; 4096];
    page[..4].copy_from_slice(b"RSTR");
    let mut put = |at: usize, bytes: &[u8]| page[at..at + bytes.len()].copy_from_slice(bytes);
    put(4, &0x1E_u16.to_le_bytes());
    put(6, &9_u16.to_le_bytes());
    put(0x10, &4096_u32.to_le_bytes());
    put(0x14, &4096_u32.to_le_bytes());
    put(0x18, &0x30_u16.to_le_bytes());
    put(0x1A, &version.1.to_le_bytes());
    put(0x1C, &version.0.to_le_bytes());
    put(0x30, &sequence.to_le_bytes());
    put(0x3C, &clients.to_le_bytes());
    put(0x3E, &flags.to_le_bytes());
    // The update sequence: number 1, in the place of zeros.
    put(0x1E, &1_u16.to_le_bytes());
    (1..=8).for_each(|sector| put(sector * 512 - 2, &1_u16.to_le_bytes()));
    page
}

#[test]
fn the_journal_of_ntfs_must_be_closed() {
    let folder = tempfile::tempdir().unwrap();
    let image = make_ntfs(folder.path(), "image", "");
    // The journal is empty after mkntfs, and while ntfs-3g has the volume mounted.
    assert!(look(&Image::open(Path::new(&image))).unwrap_err().contains("journal is empty"));
    let at = close_journal(&image);
    let file = File::options().write(true).open(&image).unwrap();
    let with = |first: Vec<u8>, second: Vec<u8>| {
        file.write_all_at(&first, at).unwrap();
        file.write_all_at(&second, at + 4096).unwrap();
        look(&Image::open(Path::new(&image))).map(|_| ())
    };
    let (closed, open) = ((0xFFFF, 0), (0, 0));
    let page = |sequence, (clients, flags)| restart_page(sequence, (1, 1), clients, flags);
    with(page(5, closed), page(4, open)).unwrap();
    with(page(5, (0, 2)), page(4, open)).unwrap();
    assert!(with(page(5, closed), page(6, open)).unwrap_err().contains("needs recovery"));
    assert!(with(page(7, open), page(6, closed)).unwrap_err().contains("needs recovery"));
    let fast = restart_page(9, (2, 0), 0xFFFF, 0);
    assert!(with(page(7, closed), fast).unwrap_err().contains("fast-starting"));
    assert!(with(page(7, closed), vec![0; 4096]).unwrap_err().contains("damaged"));
}

/// After a random change of bytes that the parsers read, nothing panics, and with `is_summed` no byte is free that was
/// in use before.
fn survives_damage(image: &str, is_summed: bool, rounds: u64) {
    let mut image = Image::open(Path::new(image));
    let (_, before, _) = look(&image).unwrap();
    let read = merged_overlapping(image.read.take());
    let mut outcomes = [0, 0, 0];
    for seed in 0..rounds {
        let mut random = Random::new(seed);
        image.changed.clear();
        for _ in 0..1 + random.below(3) {
            // Half of the changes are near the beginning of a range that is read, where the headers are.
            let range = random.pick(&read);
            let length = range.end - range.start;
            let limit = if random.percent(50) { length.min(256) } else { length };
            let at = range.start + random.below(limit);
            image.changed.insert(at, 1 << random.below(8));
        }
        match look(&image) {
            Err(_) => outcomes[0] += 1,
            Ok((_, free, summary)) => {
                outcomes[1 + usize::from(summary.doubted > 0)] += 1;
                assert!(!is_summed || is_within(&free, &before), "seed {seed}");
            }
        }
        image.read.take();
    }
    println!("refused {}, as before {}, in doubt {}", outcomes[0], outcomes[1], outcomes[2]);
    assert!(outcomes[0] + outcomes[2] > 0, "some changes are noticed");
}

fn merged_overlapping(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_by_key(|range| range.start);
    let mut out: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match out.last_mut() {
            Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
            _ => out.push(range),
        }
    }
    out
}

#[test]
fn damaged_ext4_frees_nothing_that_is_in_use() {
    let folder = tempfile::tempdir().unwrap();
    survives_damage(&make_ext(folder.path(), "summed", "-t ext4 -b 1024", 200), true, 3000);
    survives_damage(&make_ext(folder.path(), "plain", "-t ext2 -b 1024", 96), false, 1000);
}

#[test]
fn damaged_xfs_frees_nothing_that_is_in_use() {
    let folder = tempfile::tempdir().unwrap();
    let (image, _) = make_xfs(folder.path(), "image", "");
    survives_damage(&image, true, 100);
}

#[test]
fn damaged_ntfs_is_survived() {
    let folder = tempfile::tempdir().unwrap();
    let image = make_ntfs(folder.path(), "image", "");
    close_journal(&image);
    survives_damage(&image, false, 3000);
}

/// Checks that exactly one unit counts as in use, and that the others are as before.
fn one_is_doubted(image: &Image, before: &[Range<u64>], words: &str) {
    let (_, free, summary) = look(image).unwrap();
    assert!(summary.doubted == 1 && summary.doubts[0].contains(words), "{summary:?}");
    assert!(is_within(&free, before));
}

#[test]
fn damage_that_keeps_all_counts_is_noticed_by_checksums() {
    let folder = tempfile::tempdir().unwrap();
    let path = make_ext(folder.path(), "ext", "-t ext4 -b 1024", 96);
    let mut image = Image::open(Path::new(&path));
    let (_, before, _) = look(&image).unwrap();
    // The bitmap of the first group: the first block after the superblock is in use, the last free one is free.
    let shown = Command::new("dumpe2fs").arg(&path).output().unwrap();
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    let bitmap = shown.split("Block bitmap at ").nth(1).unwrap().split([' ', '\n', ',']).next().unwrap();
    let bitmap = bitmap.parse::<u64>().unwrap() * 1024;
    let block = before.iter().rfind(|range| range.start < 8192 * 1024).unwrap().start / 1024 - 1;
    image.changed.insert(bitmap + block / 8, 1 << (block % 8));
    let bytes_of = |block: u64| (block + 1) * 1024..(block + 2) * 1024;
    let used = (1..block).find(|block| !is_within(std::slice::from_ref(&bytes_of(*block)), &before)).unwrap();
    *image.changed.entry(bitmap + used / 8).or_default() ^= 1 << (used % 8);
    one_is_doubted(&image, &before, "checksum of its bitmap");

    let (path, _) = make_xfs(folder.path(), "xfs", "");
    let mut image = Image::open(Path::new(&path));
    let (_, before, _) = look(&image).unwrap();
    let root = tool("xfs_db", &["-r", "-c", "agf 1", "-c", "p bnoroot", &path]);
    let root: u64 = root.trim().rsplit(' ').next().unwrap().parse().unwrap();
    let size = tool("xfs_db", &["-r", "-c", "sb 0", "-c", "p agblocks", &path]);
    let size: u64 = size.trim().rsplit(' ').next().unwrap().parse().unwrap();
    // The first block of the first free extent, which moves the extent.
    image.changed.insert((size + root) * 4096 + 56 + 3, 1);
    one_is_doubted(&image, &before, "checksum of a block of its tree");
}

/// A source whose third quarter is damaged.
struct Damaged(Image);

impl Source for Damaged {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let length = self.0.length();
        match offset + (buffer.len() as u64) > length / 2 && offset < length / 4 * 3 {
            true => Err(Error::new(ErrorKind::Corrupt, "damaged")),
            false => self.0.read_at(offset, buffer),
        }
    }
}

#[test]
fn a_group_whose_bitmap_cannot_be_read_counts_as_in_use() {
    let folder = tempfile::tempdir().unwrap();
    let image = make_ext(folder.path(), "image", "-t ext4 -b 1024 -O ^flex_bg,^metadata_csum,^uninit_bg", 200);
    let whole = Image::open(Path::new(&image));
    let (_, before, _) = look(&whole).unwrap();
    let length = whole.length();
    let damaged = Damaged(whole);
    let Content::FileSystem(file_system) = examine(&Volume::new(&damaged, 0, length)).unwrap() else { panic!() };
    let mut free = Vec::new();
    let summary = file_system.free_ranges(&mut |range| {
        free.push(range);
        Ok(())
    });
    let summary = summary.unwrap();
    assert!(summary.doubted > 0 && summary.doubts.len() <= 8, "{summary:?}");
    assert!(!free.is_empty() && is_within(&free, &before));
    assert!(file_system.free_ranges(&mut |_| Err(Error::new(ErrorKind::Interrupted, "stop"))).is_err());
}
