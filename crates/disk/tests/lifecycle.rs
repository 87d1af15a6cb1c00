//! The shortest way through everything.
use backend::Buffer;
use disk::*;

#[test]
fn a_disk_keeps_what_is_written_over_snapshots_clones_and_reopening() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("ds");
    Datastore::init(&path, InitOptions { journal_size: 8 << 20 }).unwrap();
    let options = OpenOptions {
        mode: backend::IoMode::Buffered,
        queue: QueueChoice::Auto,
        metadata_cache: 16 << 20,
        write_buffer: 8 << 20,
    };
    let open = || Datastore::open(&path, options).unwrap();
    let ds = open();
    ds.create_disk("a", &NewDisk::native((64 << 20) + 512, Provisioning::Thin), &NoProgress).unwrap();
    let dev = ds.device("a", false).unwrap();
    let fill = |byte: u8, len: usize, skip: usize| {
        let mut b = Buffer::with_bytes(len + skip);
        b[skip..skip + len].fill(byte);
        b
    };
    dev.write(0, fill(1, 1 << 20, 0), 1 << 20, false).unwrap();
    dev.write((64 << 20) - 100, fill(2, 600, 4096 - 100), 600, false).unwrap();
    dev.write(4096 + 512, fill(3, 512, 512), 512, false).unwrap();
    dev.flush().unwrap();
    ds.create_snapshots(&[("a".into(), "s1".into())], &SnapshotOptions::default()).unwrap();
    dev.write(8192, fill(4, 4096, 0), 4096, true).unwrap();
    let check = |ds: &Datastore| {
        let dev = ds.device("a", true).unwrap();
        assert_eq!(dev.read(0, 4096).unwrap(), vec![1; 4096]);
        assert_eq!(dev.read(4096 + 512, 512).unwrap(), vec![3; 512]);
        assert_eq!(dev.read(8192, 4096).unwrap(), vec![4; 4096]);
        assert_eq!(dev.read((64 << 20) - 100, 600).unwrap(), [vec![2; 600]].concat());
        let snap = ds.device("a@s1", true).unwrap();
        assert_eq!(snap.read(8192, 4096).unwrap(), vec![1; 4096]);
        let report = ds.check(CheckOptions { data: true, repair: false }, &NoProgress).unwrap();
        assert_eq!(report.findings, vec![]);
    };
    check(&ds);
    drop(dev);
    ds.close().unwrap();
    drop(ds);
    let ds = open();
    check(&ds);
    let names: Vec<String> = (0..100).map(|i| format!("c{i}")).collect();
    ds.clone_linked("a", &Point::Snapshot("s1".into()), &names, &NoProgress).unwrap();
    ds.clone_full("a", &Point::Head, "full", &NoProgress).unwrap();
    let c = ds.device("c7", false).unwrap();
    c.write(8192, fill(9, 4096, 0), 4096, true).unwrap();
    assert_eq!(ds.device("c8", false).unwrap().read(8192, 4096).unwrap(), vec![1; 4096]);
    drop(c);
    check(&ds);
    assert_eq!(ds.delete_disk("a", false).unwrap_err().kind(), ErrorKind::Busy);
    ds.delete_disk("a", true).unwrap();
    let c = ds.device("c7", false).unwrap();
    assert_eq!(c.read(8192, 4096).unwrap(), vec![9; 4096]);
    assert_eq!(ds.device("full", false).unwrap().read(8192, 4096).unwrap(), vec![4; 4096]);
    let report = ds.check(CheckOptions { data: true, repair: false }, &NoProgress).unwrap();
    assert_eq!(report.findings, vec![]);
    println!("{:?}", ds.status().unwrap());
}
