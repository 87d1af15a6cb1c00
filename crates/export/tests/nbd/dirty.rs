//! Contexts of changed blocks on disks of a datastore, whose snapshots are deleted and taken again.

use crate::{Folder, Running};
use backend::{IoMode, Queue, SharedSlice};
use disk::device::Device;
use disk::{
    Datastore, DiskFormat, InitOptions, NewDisk, NoProgress, OpenOptions, Provisioning, QueueChoice, SnapshotOptions,
};
use export::exports::{ExportName, Exports};
use std::io;
use std::sync::Arc;
use testkit::protocol::*;

struct Served(Arc<Datastore>);

impl Exports for Served {
    fn names(&self) -> Vec<ExportName> {
        let name = |name| ExportName { name, description: String::new() };
        self.0.device_names().into_iter().map(name).collect()
    }
    fn open(&self, name: &str, read_only: bool) -> error::Result<Arc<dyn Device>> {
        self.0.device(name, read_only)
    }
    fn queue(&self, depth: u32) -> io::Result<Box<dyn Queue>> {
        self.0.queue(depth)
    }
}

/// An incremental backup asks for the changes since a snapshot in several queries. If a rotation replaces the snapshot
/// in between, the changes before the new snapshot would be missing from the backup.
#[test]
fn a_context_belongs_to_the_snapshot_that_the_client_chose_and_not_to_its_name() {
    const BLOCK: u64 = 4096;
    for format in [DiskFormat::Native, DiskFormat::Vmdk] {
        let folder = Folder::new();
        let path = folder.0.join("store");
        Datastore::init(&path, InitOptions { journal_size: 4 << 20 }).unwrap();
        let options = OpenOptions {
            mode: IoMode::Buffered,
            queue: QueueChoice::Threads,
            metadata_cache: 16 << 20,
            write_buffer: 8 << 20,
            read_cache: Some(1 << 20),
        };
        let datastore = Datastore::open(&path, options).unwrap();
        let new = NewDisk { format, ..NewDisk::native(8 << 20, Provisioning::Thin) };
        datastore.create_disk("vm", &new, &NoProgress).unwrap();
        let take = || datastore.create_snapshots(&[("vm".into(), "s".into())], &SnapshotOptions::default()).unwrap();
        take();
        let device = datastore.device("vm", false).unwrap();
        let write =
            |block: u64| device.write(block * BLOCK, SharedSlice::copy_of(&[1; BLOCK as usize]), false).unwrap();
        write(0);
        let running = Running::start(Arc::new(Served(Arc::clone(&datastore))));
        let contexts = ["lamina:dirty:s", "qemu:dirty-bitmap:s"];
        let open = || {
            let mut client = Client::unix(&running.socket);
            client.greet(3);
            client.choose(Mode::Structured);
            assert_eq!(client.set_meta("vm", &contexts).len(), 2);
            assert_eq!(client.go("vm"), REP_ACK);
            client
        };
        let mut client = open();
        assert_eq!(client.ask(CMD_STATUS, 0, 0, 64 * BLOCK).error, 0);
        write(100);
        datastore.delete_snapshot("vm", "s", None, &NoProgress).unwrap();
        assert_eq!(client.ask(CMD_STATUS, 0, 64 * BLOCK, 64 * BLOCK).error, EINVAL, "{format:?}");
        take();
        let answer = client.ask(CMD_STATUS, 0, 64 * BLOCK, 64 * BLOCK);
        assert_eq!(answer.error, EINVAL, "{format:?}: the change of block 100 is not reported");
        // The connection and other requests are not affected, and a new choice of the context names the new snapshot.
        assert_eq!(client.read(100 * BLOCK, 1), [1]);
        client.leave();
        let mut client = open();
        assert_eq!(client.ask(CMD_STATUS, 0, 64 * BLOCK, 64 * BLOCK).error, 0);
        client.leave();
        drop((running, device));
        datastore.close().unwrap();
    }
}
