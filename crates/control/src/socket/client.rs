//! The client of the control socket.

use super::lines::{Line, LineReader};
use crate::dispatch::Watch;
use crate::message::{FromClient, FromServer, REPLY_LINE_MAX, REQUEST_LINE_MAX, Reply, Request, decode, encode};
use error::{Error, ErrorKind, Result};
use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Interval at which a waiting client checks for cancellation.
const CANCEL_INTERVAL: Duration = Duration::from_millis(50);

/// A connection to the owner of a datastore.
pub struct Client {
    lines: LineReader<UnixStream>,
}

fn broken(error: io::Error) -> Error {
    Error::io("the connection to the server of the datastore broke; whether the request was done is not known", error)
}

impl Client {
    /// A client over a connected stream.
    pub fn new(stream: UnixStream) -> Result<Self> {
        stream.set_read_timeout(Some(CANCEL_INTERVAL)).map_err(broken)?;
        Ok(Self { lines: LineReader::new(stream, REPLY_LINE_MAX) })
    }

    fn send(&self, message: &FromClient) -> Result<()> {
        let line = encode(message, REQUEST_LINE_MAX)?;
        let mut stream = self.lines.stream();
        stream.write_all(&line).map_err(broken)
    }

    /// Sends a request and waits until it ends. If `watch` is cancelled, the client sends the message `cancel`. The
    /// client still waits for the reply, which shows whether the request was cancelled or had completed.
    pub fn ask(&mut self, request: Request, watch: &dyn Watch) -> Result<Reply> {
        // A server that refuses the connection sends an error and closes the connection. Then sending fails with EPIPE,
        // and the error of the server is reported instead.
        let sent = self.send(&FromClient::Request(request));
        let mut cancel_sent = false;
        loop {
            if watch.cancelled() && !cancel_sent {
                self.send(&FromClient::Cancel)?;
                cancel_sent = true;
            }
            let line = match self.lines.next() {
                Ok(Line::Complete(line)) => line,
                Ok(Line::End) => {
                    sent?;
                    return Err(broken(io::ErrorKind::UnexpectedEof.into()));
                }
                Ok(Line::TooLong) => {
                    return Err(Error::new(
                        ErrorKind::Invalid,
                        "the server sent a line longer than the protocol allows",
                    ));
                }
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => continue,
                Err(e) => return Err(broken(e)),
            };
            match decode(&line)? {
                FromServer::Progress(report) => watch.update(report.done, report.total),
                FromServer::Part(part) => watch.part(part)?,
                FromServer::Reply(reply) => return Ok(*reply),
                FromServer::Error(failure) => return Err(failure.into()),
            }
        }
    }
}
