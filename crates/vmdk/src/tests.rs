//! Records: which ones are refused, and that a written record reads back the same.

use crate::record::{
    CloneRecord, DeltaFormat, FileRecord, ImageOwnership, MergeSide, Merging, Node, OriginRecord, ParentNow, Pending,
    Record, Settlement, SnapshotRecord, Tunables,
};
use crate::{ErrorKind, Result};

fn node(id: u32, parent: Option<u32>) -> Node {
    let descriptor = format!("vm-{id:06}.vmdk");
    Node {
        id,
        parent,
        folder: None,
        descriptor,
        format: None,
        standing: ImageOwnership::Made,
        accepted: None,
        replay: false,
    }
}

#[test]
fn deltas_have_a_format_that_supports_the_capacity() {
    use DeltaFormat::{SeSparse, VmfsSparse, VsanSparse};
    const TIB: u64 = 1 << 40;
    assert_eq!(
        [TIB, 2 * TIB, 62 * TIB, 64 * TIB].map(DeltaFormat::usual),
        [VmfsSparse, SeSparse, SeSparse, VsanSparse]
    );
    assert_eq!(
        [TIB, 3 * TIB, 63 * TIB].map(|capacity| VmfsSparse.holding(capacity)),
        [VmfsSparse, SeSparse, VsanSparse]
    );
    assert_eq!([TIB, 64 * TIB].map(|capacity| SeSparse.holding(capacity)), [SeSparse, VsanSparse]);
}

fn snapshot(name: &str, uid: u32, node: u32) -> SnapshotRecord {
    SnapshotRecord {
        name: name.to_owned(),
        listed: None,
        uid,
        node,
        created: uid.into(),
        capacity: 4096,
        description: String::new(),
    }
}

/// A record with two branches: 1 <- 2 <- 3 (head), and 1 <- 4 <- 5; `<-` points to the parent.
fn record() -> Record {
    Record {
        name: "vm".to_owned(),
        uuid: "0".to_owned(),
        created: 1,
        stem: "vm".to_owned(),
        kind: "thin".to_owned(),
        delta: DeltaFormat::SeSparse,
        adapter: "lsilogic".to_owned(),
        read_only: false,
        vmsd: true,
        head: 3,
        nodes: vec![node(1, None), node(2, Some(1)), node(3, Some(2)), node(4, Some(1)), node(5, Some(4))],
        snapshots: vec![snapshot("a", 1, 1), snapshot("b", 2, 2), snapshot("b2", 3, 2), snapshot("c", 4, 5)],
        last_uid: 4,
        tunables: Tunables::default(),
        overlay: Some("x".to_owned()),
        origin: Some(OriginRecord { uuid: "1".to_owned(), disk: "d".to_owned(), snapshot: "s".to_owned() }),
        clones: vec![CloneRecord { uuid: "2".to_owned(), name: "k".to_owned(), folder: "/f".to_owned(), node: 2 }],
        permitted: vec!["/p".to_owned()],
        pending: Some(Pending {
            made: vec![FileRecord { folder: Some("/f".to_owned()), name: "x.vmdk".to_owned() }],
            settle: vec![Settlement {
                node: 2,
                content: Some(7),
                parent: Some(ParentNow::None { adapter: "ide".to_owned(), uuid: None }),
                text: Some("# Disk DescriptorFile".to_owned()),
            }],
            merging: Some(Merging { side: MergeSide::Down, node: 1, above: Some(2), content: None }),
            ..Pending::new("test")
        }),
    }
}

fn again(record: &Record) -> Result<Record> {
    Record::decode(&record.encode()?)
}

#[test]
fn a_record_is_decoded_as_encoded() {
    let record = record();
    assert_eq!(again(&record).unwrap(), record);
}

#[test]
fn queries_of_a_record_follow_the_image_tree() {
    let record = record();
    assert_eq!(record.line(3).unwrap(), [3, 2, 1]);
    assert_eq!(record.children(1), [2, 4]);
    assert_eq!(record.current().unwrap().name, "b2");
    let before = |name: &str| record.snapshot_before(record.snapshot(name).unwrap()).map(|found| found.name.as_str());
    assert_eq!((before("a"), before("b"), before("b2"), before("c")), (None, Some("a"), Some("b"), Some("a")));
    let mut pinned: Vec<u32> = record.pinned().into_iter().collect();
    pinned.sort_unstable();
    assert_eq!(pinned, [1, 2]);
    let mut record = record.clone();
    record.snapshots.retain(|snapshot| snapshot.name != "c");
    let gone: Vec<u32> = record.take_unneeded().into_iter().map(|node| node.id).collect();
    assert_eq!(gone, [5, 4]);
}

#[test]
fn a_merge_moves_children_snapshots_and_head_and_removes_what_nothing_needs() {
    let ids = |nodes: &[Node]| nodes.iter().map(|node| (node.id, node.parent)).collect::<Vec<_>>();
    let names = |record: &Record| {
        record.snapshots.iter().map(|snapshot| (snapshot.name.clone(), snapshot.node)).collect::<Vec<_>>()
    };
    let pairs =
        |pairs: &[(&str, u32)]| pairs.iter().map(|(name, node)| ((*name).to_owned(), *node)).collect::<Vec<_>>();
    // Down: the head, and the image with the snapshots b and b2, into the base.
    let mut down = record();
    assert_eq!(ids(&down.merge_down(&[3, 2], 1)), [(3, Some(2)), (2, Some(1))]);
    assert_eq!((down.head, ids(&down.nodes)), (1, vec![(1, None), (4, Some(1)), (5, Some(4))]));
    assert_eq!(names(&down), pairs(&[("c", 5)]));
    // Down below a head, which then has the base as its parent.
    let mut below = record();
    assert_eq!(ids(&below.merge_down(&[2], 1)), [(2, Some(1))]);
    assert_eq!((below.head, ids(&below.nodes)[1]), (3, (3, Some(1))));
    assert_eq!(names(&below), pairs(&[("b", 1), ("b2", 1), ("c", 5)]));
    // Up: the image of b and b2 into the head. Its branch keeps the base.
    let mut up = record();
    assert_eq!(ids(&up.merge_up(3, 2)), [(2, Some(1))]);
    assert_eq!((up.head, ids(&up.nodes)[1]), (3, (3, Some(1))));
    assert_eq!(names(&up), pairs(&[("a", 1), ("c", 5)]));
    let mut whole = record();
    assert_eq!(ids(&whole.drop_snapshot("c")), [(5, Some(4)), (4, Some(1))]);
    assert!(whole.drop_snapshot("b").is_empty(), "b2 needs the image");
}

#[test]
fn inconsistent_records_are_refused() {
    type Change = fn(&mut Record);
    let changes: [(&str, Change); 12] = [
        ("circle", |r| r.nodes[0].parent = Some(3)),
        ("itself", |r| r.nodes[0].parent = Some(1)),
        ("missing parent", |r| r.nodes[0].parent = Some(99)),
        ("same number", |r| r.nodes[4].id = 4),
        ("no head", |r| r.head = 77),
        ("head below others", |r| r.head = 2),
        ("path", |r| r.nodes[0].descriptor = "../vm.vmdk".to_owned()),
        ("stem", |r| r.stem = "a/b".to_owned()),
        ("lost snapshot", |r| r.snapshots[0].node = 50),
        ("snapshot twice", |r| r.snapshots[1].name = "a".to_owned()),
        ("number twice", |r| r.snapshots[1].uid = 1),
        ("pending path", |r| r.pending.as_mut().unwrap().made[0].name = "/etc/passwd".to_owned()),
    ];
    for (what, change) in changes {
        let mut bad = record();
        change(&mut bad);
        assert_eq!(again(&bad).unwrap_err().kind(), ErrorKind::Corrupt, "{what}");
    }
    let mut deep = record();
    deep.nodes = (1..=4000).map(|id| node(id, (id > 1).then(|| id - 1))).collect();
    deep.head = 4000;
    deep.pending = None;
    assert_eq!(again(&deep).unwrap().line(4000).unwrap().len(), 4000);
    deep.nodes = (1..=5000).map(|id| node(id, (id > 1).then(|| id - 1))).collect();
    assert!(again(&deep).is_err());
}
