//! Telling files apart by their first bytes.
//!
//! Probing answers what a file *claims* to be. A raw disk holds what its guest wrote, and a guest can write the
//! signature of any format, or a descriptor that names files of the host; and any file at all, or an image whose
//! signature is damaged, could be a raw disk. Hence: the file that a user names is probed only when the user did not
//! say what it is; its name and its size have to say that it is raw, and where they do a signature does not decide
//! otherwise ([`super::Image::open`]); the extents of a descriptor are what its lines call them; a parent counts
//! only if its content has the identity its child remembers, which raw disks have not; and whatever a probed file
//! names passes [`super::Folder`].

use crate::{Error, ErrorKind, Result, SECTOR, descriptor};

/// How many bytes from the beginning of a file [`probe`] takes; fewer will do for a shorter file.
pub const PROBE_LENGTH: usize = 4096;

/// What a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signature {
    /// A text descriptor.
    Descriptor,
    /// An extent of Workstation, sparse or compressed, perhaps with its descriptor inside.
    HostedSparse,
    /// A redo log with 512-byte grains. Its descriptor is a file of its own.
    VmfsSparse,
    /// A redo log with 4 KiB grains. Its descriptor is a file of its own.
    SeSparse,
    /// A delta object. Its descriptor is a file of its own.
    VsanSparse,
    /// VMware's list of changed blocks, which is no disk.
    ChangeTracking,
    /// QEMU's format.
    Qcow2,
    /// A format that is none of ours, by its name.
    Foreign(&'static str),
    /// None of these: bytes of a disk as they are, or anything.
    Raw,
}

impl Signature {
    /// What the option is given to say that a file is this: the name of a format.
    fn option(self) -> &'static str {
        match self {
            Self::Qcow2 => "qcow2",
            _ => "vmdk",
        }
    }
}

/// Signatures at the beginning of a file.
const SIGNATURES: [(&[u8], Signature); 9] = [
    (b"KDMV", Signature::HostedSparse),
    // What a writer of sparse extents leaves while it has not finished.
    (b"kdmv", Signature::HostedSparse),
    (b"COWD", Signature::VmfsSparse),
    (&[0xbe, 0xba, 0xfe, 0xca, 0, 0, 0, 0], Signature::SeSparse),
    (&crate::vsansparse::header::MAGIC, Signature::VsanSparse),
    (&[0xa2, 0x72, 0x19, 0xf6], Signature::ChangeTracking),
    (b"QFI\xfb", Signature::Qcow2),
    (b"vhdxfile", Signature::Foreign("VHDX")),
    (b"conectix", Signature::Foreign("VHD")),
];

/// Endings of the names of raw disks; flat extents are such.
const RAW_ENDINGS: [&str; 4] = [".raw", ".img", ".dd", "-flat.vmdk"];

/// Whether a file is called like a raw disk.
pub(super) fn is_raw_name(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    RAW_ENDINGS.iter().any(|ending| name.ends_with(ending))
}

/// What a file that begins with `bytes` claims to be.
pub fn probe(bytes: &[u8]) -> Signature {
    let bytes = &bytes[..bytes.len().min(PROBE_LENGTH)];
    match SIGNATURES.iter().find(|(magic, _)| bytes.starts_with(magic)) {
        Some((_, signature)) => *signature,
        None if descriptor::starts_like_one(bytes) => Signature::Descriptor,
        None => Signature::Raw,
    }
}

/// What a file is of which the user gave the name only.
///
/// # Errors
/// `Corrupt` for a VMDK by its name that does not begin like one; `Invalid` for another file that only the user can
/// tell: one that is perhaps raw and perhaps not.
pub(super) fn judge(name: &str, label: &str, length: u64, found: Signature) -> Result<Signature> {
    let refuse = |kind, text: String| Err(Error::new(kind, format!("'{label}' {text}")));
    match (found, is_raw_name(name)) {
        (Signature::Raw, true) if length == 0 || !length.is_multiple_of(SECTOR) => {
            let text =
                format!("has {length} bytes, and a raw disk consists of sectors of {SECTOR}: give --from raw to");
            refuse(ErrorKind::Invalid, format!("{text} take it as one all the same"))
        }
        (Signature::Raw, false) if name.to_ascii_lowercase().ends_with(".vmdk") => {
            let text = "is called like a VMDK and does not begin like one: it is damaged or no VMDK";
            refuse(ErrorKind::Corrupt, format!("{text}; only if it is a raw disk, give --from raw"))
        }
        (Signature::Raw, false) => {
            let text = "begins like no image that can be opened, and is not called like a raw disk (.raw, .img, .dd)";
            refuse(ErrorKind::Invalid, format!("{text}; if it is a raw disk, give --from raw"))
        }
        (Signature::Raw | Signature::Foreign(_) | Signature::ChangeTracking, true) | (_, false) => Ok(found),
        (_, true) => {
            let text = "is called like a raw disk and does not begin like one, which its guest may have written";
            let option = found.option();
            refuse(ErrorKind::Invalid, format!("{text}: give --from raw or --from {option} to say what it is"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_name_and_size_make_a_raw_disk_and_no_signature_overrules_them() {
        let judged = |name: &str, length, found| judge(name, name, length, found).map_err(|error| error.kind());
        for name in ["disk.raw", "DISK.IMG", "disk.dd", "vm-flat.vmdk"] {
            assert_eq!(judged(name, 1024, Signature::Raw), Ok(Signature::Raw), "{name}");
            for length in [0, 1, 1023] {
                assert_eq!(judged(name, length, Signature::Raw), Err(ErrorKind::Invalid), "{name}");
            }
            for found in [Signature::Descriptor, Signature::HostedSparse, Signature::Qcow2] {
                assert_eq!(judged(name, 1024, found), Err(ErrorKind::Invalid), "{name} {found:?}");
            }
        }
        for name in ["passwd", "vm.vmx", "vm.ova", "raw", "disk.raw.gz", "disk.bin"] {
            assert_eq!(judged(name, 1024, Signature::Raw), Err(ErrorKind::Invalid), "{name}");
        }
        assert_eq!(judged("vm.VMDK", 1024, Signature::Raw), Err(ErrorKind::Corrupt), "a damaged signature");
        for found in [Signature::Descriptor, Signature::Qcow2, Signature::Foreign("VHDX")] {
            assert_eq!(judged("any", 1, found), Ok(found));
        }
    }
}
