//! Recognition of the content of a volume by signatures at known places. More than one signature means that the content
//! is not known: the older one may be a remainder.

use crate::fields::{has, le32};
use crate::{Outcome, Volume};

pub(crate) const EXT: &str = "ext2/3/4";
pub(crate) const XFS: &str = "xfs";
pub(crate) const NTFS: &str = "ntfs";

/// Bytes at the beginning of a volume that are searched: the superblock of btrfs is the last one.
const HEAD: u64 = 68 << 10;

/// Name, place and bytes.
const SIGNATURES: [(&str, usize, &[u8]); 26] = [
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
    ("swap space", 4086, b"SWAPSPACE2"),
    ("swap space", 8182, b"SWAPSPACE2"),
    ("swap space", 16_374, b"SWAPSPACE2"),
    ("swap space", 32_758, b"SWAPSPACE2"),
    ("swap space", 65_526, b"SWAPSPACE2"),
    ("swap space with a hibernated system", 4086, b"S1SUSPEND\0"),
    ("swap space with a hibernated system", 4086, b"LINHIB0001"),
    ("Linux RAID", 0, &RAID),
    ("Linux RAID", 4096, &RAID),
];

/// The magic number of Linux software RAID.
const RAID: [u8; 4] = 0xA92B_4EFC_u32.to_le_bytes();

/// The distinct names of all signatures of a volume.
pub(crate) fn find(volume: &Volume<'_>) -> Outcome<Vec<&'static str>> {
    let head = volume.read(0, HEAD.min(volume.length()))?;
    let mut found: Vec<&'static str> =
        SIGNATURES.iter().filter(|(_, at, bytes)| has(&head, *at, bytes)).map(|(name, ..)| *name).collect();
    // RAID 0.90 and 1.0 have their superblock near the end of the volume, behind the file system.
    let length = volume.length() / 512 * 512;
    let old = (length & !0xFFFF).checked_sub(0x1_0000);
    let new = length.checked_sub(0x2000).map(|at| at & !0xFFF);
    for at in [old, new].into_iter().flatten() {
        if le32(&volume.read(at, 4.min(volume.length() - at))?, 0) == u32::from_le_bytes(RAID) {
            found.push("Linux RAID");
        }
    }
    found.dedup();
    Ok(found)
}
