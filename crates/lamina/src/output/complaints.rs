//! Failed parts of a request, printed to stderr with one line each, in addition to the reply.

use crate::exit;
use control::{Cloned, Failure};
use error::ErrorKind;
use std::io::{self, Write};

/// Prints the failures; returns the exit code of the first one.
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

/// Prints which clones are incomplete or were not made; returns the exit code.
pub fn complain_of_clones(cloned: &Cloned) -> u8 {
    let Cloned { made, failed, .. } = cloned;
    // The reason is printed once, because it is the same for all clones of one guest.
    let without = made.iter().filter(|one| one.without_identity.is_some()).count();
    if let Some(why) = made.iter().find_map(|one| one.without_identity.as_ref()) {
        let _ = writeln!(io::stderr(), "lamina: {without} of {} still have their parent's identity: {why}", made.len());
    }
    let same = made.iter().filter(|one| one.same_randomness).count();
    if same > 0 {
        let _ = writeln!(
            io::stderr(),
            "lamina: {same} of {} may draw their parent's random numbers for up to a minute: their guests have neither \
             reseed-kernel nor Perl nor Python to reseed the kernel",
            made.len()
        );
    }
    // Clones that were not begun because of an interruption are counted on one line.
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
