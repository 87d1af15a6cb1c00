//! Recognition of the content of a volume by signatures at known places. More than one signature means that the content
//! is not known: the older one may be a remainder.

use crate::fields::{be64, has, le32, le64};
use crate::{Outcome, Volume};

pub(crate) const EXT: &str = "ext2/3/4";
pub(crate) const XFS: &str = "xfs";
pub(crate) const NTFS: &str = "ntfs";
pub(crate) const HIBERNATED: &str = "swap space with a hibernated system";

/// Bytes at the beginning of a volume that are searched: the superblocks of btrfs and UFS are the last ones.
const HEAD: u64 = 68 << 10;

/// Name, place and bytes.
const SIGNATURES: [(&str, usize, &[u8]); 41] = [
    (EXT, 0x438, &[0x53, 0xEF]),
    (XFS, 0, b"XFSB"),
    (NTFS, 3, b"NTFS    "),
    ("BitLocker", 3, b"-FVE-FS-"),
    ("ReFS", 3, b"ReFS\0\0\0\0"),
    ("exFAT", 3, b"EXFAT   "),
    ("FAT", 0x36, b"FAT1"),
    ("FAT", 0x52, b"FAT32"),
    ("LUKS", 0, b"LUKS\xBA\xBE"),
    ("btrfs", 0x1_0040, b"_BHRfS_M"),
    ("F2FS", 1024, &[0x10, 0x20, 0xF5, 0xF2]),
    ("LVM", 0x18, b"LVM2 001"),
    ("LVM", 0x218, b"LVM2 001"),
    ("LVM", 0x418, b"LVM2 001"),
    ("LVM", 0x618, b"LVM2 001"),
    ("ISO 9660", 0x8001, b"CD001"),
    ("squashfs", 0, b"hsqs"),
    // These leave the first 1024 bytes as they were.
    ("NILFS2", 1024 + 6, &[0x34, 0x34]),
    ("EROFS", 1024, &[0xE2, 0xE1, 0xF5, 0xE0]),
    ("HFS+", 1024, b"H+\0\x04"),
    ("HFS+", 1024, b"HX\0\x05"),
    // Most of these leave the place of the superblock of ext as it was.
    ("BSD disklabel", 512, &[0x57, 0x45, 0x56, 0x82]),
    ("UFS", 8192 + 0x55C, &[0x54, 0x19, 0x01, 0x00]),
    ("UFS", 8192 + 0x55C, &[0x00, 0x01, 0x19, 0x54]),
    ("UFS", 0x1_0000 + 0x55C, &[0x19, 0x01, 0x54, 0x19]),
    ("UFS", 0x1_0000 + 0x55C, &[0x54, 0x19, 0x01, 0x00]),
    ("JFS", 0x8000, b"JFS1"),
    ("ReiserFS", 8192 + 0x34, b"ReIsErFs"),
    ("ReiserFS", 0x1_0034, b"ReIsEr"),
    ("Reiser4", 0x1_0000, b"ReIsEr4"),
    ("GFS2", 0x1_0000, &[0x01, 0x16, 0x19, 0x70]),
    ("OCFS2", 2048, b"OCFSV2"),
    ("OCFS2", 4096, b"OCFSV2"),
    ("OCFS2", 8192, b"OCFSV2"),
    ("bcache", 4096 + 24, &[0xC6, 0x85, 0x73, 0xF6]),
    ("Oracle ASM", 32, b"ORCLDISK"),
    ("Stratis", 0x204, b"!Stra0tis"),
    ("VDO", 0, b"dmvdo001"),
    ("dm-integrity", 0, b"integrt\0"),
    ("Linux RAID", 0, &RAID),
    ("Linux RAID", 4096, &RAID),
];

/// The ring of the superblocks of ZFS in a volume: its place, its length, and what each begins with.
const ZFS_RING: u64 = 128 << 10;
const ZFS_RING_LENGTH: u64 = 128 << 10;
const ZFS_SUPERBLOCK: usize = 1024;
const ZFS: u64 = 0x00BA_B10C;

/// Sizes of a page of memory: swap space has its signature in the last 10 bytes of the first page.
const PAGES: [usize; 5] = [4096, 8192, 16_384, 32_768, 65_536];
const SWAP_SIGNATURE_LENGTH: usize = 10;
const SWAP: &[u8] = b"SWAPSPACE2";
/// What Linux and its tools write in place of the signature while a hibernated system is in the swap space.
const SUSPENDED: [&[u8]; 5] =
    [b"S1SUSPEND", b"S2SUSPEND", b"ULSUSPEND", b"LINHIB0001", &[0xED, 0xC3, 0x02, 0xE9, 0x98, 0x56, 0xE5, 0x0C]];

/// The magic number of Linux software RAID.
const RAID: [u8; 4] = 0xA92B_4EFC_u32.to_le_bytes();

/// The distinct names of all signatures of a volume.
pub(crate) fn find(volume: &Volume<'_>) -> Outcome<Vec<&'static str>> {
    let head = volume.read(0, HEAD.min(volume.length()))?;
    let mut found: Vec<&'static str> =
        SIGNATURES.iter().filter(|(_, at, bytes)| has(&head, *at, bytes)).map(|(name, ..)| *name).collect();
    for at in PAGES.map(|page| page - SWAP_SIGNATURE_LENGTH) {
        if has(&head, at, SWAP) {
            found.push("swap space");
        }
        if SUSPENDED.iter().any(|signature| has(&head, at, signature)) {
            found.push(HIBERNATED);
        }
    }
    // ZFS does not write the first 8 KiB of a volume.
    if volume.length() >= ZFS_RING + ZFS_RING_LENGTH {
        let ring = volume.read(ZFS_RING, ZFS_RING_LENGTH)?;
        if ring.chunks_exact(ZFS_SUPERBLOCK).any(|one| le64(one, 0) == ZFS || be64(one, 0) == ZFS) {
            found.push("ZFS");
        }
    }
    // RAID 0.90 and 1.0 have their superblock near the end of the volume, behind the file system.
    let length = volume.length() / 512 * 512;
    let old = (length & !0xFFFF).checked_sub(0x1_0000);
    let new = length.checked_sub(0x2000).map(|at| at & !0xFFF);
    for at in [old, new].into_iter().flatten() {
        if le32(&volume.read(at, 4.min(volume.length() - at))?, 0) == u32::from_le_bytes(RAID) {
            found.push("Linux RAID");
        }
    }
    found.sort_unstable();
    found.dedup();
    Ok(found)
}
