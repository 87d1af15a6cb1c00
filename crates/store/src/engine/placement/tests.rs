//! Placement in isolation: every block state, and holds over several pending operations.

use super::*;

const OWN: BlockState =
    BlockState { references: 1, shared_path: false, held: false, in_flight: false, unwritten: false };

#[test]
fn only_an_exclusive_block_without_pending_operations_is_overwritten() {
    assert_eq!(place(OWN), Placement::InPlace);
    assert_eq!(place(BlockState { unwritten: true, ..OWN }), Placement::Fill);
    for unwritten in [false, true] {
        let own = BlockState { unwritten, ..OWN };
        assert_eq!(place(BlockState { references: 2, ..own }), Placement::New);
        assert_eq!(place(BlockState { shared_path: true, ..own }), Placement::New);
        assert_eq!(place(BlockState { held: true, ..own }), Placement::New);
        assert_eq!(place(BlockState { in_flight: true, ..own }), Placement::New);
    }
}

#[test]
fn a_block_is_held_until_the_last_operation_that_concerns_it_is_durable() {
    let mut holds = Holds::default();
    holds.hold_block(7, false);
    let first = holds.pushed();
    holds.hold_block(7, true);
    let second = holds.pushed();
    holds.hold_block(7, true);
    let third = holds.pushed();
    assert!(!holds.release_block(7, first));
    assert!(!holds.release_block(7, second));
    assert!(holds.release_block(7, third));
    // A later operation holds the block again, and its completion alone releases the block.
    holds.hold_block(7, false);
    let fourth = holds.pushed();
    assert!(holds.release_block(7, fourth));
}

#[test]
fn a_node_is_held_until_the_operation_that_unshared_it_is_durable() {
    let mut holds = Holds::default();
    assert!(!holds.is_node_held(NodeId(3)));
    holds.hold_node(NodeId(3));
    let first = holds.pushed();
    let second = holds.pushed();
    assert!(holds.is_node_held(NodeId(3)));
    holds.committed(first);
    assert!(!holds.is_node_held(NodeId(3)));
    holds.committed(second);
    assert!(holds.no_nodes());
}

#[test]
fn moved_entries_keep_the_hold_of_their_node_without_prolonging_it() {
    let mut holds = Holds::default();
    holds.hold_node(NodeId(1));
    let first = holds.pushed();
    holds.spread(&[NodeId(1), NodeId(2)]);
    let second = holds.pushed();
    assert!(holds.is_node_held(NodeId(1)) && holds.is_node_held(NodeId(2)));
    holds.committed(first);
    // The second operation is still pending. The hold that this operation spread to another node has ended with the
    // original hold.
    assert!(!holds.is_node_held(NodeId(1)) && !holds.is_node_held(NodeId(2)));
    holds.committed(second);
}

#[test]
fn cleaning_removes_only_holds_that_ended() {
    let mut holds = Holds::default();
    for node in 0..5000 {
        holds.hold_node(NodeId(node));
        let number = holds.pushed();
        if node % 2 == 1 {
            holds.committed(number - 1);
        }
    }
    assert!(holds.nodes.len() < 3000, "{}", holds.nodes.len());
    assert!(holds.is_node_held(NodeId(4999)));
    assert!(!holds.is_node_held(NodeId(4998)));
}

#[test]
fn runs_in_flight_cover_their_blocks() {
    let mut in_flight = InFlight::default();
    in_flight.claim(Run { start: 10, blocks: 4 });
    in_flight.claim(Run { start: 14, blocks: 1 });
    let covered: Vec<u64> = (8..18).filter(|block| in_flight.contains(*block)).collect();
    assert_eq!(covered, [10, 11, 12, 13, 14]);
    in_flight.release(Run { start: 10, blocks: 4 });
    assert!(!in_flight.contains(13) && in_flight.contains(14));
}

#[test]
fn a_watch_ends_when_its_block_is_written_or_freed_and_does_not_return() {
    let mut in_flight = InFlight::default();
    let (first, other) = (in_flight.watch(7), in_flight.watch(8));
    let second = in_flight.watch(7);
    in_flight.unwatch(first);
    assert!(in_flight.is_watched(second) && in_flight.is_watched(other), "another thread has the watch too");
    let write = Run { start: 6, blocks: 2 };
    in_flight.claim(write);
    in_flight.release(write);
    assert!(!in_flight.is_watched(second) && in_flight.is_watched(other));
    let third = in_flight.watch(7);
    assert!(in_flight.is_watched(third) && !in_flight.is_watched(second), "a later watch is another one");
    in_flight.unwatch(second);
    assert!(in_flight.is_watched(third));
    in_flight.end_watches(Run { start: 7, blocks: 1 });
    assert!(!in_flight.is_watched(third));
    in_flight.unwatch(other);
    in_flight.unwatch(third);
    assert!(in_flight.watches_nothing());
}

mod model;
