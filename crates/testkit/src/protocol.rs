//! An NBD client written from the protocol document. The client shares no code with the server, so that no constant is
//! wrong on both sides. It blocks, uses one thread, and panics on every violation of the protocol.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;

/// A stream in both directions.
pub trait Stream: Read + Write + Send {}
impl<T: Read + Write + Send> Stream for T {}

pub const OPT_EXPORT_NAME: u32 = 1;
pub const OPT_ABORT: u32 = 2;
pub const OPT_LIST: u32 = 3;
pub const OPT_STARTTLS: u32 = 5;
pub const OPT_INFO: u32 = 6;
pub const OPT_GO: u32 = 7;
pub const OPT_STRUCTURED_REPLY: u32 = 8;
pub const OPT_LIST_META: u32 = 9;
pub const OPT_SET_META: u32 = 10;
pub const OPT_EXTENDED: u32 = 11;

pub const REP_ACK: u32 = 1;
pub const REP_SERVER: u32 = 2;
pub const REP_INFO: u32 = 3;
pub const REP_META: u32 = 4;
pub const ERR_UNSUP: u32 = 0x8000_0001;
pub const ERR_POLICY: u32 = 0x8000_0002;
pub const ERR_INVALID: u32 = 0x8000_0003;
pub const ERR_TLS_REQD: u32 = 0x8000_0005;
pub const ERR_UNKNOWN: u32 = 0x8000_0006;
pub const ERR_TOO_BIG: u32 = 0x8000_0009;
pub const ERR_EXT_REQD: u32 = 0x8000_000a;

pub const CMD_READ: u16 = 0;
pub const CMD_WRITE: u16 = 1;
pub const CMD_DISC: u16 = 2;
pub const CMD_FLUSH: u16 = 3;
pub const CMD_TRIM: u16 = 4;
pub const CMD_CACHE: u16 = 5;
pub const CMD_ZEROES: u16 = 6;
pub const CMD_STATUS: u16 = 7;
pub const CMD_RESIZE: u16 = 8;

pub const FUA: u16 = 1;
pub const NO_HOLE: u16 = 2;
pub const DF: u16 = 4;
pub const REQ_ONE: u16 = 8;
pub const FAST_ZERO: u16 = 16;
pub const PAYLOAD: u16 = 32;

pub const EPERM: u32 = 1;
pub const EIO: u32 = 5;
pub const EINVAL: u32 = 22;
pub const ENOSPC: u32 = 28;
pub const EOVERFLOW: u32 = 75;
pub const ENOTSUP: u32 = 95;

/// Style of headers and replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Simple,
    Structured,
    Extended,
}

/// A range of bytes with its status flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    pub length: u64,
    pub flags: u64,
}

/// The reply to a request.
#[derive(Debug, Default)]
pub struct Reply {
    pub error: u32,
    pub message: String,
    /// Data of a read, joined from its chunks.
    pub data: Vec<u8>,
    /// Number of content chunks: data, holes.
    pub chunks: (usize, usize),
    pub status: HashMap<u32, Vec<Extent>>,
}

struct Asked {
    offset: u64,
    length: u64,
    command: u16,
    reply: Reply,
    covered: u64,
}

pub struct Client {
    pub stream: Box<dyn Stream>,
    pub mode: Mode,
    pub size: u64,
    pub flags: u16,
    cookie: u64,
    asked: HashMap<u64, Asked>,
}

fn be16(bytes: &[u8]) -> u16 {
    u16::from_be_bytes(bytes[..2].try_into().unwrap())
}
fn be32(bytes: &[u8]) -> u32 {
    u32::from_be_bytes(bytes[..4].try_into().unwrap())
}
fn be64(bytes: &[u8]) -> u64 {
    u64::from_be_bytes(bytes[..8].try_into().unwrap())
}

impl Client {
    pub fn unix(path: &Path) -> Self {
        Self::new(Box::new(UnixStream::connect(path).unwrap()))
    }

    pub fn tcp(address: std::net::SocketAddr) -> Self {
        Self::new(Box::new(TcpStream::connect(address).unwrap()))
    }

    pub fn new(stream: Box<dyn Stream>) -> Self {
        Self { stream, mode: Mode::Simple, size: 0, flags: 0, cookie: 1000, asked: HashMap::new() }
    }

    /// Connects, and opens an export.
    pub fn open(path: &Path, export: &str, mode: Mode) -> Self {
        let mut client = Self::unix(path);
        client.greet(3);
        client.choose(mode);
        assert_eq!(client.go(export), REP_ACK);
        client
    }

    pub fn take(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// Whether the server has closed the connection and all input was read.
    pub fn at_end(&mut self) -> bool {
        let mut byte = [0];
        matches!(self.stream.read(&mut byte), Ok(0) | Err(_))
    }

    pub fn greet(&mut self, flags: u32) {
        let greeting = self.take(18);
        assert_eq!(&greeting[..8], b"NBDMAGIC");
        assert_eq!(&greeting[8..16], b"IHAVEOPT");
        assert_eq!(be16(&greeting[16..]), 3);
        self.stream.write_all(&flags.to_be_bytes()).unwrap();
    }

    pub fn send_option(&mut self, code: u32, data: &[u8]) {
        let mut out = b"IHAVEOPT".to_vec();
        out.extend_from_slice(&code.to_be_bytes());
        out.extend_from_slice(&(data.len() as u32).to_be_bytes());
        out.extend_from_slice(data);
        self.stream.write_all(&out).unwrap();
    }

    /// The replies to an option, including the final one.
    pub fn option_replies(&mut self, code: u32) -> Vec<(u32, Vec<u8>)> {
        let mut replies = Vec::new();
        loop {
            let head = self.take(20);
            assert_eq!(be64(&head), 0x0003_e889_0455_65a9);
            assert_eq!(be32(&head[8..]), code);
            let kind = be32(&head[12..]);
            let data = self.take(be32(&head[16..]) as usize);
            replies.push((kind, data));
            if kind == REP_ACK || kind >= 0x8000_0000 {
                return replies;
            }
        }
    }

    pub fn option(&mut self, code: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
        self.send_option(code, data);
        self.option_replies(code)
    }

    /// The type of the final reply to an option.
    pub fn verdict(&mut self, code: u32, data: &[u8]) -> u32 {
        self.option(code, data).last().unwrap().0
    }

    pub fn choose(&mut self, mode: Mode) {
        match mode {
            Mode::Simple => {}
            Mode::Structured => assert_eq!(self.verdict(OPT_STRUCTURED_REPLY, &[]), REP_ACK),
            Mode::Extended => assert_eq!(self.verdict(OPT_EXTENDED, &[]), REP_ACK),
        }
        self.mode = mode;
    }

    pub fn name_data(name: &str) -> Vec<u8> {
        let mut data = (name.len() as u32).to_be_bytes().to_vec();
        data.extend_from_slice(name.as_bytes());
        data
    }

    pub fn info_data(name: &str, wanted: &[u16]) -> Vec<u8> {
        let mut data = Self::name_data(name);
        data.extend_from_slice(&(wanted.len() as u16).to_be_bytes());
        for kind in wanted {
            data.extend_from_slice(&kind.to_be_bytes());
        }
        data
    }

    pub fn meta_data(name: &str, queries: &[&str]) -> Vec<u8> {
        let mut data = Self::name_data(name);
        data.extend_from_slice(&(queries.len() as u32).to_be_bytes());
        for query in queries {
            data.extend(Self::name_data(query));
        }
        data
    }

    /// Chooses contexts; returns their ids by name.
    pub fn set_meta(&mut self, export: &str, queries: &[&str]) -> HashMap<String, u32> {
        let replies = self.option(OPT_SET_META, &Self::meta_data(export, queries));
        assert_eq!(replies.last().unwrap().0, REP_ACK);
        let contexts = replies.iter().filter(|(kind, _)| *kind == REP_META);
        contexts.map(|(_, data)| (String::from_utf8(data[4..].to_vec()).unwrap(), be32(data))).collect()
    }

    /// Chooses an export; returns the type of the final reply.
    pub fn go(&mut self, export: &str) -> u32 {
        let replies = self.option(OPT_GO, &Self::info_data(export, &[]));
        for (kind, data) in &replies {
            if *kind == REP_INFO && be16(data) == 0 {
                assert_eq!(data.len(), 12);
                self.size = be64(&data[2..]);
                self.flags = be16(&data[10..]);
            }
        }
        replies.last().unwrap().0
    }

    /// Encodes a request. Writes in extended mode have the payload flag.
    pub fn encode(&mut self, command: u16, flags: u16, offset: u64, length: u64, payload: &[u8]) -> (u64, Vec<u8>) {
        self.cookie += 7;
        let mut out = Vec::with_capacity(32 + payload.len());
        let extended = self.mode == Mode::Extended;
        out.extend_from_slice(&if extended { 0x21e4_1c71u32 } else { 0x2560_9513 }.to_be_bytes());
        let flags = if extended && command == CMD_WRITE { flags | PAYLOAD } else { flags };
        out.extend_from_slice(&flags.to_be_bytes());
        out.extend_from_slice(&command.to_be_bytes());
        out.extend_from_slice(&self.cookie.to_be_bytes());
        out.extend_from_slice(&offset.to_be_bytes());
        if extended {
            out.extend_from_slice(&length.to_be_bytes());
        } else {
            out.extend_from_slice(&(length as u32).to_be_bytes());
        }
        out.extend_from_slice(payload);
        if command != CMD_DISC {
            let asked = Asked { offset, length, command, reply: Reply::default(), covered: 0 };
            self.asked.insert(self.cookie, asked);
        }
        (self.cookie, out)
    }

    /// Registers a request that was sent in another way.
    pub fn expect(&mut self, command: u16, cookie: u64, offset: u64, length: u64) {
        let asked = Asked { offset, length, command, reply: Reply::default(), covered: 0 };
        assert!(self.asked.insert(cookie, asked).is_none(), "two requests with one cookie");
    }

    /// Sends a request without waiting for its reply.
    pub fn send(&mut self, command: u16, flags: u16, offset: u64, length: u64, payload: &[u8]) -> u64 {
        let (cookie, bytes) = self.encode(command, flags, offset, length, payload);
        self.stream.write_all(&bytes).unwrap();
        cookie
    }

    /// Receives until one of the requests is completely answered.
    pub fn receive(&mut self) -> (u64, Reply) {
        loop {
            let magic = be32(&self.take(4));
            match magic {
                0x6744_6698 => {
                    assert_ne!(self.mode, Mode::Extended, "simple reply in extended mode");
                    let rest = self.take(12);
                    let cookie = be64(&rest[4..]);
                    let mut asked = self.asked.remove(&cookie).expect("a reply to a request");
                    asked.reply.error = be32(&rest);
                    if asked.command == CMD_READ {
                        assert_eq!(self.mode, Mode::Simple, "simple reply to a read in structured mode");
                        if asked.reply.error == 0 {
                            asked.reply.data = self.take(asked.length as usize);
                        }
                    }
                    return (cookie, asked.reply);
                }
                0x668e_33ef => {
                    assert_eq!(self.mode, Mode::Structured);
                    let head = self.take(16);
                    let length = be32(&head[12..]) as usize;
                    if let Some(done) = self.chunk(be16(&head), be16(&head[2..]), be64(&head[4..]), length) {
                        return done;
                    }
                }
                0x6e8a_278c => {
                    assert_eq!(self.mode, Mode::Extended);
                    let head = self.take(28);
                    let cookie = be64(&head[4..]);
                    assert_eq!(be64(&head[12..]), self.asked[&cookie].offset);
                    let length = be64(&head[20..]) as usize;
                    if let Some(done) = self.chunk(be16(&head), be16(&head[2..]), cookie, length) {
                        return done;
                    }
                }
                other => panic!("reply begins with {other:#x}"),
            }
        }
    }

    fn chunk(&mut self, flags: u16, kind: u16, cookie: u64, length: usize) -> Option<(u64, Reply)> {
        assert!(length <= (32 << 20) + 8, "oversize chunk of {length} bytes");
        let payload = self.take(length);
        let extended = self.mode == Mode::Extended;
        let asked = self.asked.get_mut(&cookie).expect("a reply to a request");
        assert!(flags <= 1);
        let mut place = |offset: u64, data: &[u8]| {
            assert_eq!(asked.command, CMD_READ);
            asked.reply.data.resize(asked.length as usize, 0xee);
            assert!(offset >= asked.offset && !data.is_empty());
            let at = (offset - asked.offset) as usize;
            asked.reply.data[at..at + data.len()].copy_from_slice(data);
            asked.covered += data.len() as u64;
        };
        match kind {
            0 => assert!(length == 0 && flags == 1),
            1 => {
                place(be64(&payload), &payload[8..]);
                asked.reply.chunks.0 += 1;
            }
            2 => {
                assert_eq!(length, 12);
                place(be64(&payload), &vec![0; be32(&payload[8..]) as usize]);
                asked.reply.chunks.1 += 1;
            }
            5 | 6 => {
                assert_eq!(asked.command, CMD_STATUS);
                assert_eq!(kind == 6, extended);
                let id = be32(&payload);
                let extents: Vec<Extent> = if extended {
                    let all = payload[8..].chunks(16);
                    assert_eq!(be32(&payload[4..]) as usize, all.len());
                    all.map(|e| Extent { length: be64(e), flags: be64(&e[8..]) }).collect()
                } else {
                    let all = payload[4..].chunks(8);
                    all.map(|e| Extent { length: u64::from(be32(e)), flags: u64::from(be32(&e[4..])) }).collect()
                };
                assert!(!extents.is_empty() && extents.iter().all(|extent| extent.length > 0));
                assert!(asked.reply.status.insert(id, extents).is_none(), "two chunks for one context");
            }
            0x8001 => {
                asked.reply.error = be32(&payload);
                assert_ne!(asked.reply.error, 0);
                assert_eq!(usize::from(be16(&payload[4..])), length - 6);
                asked.reply.message = String::from_utf8(payload[6..].to_vec()).unwrap();
                assert!(!asked.reply.message.is_empty());
            }
            other => panic!("chunk of type {other}"),
        }
        if flags & 1 == 0 {
            return None;
        }
        let asked = self.asked.remove(&cookie)?;
        if asked.command == CMD_READ && asked.reply.error == 0 {
            assert_eq!(asked.covered, asked.length, "chunks do not cover the read");
        }
        Some((cookie, asked.reply))
    }

    /// Sends a request and waits for its reply.
    pub fn ask(&mut self, command: u16, flags: u16, offset: u64, length: u64) -> Reply {
        self.ask_with(command, flags, offset, length, &[])
    }

    pub fn ask_with(&mut self, command: u16, flags: u16, offset: u64, length: u64, payload: &[u8]) -> Reply {
        let sent = self.send(command, flags, offset, length, payload);
        let (cookie, reply) = self.receive();
        assert_eq!(cookie, sent);
        reply
    }

    pub fn read(&mut self, offset: u64, length: u64) -> Vec<u8> {
        let reply = self.ask(CMD_READ, 0, offset, length);
        assert_eq!(reply.error, 0, "{}", reply.message);
        reply.data
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) {
        let reply = self.ask_with(CMD_WRITE, 0, offset, data.len() as u64, data);
        assert_eq!(reply.error, 0, "{}", reply.message);
    }

    /// Sends a disconnect request and checks that the server closes the connection.
    pub fn leave(mut self) {
        self.send(CMD_DISC, 0, 0, 0, &[]);
        assert!(self.at_end());
    }
}
