//! A small NBD client for tests: the basic protocol (fixed newstyle, simple replies) over a unix socket.
//!
//! The public clients test compatibility. This client is for tests that need more control: for example, which request
//! was answered when the server was killed, the error of a single block, or many writes in flight. It does not panic if
//! the server disconnects, but returns [`Failure::Gone`].

use std::collections::HashMap;
use std::io::{self, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

const GREETING: u64 = u64::from_be_bytes(*b"NBDMAGIC");
pub const OPTION: u64 = u64::from_be_bytes(*b"IHAVEOPT");
pub const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
const REQUEST: u32 = 0x2560_9513;
pub const SIMPLE_REPLY: u32 = 0x6744_6698;
pub const OPT_GO: u32 = 7;
pub const REP_ACK: u32 = 1;
pub const REP_INFO: u32 = 3;
const FLAG_FUA: u16 = 1;

/// Error numbers of the NBD protocol.
pub const EIO: u32 = 5;
pub const ENOSPC: u32 = 28;

/// The reason why a request failed.
#[derive(Debug)]
pub enum Failure {
    /// The server replied with this error number.
    Errno(u32),
    /// The connection has ended.
    Gone(io::Error),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Gone(error)
    }
}

/// A request to an export.
#[derive(Clone, Copy)]
pub enum Command<'a> {
    Read { offset: u64, length: u32 },
    Write { offset: u64, data: &'a [u8], fua: bool },
    Flush,
    Trim { offset: u64, length: u32, fua: bool },
    Zero { offset: u64, length: u32, fua: bool },
}

/// A connection to one export. Dropping it sends a disconnect request.
pub struct Client {
    stream: UnixStream,
    replies: BufReader<UnixStream>,
    /// Number of data bytes in the reply to each request in flight.
    in_flight: HashMap<u64, usize>,
    next: u64,
    vanishes: bool,
    pub size: u64,
}

impl Drop for Client {
    fn drop(&mut self) {
        if !self.vanishes {
            let mut message = REQUEST.to_be_bytes().to_vec();
            message.extend([0, 0, 0, 2]);
            message.extend([0; 20]);
            // Sending may fail, because the server may have ended.
            let _ = self.stream.write_all(&message);
        }
    }
}

fn number<const N: usize>(stream: &mut dyn Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn unexpected(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_string())
}

impl Client {
    pub fn connect(socket: &Path, export: &str) -> io::Result<Self> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(crate::process::PATIENCE))?;
        stream.set_write_timeout(Some(crate::process::PATIENCE))?;
        let replies = BufReader::with_capacity(256 << 10, stream.try_clone()?);
        let mut client = Self { stream, replies, in_flight: HashMap::new(), next: 0, vanishes: false, size: 0 };
        client.handshake(export)?;
        Ok(client)
    }

    /// Closes the connection without a disconnect request, as a killed client does.
    pub fn vanish(mut self) {
        self.vanishes = true;
    }

    fn handshake(&mut self, export: &str) -> io::Result<()> {
        let [magic, option] = [(); 2].map(|()| number(&mut self.replies).map(u64::from_be_bytes));
        if (magic?, option?) != (GREETING, OPTION) {
            return Err(unexpected("no NBD server"));
        }
        let _flags: [u8; 2] = number(&mut self.replies)?;
        let mut message = Vec::new();
        message.extend(3u32.to_be_bytes());
        message.extend(OPTION.to_be_bytes());
        message.extend(OPT_GO.to_be_bytes());
        message.extend((export.len() as u32 + 6).to_be_bytes());
        message.extend((export.len() as u32).to_be_bytes());
        message.extend(export.as_bytes());
        message.extend(0u16.to_be_bytes());
        self.stream.write_all(&message)?;
        loop {
            let magic = u64::from_be_bytes(number(&mut self.replies)?);
            let _option: [u8; 4] = number(&mut self.replies)?;
            let kind = u32::from_be_bytes(number(&mut self.replies)?);
            let length = u32::from_be_bytes(number(&mut self.replies)?);
            let mut data = vec![0; length as usize];
            self.replies.read_exact(&mut data)?;
            match (magic, kind) {
                (OPTION_REPLY, REP_ACK) => return Ok(()),
                (OPTION_REPLY, REP_INFO) => {
                    if data[..2] == [0, 0] {
                        self.size = u64::from_be_bytes(data[2..10].try_into().unwrap());
                    }
                }
                _ => return Err(unexpected(&format!("{export}: {kind:#x} {}", String::from_utf8_lossy(&data)))),
            }
        }
    }

    /// Sends a request; returns its cookie.
    pub fn submit(&mut self, command: Command) -> Result<u64, Failure> {
        let (kind, fua, offset, length, payload): (u16, bool, u64, u32, &[u8]) = match command {
            Command::Read { offset, length } => (0, false, offset, length, &[]),
            Command::Write { offset, data, fua } => (1, fua, offset, data.len() as u32, data),
            Command::Flush => (3, false, 0, 0, &[]),
            Command::Trim { offset, length, fua } => (4, fua, offset, length, &[]),
            Command::Zero { offset, length, fua } => (6, fua, offset, length, &[]),
        };
        let cookie = self.next;
        self.next += 1;
        let mut message = Vec::with_capacity(28 + payload.len());
        message.extend(REQUEST.to_be_bytes());
        message.extend((if fua { FLAG_FUA } else { 0 }).to_be_bytes());
        message.extend(kind.to_be_bytes());
        message.extend(cookie.to_be_bytes());
        message.extend(offset.to_be_bytes());
        message.extend(length.to_be_bytes());
        message.extend(payload);
        let answer = if kind == 0 { length as usize } else { 0 };
        self.in_flight.insert(cookie, answer);
        self.stream.write_all(&message)?;
        Ok(cookie)
    }

    /// Waits for the next reply; returns the request's cookie and result.
    pub fn complete(&mut self) -> Result<(u64, Result<Vec<u8>, u32>), Failure> {
        let magic = u32::from_be_bytes(number(&mut self.replies)?);
        let error = u32::from_be_bytes(number(&mut self.replies)?);
        let cookie = u64::from_be_bytes(number(&mut self.replies)?);
        assert_eq!(magic, SIMPLE_REPLY, "not a simple reply");
        let length = self.in_flight.remove(&cookie).expect("a reply to a request");
        if error != 0 {
            return Ok((cookie, Err(error)));
        }
        let mut data = vec![0; length];
        self.replies.read_exact(&mut data)?;
        Ok((cookie, Ok(data)))
    }

    /// Sends one request and waits for its reply. No other request may be in flight.
    pub fn call(&mut self, command: Command) -> Result<Vec<u8>, Failure> {
        assert!(self.in_flight.is_empty());
        let asked = self.submit(command)?;
        let (answered, outcome) = self.complete()?;
        assert_eq!(asked, answered);
        outcome.map_err(Failure::Errno)
    }

    pub fn read(&mut self, offset: u64, length: u32) -> Result<Vec<u8>, Failure> {
        self.call(Command::Read { offset, length })
    }

    /// The content of the whole export.
    pub fn read_all(&mut self) -> Result<Vec<u8>, Failure> {
        const PIECE: u64 = 1 << 20;
        let mut content = Vec::with_capacity(self.size as usize);
        for offset in (0..self.size).step_by(PIECE as usize) {
            content.extend(self.read(offset, PIECE.min(self.size - offset) as u32)?);
        }
        Ok(content)
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), Failure> {
        self.call(Command::Write { offset, data, fua: false }).map(drop)
    }

    pub fn trim(&mut self, offset: u64, length: u32) -> Result<(), Failure> {
        self.call(Command::Trim { offset, length, fua: false }).map(drop)
    }

    pub fn flush(&mut self) -> Result<(), Failure> {
        self.call(Command::Flush).map(drop)
    }
}
