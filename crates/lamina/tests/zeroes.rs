//! Writes of zeros become requests to zero their range, if the setting of the disk requests that.

#![allow(clippy::unwrap_used)]

use testkit::nbd::{Client, Command};
use testkit::process::Store;

const MIB: u64 = 1 << 20;

/// Bytes that a disk maps, and those that it stores as data, according to NBD clients.
fn extents(store: &Store, disk: &str) -> (u64, u64) {
    let map = testkit::process::tool("nbdinfo", &["--map", "--json", &store.uri(disk)]);
    let map: serde_json::Value = serde_json::from_str(&map).unwrap();
    let sum = |hole: bool| {
        let all = map.as_array().unwrap().iter();
        all.filter(|one| hole || one["type"] == 0)
            .filter(|one| one["type"].as_u64().unwrap() & 1 == 0)
            .map(|one| one["length"].as_u64().unwrap())
            .sum::<u64>()
    };
    (sum(true), sum(false))
}

#[test]
fn zeros_are_written_as_the_disk_says() {
    let store = Store::new();
    let mut server = store.serve("");
    for format in ["native", "sesparse"] {
        for setting in ["off", "on", "unmap"] {
            let name = format!("{format}-{setting}");
            store.run(&format!("disk create {name} 16M --format {format} --detect-zeroes {setting}")).ok();
            let mut client = Client::connect(&store.socket(), &name).unwrap();
            let data = vec![7; 2 * MIB as usize];
            client.write(0, &data).unwrap();
            // Zeros are written over data and over holes, with and without FUA, unaligned, and in less than a block.
            client.write(0, &vec![0; MIB as usize]).unwrap();
            client.call(Command::Write { offset: 4 * MIB, data: &vec![0; MIB as usize], fua: true }).unwrap();
            client.write(MIB + 512, &vec![0; 8192]).unwrap();
            client.write(2 * MIB - 512, &[0; 512]).unwrap();
            client.flush().unwrap();
            let mut wanted = vec![0; 6 * MIB as usize];
            wanted[MIB as usize..2 * MIB as usize].fill(7);
            wanted[MIB as usize + 512..MIB as usize + 512 + 8192].fill(0);
            wanted[2 * MIB as usize - 512..2 * MIB as usize].fill(0);
            assert!(client.read(0, 6 * MIB as u32).unwrap() == wanted, "{name}");
            let (mapped, stored) = extents(&store, &name);
            match (setting, format) {
                ("off", _) => assert_eq!((mapped, stored), (3 * MIB, 3 * MIB), "{name}"),
                ("on", "native") => {
                    assert_eq!(mapped, 3 * MIB, "{name}");
                    assert!(stored <= MIB, "{name}: {stored}");
                }
                ("unmap", "native") => assert!((MIB - 8192..=MIB).contains(&mapped), "{name}: {mapped}"),
                ("unmap", _) => assert!(mapped <= MIB, "{name}: {mapped}"),
                _ => assert!(mapped <= 3 * MIB, "{name}: {mapped}"),
            }
            // The setting can be changed while the client is connected.
            store.run(&format!("disk edit {name} --detect-zeroes unmap")).ok();
            client.write(0, &vec![0; 2 * MIB as usize]).unwrap();
            client.write(4 * MIB, &vec![0; MIB as usize]).unwrap();
            if setting != "off" {
                assert_eq!(extents(&store, &name), (0, 0), "{name}");
            }
            let shown = store.run(&format!("disk show {name}")).ok();
            assert!(shown.contains("unmap: the range is unmapped"), "{shown}");
        }
    }
    store.run("disk edit native-on --detect-zeroes auto").fails(2, "off, on and unmap");
    // A thick disk keeps its space.
    store.run("disk create thick 8M --provisioning zeroedthick --detect-zeroes unmap").ok();
    let mut client = Client::connect(&store.socket(), "thick").unwrap();
    client.write(0, &vec![0; MIB as usize]).unwrap();
    drop(client);
    assert_eq!(store.run("disk show thick --json").json()["blocks_allocated"], 8 * MIB / 4096);
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
}
