//! `lamina disk optimize` through the program, while clients have the disks open.

#![allow(clippy::unwrap_used)]

use testkit::Random;
use testkit::nbd::Client;
use testkit::process::Store;

const MIB: usize = 1 << 20;

#[test]
fn equal_data_of_disks_in_use_is_stored_once() {
    let store = Store::new();
    let mut server = store.serve("");
    let mut random = Random::new(7);
    let data = random.bytes(2 * MIB);
    let mut clients: Vec<Client> = ["a", "b"]
        .into_iter()
        .map(|name| {
            store.run(&format!("disk create {name} 16M")).ok();
            let mut client = Client::connect(&store.socket(), name).unwrap();
            client.write(4 * MIB as u64, &data).unwrap();
            client.write(8 * MIB as u64, &data[..MIB]).unwrap();
            client.flush().unwrap();
            client
        })
        .collect();
    let shared = |arguments: &str| store.run(&format!("disk optimize {arguments} --json")).json()["shared"].as_u64();
    assert_eq!(shared("a --dedup disk --compression off"), Some(MIB as u64));
    // What `b` has itself twice, and what it has in common with `a`.
    assert_eq!(shared("b --dedup datastore --compression off"), Some(3 * MIB as u64));
    let shown = store.run("disk optimize a --dedup datastore").ok();
    assert!(shown.contains("disk a: 0 B of equal data removed") && shown.contains("compressed to"), "{shown}");
    // A guest overwrites its part of the data.
    let other = random.bytes(MIB / 2);
    clients[1].write(4 * MIB as u64, &other).unwrap();
    clients[1].flush().unwrap();
    let is_kept = |clients: &mut Vec<Client>| {
        for (number, client) in clients.iter_mut().enumerate() {
            let mut wanted = data.clone();
            if number == 1 {
                wanted[..other.len()].copy_from_slice(&other);
            }
            assert!(client.read(4 * MIB as u64, 2 * MIB as u32).unwrap() == wanted);
            assert!(client.read(8 * MIB as u64, MIB as u32).unwrap() == data[..MIB]);
        }
    };
    is_kept(&mut clients);
    drop(clients);
    server.kill();
    let mut server = store.serve("");
    let mut clients: Vec<Client> =
        ["a", "b"].into_iter().map(|name| Client::connect(&store.socket(), name).unwrap()).collect();
    is_kept(&mut clients);
    drop(clients);
    store.run("disk optimize a --compression off").fails(2, "nothing to do");
    store.run("disk optimize a --dedup vm").fails(2, "off, disk, datastore");
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
}
