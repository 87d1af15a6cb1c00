//! Streams exchanged with qemu-img in both directions.

use super::*;
use crate::proving::Folder;

#[test]
fn qemu_reads_extents_written_by_lamina() {
    for (seed, capacity) in [(1, 70 << 20), (2, (5 << 20) + 33 * 512)] {
        let folder = Folder::new();
        let model = content(seed, capacity);
        folder.write("disk.vmdk", &written(&model, 6, 2));
        let info = folder.run("qemu-img", &["info", "disk.vmdk"]);
        assert!(info.contains("create type: streamOptimized") && info.contains("compressed: true"), "{info}");
        folder.run("qemu-img", &["check", "disk.vmdk"]);
        folder.run("qemu-img", &["convert", "-f", "vmdk", "-O", "raw", "disk.vmdk", "out.raw"]);
        assert!(folder.read("out.raw") == model);
    }
}

#[test]
fn lamina_reads_extents_written_by_qemu() {
    for (seed, capacity) in [(3, 40 << 20), (4, (7 << 20) + 5 * 512)] {
        let folder = Folder::new();
        let model = content(seed, capacity);
        folder.write("in.raw", &model);
        let options = ["convert", "-O", "vmdk", "-o", "subformat=streamOptimized", "in.raw", "disk.vmdk"];
        folder.run("qemu-img", &options);
        let layer = Stream::open(folder.file("disk.vmdk"), "disk.vmdk").unwrap();
        let found = read_all(&layer, None);
        // QEMU rounds the capacity up to whole grains.
        assert!(found[..model.len()] == model && found[model.len()..].iter().all(|byte| *byte == 0));
        assert!(layer.warnings().is_empty(), "{:?}", layer.warnings());
    }
}
