//! Machines as other programs store them: a folder with bootable disks, and a description.
//!
//! Every disk has, in its second sector, a text by which a guest recognises it. The guest is a boot sector (`boot.s`)
//! that prints, on the serial port, the text of every disk that the firmware finds.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::SystemTime;
use testkit::fleet::Fleet;
use testkit::nbd::Client;
use testkit::pattern;
use testkit::process::{Done, lamina, output, tool};

pub const MIB: u64 = 1 << 20;

/// The boot sector, assembled.
fn boot_sector() -> &'static [u8] {
    static SECTOR: OnceLock<Vec<u8>> = OnceLock::new();
    SECTOR.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/foreign/boot.s");
        let [object, sector] = ["boot.o", "boot.bin"].map(|name| folder.path().join(name).display().to_string());
        tool("as", &["--32", "-o", &object, source.to_str().unwrap()]);
        tool("ld", &["-m", "elf_i386", "-Ttext", "0x7c00", "--oformat", "binary", "-o", &sector, &object]);
        fs::read(sector).unwrap()
    })
}

/// Writes a raw disk that boots, and that a guest recognises by `text`. The rest is data that depends on the text.
pub fn raw_disk(path: &Path, text: &str, size: u64) {
    let file = fs::File::create(path).unwrap();
    file.set_len(size).unwrap();
    file.write_all_at(boot_sector(), 0).unwrap();
    file.write_all_at(text.as_bytes(), 512).unwrap();
    let seed = text.bytes().fold(7, |seed: u64, byte| seed.wrapping_mul(31).wrapping_add(byte.into()));
    file.write_all_at(&pattern::bytes(seed, MIB as usize), size / 2).unwrap();
}

/// A folder as another program stores a machine, and the contents of the machine's disks.
pub struct Left {
    folder: tempfile::TempDir,
}

impl Left {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        for name in ["machine", "contents"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        Self { folder }
    }

    /// The folder of the machine.
    pub fn path(&self) -> PathBuf {
        self.folder.path().join("machine")
    }

    /// The content of a disk.
    pub fn content(&self, text: &str) -> Vec<u8> {
        fs::read(self.folder.path().join("contents").join(text)).unwrap()
    }

    fn raw(&self, text: &str) -> String {
        let raw = self.folder.path().join("contents").join(text);
        raw_disk(&raw, text, 8 * MIB);
        raw.display().to_string()
    }

    /// Creates a disk in a format of `lamina convert`.
    pub fn disk(&self, name: &str, text: &str, format: &str) {
        let target = self.path().join(name);
        let mut command = lamina();
        command.args(["convert", "--from", "raw", "-d", format, &self.raw(text)]).arg(target);
        let done: Done = output(&mut command).into();
        done.ok();
    }

    /// Creates a disk with qemu-img.
    pub fn qemu_disk(&self, name: &str, text: &str, format: &str, options: &str) {
        let (raw, target) = (self.raw(text), self.path().join(name).display().to_string());
        let mut arguments = vec!["convert", "-f", "raw", "-O", format];
        if !options.is_empty() {
            arguments.extend(["-o", options]);
        }
        tool("qemu-img", &[&arguments[..], &[&raw, &target]].concat());
    }

    /// Writes a file into the machine's folder.
    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path().join(name);
        fs::write(&path, text).unwrap();
        path
    }

    /// All files with their contents and times, for a check that the import wrote nothing.
    pub fn state(&self) -> BTreeMap<String, (Vec<u8>, SystemTime)> {
        let files = fs::read_dir(self.path()).unwrap().map(Result::unwrap);
        let state = files.map(|entry| {
            let modified = entry.metadata().unwrap().modified().unwrap();
            (entry.file_name().into_string().unwrap(), (fs::read(entry.path()).unwrap(), modified))
        });
        state.collect()
    }
}

/// Checks the content of a disk of the datastore.
#[track_caller]
pub fn same_bytes(fleet: &Fleet, disk: &str, content: &[u8]) {
    let mut client = Client::connect(&fleet.store.socket(), disk).unwrap();
    for (index, part) in content.chunks(MIB as usize).enumerate() {
        assert!(client.read(index as u64 * MIB, part.len() as u32).unwrap() == part, "{disk}: MiB {index} differs");
    }
}

/// A VMware configuration, with the keys that VMware's programs always write.
pub fn vmx(name: &str, more: &str) -> String {
    format!(
        ".encoding = \"UTF-8\"\nconfig.version = \"8\"\nvirtualHW.version = \"14\"\nnvram = \"{name}.nvram\"\n\
         displayName = \"{name}\"\nguestOS = \"debian10-64\"\nmemSize = \"64\"\nnumvcpus = \"2\"\n\
         cpuid.coresPerSocket = \"2\"\nuuid.bios = \"56 4d 11 22 33 44 55 66-77 88 99 aa bb cc dd ee\"\n\
         pciBridge0.present = \"TRUE\"\nvmci0.present = \"TRUE\"\nfloppy0.present = \"FALSE\"\n{more}"
    )
}

/// The lines of a VMware configuration for a disk.
pub fn vmx_disk(device: &str, file: &str) -> String {
    format!("{device}.present = \"TRUE\"\n{device}.deviceType = \"disk\"\n{device}.fileName = \"{file}\"\n")
}

/// The lines of a VMware configuration for a network card.
pub fn vmx_card(number: u32, model: &str) -> String {
    format!(
        "ethernet{number}.present = \"TRUE\"\nethernet{number}.virtualDev = \"{model}\"\n\
         ethernet{number}.networkName = \"VM Network\"\nethernet{number}.addressType = \"generated\"\n\
         ethernet{number}.generatedAddress = \"00:0c:29:aa:bb:0{number}\"\n"
    )
}
