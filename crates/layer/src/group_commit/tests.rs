//! Which commit serves which call: by example, and with threads that write and flush.

use super::*;
use crate::model::Random;

/// Makes a commit as the formats do. Returns true if this call made it, false if another thread's commit served the
/// call.
fn commit(commits: &GroupCommit<u64>, call: Call, what: impl FnOnce(&mut u64) -> Result<()>) -> Result<bool> {
    let Some(mut turn) = commits.turn_for(call) else { return commits.check_changeable("image", true).map(|()| false) };
    commits.check_changeable("image", true)?;
    turn.begin();
    what(&mut turn)?;
    turn.complete();
    Ok(true)
}

#[test]
fn a_call_is_served_by_a_commit_that_begins_later() {
    let commits = GroupCommit::new(0);
    let early = commits.call();
    let mut turn = commits.try_turn().unwrap();
    turn.begin();
    let during = commits.call();
    assert!(commits.try_turn().is_none(), "only one commit at a time");
    turn.complete();
    drop(turn);
    assert!(commits.turn_for(early).is_none(), "served");
    assert!(commits.turn_for(during).is_some(), "the call came after the commit had begun");
    assert!(commits.turn_for(commits.call()).is_some());
}

#[test]
fn a_failed_commit_serves_no_call() {
    let commits = GroupCommit::new(0);
    let call = commits.call();
    let full = || Error::new(ErrorKind::NoSpace, "full");
    assert!(commit(&commits, call, |_| Err(full())).is_err());
    assert!(commit(&commits, call, |_| Ok(())).unwrap(), "the call makes a commit of its own");
    assert!(!commit(&commits, call, |_| Ok(())).unwrap());
    let last = commits.call();
    assert_eq!(commits.stop_after(full()).kind(), ErrorKind::Stopped, "the changes are not kept");
    assert_eq!(commit(&commits, last, |_| Ok(())).unwrap_err().kind(), ErrorKind::Stopped);
    assert_eq!(commits.check_changeable("image", false).unwrap_err().kind(), ErrorKind::Stopped);
    assert_eq!(GroupCommit::new(()).check_changeable("image", false).unwrap_err().kind(), ErrorKind::ReadOnly);
}

#[test]
fn calls_that_wait_share_one_commit() {
    let commits = &GroupCommit::new(0);
    let (held, made) = (commits.turn(), &AtomicU64::new(0));
    let waiting = &AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let call = commits.call();
                waiting.fetch_add(1, Ordering::SeqCst);
                made.fetch_add(u64::from(commit(commits, call, |_| Ok(())).unwrap()), Ordering::SeqCst);
            });
        }
        while waiting.load(Ordering::SeqCst) < 8 {
            std::thread::yield_now();
        }
        drop(held);
    });
    assert_eq!(made.load(Ordering::SeqCst), 1);
}

#[test]
fn writes_before_a_flush_are_on_the_medium_after_the_flush() {
    const THREADS: usize = 4;
    const ROUNDS: u64 = 1_000;
    let written: Vec<AtomicU64> = (0..THREADS).map(|_| AtomicU64::new(0)).collect();
    let medium: Vec<AtomicU64> = (0..THREADS).map(|_| AtomicU64::new(0)).collect();
    let (commits, made) = (GroupCommit::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (written, medium, commits, made) = (&written, &medium, &commits, &made);
            scope.spawn(move || {
                let mut random = Random::new(thread as u64);
                for round in 1..=ROUNDS {
                    written[thread].store(round, Ordering::SeqCst);
                    let work = |count: &mut u64| {
                        // A commit reads the values at its beginning and stores them at its end; some fail for lack of
                        // space.
                        let taken: Vec<u64> = written.iter().map(|word| word.load(Ordering::SeqCst)).collect();
                        std::thread::yield_now();
                        if random.below(20) == 0 {
                            return Err(Error::new(ErrorKind::NoSpace, "full"));
                        }
                        *count += 1;
                        medium.iter().zip(taken).for_each(|(word, taken)| word.store(taken, Ordering::SeqCst));
                        Ok(())
                    };
                    if let Ok(own) = commit(commits, commits.call(), work) {
                        made.fetch_add(u64::from(own), Ordering::SeqCst);
                        assert!(medium[thread].load(Ordering::SeqCst) >= round, "flushed but not on the device");
                    }
                }
            });
        }
    });
    assert_eq!(*commits.turn(), made.load(Ordering::SeqCst), "commits do not overlap");
}
