//! Recognising formats by the first bytes of a file.
//!
//! Probing determines what a file *claims* to be. A raw disk contains the bytes that its guest wrote, and a guest can
//! write the signature of any format, or a descriptor that names files of the host. On the other hand, any file could
//! be a raw disk, even an image with a damaged signature. Therefore a file that the user names is probed only if the
//! user does not state its format. A file counts as raw only if its name and its size indicate a raw disk, and then no
//! signature overrules the name and the size ([`super::Image::open`]). The extents of a descriptor have the formats
//! that their lines state. A parent is accepted only if its CID is the one that its child records, and raw disks have
//! no CID. Files that a probed file names are opened through [`super::Folder`].

use crate::{Error, ErrorKind, Result, SECTOR, descriptor};

/// How many bytes from the beginning of a file [`probe`] needs; a shorter file is probed as a whole.
pub const PROBE_LENGTH: usize = 4096;

/// The format of a file according to its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signature {
    /// A text descriptor.
    Descriptor,
    /// An extent of VMware Workstation, sparse or compressed, possibly with an embedded descriptor.
    HostedSparse,
    /// A redo log with 512-byte grains. Its descriptor is a separate file.
    VmfsSparse,
    /// A redo log with 4 KiB grains. Its descriptor is a separate file.
    SeSparse,
    /// A delta object. Its descriptor is a separate file.
    VsanSparse,
    /// VMware's changed-block tracking file, which is not a disk.
    ChangeTracking,
    /// QEMU's qcow2.
    Qcow2,
    /// A format that lamina does not read, by its name.
    Foreign(&'static str),
    /// None of these: a raw disk, or any other file.
    Raw,
}

impl Signature {
    /// The format's name for the option that states a file's format.
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
    // Some writers of sparse extents leave this magic number until the file is complete.
    (b"kdmv", Signature::HostedSparse),
    (b"COWD", Signature::VmfsSparse),
    (&[0xbe, 0xba, 0xfe, 0xca, 0, 0, 0, 0], Signature::SeSparse),
    (&crate::vsansparse::header::MAGIC, Signature::VsanSparse),
    (&[0xa2, 0x72, 0x19, 0xf6], Signature::ChangeTracking),
    (b"QFI\xfb", Signature::Qcow2),
    (b"vhdxfile", Signature::Foreign("VHDX")),
    (b"conectix", Signature::Foreign("VHD")),
];

/// Endings of raw disks' names, flat extents included.
const RAW_ENDINGS: [&str; 4] = [".raw", ".img", ".dd", "-flat.vmdk"];

/// Whether a file is named like a raw disk.
pub(super) fn is_raw_name(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    RAW_ENDINGS.iter().any(|ending| name.ends_with(ending))
}

/// The format that a file beginning with `bytes` claims.
pub fn probe(bytes: &[u8]) -> Signature {
    let bytes = &bytes[..bytes.len().min(PROBE_LENGTH)];
    match SIGNATURES.iter().find(|(magic, _)| bytes.starts_with(magic)) {
        Some((_, signature)) => *signature,
        None if descriptor::starts_like_one(bytes) => Signature::Descriptor,
        None => Signature::Raw,
    }
}

/// The format of a file that the user named without a format.
///
/// # Errors
/// `Corrupt` for a file named like a VMDK that does not begin like one; `Invalid` for a file that may be raw or not, so
/// that the user must name its format.
pub(super) fn judge(name: &str, label: &str, length: u64, found: Signature) -> Result<Signature> {
    let refuse = |kind, text: String| Err(Error::new(kind, format!("'{label}' {text}")));
    match (found, is_raw_name(name)) {
        (Signature::Raw, true) if length == 0 || !length.is_multiple_of(SECTOR) => {
            let text =
                format!("has {length} bytes, and a raw disk consists of sectors of {SECTOR}: give --from raw to");
            refuse(ErrorKind::Invalid, format!("{text} open it as one nevertheless"))
        }
        (Signature::Raw, false) if name.to_ascii_lowercase().ends_with(".vmdk") => {
            let text = "is called like a VMDK and does not begin like one: it is damaged or no VMDK";
            refuse(ErrorKind::Corrupt, format!("{text}; only if it is a raw disk, give --from raw"))
        }
        (Signature::Raw, false) if name.to_ascii_lowercase().ends_with(".ova") => {
            let text = "is called like an archive, and an image is needed here: 'lamina convert' makes an image from a \
                        disk in an archive";
            refuse(ErrorKind::Invalid, text.to_owned())
        }
        (Signature::Raw, false) => {
            let text = "begins like no image that can be opened, and is not called like a raw disk (.raw, .img, .dd)";
            refuse(ErrorKind::Invalid, format!("{text}; if it is a raw disk, give --from raw"))
        }
        (Signature::Raw | Signature::Foreign(_) | Signature::ChangeTracking, true) | (_, false) => Ok(found),
        (_, true) => {
            let text = "is called like a raw disk and does not begin like one; a guest may have written its beginning";
            let option = found.option();
            refuse(ErrorKind::Invalid, format!("{text}: give --from raw or --from {option} to say what it is"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_and_size_decide_that_a_file_is_a_raw_disk_even_with_a_signature() {
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
