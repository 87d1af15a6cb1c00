//! Operations on many machines: each succeeds completely or has no effect, and each failure is reported.

use error::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use work::Progress;

/// Results of an operation on several machines, by name.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Machines on which the operation succeeded, in the order of the names.
    pub made: Vec<String>,
    /// Machines on which the operation failed, with the error.
    pub failed: Vec<(String, Error)>,
}

/// Calls `work` for each name, with at most `parallel` calls at a time. `progress` counts the completed calls. Once
/// `progress` is cancelled, no further calls are begun; `work` has to complete or undo the calls in progress.
pub fn each(
    names: &[String],
    parallel: usize,
    progress: &dyn Progress,
    work: &(dyn Fn(&str) -> Result<()> + Sync),
) -> Outcome {
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let results: Mutex<Vec<(usize, Result<()>)>> = Mutex::new(Vec::with_capacity(names.len()));
    thread::scope(|scope| {
        for _ in 0..parallel.clamp(1, names.len().max(1)) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(name) = names.get(index) else { break };
                    let result = match progress.cancelled() {
                        true => Err(Error::new(ErrorKind::Interrupted, "stopped before it was begun")),
                        false => work(name),
                    };
                    results.lock().push((index, result));
                    progress.update(done.fetch_add(1, Ordering::Relaxed) as u64 + 1, names.len() as u64);
                }
            });
        }
    });
    let mut results = results.into_inner();
    results.sort_by_key(|(index, _)| *index);
    let mut outcome = Outcome::default();
    for (index, result) in results {
        match result {
            Ok(()) => outcome.made.push(names[index].clone()),
            Err(error) => outcome.failed.push((names[index].clone(), error)),
        }
    }
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    struct Stop(AtomicBool);

    impl Progress for Stop {
        fn update(&self, done: u64, _: u64) {
            self.0.fetch_or(done >= 50, Ordering::Relaxed);
        }
        fn cancelled(&self) -> bool {
            self.0.load(Ordering::Relaxed)
        }
    }

    #[test]
    fn each_item_succeeds_fails_or_is_not_started() {
        let names: Vec<String> = (0..100).map(|number| format!("vm-{number:03}")).collect();
        let seen = Mutex::new(Vec::new());
        let outcome = each(&names, 4, &Stop(AtomicBool::new(false)), &|name| {
            seen.lock().push(name.to_owned());
            match name.ends_with('7') {
                true => Err(Error::new(ErrorKind::Io, "no")),
                false => Ok(()),
            }
        });
        assert_eq!(outcome.made.len() + outcome.failed.len(), 100);
        let begun = outcome.failed.iter().filter(|(_, error)| error.kind() != ErrorKind::Interrupted).count();
        assert_eq!(begun + outcome.made.len(), seen.lock().len());
        assert!((50..60).contains(&seen.lock().len()), "{}", seen.lock().len());
        assert!(outcome.made.iter().all(|name| !name.ends_with('7')));
    }
}
