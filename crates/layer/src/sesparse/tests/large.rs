//! Disks far beyond 2 TiB, in sparse files: the cost of operations depends on the data in them, not on the capacity.

use super::super::header::{Layout, Volatile, put_journal_header};
use super::*;
use crate::{CAPACITY_MAX, ErrorKind};
use backend::local::{LocalDirectory, LocalQueues};
use std::process::Command;
use std::time::{Duration, Instant};

/// The most time for any operation on a nearly empty disk, on a slow machine without optimisation.
const TIME_MAX: Duration = Duration::from_secs(20);
const MEMORY_MAX: u64 = 80 << 20;

/// Makes an image of any capacity, as another program would.
fn craft(file: &dyn File, capacity: u64) -> Layout {
    let layout = Layout::for_capacity(capacity / 512);
    let mut block = Buffer::zeroed(1);
    layout.encode(&mut block);
    Volatile { free_table: 0, next_sequence: 0, replay: 0 }.encode(&mut block[512..]);
    put_journal_header(&mut block[1024..], 0);
    file.set_len(layout.grains.offset * 512).unwrap();
    file.write_at(&[&block], 0, false).unwrap();
    layout
}

/// Writes at the beginning, in the middle and at the end of the disk, discards half of each write, opens the image
/// after a kill, wipes and shrinks it.
#[test]
fn images_of_any_capacity_up_to_the_limit_can_be_created() {
    for capacity in [(2 << 40) - 512, (2 << 40) + GRAIN, 3 << 40, 16 << 40, 62 << 40, CAPACITY_MAX] {
        let folder = tempfile::tempdir().unwrap();
        let directory = LocalDirectory::open(folder.path(), LocalQueues::Threads).unwrap();
        let file = directory.create(NAME, IoMode::Buffered).unwrap();
        let layout = craft(&*file, capacity);
        let begun = Instant::now();
        let places = [0, capacity / 3 / GRAIN * GRAIN, (capacity / GRAIN - 64) * GRAIN];
        let layer = open(&directory, IoMode::Buffered, writing()).unwrap();
        for (stamp, place) in (1..).zip(places) {
            layer.write(place, &[&stamped(64, stamp)]).unwrap();
            layer.zero(place..place + 32 * GRAIN, false).unwrap();
        }
        layer.flush().unwrap();
        // The layer is dropped without closing, as by SIGKILL.
        drop(layer);
        let layer = open(&directory, IoMode::Buffered, writing()).unwrap();
        let compare = |layer: &SeSparse| {
            for (stamp, place) in (1..).zip(places) {
                let expected = [vec![0; 256], vec![stamp; 256]].concat();
                assert_eq!(stamps(layer, place, 64 * GRAIN).unwrap(), expected);
            }
        };
        compare(&layer);
        layer.wipe(true, &NoProgress).unwrap();
        layer.shrink(&NoProgress).unwrap();
        compare(&layer);
        assert_clean(&layer);
        let usage = layer.usage().unwrap();
        assert_eq!((usage.mapped, usage.dead), (96 * GRAIN, 0));
        assert_eq!(file.len().unwrap(), (layout.grains.offset * 512) + 96 * GRAIN);
        assert!(usage.allocated < 4 * MIB, "{usage:?}");
        // The rest of the disk is absent; the map returns it as one extent.
        let mut out = Vec::new();
        layer.map(64 * GRAIN..capacity / 3 / GRAIN * GRAIN, 64, &mut out).unwrap();
        assert_eq!((out.len(), out[0].content), (1, Content::Absent));
        assert!(layer.memory() <= MEMORY_MAX);
        layer.close().unwrap();
        compare(&open(&directory, IoMode::Buffered, Options::default()).unwrap());
        assert!(begun.elapsed() < TIME_MAX, "{capacity}: {:?}", begun.elapsed());
    }
}

#[test]
fn invalid_capacities_are_refused() {
    let disk = simulated(1);
    let file = disk.directory().create(NAME, IoMode::Buffered).unwrap();
    for capacity in [(62 << 40) + GRAIN, u64::MAX / 512 * 512, 511, 0] {
        let error = SeSparse::create(Arc::clone(&file), NAME, capacity, writing()).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{capacity}");
    }
    craft(&*file, CAPACITY_MAX + GRAIN);
    assert_eq!(open(&*disk.directory(), IoMode::Buffered, writing()).err().unwrap().kind(), ErrorKind::Corrupt);
}

/// QEMU reads patterns in a chain of two deltas over a flat base.
#[test]
fn qemu_reads_chains_beyond_two_tebibytes() {
    let folder = tempfile::tempdir().unwrap();
    let directory = LocalDirectory::open(folder.path(), LocalQueues::Threads).unwrap();
    let capacity: u64 = 5 << 40;
    let sectors = capacity / 512;
    let describe = |name: &str, cid: u32, parent: Option<(u32, &str)>, kind: &str, extent: &str| {
        let (parent_cid, hint) =
            parent.map_or((u32::MAX, String::new()), |(cid, name)| (cid, format!("parentFileNameHint=\"{name}\"\n")));
        let create = if kind == "VMFS" { "vmfs" } else { "seSparse" };
        let text = format!(
            "# Disk DescriptorFile\nversion=1\nCID={cid:08x}\nparentCID={parent_cid:08x}\ncreateType=\"{create}\"\n{hint}\
             # Extent description\nRW {sectors} {kind} \"{extent}\"\n\n# The Disk Data Base\n#DDB\n"
        );
        std::fs::write(folder.path().join(name), text).unwrap();
    };
    describe("vm.vmdk", 1, None, "VMFS", "vm-flat.vmdk");
    describe("vm-000001.vmdk", 2, Some((1, "vm.vmdk")), "SESPARSE", "one");
    describe("vm-000002.vmdk", 3, Some((2, "vm-000001.vmdk")), "SESPARSE", "two");
    directory.create("vm-flat.vmdk", IoMode::Buffered).unwrap().set_len(capacity).unwrap();
    let layers = ["one", "two"].map(|name| {
        let file = directory.create(name, IoMode::Buffered).unwrap();
        SeSparse::create(file, name, capacity, writing()).unwrap()
    });
    let (last, middle) = (capacity - 64 * GRAIN, 3 << 40);
    for (layer, stamp) in layers.iter().zip([0x1111_1111_1111_1111, 0x2222_2222_2222_2222]) {
        layer.write(last, &[&stamped(64, stamp)]).unwrap();
        layer.write(middle, &[&stamped(64, stamp)]).unwrap();
    }
    // The lower delta loses its first grains, so that shrinking moves the grains that it keeps.
    layers[0].zero(last..last + 64 * GRAIN, false).unwrap();
    layers[1].zero(middle..middle + 32 * GRAIN, false).unwrap();
    for layer in &layers {
        layer.wipe(true, &NoProgress).unwrap();
        assert!(layer.shrink(&NoProgress).unwrap().moved > 0 || layer.usage().unwrap().dead == 0);
        layer.flush().unwrap();
    }
    let read = |image: &str, patterns: &[(u8, u64, u64)]| {
        let mut command = Command::new("qemu-io");
        command.args(["-r", "-f", "vmdk"]);
        for (pattern, at, length) in patterns {
            command.args(["-c", &format!("read -P {pattern} {at} {length}")]);
        }
        let output = command.arg(image).current_dir(folder.path()).output().expect("qemu-io is installed");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && !text.contains("verification failed"), "{text}");
    };
    let half = 32 * GRAIN;
    for _ in 0..2 {
        read("vm-000001.vmdk", &[(0, last, 64 * GRAIN), (0x11, middle, 64 * GRAIN), (0, 1 << 40, 65_536)]);
        read("vm-000002.vmdk", &[(0x22, last, 64 * GRAIN), (0, middle, half), (0x22, middle + half, half)]);
        layers.iter().for_each(|layer| layer.close().unwrap());
    }
}
