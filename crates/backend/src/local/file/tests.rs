//! Local files: failures of write-back that flushes report, closing, and what counts as dirty.

#![allow(clippy::unwrap_used)]
use super::*;
use std::time::{Duration, Instant};

impl OpenFile {
    /// Takes what is counted as dirty.
    pub(crate) fn take_counted(&self) -> u64 {
        self.dirty.get().and_then(Option::as_ref).map_or(0, |dirty| dirty.take_counted())
    }
}

/// Descriptors of this process that lead to removed files of `folder`.
fn removed(folder: &std::path::Path) -> usize {
    let all = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let links = all.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    links.filter(|link| link.starts_with(folder) && link.to_string_lossy().ends_with("(deleted)")).count()
}

#[test]
fn a_write_in_pieces_writes_all_bytes() {
    let folder = std::env::temp_dir().join(format!("lamina-pieces-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let open = std::fs::OpenOptions::new().read(true).write(true).create_new(true).open(folder.join("file"));
    let file = OpenFile::new(open.unwrap(), IoMode::Buffered);
    let max = CACHED_WRITE_MAX as usize;
    let bytes: Vec<u8> = (0..4 * max as u64).map(|at| (at * 31 % 251) as u8).collect();
    let mut model = vec![0; 6 * max];
    for (offset, cuts) in [(0, [0, max]), (512, [max - 512, max]), (max - 1, [1, 3 * max]), (2 * max, [7, 7])] {
        let (first, rest) = bytes.split_at(cuts[0]);
        let (second, third) = rest.split_at(cuts[1] - cuts[0].min(cuts[1]));
        file.write_at(&[first, second, &[], third], offset as u64, false).unwrap();
        model[offset..offset + bytes.len()].copy_from_slice(&bytes);
        let mut found = vec![1; model.len()];
        file.read_at(&mut found, 0).unwrap();
        assert!(found == model, "at {offset}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_flush_fails_once_after_a_failed_write_out() {
    let folder = std::env::temp_dir().join(format!("lamina-lost-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = OpenFile::new(std::fs::File::create_new(folder.join("file")).unwrap(), IoMode::Buffered);
    let lost = || Err(io::Error::from_raw_os_error(rustix::io::Errno::NOSPC.raw_os_error()));
    file.file.written_out.run(lost).unwrap_err();
    // A write-back that succeeds afterwards does not clear the failure.
    file.write_out(0, 4096, true);
    // Writes are lost, so the caller must not wait for space and continue.
    let error = file.sync().unwrap_err();
    assert!(!error::lacks_space(&error) && error.to_string().contains("lost"), "{error}");
    file.sync().unwrap();
    // On a kernel without this call the error does not mean a lost write.
    file.file.written_out.run(|| Err(io::ErrorKind::Unsupported.into())).unwrap_err();
    file.sync().unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn buffered_writes_are_counted_as_dirty_until_a_flush() {
    let folder = std::env::temp_dir().join(format!("lamina-counted-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let open = |mode| OpenFile::new(std::fs::File::create(folder.join("file")).unwrap(), mode);
    let file = open(IoMode::Buffered);
    file.write_at(&[&[1; 4096]], 0, true).unwrap();
    assert_eq!(file.take_counted(), 0, "a durable write leaves nothing dirty");
    file.write_at(&[&[1; 1 << 16], &[2; 1 << 16]], 0, false).unwrap();
    assert_eq!(file.take_counted(), 1 << 17);
    file.write_at(&[&[1; 4096]], 0, false).unwrap();
    file.sync().unwrap();
    assert_eq!(file.take_counted(), 0);
    // A queue has written.
    LocalFile::wrote(&file, 0, 1 << 16);
    assert_eq!(file.take_counted(), 1 << 16);
    let file = open(IoMode::Direct);
    LocalFile::wrote(&file, 0, 1 << 16);
    assert!(file.dirty.get().is_none());
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_flush_fails_after_the_thread_that_writes_dirty_data_out_has_failed() {
    let folder = std::env::temp_dir().join(format!("lamina-thread-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = OpenFile::new(std::fs::File::create_new(folder.join("file")).unwrap(), IoMode::Buffered);
    let target: Arc<dyn WriteOut> = Arc::clone(&file.file) as _;
    // The kernel refuses this range.
    target.write_out(i64::MAX as u64, 1 << 20, true);
    file.sync().unwrap_err();
    file.sync().unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_removed_file_is_closed_with_its_last_handle() {
    let folder = std::env::temp_dir().join(format!("lamina-closing-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("large");
    let file = std::fs::File::create_new(&path).unwrap();
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, 2 * CLOSED_ELSEWHERE).unwrap();
    let file = OpenFile::new(file, IoMode::Buffered);
    std::fs::remove_file(&path).unwrap();
    assert_eq!(removed(&folder), 1);
    drop(file);
    let begun = Instant::now();
    while removed(&folder) > 0 {
        assert!(begun.elapsed() < Duration::from_secs(30), "it stays open");
        std::thread::sleep(Duration::from_millis(1));
    }
    std::fs::remove_dir(&folder).unwrap();
}
