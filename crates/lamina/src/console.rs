//! `lamina vm console`: access to the guest's first serial port.

use crate::{End, exit, follow};
use backend::private;
use control::{MachineReply, Reply};
use error::{Error, ErrorKind};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use std::fs::File;
use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The escape key, Ctrl-], as in telnet and virsh.
const ESCAPE: u8 = 0x1d;
/// Interval at which [`exchange`] checks for an interruption.
const LOOK: Duration = Duration::from_millis(100);

/// The terminal in raw mode. Dropping this value restores the former mode.
struct Raw {
    before: Termios,
}

impl Raw {
    fn new() -> io::Result<Self> {
        let before = tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
        Ok(Self { before })
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.before);
    }
}

/// Attaches to the console; with `said`, prints the output so far instead.
pub fn attach(reply: &Reply, said: bool, quiet: Duration) -> std::result::Result<End, End> {
    let Reply::Machine(MachineReply::Console { name, socket, lock, log }) = reply else {
        return Err(
            Error::new(ErrorKind::Invalid, "the reply does not contain the path of the console's socket").into()
        );
    };
    let mut out = io::stdout().lock();
    if said {
        let mut said = match File::open(log) {
            Ok(said) => said,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(End::Code(0)),
            Err(e) => return Err(Error::io(format!("opening '{}'", log.display()), e).into()),
        };
        io::copy(&mut said, &mut out)?;
        out.flush()?;
        return Ok(End::Code(0));
    }
    // The port serves one connection at a time, and leaves a second one waiting without a message. So a lock file
    // ensures that only one command connects.
    let lock = private::create(lock).map_err(|e| Error::io(format!("opening '{}'", lock.display()), e))?;
    if lock.try_lock().is_err() {
        let text = format!("another process is attached to the console of machine '{name}'");
        return Err(Error::new(ErrorKind::Busy, text).into());
    }
    let stream =
        UnixStream::connect(socket).map_err(|e| Error::io(format!("connecting to '{}'", socket.display()), e))?;
    let interactive = io::stdin().is_terminal();
    if interactive {
        let _ = write!(io::stderr(), "attached to {name}; Ctrl-] detaches\r\n");
    }
    let outcome = {
        let _raw = interactive.then(Raw::new).transpose()?;
        exchange(&stream, interactive, quiet, &mut out)
    };
    if interactive {
        let _ = writeln!(io::stderr(), "\ndetached from {name}");
    }
    outcome
}

/// Copies in both directions until the console closes, the escape key is pressed, or the input has ended and no output
/// arrives for the time `quiet`.
fn exchange(
    stream: &UnixStream,
    interactive: bool,
    quiet: Duration,
    out: &mut dyn Write,
) -> std::result::Result<End, End> {
    let interrupted = follow::interruption(exit::INTERRUPTED)?;
    let (mut buffer, mut input_open, mut heard) = (vec![0; 16 << 10], true, Instant::now());
    let lost = |e| Error::io("exchanging data with the console", e);
    loop {
        if interrupted.load(Ordering::Relaxed) {
            return Ok(End::Code(exit::INTERRUPTED));
        }
        if !interactive && !input_open && heard.elapsed() >= quiet {
            return Ok(End::Code(0));
        }
        let input = io::stdin();
        let mut entries = vec![PollFd::from_borrowed_fd(stream.as_fd(), PollFlags::IN)];
        if input_open {
            entries.push(PollFd::from_borrowed_fd(input.as_fd(), PollFlags::IN));
        }
        let wait = Timespec { tv_sec: 0, tv_nsec: i64::from(LOOK.subsec_nanos()) };
        match poll(&mut entries, Some(&wait)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(lost(e.into()).into()),
        }
        let ready: Vec<bool> = entries.iter().map(|entry| !entry.revents().is_empty()).collect();
        if ready[0] {
            let mut from = stream;
            match from.read(&mut buffer).map_err(lost)? {
                // The console closes when the machine stops.
                0 => return Ok(End::Code(0)),
                length => {
                    out.write_all(&buffer[..length])?;
                    out.flush()?;
                    heard = Instant::now();
                }
            }
        }
        if ready.get(1) == Some(&true) {
            let length = rustix::io::read(&input, &mut buffer).map_err(|e| lost(e.into()))?;
            let keys = &buffer[..length];
            let escape = keys.iter().position(|key| interactive && *key == ESCAPE);
            let mut to = stream;
            to.write_all(&keys[..escape.unwrap_or(length)]).map_err(lost)?;
            if escape.is_some() {
                return Ok(End::Code(0));
            }
            input_open = length > 0;
            heard = Instant::now();
        }
    }
}
