//! Every command with every flag in every style of headers: its payload, its effect and its errors.

use super::*;
use crate::nbd::status::Topic;

const STYLES: [Style; 3] = [Style::Simple, Style::Structured, Style::Extended];
const CAPACITY: u64 = 1 << 30;
/// All commands of the protocol except RESIZE and DISC.
const WITH_RANGE: [u16; 6] =
    [command::READ, command::WRITE, command::TRIM, command::CACHE, command::WRITE_ZEROES, command::BLOCK_STATUS];
const UNKNOWN: [u16; 4] = [9, 10, 255, u16::MAX];

fn rules(style: Style) -> Rules {
    Rules { style, read_only: false, capacity: CAPACITY, resize: ResizePolicy::Grow, contexts: true }
}

fn head(command: u16, flags: u16, offset: u64, length: u64) -> RequestHead {
    RequestHead { flags, command, cookie: 77, offset, length }
}

fn errno_of(judged: Result<Action, Refusal>) -> u32 {
    judged.map_or_else(|refusal| refusal.errno, |_| 0)
}

/// A valid request without flags.
fn sound(command: u16) -> RequestHead {
    match command {
        command::FLUSH => head(command, 0, 0, 0),
        command::RESIZE => head(command, 0, CAPACITY + 4096, 0),
        _ => head(command, 0, 4096, 8192),
    }
}

/// Flags that the protocol document allows for a command.
fn documented(command: u16, style: Style) -> u16 {
    let payload = if style == Style::Extended { flag::PAYLOAD_LEN } else { 0 };
    flag::FUA
        | match (command, style) {
            (command::READ, Style::Simple) => 0,
            (command::READ, _) => flag::DF,
            (command::WRITE, _) => payload,
            (command::WRITE_ZEROES, _) => flag::NO_HOLE | flag::FAST_ZERO,
            (command::BLOCK_STATUS, _) => flag::REQ_ONE | payload,
            _ => 0,
        }
}

#[test]
fn the_payload_depends_on_command_flag_and_style() {
    for command in 0..300 {
        for flags in (0..64).chain([1 << 9, 1 << 15, u16::MAX]) {
            for length in [0, 1, 512, 1 << 20, u64::from(u32::MAX), u64::MAX] {
                let head = head(command, flags, u64::MAX, length);
                let writes = command == 1;
                let flagged = flags & 0x20 != 0;
                assert_eq!(head.payload(false), if writes { length } else { 0 }, "compact, {head:?}");
                assert_eq!(head.payload(true), if writes || flagged { length } else { 0 }, "extended, {head:?}");
            }
        }
    }
}

#[test]
fn each_flag_is_accepted_only_where_the_protocol_defines_it() {
    let commands = WITH_RANGE.into_iter().chain([command::FLUSH, command::RESIZE]).chain(UNKNOWN);
    for command in commands {
        for style in STYLES {
            for bit in 0..16 {
                let flags = 1 << bit;
                let request = RequestHead { flags, ..sound(command) };
                let judged = judge(&request, &rules(style));
                let known = !UNKNOWN.contains(&command) && documented(command, style) & flags != 0;
                assert_eq!(errno_of(judged), if known { 0 } else { errno::EINVAL }, "{style:?} {request:?}");
            }
        }
    }
}

#[test]
fn a_write_is_accepted_with_and_without_the_payload_flag() {
    let (plain, flagged) = (head(command::WRITE, 0, 4096, 8192), head(command::WRITE, flag::PAYLOAD_LEN, 4096, 8192));
    let write = Ok(Action::Write { length: 8192, fua: false });
    for style in STYLES {
        assert_eq!(judge(&plain, &rules(style)), write);
    }
    assert_eq!(judge(&flagged, &rules(Style::Extended)), write);
    let durable = head(command::WRITE, flag::PAYLOAD_LEN | flag::FUA, 4096, 8192);
    assert_eq!(judge(&durable, &rules(Style::Extended)), Ok(Action::Write { length: 8192, fua: true }));
    // Compact headers have no flag PAYLOAD_LEN, but a write has its payload nevertheless.
    for style in [Style::Simple, Style::Structured] {
        assert_eq!(errno_of(judge(&flagged, &rules(style))), errno::EINVAL);
        assert_eq!(flagged.payload(false), 8192);
    }
}

#[test]
fn an_undefined_payload_is_refused() {
    let commands = WITH_RANGE.into_iter().chain([command::FLUSH, command::RESIZE]).chain(UNKNOWN);
    for command in commands.filter(|command| !matches!(*command, command::WRITE | command::BLOCK_STATUS)) {
        for length in [0, 1, 512, PAYLOAD_BYTES_MAX as u64] {
            let request = RequestHead { flags: flag::PAYLOAD_LEN, length, ..sound(command) };
            assert_eq!(errno_of(judge(&request, &rules(Style::Extended))), errno::EINVAL, "{request:?}");
            assert_eq!(request.payload(true), length);
        }
    }
}

#[test]
fn empty_ranges_and_ranges_past_the_end_are_refused() {
    for command in WITH_RANGE {
        let beyond = match command {
            command::WRITE | command::WRITE_ZEROES => errno::ENOSPC,
            _ => errno::EINVAL,
        };
        let table = [
            (0, 1, 0),
            (CAPACITY - 1, 1, 0),
            (CAPACITY - 8192, 8192, 0),
            (0, 0, errno::EINVAL),
            (CAPACITY, 0, errno::EINVAL),
            (u64::MAX, 0, errno::EINVAL),
            (CAPACITY - 1, 2, beyond),
            (CAPACITY, 1, beyond),
            (CAPACITY + 1, 512, beyond),
            (u64::MAX, 1, beyond),
            (u64::MAX - 511, 512, beyond),
            (u64::MAX - 511, 4096, beyond),
            (1 << 63, 1 << 31, beyond),
        ];
        for style in STYLES {
            for (offset, length, errno) in table {
                let request = head(command, 0, offset, length);
                assert_eq!(errno_of(judge(&request, &rules(style))), errno, "{style:?} {request:?}");
            }
        }
    }
    // Lengths that only extended headers can express.
    for command in WITH_RANGE {
        let errno = errno_of(judge(&head(command, 0, 1, u64::MAX), &rules(Style::Extended)));
        assert!(matches!(errno, errno::ENOSPC | errno::EINVAL), "command {command}: {errno}");
    }
}

#[test]
fn ranges_without_payload_may_exceed_the_payload_limit() {
    for style in STYLES {
        for command in [command::TRIM, command::CACHE, command::WRITE_ZEROES, command::BLOCK_STATUS] {
            assert_eq!(errno_of(judge(&head(command, 0, 0, CAPACITY), &rules(style))), 0, "{style:?} {command}");
        }
        let longest = PAYLOAD_BYTES_MAX as u64;
        for command in [command::READ, command::WRITE] {
            assert_eq!(errno_of(judge(&head(command, 0, 0, longest), &rules(style))), 0, "{style:?} {command}");
        }
        let too_long = if style == Style::Simple { errno::EINVAL } else { errno::EOVERFLOW };
        assert_eq!(errno_of(judge(&head(command::READ, 0, 0, longest + 1), &rules(style))), too_long);
        assert_eq!(errno_of(judge(&head(command::WRITE, 0, 0, longest + 1), &rules(style))), errno::EINVAL);
    }
}

#[test]
fn read_only_exports_refuse_every_change_with_eperm() {
    for style in STYLES {
        let rules = Rules { read_only: true, resize: ResizePolicy::Any, ..rules(style) };
        for command in WITH_RANGE.into_iter().chain([command::FLUSH, command::RESIZE]) {
            let changes = matches!(command, command::WRITE | command::TRIM | command::WRITE_ZEROES | command::RESIZE);
            for flags in [0, flag::FUA] {
                let request = RequestHead { flags, ..sound(command) };
                let errno = if changes { errno::EPERM } else { 0 };
                assert_eq!(errno_of(judge(&request, &rules)), errno, "{style:?} {request:?}");
            }
        }
        // The payload of an invalid write is consumed in any case.
        let hopeless = head(command::WRITE, 0, u64::MAX, 4096);
        assert_eq!(errno_of(judge(&hopeless, &rules)), errno::EPERM);
        assert_eq!(hopeless.payload(style == Style::Extended), 4096);
    }
}

#[test]
fn a_flush_with_a_range_is_refused() {
    for style in STYLES {
        assert_eq!(judge(&head(command::FLUSH, 0, 0, 0), &rules(style)), Ok(Action::Flush));
        assert_eq!(judge(&head(command::FLUSH, flag::FUA, 0, 0), &rules(style)), Ok(Action::Flush));
        for (offset, length) in [(1, 0), (0, 1), (4096, 4096)] {
            assert_eq!(errno_of(judge(&head(command::FLUSH, 0, offset, length), &rules(style))), errno::EINVAL);
        }
    }
}

#[test]
fn a_disconnect_is_accepted_with_any_flags_and_payload() {
    for style in STYLES {
        for read_only in [false, true] {
            for flags in [0, flag::FUA, flag::PAYLOAD_LEN, u16::MAX] {
                for (offset, length) in [(0, 0), (4096, 4096), (u64::MAX, u64::MAX)] {
                    let rules = Rules { read_only, contexts: false, ..rules(style) };
                    assert_eq!(judge(&head(command::DISC, flags, offset, length), &rules), Ok(Action::Disconnect));
                }
            }
        }
    }
}

#[test]
fn unknown_commands_are_invalid_in_every_style() {
    for command in UNKNOWN {
        for style in STYLES {
            for flags in [0, flag::FUA, flag::PAYLOAD_LEN] {
                for (offset, length) in [(0, 0), (0, 512), (u64::MAX, u64::MAX)] {
                    let request = head(command, flags, offset, length);
                    assert_eq!(errno_of(judge(&request, &rules(style))), errno::EINVAL, "{style:?} {request:?}");
                }
            }
        }
    }
}

#[test]
fn fast_zeroing_needs_whole_blocks_and_permission_for_holes() {
    let rules = Rules { capacity: (1 << 20) + 512, ..rules(Style::Structured) };
    let zero = |flags, offset, length| errno_of(judge(&head(command::WRITE_ZEROES, flags, offset, length), &rules));
    assert_eq!(zero(flag::FAST_ZERO, 4096, 8192), 0);
    assert_eq!(zero(flag::FAST_ZERO, 1 << 20, 512), 0, "the end of the export counts as aligned");
    assert_eq!(zero(flag::FAST_ZERO | flag::NO_HOLE, 4096, 8192), errno::ENOTSUP);
    assert_eq!(zero(flag::FAST_ZERO, 4096, 8191), errno::ENOTSUP);
    assert_eq!(zero(flag::FAST_ZERO, 4095, 4097), errno::ENOTSUP);
    assert_eq!(zero(flag::FAST_ZERO, 1 << 20, 513), errno::ENOSPC);
}

#[test]
fn resizing_follows_the_policy() {
    let resize = |policy, capacity| {
        let rules = Rules { resize: policy, ..rules(Style::Structured) };
        errno_of(judge(&head(command::RESIZE, 0, capacity, 0), &rules))
    };
    let (less, more) = (CAPACITY - 512, CAPACITY + 512);
    for (policy, expected) in [
        (ResizePolicy::Never, [errno::EPERM; 3]),
        (ResizePolicy::Grow, [errno::EPERM, 0, 0]),
        (ResizePolicy::Any, [0, 0, 0]),
    ] {
        assert_eq!([less, CAPACITY, more].map(|capacity| resize(policy, capacity)), expected, "{policy:?}");
    }
}

#[test]
fn block_status_needs_contexts_and_takes_a_payload_with_extended_headers_only() {
    let plain = head(command::BLOCK_STATUS, 0, 0, 12);
    let flagged = head(command::BLOCK_STATUS, flag::PAYLOAD_LEN, 0, 12);
    for style in STYLES {
        let none = Rules { contexts: false, ..rules(style) };
        assert_eq!(errno_of(judge(&plain, &none)), errno::EINVAL);
        assert_eq!(errno_of(judge(&flagged, &none)), errno::EINVAL);
        assert_eq!(judge(&plain, &rules(style)), Ok(Action::Status { length: 12, only_one: false }));
        let judged = judge(&flagged, &rules(style));
        if style == Style::Extended {
            assert_eq!(judged, Ok(Action::StatusPayload { payload: 12, only_one: false }));
        } else {
            assert_eq!(errno_of(judged), errno::EINVAL);
        }
    }
    let one = head(command::BLOCK_STATUS, flag::PAYLOAD_LEN | flag::REQ_ONE, 0, 12);
    let judged = judge(&one, &rules(Style::Extended));
    assert_eq!(judged, Ok(Action::StatusPayload { payload: 12, only_one: true }));
}

#[test]
fn the_payload_of_block_status_is_a_length_and_distinct_contexts() {
    let context = |id| Context { id, name: format!("context {id}"), topic: Topic::Allocation };
    let contexts = [context(1), context(2)];
    let rules = rules(Style::Extended);
    let form = |length: u64, ids: &[u32]| {
        let mut payload = length.to_be_bytes().to_vec();
        ids.iter().for_each(|id| payload.extend(id.to_be_bytes()));
        payload
    };
    let parse = |offset, payload: &[u8]| {
        let head = head(command::BLOCK_STATUS, flag::PAYLOAD_LEN, offset, payload.len() as u64);
        status_payload(&head, payload, &contexts, &rules).map_err(|refusal| refusal.errno)
    };
    assert_eq!(parse(0, &form(CAPACITY, &[2])), Ok((CAPACITY, vec![1])));
    assert_eq!(parse(512, &form(512, &[2, 1])), Ok((512, vec![1, 0])));
    let short = form(512, &[1])[..11].to_vec();
    let long = [form(512, &[1]), vec![0]].concat();
    for payload in [vec![], vec![0; 7], form(512, &[]), form(512, &[3]), form(512, &[1, 1]), short, long] {
        assert_eq!(parse(0, &payload), Err(errno::EINVAL), "{payload:?}");
    }
    assert_eq!(parse(0, &form(512, &[1, 2, 1])), Err(errno::EINVAL));
    assert_eq!(parse(0, &form(0, &[1])), Err(errno::EINVAL));
    assert_eq!(parse(1, &form(CAPACITY, &[1])), Err(errno::EINVAL));
    assert_eq!(parse(u64::MAX, &form(1, &[1])), Err(errno::EINVAL));
    assert_eq!(parse(1, &form(u64::MAX, &[1])), Err(errno::EINVAL));
}

#[test]
fn errors_of_system_calls_become_nbd_errors() {
    use error::Error;
    use std::io;
    let refused = |kind: io::ErrorKind| Refusal::from(Error::io("writing", kind.into())).errno;
    assert_eq!(refused(io::ErrorKind::StorageFull), errno::ENOSPC);
    assert_eq!(refused(io::ErrorKind::QuotaExceeded), errno::ENOSPC);
    // A file system mounted read-only after I/O errors, a missing file, a system call that does not exist.
    for kind in [io::ErrorKind::ReadOnlyFilesystem, io::ErrorKind::NotFound, io::ErrorKind::Unsupported] {
        assert_eq!(refused(kind), errno::EIO, "{kind}");
    }
    assert_eq!(Refusal::from(Error::new(ErrorKind::ReadOnly, "open for reading only")).errno, errno::EPERM);
}
