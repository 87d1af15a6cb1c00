//! A small pipelined NBD client, which writes layouts block by block and measures the time of each request with the
//! study's clock.
//!
//! fio measures throughput better, but it cannot write a given set of blocks between two snapshots, and does not report
//! which requests were in flight while a snapshot was taken. The client uses only the basic protocol: fixed newstyle,
//! simple replies.
//!
//! Invariant: at most `depth` requests are in flight, each in its own slot, whose number is the cookie. A reply with
//! another cookie, or no reply within [`REPLY_TIME_MAX`], is an error.

use crate::error::{Doing, Error, Result};
use crate::random::Random;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

const GREETING: u64 = u64::from_be_bytes(*b"NBDMAGIC");
const OPTION: u64 = u64::from_be_bytes(*b"IHAVEOPT");
const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
const OPT_GO: u32 = 7;
const REP_ACK: u32 = 1;
const REP_INFO: u32 = 3;
const REP_ERROR: u32 = 1 << 31;
const INFO_EXPORT: u16 = 0;
/// Flags of the client: fixed newstyle, no padding after the handshake.
const CLIENT_FLAGS: u32 = 3;
const REQUEST: u32 = 0x2560_9513;
const SIMPLE_REPLY: u32 = 0x6744_6698;

/// Longest wait for one reply.
pub const REPLY_TIME_MAX: Duration = Duration::from_secs(120);
/// Most bytes in one request.
pub const LENGTH_MAX: u32 = 4 << 20;
/// Payloads of at least this length are sent directly, without being copied into the send buffer.
const SENT_ALONE_MIN: u32 = 32 << 10;
/// Size of the blocks that [`Request::Stamped`] writes.
const BLOCK: usize = 4096;
/// Most bytes of one option reply.
const OPTION_REPLY_MAX: u32 = 64 << 10;

/// One request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Reads and discards the data.
    Read {
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u32,
    },
    /// Writes random bytes.
    Write {
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u32,
    },
    /// Writes whole blocks whose content is a function of offset and version, for [`Client::compare`].
    Stamped {
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u32,
        /// The version.
        version: u32,
    },
    /// Discards a range.
    Trim {
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u32,
    },
    /// Flushes: makes all writes that were answered before durable.
    Flush,
}

impl Request {
    fn wire(self) -> (u16, u64, u32) {
        match self {
            Request::Read { offset, length } => (0, offset, length),
            Request::Write { offset, length } | Request::Stamped { offset, length, .. } => (1, offset, length),
            Request::Flush => (3, 0, 0),
            Request::Trim { offset, length } => (4, offset, length),
        }
    }
}

/// The time at which a request was sent and at which it was answered.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Time just before the request was sent.
    pub sent: Instant,
    /// Time just after the reply was read.
    pub answered: Instant,
}

impl Timing {
    /// Latency in microseconds.
    pub fn microseconds(&self) -> f64 {
        self.answered.duration_since(self.sent).as_secs_f64() * 1e6
    }
}

/// Appends the header of a request.
fn head(message: &mut Vec<u8>, kind: u16, cookie: u64, offset: u64, length: u32) {
    message.extend(REQUEST.to_be_bytes());
    message.extend(0u16.to_be_bytes());
    message.extend(kind.to_be_bytes());
    message.extend(cookie.to_be_bytes());
    message.extend(offset.to_be_bytes());
    message.extend(length.to_be_bytes());
}

/// Appends the content of a version of a block: offset and version, followed by random bytes. So another block's
/// content or an older version is detected.
fn stamped(content: &[u8], offset: u64, version: u32, out: &mut Vec<u8>) {
    let from = Random::new(offset ^ u64::from(version) << 40).below(u64::from(LENGTH_MAX)) as usize;
    out.extend(offset.to_le_bytes());
    out.extend(version.to_le_bytes());
    out.extend(&content[from + 12..from + BLOCK]);
}

/// A connection to one export.
pub struct Client {
    stream: UnixStream,
    replies: BufReader<UnixStream>,
    size: u64,
    content: Vec<u8>,
    random: Random,
}

fn number<const N: usize>(stream: &mut dyn Read) -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

impl Client {
    /// Connects to an export over a unix socket.
    pub fn connect(socket: &Path, export: &str) -> Result<Client> {
        let doing = || format!("connecting to {} for {export:?}", socket.display());
        let stream = UnixStream::connect(socket).doing(doing)?;
        stream.set_read_timeout(Some(REPLY_TIME_MAX)).doing(doing)?;
        stream.set_write_timeout(Some(REPLY_TIME_MAX)).doing(doing)?;
        let replies = BufReader::with_capacity(256 << 10, stream.try_clone().doing(doing)?);
        let mut random = Random::new(0x6c61_6d69_6e61);
        let mut content = vec![0; 2 * LENGTH_MAX as usize];
        random.fill(&mut content);
        let mut client = Client { stream, replies, size: 0, content, random };
        client.handshake(export).map_err(|e| match e {
            Error::Io { source, .. } => Error::Io { what: doing(), source },
            other => other,
        })?;
        Ok(client)
    }

    fn handshake(&mut self, export: &str) -> Result<()> {
        let doing = || "NBD handshake".to_string();
        let magic = u64::from_be_bytes(number(&mut self.replies).doing(doing)?);
        let option = u64::from_be_bytes(number(&mut self.replies).doing(doing)?);
        let _flags = u16::from_be_bytes(number(&mut self.replies).doing(doing)?);
        if magic != GREETING || option != OPTION {
            return Err(Error::Answer("not an NBD server of the newstyle protocol".into()));
        }
        let name = u32::try_from(export.len()).map_err(|_| Error::Usage("export name too long".into()))?;
        let mut message = Vec::with_capacity(64);
        message.extend(CLIENT_FLAGS.to_be_bytes());
        message.extend(OPTION.to_be_bytes());
        message.extend(OPT_GO.to_be_bytes());
        message.extend((name + 6).to_be_bytes());
        message.extend(name.to_be_bytes());
        message.extend(export.as_bytes());
        message.extend(0u16.to_be_bytes());
        self.stream.write_all(&message).doing(doing)?;
        loop {
            let magic = u64::from_be_bytes(number(&mut self.replies).doing(doing)?);
            let _option: [u8; 4] = number(&mut self.replies).doing(doing)?;
            let kind = u32::from_be_bytes(number(&mut self.replies).doing(doing)?);
            let length = u32::from_be_bytes(number(&mut self.replies).doing(doing)?);
            if magic != OPTION_REPLY || length > OPTION_REPLY_MAX {
                return Err(Error::Answer("malformed NBD option reply".into()));
            }
            let mut data = vec![0; length as usize];
            self.replies.read_exact(&mut data).doing(doing)?;
            match kind {
                REP_ACK => return Ok(()),
                REP_INFO if data.len() >= 10 && data[..2] == INFO_EXPORT.to_be_bytes() => {
                    let size: [u8; 8] = data[2..10].try_into().map_err(|_| Error::Answer("short reply".into()))?;
                    self.size = u64::from_be_bytes(size);
                }
                REP_INFO => {}
                _ if kind & REP_ERROR != 0 => {
                    let text = String::from_utf8_lossy(&data).into_owned();
                    return Err(Error::Answer(format!("export {export:?} refused ({kind:#x}): {text}")));
                }
                _ => return Err(Error::Answer(format!("unknown NBD option reply {kind:#x}"))),
            }
        }
    }

    /// Size of the export in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Sends all requests with up to `depth` in flight. When a request is answered, calls `each` with its timing.
    /// Returns the number of requests.
    pub fn run(
        &mut self,
        depth: usize,
        requests: impl IntoIterator<Item = Request>,
        mut each: impl FnMut(Timing),
    ) -> Result<u64> {
        self.run_told(depth, requests, |_, timing| each(timing))
    }

    /// As [`Client::run`], but `each` also receives the answered request.
    pub fn run_told(
        &mut self,
        depth: usize,
        requests: impl IntoIterator<Item = Request>,
        mut each: impl FnMut(Request, Timing),
    ) -> Result<u64> {
        let mut requests = requests.into_iter();
        let mut slots: Vec<Option<(Instant, Request)>> = vec![None; depth.max(1)];
        let mut free: Vec<usize> = (0..slots.len()).rev().collect();
        let mut message = Vec::new();
        let mut done = 0;
        let mut more = true;
        loop {
            message.clear();
            while more && let Some(&slot) = free.last() {
                let Some(request) = requests.next() else {
                    more = false;
                    break;
                };
                free.pop();
                let (kind, offset, length) = request.wire();
                if length > LENGTH_MAX && !matches!(request, Request::Trim { .. }) {
                    return Err(Error::Usage(format!("a request of {length} bytes is above {LENGTH_MAX}")));
                }
                head(&mut message, kind, slot as u64, offset, length);
                match request {
                    Request::Write { .. } => {
                        let at = self.random.below(u64::from(LENGTH_MAX)) as usize;
                        let payload = &self.content[at..at + length as usize];
                        if length < SENT_ALONE_MIN {
                            message.extend_from_slice(payload);
                        } else {
                            let doing = || "sending NBD requests".to_string();
                            self.stream.write_all(&message).doing(doing)?;
                            message.clear();
                            slots[slot] = Some((Instant::now(), request));
                            self.stream.write_all(payload).doing(doing)?;
                            continue;
                        }
                    }
                    Request::Stamped { version, .. } => {
                        for at in (offset..offset + u64::from(length)).step_by(BLOCK) {
                            stamped(&self.content, at, version, &mut message);
                        }
                    }
                    _ => {}
                }
                slots[slot] = Some((Instant::now(), request));
            }
            if !message.is_empty() {
                self.stream.write_all(&message).doing(|| "sending NBD requests".into())?;
            }
            if free.len() == slots.len() {
                return Ok(done);
            }
            // All replies that have arrived are processed before more requests are sent, so that requests are sent in
            // batches.
            loop {
                let slot = self.reply(&mut slots, &mut each)?;
                free.push(slot);
                done += 1;
                if self.replies.buffer().is_empty() || free.len() == slots.len() {
                    break;
                }
            }
            crate::process::go_on()?;
        }
    }

    fn reply(
        &mut self,
        slots: &mut [Option<(Instant, Request)>],
        each: &mut impl FnMut(Request, Timing),
    ) -> Result<usize> {
        let doing = || "waiting for an NBD reply".to_string();
        let magic = u32::from_be_bytes(number(&mut self.replies).doing(doing)?);
        let error = u32::from_be_bytes(number(&mut self.replies).doing(doing)?);
        let cookie = u64::from_be_bytes(number(&mut self.replies).doing(doing)?);
        if magic != SIMPLE_REPLY {
            return Err(Error::Answer(format!("NBD reply magic {magic:#x}")));
        }
        let slot = usize::try_from(cookie).ok().filter(|s| slots.get(*s).is_some_and(Option::is_some));
        let Some((slot, (sent, request))) = slot.and_then(|s| Some((s, slots[s].take()?))) else {
            return Err(Error::Answer(format!("NBD reply to a request that was not made ({cookie})")));
        };
        if error != 0 {
            let error = std::io::Error::from_raw_os_error(error as i32);
            return Err(Error::Refused(error));
        }
        let length = if let Request::Read { length, .. } = request { length } else { 0 };
        let mut left = length as usize;
        while left > 0 {
            let part = self.replies.fill_buf().doing(doing)?.len().min(left);
            if part == 0 {
                return Err(Error::Answer("NBD server closed the connection in a reply".into()));
            }
            self.replies.consume(part);
            left -= part;
        }
        each(request, Timing { sent, answered: Instant::now() });
        Ok(slot)
    }

    /// Reads as many blocks at `offset` as there are versions; returns the number of blocks whose content differs from
    /// what [`Request::Stamped`] writes for the version.
    pub fn compare(&mut self, offset: u64, versions: &[u32]) -> Result<u64> {
        let doing = || "comparing what was written".to_string();
        let length = u32::try_from(versions.len() * BLOCK).ok().filter(|length| *length <= LENGTH_MAX);
        let length = length.ok_or_else(|| Error::Usage(format!("comparing {} blocks at once", versions.len())))?;
        let mut message = Vec::with_capacity(28);
        let (kind, offset, length) = Request::Read { offset, length }.wire();
        head(&mut message, kind, 0, offset, length);
        self.stream.write_all(&message).doing(doing)?;
        let magic = u32::from_be_bytes(number(&mut self.replies).doing(doing)?);
        let error = u32::from_be_bytes(number(&mut self.replies).doing(doing)?);
        let cookie = u64::from_be_bytes(number(&mut self.replies).doing(doing)?);
        if (magic, error, cookie) != (SIMPLE_REPLY, 0, 0) {
            return Err(Error::Answer(format!("NBD read at {offset} failed: {magic:#x}, error {error}, {cookie}")));
        }
        let mut bytes = vec![0; length as usize];
        self.replies.read_exact(&mut bytes).doing(doing)?;
        let mut expected = Vec::with_capacity(BLOCK);
        let mut differences = 0;
        for ((found, version), at) in bytes.chunks(BLOCK).zip(versions).zip((offset..).step_by(BLOCK)) {
            expected.clear();
            stamped(&self.content, at, *version, &mut expected);
            differences += u64::from(found != expected);
        }
        Ok(differences)
    }

    /// Makes all completed writes durable.
    pub fn flush(&mut self) -> Result<()> {
        self.run(1, [Request::Flush], |_| ()).map(|_| ())
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let mut message = Vec::with_capacity(28);
        message.extend(REQUEST.to_be_bytes());
        message.extend([0, 0, 0, 2]);
        message.extend([0; 20]);
        // An error of sending the disconnect request is ignored, because the server may have ended.
        let _ = self.stream.write_all(&message);
    }
}
