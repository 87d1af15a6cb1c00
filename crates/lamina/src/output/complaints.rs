//! What was not done, a line for each on stderr, beside what was printed of what was.

use crate::exit;
use control::{Cloned, Failure};
use error::ErrorKind;
use std::io::{self, Write};

/// Tells which failed; the exit code of the first.
pub fn complain<'a>(failed: impl IntoIterator<Item = &'a (String, Failure)>) -> u8 {
    let mut err = io::stderr().lock();
    let mut code = 0;
    for (name, failure) in failed {
        let line: Vec<&str> = failure.message().lines().map(str::trim).collect();
        let _ = writeln!(err, "lamina: {name}: {}", line.join(" "));
        if code == 0 {
            code = exit::code(failure.kind());
        }
    }
    code
}

/// Tells what clones lack, and which were not made; the exit code.
pub fn complain_of_clones(cloned: &Cloned) -> u8 {
    let Cloned { made, failed, .. } = cloned;
    // Said about the first of them: what is true of one is true of all from the same guest.
    let without = made.iter().filter(|one| one.without_identity.is_some()).count();
    if let Some(why) = made.iter().find_map(|one| one.without_identity.as_ref()) {
        let _ = writeln!(io::stderr(), "lamina: {without} of {} still have their parent's identity: {why}", made.len());
    }
    let same = made.iter().filter(|one| one.same_randomness).count();
    if same > 0 {
        let _ = writeln!(
            io::stderr(),
            "lamina: {same} of {} may draw their parent's random numbers for up to a minute: their guests have neither \
             reseed-kernel nor Perl nor Python to have the kernel start over",
            made.len()
        );
    }
    // Those that were interrupted before they were begun are one fact, not many.
    let (stopped, failed): (Vec<_>, Vec<_>) =
        failed.iter().partition(|(_, failure)| failure.kind() == ErrorKind::Interrupted);
    if !stopped.is_empty() {
        let _ = writeln!(io::stderr(), "lamina: stopped on request; {} were not made", stopped.len());
    }
    match complain(failed) {
        0 if !stopped.is_empty() => exit::INTERRUPTED,
        code => code,
    }
}
