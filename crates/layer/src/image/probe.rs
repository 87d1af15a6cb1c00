//! Telling files apart by their first bytes.
//!
//! Probing answers what a file *claims* to be. A raw disk holds what its guest wrote, and a guest can write the
//! signature of any format, or a descriptor that names files of the host. Hence: the file that a user names is probed
//! only when the user did not say what it is; the extents of a descriptor are what its lines call them; a parent counts
//! only if its content has the identity its child remembers, which raw disks have not; and whatever a probed file
//! names passes [`super::Folder`].

use crate::descriptor;

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

/// What a file that begins with `bytes` claims to be.
pub fn probe(bytes: &[u8]) -> Signature {
    let bytes = &bytes[..bytes.len().min(PROBE_LENGTH)];
    match SIGNATURES.iter().find(|(magic, _)| bytes.starts_with(magic)) {
        Some((_, signature)) => *signature,
        None if descriptor::starts_like_one(bytes) => Signature::Descriptor,
        None => Signature::Raw,
    }
}
