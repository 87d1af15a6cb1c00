//! Encoding and decoding leaves messages unchanged; malformed messages are refused.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::message::{Change, DiskRequest, JobRequest, MachineRequest, MachineVerb, Reconnect, SnapshotRequest};
use disk::{
    Compression, Deduplication, DefaultsChange, DeltaFormat, DetectZeroes, Direction, DiskFormat, ImageKind,
    LimitsChange, NewDisk, OnFull, Point, Provisioning, ReduceAt, SettingsChange, SnapshotOptions, Tuning,
};

fn requests() -> Vec<Request> {
    let name = || String::from("a \"quoted\" näme\u{1F4BE}");
    vec![
        Request::Status,
        Request::StatusSpace,
        Request::Check { data: true, repair: false },
        Request::Disk(DiskRequest::Create {
            name: name(),
            new: NewDisk {
                capacity: u64::MAX,
                provisioning: Provisioning::EagerZeroedThick,
                format: DiskFormat::Image(ImageKind::SeSparse),
                delta: Some(DeltaFormat::VsanSparse),
            },
            settings: SettingsChange::default(),
        }),
        Request::Disk(DiskRequest::Edit {
            name: name(),
            settings: SettingsChange {
                on_full: Some(OnFull::Wait(Some(std::time::Duration::from_secs(90)))),
                detect_zeroes: Some(DetectZeroes::Unmap),
                labels: [(name(), name())].into(),
                remove_labels: vec![name()],
                limits: LimitsChange { quota: Some(u64::MAX), reservation: Some(0) },
                compression: Some(Compression::Zstd(19)),
                compress_at: Some(ReduceAt::WriteBack),
                dedup: Some(Deduplication::Label("tenant".into())),
                dedup_at: Some(ReduceAt::Idle),
            },
        }),
        Request::Disk(DiskRequest::Defaults {
            change: DefaultsChange {
                compression: Some(Compression::Off),
                compress_at: None,
                dedup: Some(Deduplication::Disk),
                dedup_at: Some(ReduceAt::WriteBack),
            },
        }),
        Request::Disk(DiskRequest::List),
        Request::Disk(DiskRequest::Resize {
            name: name(),
            capacity: 1,
            shrink: false,
            reconnect: Reconnect::Process(7),
            tell_machine: true,
        }),
        Request::Disk(DiskRequest::Delete { name: name(), promote: true, force: false }),
        Request::Snapshot(SnapshotRequest::Create {
            of: vec![(name(), name()), (name(), "b".into())],
            options: SnapshotOptions { description: name(), folder: Some(name().into()), delta: None },
        }),
        Request::Snapshot(SnapshotRequest::Delete {
            disk: name(),
            name: name(),
            direction: Some(Direction::Up),
            rate: 1,
            force: true,
        }),
        Request::Disk(DiskRequest::Tune { name: name(), tuning: Tuning { read_cache: Some(0), ..Tuning::default() } }),
        Request::Snapshot(SnapshotRequest::List { disk: None }),
        Request::Snapshot(SnapshotRequest::Diff { disk: name(), from: Point::Snapshot(name()), to: Point::Head }),
        Request::Clone { disk: name(), at: Point::Head, names: vec![name()], full: false },
        Request::ExportList,
        Request::Machine(Box::new(MachineRequest {
            qemu: name().into(),
            memory_folder: None,
            verb: MachineVerb::Execute { name: name(), command: vec![name()], input: vec![0, 255], timeout: 1 },
        })),
        Request::Job(JobRequest::Start(Box::new(Request::Check { data: true, repair: false }))),
        Request::Events,
    ]
}

#[test]
fn a_request_is_encoded_on_one_line_and_decoded_unchanged() {
    for request in requests() {
        let line = encode(&FromClient::Request(request.clone()), REQUEST_LINE_MAX).unwrap();
        assert_eq!(line.iter().filter(|b| **b == b'\n').count(), 1);
        assert_eq!(decode::<FromClient>(&line[..line.len() - 1]).unwrap(), FromClient::Request(request));
    }
}

#[test]
fn an_event_is_encoded_and_decoded_unchanged() {
    for change in [Change::DiskResized { disk: "a".into(), capacity: u64::MAX }, Change::Missed { count: 3 }] {
        let event = FromServer::Part(Part::Event(Box::new(Event { number: 1, time: u64::MAX, change })));
        let line = encode(&event, REPLY_LINE_MAX).unwrap();
        assert_eq!(decode::<FromServer>(&line[..line.len() - 1]).unwrap(), event);
    }
}

#[test]
fn every_kind_of_message_is_encoded_and_decoded_unchanged() {
    for kind in ErrorKind::ALL {
        let error: Error = Failure::from(&Error::new(kind, "why")).into();
        assert_eq!((error.kind(), error.to_string().as_str()), (kind, "why"));
    }
}

#[test]
fn a_message_of_another_version_gets_a_version_error_whatever_it_contains() {
    let error = decode::<FromClient>(br#"{"version":5,"message":{"request":{"teleport":{}}}}"#).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("protocol 5"), "{error}");
}

#[test]
fn malformed_lines_are_invalid() {
    for line in [
        &b""[..],
        b"{}",
        b"null",
        b"[4]",
        b"\xff\xfe",
        br#"{"version":4}"#,
        br#"{"version":-1,"message":"cancel"}"#,
        br#"{"version":4,"message":"cancel"} x"#,
        br#"{"version":4,"message":{"request":"format_disk"}}"#,
        br#"{"version":4,"message":{"request":{"disk":{"show":{}}}}}"#,
        br#"{"version":4,"message":{"request":{"disk":{"show":{"name":"a","force":true}}}}}"#,
        br#"{"version":4,"message":{"request":{"disk":{"resize":{"name":"a","capacity":-1,"shrink":false,"reconnect":"no_client","tell_machine":false}}}}}"#,
    ] {
        assert_eq!(decode::<FromClient>(line).unwrap_err().kind(), ErrorKind::Invalid);
    }
    let deep = format!(r#"{{"version":4,"message":{}"#, "[".repeat(1 << 20));
    assert_eq!(decode::<FromClient>(deep.as_bytes()).unwrap_err().kind(), ErrorKind::Invalid);
}

#[test]
fn no_damage_to_a_line_panics() {
    let mut state = 7u64;
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize
    };
    let lines: Vec<_> =
        requests().into_iter().map(|r| encode(&FromClient::Request(r), REQUEST_LINE_MAX).unwrap()).collect();
    for _ in 0..20_000 {
        let mut line = lines[next() % lines.len()].clone();
        for _ in 0..1 + next() % 4 {
            let at = next() % line.len();
            match next() % 3 {
                0 => line[at] ^= 1 << (next() % 8),
                1 => drop(line.drain(at..)),
                _ => line.insert(at, next() as u8),
            }
            if line.is_empty() {
                break;
            }
        }
        let _ = decode::<FromClient>(&line);
    }
}

#[test]
fn a_message_over_the_limit_is_not_sent() {
    let request = FromClient::Request(Request::Disk(DiskRequest::Show { name: "a".repeat(100) }));
    assert_eq!(encode(&request, 100).unwrap_err().kind(), ErrorKind::Invalid);
}
