//! Shared by the tests on real files: a temporary folder, a seeded generator, reading a layer, and running QEMU's
//! tools.

#![allow(dead_code, reason = "each test binary uses only some of these items")]

use backend::Buffer;
use layer::{Content, Layer};
use std::path::{Path, PathBuf};
use std::process::Command;
pub use testkit::Random;

/// A temporary folder in cargo's target directory.
pub fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Reads a layer as a chain does.
pub fn read(layer: &dyn Layer, start: u64, length: u64) -> Vec<u8> {
    let mut bytes = vec![0; length as usize];
    let mut extents = Vec::new();
    let mut at = start;
    while at < start + length {
        extents.clear();
        layer.map(at..start + length, 16, &mut extents).unwrap();
        for extent in &extents {
            let within = (at - start) as usize..(at + extent.length - start) as usize;
            if let Content::Data { file, offset } = extent.content {
                let first = offset / 4096 * 4096;
                let mut memory = Buffer::with_bytes((offset + extent.length - first).next_multiple_of(4096) as usize);
                layer.file(file).unwrap().read_at(&mut memory, first).unwrap();
                let skip = (offset - first) as usize;
                bytes[within].copy_from_slice(&memory[skip..skip + extent.length as usize]);
            }
            at += extent.length;
        }
    }
    bytes
}

/// Runs a tool, which must succeed; returns its output.
pub fn run(folder: &Path, program: &str, arguments: &[&str]) -> String {
    let (good, text) = try_run(folder, program, arguments);
    assert!(good, "{program} {arguments:?}: {text}");
    text
}

/// Runs a tool; returns whether it succeeded, and its output.
pub fn try_run(folder: &Path, program: &str, arguments: &[&str]) -> (bool, String) {
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let output = Command::new(program).args(arguments).current_dir(folder).env("PATH", path).output();
    let output = output.unwrap_or_else(|error| panic!("{program} is needed for this test: {error}"));
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

/// The content of the disk as QEMU reads it.
pub fn read_by_qemu(folder: &Path, image: &str) -> Vec<u8> {
    run(folder, "qemu-img", &["convert", "-f", "vmdk", "-O", "raw", image, "by-qemu.raw"]);
    let path: PathBuf = folder.join("by-qemu.raw");
    let bytes = std::fs::read(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    bytes
}
