//! Reservations on a full file system: a range that has space already can be reserved; other reservations are refused.

#![allow(clippy::unwrap_used)]

use backend::local::{LocalDirectory, LocalQueues};
use backend::{Directory, IoMode};
use std::path::Path;
use testkit::mounted;

const PIECE: u64 = 4 << 20;

#[test]
fn space_is_reserved_again_on_a_full_ext4() {
    mounted::on_ext4("space_is_reserved_again_on_a_full_ext4", reserve_again);
}

#[test]
fn space_is_reserved_again_on_a_full_xfs() {
    mounted::on_xfs("space_is_reserved_again_on_a_full_xfs", reserve_again);
}

#[test]
fn space_is_reserved_again_on_a_full_btrfs() {
    mounted::on_btrfs("space_is_reserved_again_on_a_full_btrfs", reserve_again);
}

fn reserve_again(folder: &Path) {
    let directory = LocalDirectory::open(folder, LocalQueues::Threads).unwrap();
    let file = directory.create("file", IoMode::Buffered).unwrap();
    file.reserve(0, PIECE).unwrap();
    file.write_at(&[&[7; 8192]], 4096, false).unwrap();
    mounted::take_the_rest(folder, "rest");
    file.reserve(0, PIECE).unwrap();
    file.reserve(8192, 4096).unwrap();
    let refused = file.reserve(PIECE / 2, PIECE).unwrap_err();
    assert!(error::lacks_space(&refused), "{refused}");
}
