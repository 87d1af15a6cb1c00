//! Lists as ESXi hosts write them, and malformed ones.

use super::{Vmsd, VmsdDisk, VmsdSnapshot};
use crate::ErrorKind;

/// A list from an ESXi host: UIDs and lines out of order, and a negative lower half of a time.
const REAL: &str = ".encoding = \"UTF-8\"
snapshot.lastUID = \"4\"
snapshot.current = \"4\"
snapshot0.uid = \"1\"
snapshot0.filename = \"web 1-Snapshot1.vmsn\"
snapshot0.displayName = \"after |22install|22\"
snapshot0.description = \"first\"
snapshot0.createTimeHigh = \"388745\"
snapshot0.createTimeLow = \"1991180826\"
snapshot0.numDisks = \"2\"
snapshot0.disk0.fileName = \"web 1.vmdk\"
snapshot0.disk0.node = \"scsi0:0\"
snapshot0.disk1.fileName = \"/vmfs/volumes/5f/web 1/data.vmdk\"
snapshot0.disk1.node = \"scsi0:1\"
snapshot.numSnapshots = \"2\"
snapshot1.uid = \"4\"
snapshot1.filename = \"web 1-Snapshot4.vmsn\"
snapshot1.parent = \"1\"
snapshot1.displayName = \"later\"
snapshot1.createTimeHigh = \"388801\"
snapshot1.createTimeLow = \"-814770620\"
snapshot1.numDisks = \"1\"
snapshot1.disk0.fileName = \"web 1-000001.vmdk\"
snapshot1.disk0.node = \"scsi0:0\"
";

fn disk(file: &str, node: &str) -> VmsdDisk {
    VmsdDisk { file: file.to_owned(), node: node.to_owned() }
}

fn real() -> Vmsd {
    let first = VmsdSnapshot {
        uid: 1,
        parent: None,
        state: "web 1-Snapshot1.vmsn".to_owned(),
        name: "after \"install\"".to_owned(),
        description: "first".to_owned(),
        created: 388_745 << 32 | 1_991_180_826,
        disks: vec![disk("web 1.vmdk", "scsi0:0"), disk("/vmfs/volumes/5f/web 1/data.vmdk", "scsi0:1")],
    };
    let second = VmsdSnapshot {
        uid: 4,
        parent: Some(1),
        state: "web 1-Snapshot4.vmsn".to_owned(),
        name: "later".to_owned(),
        description: String::new(),
        created: (388_801 << 32) + (0x1_0000_0000 - 814_770_620),
        disks: vec![disk("web 1-000001.vmdk", "scsi0:0")],
    };
    Vmsd { last_uid: 4, current: Some(4), need_consolidate: false, snapshots: vec![first, second] }
}

#[test]
fn a_list_of_vmware_is_parsed_and_written_unchanged() {
    assert_eq!(Vmsd::parse(REAL.as_bytes()).unwrap(), real());
    assert_eq!(String::from_utf8(real().to_bytes()).unwrap(), REAL);
    let windows = REAL.replace('\n', "  \r\n").replace("displayName", "DisplayName").replace(" = ", "=");
    assert_eq!(Vmsd::parse(windows.as_bytes()).unwrap(), real());
    let spoken = b".encoding = \"windows-1252\"\nsnapshot0.uid = \"1\"\nsnapshot0.displayName = \"caf\xe9\"\n";
    assert_eq!(Vmsd::parse(spoken).unwrap().snapshots[0].name, "caf\u{e9}");
}

#[test]
fn mutated_lists_cause_no_panic() {
    let mut random = testkit::Random(1);
    let mut next = |bound: usize| random.index(bound);
    for _ in 0..20_000 {
        let mut bytes = REAL.as_bytes().to_vec();
        for _ in 0..1 + next(8) {
            if bytes.is_empty() {
                break;
            }
            let at = next(bytes.len());
            match next(4) {
                0 => bytes[at] = next(256) as u8,
                1 => drop(bytes.remove(at)),
                2 => bytes.truncate(at.max(1)),
                _ => {
                    let from = next(bytes.len());
                    let piece = bytes[from..(from + next(60)).min(bytes.len())].to_vec();
                    bytes.splice(at..at, piece);
                }
            }
        }
        if let Ok(list) = Vmsd::parse(&bytes) {
            assert_eq!(Vmsd::parse(&list.to_bytes()).unwrap(), list);
        }
    }
}

#[test]
fn invalid_lists_are_refused() {
    let kind = |text: &[u8]| Vmsd::parse(text).unwrap_err().kind();
    assert_eq!(kind(&vec![b'\n'; 5 << 20]), ErrorKind::Corrupt);
    assert_eq!(kind(&vec![b'x'; 20 << 10]), ErrorKind::Corrupt);
    assert_eq!(kind(b"a\0b"), ErrorKind::Corrupt);
    assert_eq!(kind(b"snapshot0.uid = \"1\"\nsnapshot1.uid = \"1\""), ErrorKind::Corrupt);
    assert_eq!(kind(b"snapshot99999999999999999999.uid = \"1\""), ErrorKind::Corrupt);
    assert_eq!(kind(b"snapshot0.disk4294967296.fileName = \"1\""), ErrorKind::Corrupt);
    assert_eq!(Vmsd::parse(b"").unwrap(), Vmsd::default());
    assert_eq!(Vmsd::parse(b"snapshot0.displayName = \"gone\"").unwrap(), Vmsd::default());
}
