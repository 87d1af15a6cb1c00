//! Finding the images of a disk whose record is lost.

use crate::world::{local, options, scratch};
use layer::image::ImageKind;
use vmdk::{Disk, NewDisk, Remains};
use work::NoProgress;

/// A guest writes the text of a descriptor to the beginning of its disk, which is the beginning of an extent's file.
#[test]
fn a_descriptor_that_a_guest_has_written_is_no_image() {
    const CAPACITY: u64 = 64 << 10;
    let folder = scratch();
    let new = NewDisk::new("web", CAPACITY, ImageKind::SplitFlat, None);
    let disk = Disk::create(local(folder.path()), &new, &options(1), &NoProgress).unwrap();
    let text = "# Disk DescriptorFile\nversion=1\nCID=00000001\nparentCID=ffffffff\ncreateType=\"vmfs\"\n";
    let mut text = format!("{text}RW 128 VMFS \"web-f001.vmdk\"\n").into_bytes();
    text.resize(CAPACITY as usize, b'\n');
    let chain = disk.chain().unwrap();
    chain.write(0, &text).unwrap();
    drop(chain);
    disk.close().unwrap();
    drop(disk);
    assert!(std::fs::read(folder.path().join("web-f001.vmdk")).unwrap().starts_with(b"# Disk DescriptorFile"));
    std::fs::remove_file(folder.path().join("lamina.disk")).unwrap();
    let remains = Remains::look(local(folder.path()), "web", &options(1)).unwrap().unwrap();
    assert_eq!(remains.states(), [None], "{:?}", remains.notes());
}
