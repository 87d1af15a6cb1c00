//! Log messages when a connection ends by a protocol violation. This is a separate test program, because `tracing`
//! caches for the whole process whether an event is enabled, so sessions of other tests would interfere.
#![allow(clippy::unwrap_used, missing_docs)]

#[allow(dead_code)]
#[path = "../nbd/in_process.rs"]
mod in_process;
#[allow(dead_code)]
#[path = "../nbd/memory_disk.rs"]
mod memory_disk;

use export::nbd::Terms;
use in_process::{Script, encode, opening, run};
use memory_disk::{MemoryDisk, Shelf};
use parking_lot::Mutex;
use std::fmt::{Debug, Write};
use std::sync::Arc;
use testkit::protocol::{CMD_DISC, CMD_WRITE, Mode};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Collects log events as lines, each with the names of its spans before it.
#[derive(Default)]
struct Log {
    spans: Mutex<Vec<String>>,
    entered: Mutex<Vec<u64>>,
    lines: Arc<Mutex<Vec<String>>>,
}

struct Line<'a>(&'a mut String);

impl Visit for Line<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, " {}={value:?}", field.name()).unwrap();
    }
}

impl Subscriber for Log {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, attributes: &Attributes<'_>) -> Id {
        let mut line = attributes.metadata().name().to_owned();
        attributes.record(&mut Line(&mut line));
        let mut spans = self.spans.lock();
        spans.push(line);
        Id::from_u64(spans.len() as u64)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        let spans = self.spans.lock();
        let mut line = event.metadata().level().to_string();
        for id in &*self.entered.lock() {
            write!(line, " {}", spans[*id as usize - 1]).unwrap();
        }
        event.record(&mut Line(&mut line));
        self.lines.lock().push(line);
    }
    fn enter(&self, id: &Id) {
        self.entered.lock().push(id.into_u64());
    }
    fn exit(&self, _: &Id) {
        self.entered.lock().pop();
    }
}

/// The log lines of a session in which the client sends `requests`.
fn log_of(mode: Mode, requests: Vec<u8>) -> Vec<String> {
    let log = Log::default();
    let lines = Arc::clone(&log.lines);
    tracing::subscriber::with_default(log, || {
        let shelf = Shelf::of(&[&MemoryDisk::new("vm", 1 << 20, 1)]);
        run(&*shelf, &Terms::default(), Script::new(vec![opening(mode, &[]), requests], 0))
    });
    std::mem::take(&mut *lines.lock())
}

#[test]
fn a_connection_that_the_server_ends_is_logged_with_export_and_reason() {
    for mode in [Mode::Simple, Mode::Structured, Mode::Extended] {
        let oversize = encode(mode, CMD_WRITE, 0, 1, 0, (32 << 20) + 1, &[]);
        for (requests, reason) in [
            (vec![0xa5; 64], "a request does not begin with its magic number"),
            (oversize, "a request (command 1) announces a payload of 33554433 bytes; the maximum is 33554432"),
        ] {
            let lines = log_of(mode, requests);
            let said: Vec<&String> = lines.iter().filter(|line| line.contains(reason)).collect();
            assert_eq!(said.len(), 1, "{lines:#?}");
            assert!(said[0].starts_with("WARN export name=\"vm\""), "{}", said[0]);
            assert!(said[0].contains("client of vm"), "{}", said[0]);
        }
        let farewell = encode(mode, CMD_DISC, 0, 1, 0, 0, &[]);
        assert!(!log_of(mode, farewell).iter().any(|line| line.contains("WARN")));
    }
}
