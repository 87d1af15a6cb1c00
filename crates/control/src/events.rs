//! Events: every change of a datastore and of its jobs, told to whatever subscribes.
//!
//! What holds:
//! 1. A subscriber is told of every change that is made after [`Change::Subscribed`], in the order of their numbers.
//!    A change is in its queue before the request that made it has its reply.
//! 2. Nothing waits for a subscriber. One that has [`QUEUE_MAX`] events to take loses those that follow, until it has
//!    taken them; then it is told how many it has lost.
//!
//! Locks: `state`, for as long as an event is put into the queues.

pub mod changes;

use crate::dispatch::Watch;
use crate::message::{Change, Event, Part, Reply};
use backend::clock;
use error::{Error, ErrorKind, Result};
use parking_lot::{Condvar, Mutex};
use std::collections::BTreeMap;
use std::time::Duration;

/// Events that wait for one subscriber.
pub const QUEUE_MAX: usize = 1024;

/// Subscribers at once: fewer than connections, so that verbs always find room.
pub const SUBSCRIBERS_MAX: usize = 16;

/// How often a subscription looks whether it is still wanted.
const INTERVAL: Duration = Duration::from_millis(100);

/// The events of one datastore.
#[derive(Default)]
pub struct Events {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Number of the last event.
    last: u64,
    /// Number of the last subscriber.
    subscribers: u64,
    queues: BTreeMap<u64, Queue>,
    closed: bool,
}

/// What one subscriber is still to be told.
#[derive(Default)]
struct Queue {
    events: Vec<Event>,
    /// Events dropped after those, and the last of them.
    missed: u64,
    last_missed: u64,
}

impl Queue {
    fn put(&mut self, event: &Event) {
        if self.missed == 0 && self.events.len() < QUEUE_MAX {
            self.events.push(event.clone());
        } else {
            self.missed += 1;
            self.last_missed = event.number;
        }
    }

    fn take(&mut self) -> Vec<Event> {
        let mut events = std::mem::take(&mut self.events);
        if self.missed > 0 {
            let change = Change::Missed { count: std::mem::take(&mut self.missed) };
            events.push(Event { number: self.last_missed, time: clock::seconds(), change });
        }
        events
    }
}

/// A subscriber; it goes with this.
struct Subscription<'a> {
    events: &'a Events,
    number: u64,
}

impl Drop for Subscription<'_> {
    fn drop(&mut self) {
        self.events.state.lock().queues.remove(&self.number);
    }
}

impl Subscription<'_> {
    /// What is to be told; waits for it for [`INTERVAL`]. `None` after the end of all events.
    fn take(&self) -> Option<Vec<Event>> {
        let mut state = self.events.state.lock();
        let mut waited = false;
        loop {
            let taken = state.queues.get_mut(&self.number).map(Queue::take).unwrap_or_default();
            match (taken.is_empty(), state.closed) {
                (true, true) => return None,
                (true, false) if !waited => {
                    waited = true;
                    self.events.changed.wait_for(&mut state, INTERVAL);
                }
                _ => return Some(taken),
            }
        }
    }
}

impl Events {
    /// Tells subscribers of changes.
    pub fn publish(&self, changes: Vec<Change>) {
        if changes.is_empty() {
            return;
        }
        let time = clock::seconds();
        let mut state = self.state.lock();
        for change in changes {
            state.last += 1;
            let event = Event { number: state.last, time, change };
            state.queues.values_mut().for_each(|queue| queue.put(&event));
        }
        self.changed.notify_all();
    }

    /// Ends all subscriptions, once they have told what there is.
    pub fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_all();
    }

    fn subscribe(&self) -> Result<Subscription<'_>> {
        let mut state = self.state.lock();
        if state.queues.len() >= SUBSCRIBERS_MAX {
            let text = format!("{SUBSCRIBERS_MAX} subscribers follow the events already: end one of them first");
            return Err(Error::new(ErrorKind::Busy, text));
        }
        state.subscribers += 1;
        let number = state.subscribers;
        let mut queue = Queue::default();
        queue.put(&Event { number: state.last, time: clock::seconds(), change: Change::Subscribed });
        state.queues.insert(number, queue);
        Ok(Subscription { events: self, number })
    }

    /// Tells of every change from now on, until that is not wanted any more.
    ///
    /// # Errors
    /// Always: `Busy` for a subscriber too many, `Interrupted` on request, `Stopped` when the process closes the
    /// datastore, the error of `watch` if it takes no more.
    pub fn follow(&self, watch: &dyn Watch) -> Result<Reply> {
        let subscription = self.subscribe()?;
        while let Some(events) = subscription.take() {
            for event in events {
                watch.part(Part::Event(Box::new(event)))?;
            }
            if watch.cancelled() {
                return Err(Error::new(ErrorKind::Interrupted, "the subscription was ended on request"));
            }
        }
        Err(Error::new(ErrorKind::Stopped, "the server of the datastore is stopping: there are no more events"))
    }
}

#[cfg(test)]
mod tests;
