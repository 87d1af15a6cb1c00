//! Every change of a datastore, cut off at each request to the medium in turn, with a second cut in recovery; and
//! operations that reproduce bugs found by random runs.

use simulation::operation::{Operation, Profile, Span};
use simulation::scenario::{Failure, carry_out};

/// An upper limit of the number of requests to the medium that one of these changes makes.
const CUTS: u64 = 70;

const fn span(at: u64, length: u64) -> Span {
    Span { at, length, align: 4096 }
}

fn write(disk: u64, at: u64, length: u64, fill: u64) -> Operation {
    Operation::Write { disk, span: span(at, length), fill, again: false, fua: false }
}

/// Two disks. The first has two snapshots, a clone of the older one, and unflushed writes.
fn history() -> Vec<Operation> {
    vec![
        Operation::Create { capacity: 1 << 20, kind: 7 },
        Operation::Create { capacity: (2 << 20) - 512, kind: 7 },
        write(0, 0, 40_000, 1),
        write(1, 0, 60_000, 2),
        // Writes at the end of the second disk. This end lies within a block.
        write(1, 12, 2048, 3),
        Operation::Snapshot { disk: 0, disks: 1 },
        write(0, 0, 20_000, 4),
        Operation::CloneLinked { source: 0, head: false, count: 1 },
        Operation::Snapshot { disk: 0, disks: 2 },
        Operation::Flush { disk: 0 },
        write(0, 0, 9_000, 5),
        write(1, 0, 9_000, 6),
        write(2, 0, 9_000, 7),
    ]
}

fn run(seed: u64, operations: &[Operation]) {
    if let Err(failure) = carry_out(seed, Profile::PowerCuts, operations) {
        let failure: Failure = *failure;
        panic!("{failure}\n{operations:#?}");
    }
}

/// Runs the history, and then `last` with a power cut after each number of requests to the medium, with and without a
/// cut in recovery.
fn cut_everywhere(last: &[Operation]) {
    for after in 0..CUTS {
        for again in [None, Some(after % 7), Some(10 + after % 23)] {
            let mut operations = history();
            operations.push(Operation::Cut { after, again });
            operations.extend_from_slice(last);
            operations.extend([Operation::Compare, Operation::Check, Operation::Reopen, Operation::Compare]);
            run(after, &operations);
        }
    }
}

#[test]
fn creating_a_disk_is_atomic() {
    for kind in [7, 0, 1] {
        cut_everywhere(&[Operation::Create { capacity: 300 << 10, kind }]);
    }
}

#[test]
fn taking_snapshots_is_atomic() {
    cut_everywhere(&[Operation::Snapshot { disk: 0, disks: 3 }, write(0, 0, 9_000, 8), Operation::Flush { disk: 0 }]);
}

#[test]
fn deleting_and_reverting_are_atomic() {
    cut_everywhere(&[Operation::DeleteSnapshot { snapshot: 1 }, Operation::Pump { rounds: 3 }]);
    cut_everywhere(&[Operation::Revert { snapshot: 0 }, write(0, 0, 9_000, 8)]);
    cut_everywhere(&[Operation::Delete { disk: 1, promote: false }, Operation::Pump { rounds: 3 }]);
}

#[test]
fn deleting_a_disk_with_promotion_of_clones_is_atomic() {
    for disk in 0..3 {
        cut_everywhere(&[Operation::Delete { disk, promote: true }]);
    }
}

#[test]
fn cloning_a_head_with_its_snapshot_is_atomic() {
    cut_everywhere(&[Operation::CloneLinked { source: 1, head: true, count: 3 }]);
    cut_everywhere(&[Operation::CloneFull { source: 1, head: true, cancel: false }]);
}

#[test]
fn a_disk_that_shrank_and_grew_reads_zeros_after_a_power_cut() {
    let resize = |capacity| Operation::Resize { disk: 1, capacity, by_device: false };
    cut_everywhere(&[resize(10_240), resize(1 << 20), Operation::Compare]);
    let mut history = history();
    history.extend([resize(10_240), Operation::Kill, resize(1 << 20), Operation::Compare, Operation::Check]);
    run(1, &history);
}

#[test]
fn payload_in_the_journal_survives_power_cuts_in_an_overwrite_and_in_recovery() {
    // The flush of the interrupted recovery must not count as a flush of the overwrite.
    for after in 0..8 {
        for again in 0..40 {
            let operations = [
                Operation::Create { capacity: 1 << 20, kind: 7 },
                write(0, 0, 8192, 1),
                Operation::Flush { disk: 0 },
                write(0, 0, 8192, 2),
                Operation::Cut { after, again: Some(again) },
                Operation::Pump { rounds: 2 },
                Operation::Kill,
                Operation::Compare,
            ];
            for seed in 0..4 {
                run(seed, &operations);
            }
        }
    }
}

#[test]
fn space_reserved_before_a_kill_is_freed() {
    let thick = Operation::Create { capacity: 1_984_512, kind: 0 };
    run(1, &[thick.clone(), write(0, 0, 1_000_000, 1), Operation::Kill, Operation::Check]);
    // Space is also freed if nothing was journalled since the datastore was opened.
    let quiet = [thick, Operation::Snapshot { disk: 0, disks: 1 }, Operation::Reopen, write(0, 0, 4096, 1)];
    for after in 0..12 {
        let cut =
            [Operation::Cut { after, again: None }, Operation::Diff { disk: 0, from: 0, to: 1 }, Operation::Check];
        run(after, &[&quiet[..], &cut[..]].concat());
    }
}

#[test]
fn an_operation_refused_on_a_full_file_system_has_no_effect() {
    let base = [
        Operation::Create { capacity: 2 << 20, kind: 7 },
        Operation::Create { capacity: 1 << 20, kind: 0 },
        write(0, 0, 300_000, 1),
        Operation::Snapshot { disk: 0, disks: 2 },
        Operation::Room { bytes: 0 },
    ];
    let changes = [
        Operation::Create { capacity: 8 << 20, kind: 7 },
        Operation::Create { capacity: 8 << 20, kind: 0 },
        Operation::Resize { disk: 0, capacity: 1_000_448, by_device: false },
        Operation::CloneLinked { source: 0, head: true, count: 3 },
        Operation::CloneFull { source: 0, head: true, cancel: false },
        Operation::Revert { snapshot: 1 },
        Operation::Snapshot { disk: 0, disks: 2 },
    ];
    for change in changes {
        let then = [change, Operation::Compare, Operation::Check, Operation::Reopen, Operation::Compare];
        run(3, &[&base[..], &then[..]].concat());
    }
    // Writes of a thick disk always have space, flushed or not, before and after a snapshot and after reverting to it.
    let mut thick = base.to_vec();
    for round in 0..6 {
        thick.extend([write(1, round, 500_000, round + 1), Operation::Flush { disk: 1 }]);
    }
    run(4, &thick);
    // Growing the disk, refused or not, must not use up the reservation for writes to shared blocks.
    for grown in [8 << 20, (1 << 20) + 65_536] {
        let mut thick = base.to_vec();
        thick.insert(4, Operation::Room { bytes: 2 << 20 });
        thick.insert(4, Operation::Snapshot { disk: 1, disks: 1 });
        thick.push(Operation::Resize { disk: 1, capacity: grown, by_device: false });
        thick.push(write(1, 0, 1 << 20, 9));
        run(5, &thick);
    }
}
