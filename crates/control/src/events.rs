//! Events: notifications of every change of a datastore and of its jobs to subscribers.
//!
//! Invariants:
//! 1. A subscriber receives every change made after [`Change::Subscribed`], in the order of event numbers. A change is
//!    in the subscriber's queue before the client that requested the change receives its reply.
//! 2. No request waits for a subscriber. If a subscriber's queue has [`QUEUE_MAX`] events, further events are dropped
//!    until the subscriber takes the queued events. The subscriber then receives the number of dropped events.
//!
//! Locks: `state` is held while an event is added to the queues.

pub mod changes;

use crate::dispatch::Watch;
use crate::message::{Change, Event, Part, Reply};
use backend::clock;
use error::{Error, ErrorKind, Result};
use parking_lot::{Condvar, Mutex};
use std::collections::BTreeMap;
use std::time::Duration;

/// Limit of the events in one subscriber's queue.
pub const QUEUE_MAX: usize = 1024;

/// Limit of the number of subscribers: lower than the limit of connections, so that connections remain for other
/// requests.
pub const SUBSCRIBERS_MAX: usize = 16;

/// Interval at which a subscription checks for cancellation.
const INTERVAL: Duration = Duration::from_millis(100);

/// The events of one datastore.
#[derive(Default)]
pub struct Events {
    state: Mutex<EventsState>,
    changed: Condvar,
}

#[derive(Default)]
struct EventsState {
    /// Number of the last event published.
    last: u64,
    /// Number given to the last subscriber.
    subscribers: u64,
    queues: BTreeMap<u64, Queue>,
    closed: bool,
}

/// The events that a subscriber has not taken yet.
#[derive(Default)]
struct Queue {
    events: Vec<Event>,
    /// Number of events dropped since `events` was full, and the number of the last dropped event.
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

/// A subscription, which ends when this value is dropped.
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
    /// The queued events; waits up to [`INTERVAL`] for the first one. `None` after [`Events::close`].
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
    /// Adds changes to the queues of all subscribers.
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

    /// Ends all subscriptions after the queued events were passed on.
    pub fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_all();
    }

    /// Keeps others from publishing changes until the result is dropped.
    #[cfg(test)]
    pub(crate) fn held(&self) -> impl Drop {
        self.state.lock()
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

    /// Passes on every change from now on, until cancelled.
    ///
    /// # Errors
    /// Always ends with an error: `Busy` if there are too many subscribers, `Interrupted` if cancelled, `Stopped` when
    /// the process closes the datastore, or the error of `watch`.
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
