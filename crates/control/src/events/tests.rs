//! Events that subscribers receive, including subscribers that take events slowly.

#![allow(clippy::unwrap_used)]

use super::*;
use disk::Progress;
use std::sync::atomic::{AtomicBool, Ordering};

/// Takes events until cancelled.
#[derive(Default)]
struct Taken {
    events: Mutex<Vec<Event>>,
    enough: AtomicBool,
}

impl Progress for Taken {
    fn update(&self, _: u64, _: u64) {}
    fn cancelled(&self) -> bool {
        self.enough.load(Ordering::Relaxed)
    }
}

impl Watch for Taken {
    fn part(&self, part: Part) -> Result<()> {
        let Part::Event(event) = part else { panic!("{part:?}") };
        self.events.lock().push(*event);
        Ok(())
    }
}

fn deleted(number: u64) -> Change {
    Change::DiskDeleted { disk: format!("vm{number}") }
}

#[test]
fn every_change_after_the_subscription_is_published_in_order() {
    let events = Events::default();
    events.publish(vec![deleted(1)]);
    let subscription = events.subscribe().unwrap();
    events.publish(vec![deleted(2), deleted(3)]);
    events.publish(vec![deleted(4)]);
    let taken = subscription.take().unwrap();
    assert_eq!(taken[0].change, Change::Subscribed);
    assert_eq!(taken.iter().map(|event| event.number).collect::<Vec<_>>(), [1, 2, 3, 4]);
    assert_eq!(taken[1..].iter().map(|event| event.change.clone()).collect::<Vec<_>>(), [2, 3, 4].map(deleted));
    assert_eq!(subscription.take().unwrap(), [], "nothing twice");
}

#[test]
fn a_slow_subscriber_gets_the_number_of_missed_events_and_delays_no_other() {
    let events = Events::default();
    let (slow, quick) = (events.subscribe().unwrap(), events.subscribe().unwrap());
    let count = QUEUE_MAX as u64 + 10;
    for number in 1..=count {
        events.publish(vec![deleted(number)]);
        assert!(quick.take().unwrap().iter().all(|event| !matches!(event.change, Change::Missed { .. })));
    }
    let taken = slow.take().unwrap();
    // The queue contains the event `Subscribed` too.
    assert_eq!(taken.len(), QUEUE_MAX + 1);
    let last = taken.last().unwrap();
    assert_eq!((last.number, &last.change), (count, &Change::Missed { count: 11 }));
    assert_eq!(taken[QUEUE_MAX - 1].number, count - 11);
    events.publish(vec![deleted(0)]);
    assert_eq!(slow.take().unwrap()[0].number, count + 1, "it goes on");
}

#[test]
fn subscribers_beyond_the_limit_are_refused_until_one_ends() {
    let events = Events::default();
    let mut held: Vec<_> = (0..SUBSCRIBERS_MAX).map(|_| events.subscribe().unwrap()).collect();
    assert_eq!(events.subscribe().err().map(|error| error.kind()), Some(ErrorKind::Busy));
    held.pop();
    assert!(events.subscribe().is_ok());
}

#[test]
fn a_subscription_ends_on_request_and_with_the_events() {
    let events = Events::default();
    let taken = Taken::default();
    std::thread::scope(|scope| {
        let following = scope.spawn(|| events.follow(&taken));
        while taken.events.lock().is_empty() {
            std::thread::yield_now();
        }
        taken.enough.store(true, Ordering::Relaxed);
        assert_eq!(following.join().unwrap().unwrap_err().kind(), ErrorKind::Interrupted);
    });
    assert!(events.state.lock().queues.is_empty(), "no state is kept for a subscriber that has disconnected");
    taken.enough.store(false, Ordering::Relaxed);
    std::thread::scope(|scope| {
        let following = scope.spawn(|| events.follow(&taken));
        while taken.events.lock().len() < 2 {
            std::thread::yield_now();
        }
        events.publish(vec![deleted(1)]);
        events.close();
        assert_eq!(following.join().unwrap().unwrap_err().kind(), ErrorKind::Stopped);
    });
    assert_eq!(taken.events.lock().last().unwrap().change, deleted(1), "earlier events are delivered before the end");
}
