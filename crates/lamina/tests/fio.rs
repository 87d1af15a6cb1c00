//! fio writes and verifies through its NBD engine: with many requests, in mixed sizes, with flushes and trims, and
//! again after a restart.

#![allow(clippy::unwrap_used)]

use testkit::process::{Store, tool};

fn fio(store: &Store, disk: &str, arguments: &[&str]) {
    let uri = format!("--uri={}", store.uri(disk));
    let name = format!("--name={disk}");
    let folder = tempfile::tempdir().unwrap();
    let state = format!("--aux-path={}", folder.path().display());
    let common = [&*name, "--ioengine=nbd", &uri, &state, "--thread=1", "--verify=crc32c", "--verify_fatal=1"];
    let text = tool("fio", &[&common[..], arguments].concat());
    assert!(text.contains("err= 0"), "{text}");
}

#[test]
fn fio_verifies_its_writes() {
    let store = Store::new();
    store.run("disk create vm1 64M").ok();
    store.run("disk create vm2 64M --provisioning zeroedthick").ok();
    store.run("disk create vm3 64M").ok();
    let random = ["--rw=randwrite", "--size=64M", "--iodepth=16", "--bs=4k", "--fsync=64", "--randseed=1"];
    let mixed = [
        "--rw=randrw",
        "--size=64M",
        "--iodepth=8",
        "--bsrange=512-64k",
        "--bs_unaligned=1",
        "--fsync=16",
        "--randseed=2",
    ];
    // This job trims each block before writing it.
    let trims = ["--rw=randtrimwrite", "--size=64M", "--iodepth=16", "--bs=8k", "--fsync=128", "--randseed=3"];
    let jobs: [(&str, &[&str]); 3] = [("vm1", &random), ("vm2", &mixed), ("vm3", &trims)];
    for options in ["", "--io direct --read-cache 8M"] {
        let mut server = store.serve(options);
        for (disk, arguments) in jobs {
            fio(&store, disk, arguments);
        }
        assert_eq!(server.stop("TERM"), Some(0));
        let mut server = store.serve("");
        fio(&store, "vm1", &[&random[..], &["--verify_only=1"]].concat());
        assert_eq!(server.stop("TERM"), Some(0));
        store.is_clean();
    }
}
