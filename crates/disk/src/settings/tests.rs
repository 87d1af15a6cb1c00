//! The record of settings: what is stored, and the effect of a record that cannot be read.
#![allow(clippy::unwrap_used)]

use super::record::{LABELS_MAX, decode};
use super::*;
use crate::compression::Compression;
use crate::deduplication::Deduplication;
use crate::full::OnFull;
use crate::quota::Limits;
use crate::reduce_at::ReduceAt;
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{File, IoMode};
use error::ErrorKind;
use std::time::Duration;

const ONE: &str = "0f0e0d0c-0b0a-4908-8706-050403020101";
const TWO: &str = "1f1e1d1c-1b1a-4918-9716-151413121111";

fn directory() -> Arc<dyn Directory> {
    SimulatedDisk::new(1, SimulatedOptions::default()).directory()
}

fn waits(seconds: u64) -> SettingsChange {
    SettingsChange { on_full: Some(OnFull::Wait(Some(Duration::from_secs(seconds)))), ..SettingsChange::default() }
}

fn stored_files(directory: &Arc<dyn Directory>) -> Vec<String> {
    directory.list().unwrap().into_iter().filter(|name| name.starts_with(FILE)).collect()
}

#[test]
fn settings_are_stored_when_they_are_changed_and_removed_with_the_disk() {
    let directory = directory();
    let settings = Settings::open(Arc::clone(&directory));
    assert_eq!(settings.of(ONE), DiskSettings::default());
    settings.inherit(ONE, &[TWO.into()]).unwrap();
    settings.forget(ONE);
    assert_eq!(stored_files(&directory), Vec::<String>::new(), "nothing has other settings than the defaults");

    let open = settings.open_disk(ONE, "one");
    settings.change(ONE, &waits(60)).unwrap();
    assert_eq!(open.space.policy(), OnFull::Wait(Some(Duration::from_secs(60))), "open disks get the new policy");
    settings.change(ONE, &SettingsChange::default()).unwrap();
    settings.inherit(ONE, &[TWO.into()]).unwrap();
    let again = Settings::open(Arc::clone(&directory));
    assert_eq!([again.of(ONE), again.of(TWO)], [settings.of(ONE), settings.of(ONE)]);
    assert_eq!(again.open_disk(TWO, "two").space.policy(), open.space.policy());

    settings.forget(ONE);
    settings.change(TWO, &SettingsChange { on_full: Some(OnFull::Error), ..SettingsChange::default() }).unwrap();
    let bytes = KIND.read(&*directory, FILE).unwrap().unwrap();
    assert_eq!(decode(&bytes).unwrap(), SettingsRecord::default());
}

#[test]
fn a_migrated_disk_keeps_its_settings_and_its_waiting_writes() {
    let wait = |seconds| OnFull::Wait(Some(Duration::from_secs(seconds)));
    let (here, there) = (Settings::open(directory()), Settings::open(directory()));
    here.change(ONE, &waits(60)).unwrap();
    let open = here.open_disk(ONE, "one");
    there.adopt(ONE, &here).unwrap();
    there.take_over(TWO, &here, ONE);
    here.forget(ONE);
    assert_eq!(open.space.policy(), wait(60), "the other datastore has no settings for the disk any more");
    open.space.begin(512, &Error::new(ErrorKind::NoSpace, "full"));
    assert_eq!([here.all_waiting().len(), there.all_waiting().len()], [0, 1]);
    there.change(TWO, &waits(7)).unwrap();
    assert_eq!((open.space.policy(), there.of(ONE)), (wait(7), DiskSettings::default()));
    // Within a datastore, and without settings at first.
    let open = here.open_disk(ONE, "one");
    here.take_over(TWO, &here, ONE);
    here.change(TWO, &waits(8)).unwrap();
    assert_eq!(open.space.policy(), wait(8));
    here.take_over(ONE, &here, TWO);
    assert_eq!((open.space.policy(), here.of(ONE).on_full), (wait(8), wait(8)));
    assert!(Arc::ptr_eq(&open, &here.open_disk(ONE, "one")));
}

#[test]
fn a_record_that_cannot_be_read_is_kept_until_a_repair() {
    let newer = decode(b"lamina settings 6 crc32c=00000000\n{}\n").unwrap_err();
    assert_eq!(newer.to_string(), "the settings record has version 6, and this program reads 5");
    let all =
        [6, 5, 4, 3, 2, 1].map(|version| format!("lamina settings {version} crc32c=00000000\n{{}}\n").into_bytes());
    for damage in all.into_iter().chain([b"x".to_vec()]) {
        let damage = &damage[..];
        let directory = directory();
        sealed::put(&*directory, FILE, damage).unwrap();
        let settings = Settings::open(Arc::clone(&directory));
        assert_eq!(settings.of(ONE), DiskSettings::default());
        let refused = settings.change(ONE, &waits(60)).unwrap_err();
        assert!(refused.to_string().contains("check --repair"), "{refused}");
        settings.forget(ONE);
        assert_eq!(KIND.read(&*directory, FILE).unwrap().unwrap(), damage);

        let mut report = CheckReport::default();
        settings.check(false, &mut report).unwrap();
        assert!(report.findings[0].repaired.is_none());
        settings.check(true, &mut report).unwrap();
        assert!(report.findings[1].repaired.is_some());
        let kept: Arc<dyn File> = directory.open(DAMAGED, IoMode::Buffered).unwrap();
        assert_eq!(kept.len().unwrap(), damage.len() as u64);
        settings.change(ONE, &waits(60)).unwrap();
        let mut report = CheckReport::default();
        settings.check(false, &mut report).unwrap();
        assert_eq!(report.findings, []);
        assert_eq!(Settings::open(directory).of(ONE), settings.of(ONE));
    }
}

#[test]
fn one_damaged_byte_of_the_record_is_mended() {
    for (compression, dedup) in
        [(None, None), (Some(Compression::Zstd(7)), None), (None, Some(Deduplication::Datastore))]
    {
        let directory = directory();
        let change = SettingsChange { compression, dedup, ..waits(60) };
        let settings = Settings::open(Arc::clone(&directory));
        settings.change(ONE, &change).unwrap();
        let mut bytes = KIND.read(&*directory, FILE).unwrap().unwrap();
        let last = bytes.len() - 20;
        bytes[last] ^= 0x55;
        sealed::put(&*directory, FILE, &bytes).unwrap();
        assert_eq!(Settings::open(directory).of(ONE), settings.of(ONE));
    }
}

fn compressed(compression: Compression) -> SettingsChange {
    let compress_at = (!compression.is_off()).then_some(ReduceAt::Idle);
    SettingsChange { compression: Some(compression), compress_at, ..SettingsChange::default() }
}

/// The version in the first line of the file.
fn version(directory: &Arc<dyn Directory>) -> Option<char> {
    let bytes = KIND.read(&**directory, FILE).unwrap().unwrap();
    String::from_utf8(bytes).unwrap().strip_prefix("lamina settings ").and_then(|rest| rest.chars().next())
}

#[test]
fn only_a_record_with_compression_has_the_version_of_compression() {
    let directory = directory();
    let settings = Settings::open(Arc::clone(&directory));
    settings.change(ONE, &waits(60)).unwrap();
    assert_eq!(version(&directory), Some('1'));
    settings.change(TWO, &compressed(Compression::Lz4)).unwrap();
    assert_eq!(version(&directory), Some('2'));
    assert_eq!(settings.compressed(), [(TWO.to_owned(), Compression::Lz4)].into());
    assert_eq!(Settings::open(Arc::clone(&directory)).of(TWO), settings.of(TWO));
    settings.change(TWO, &compressed(Compression::Off)).unwrap();
    assert_eq!(version(&directory), Some('1'));
    let defaults = |compression: Option<Compression>| DefaultsChange {
        compress_at: compression.filter(|compression| !compression.is_off()).map(|_| ReduceAt::Idle),
        compression,
        ..DefaultsChange::default()
    };
    settings.change_defaults(&defaults(Some(Compression::Zstd(3)))).unwrap();
    assert_eq!(version(&directory), Some('2'));
    settings.change_defaults(&defaults(None)).unwrap();
    let again = Settings::open(Arc::clone(&directory));
    assert_eq!(again.defaults(), DiskDefaults { compression: Compression::Zstd(3), ..DiskDefaults::default() });
    again.change_defaults(&defaults(Some(Compression::Off))).unwrap();
    assert_eq!((version(&directory), again.of(ONE)), (Some('1'), settings.of(ONE)));
    // A record of the earlier version never has compression.
    let record = SettingsRecord { new_disks: settings.defaults(), ..SettingsRecord::default() };
    let wrong = decode(&KIND.encode(&record).unwrap()).unwrap_err();
    assert!(wrong.kind() == ErrorKind::Corrupt && wrong.to_string().contains("later version"), "{wrong}");
}

#[test]
fn compression_at_write_back_needs_the_version_of_deduplication() {
    let directory = directory();
    let settings = Settings::open(Arc::clone(&directory));
    let at = |at| SettingsChange { compress_at: Some(at), ..compressed(Compression::Lz4) };
    settings.change(ONE, &at(ReduceAt::WriteBack)).unwrap();
    assert_eq!(version(&directory), Some('3'));
    assert_eq!(settings.compressed_at_write_back(), [(ONE.to_owned(), Compression::Lz4)].into());
    assert_eq!(Settings::open(Arc::clone(&directory)).of(ONE), settings.of(ONE));
    settings.change(ONE, &at(ReduceAt::Idle)).unwrap();
    assert_eq!((version(&directory), settings.compressed_at_write_back()), (Some('2'), BTreeMap::new()));
}

#[test]
fn inline_reductions_have_a_version_of_their_own() {
    let directory = directory();
    let settings = Settings::open(Arc::clone(&directory));
    let at = |at| SettingsChange { compress_at: Some(at), ..compressed(Compression::Lz4) };
    settings.change(ONE, &at(ReduceAt::Inline)).unwrap();
    assert_eq!((version(&directory), settings.reduced_inline()), (Some('5'), [(ONE.to_owned(), ())].into()));
    assert_eq!(settings.compressed_at_write_back(), [(ONE.to_owned(), Compression::Lz4)].into());
    assert_eq!(Settings::open(Arc::clone(&directory)).of(ONE), settings.of(ONE));
    let idle = SettingsChange { dedup: Some(Deduplication::Disk), dedup_at: Some(ReduceAt::Idle), ..<_>::default() };
    settings.change(ONE, &idle).unwrap();
    assert_eq!(settings.reduced_inline(), BTreeMap::new(), "data is not compressed before it is compared");
    let inline = SettingsChange { dedup_at: Some(ReduceAt::Inline), ..at(ReduceAt::WriteBack) };
    settings.change(ONE, &inline).unwrap();
    assert_eq!((version(&directory), settings.reduced_inline()), (Some('5'), [(ONE.to_owned(), ())].into()));
    let of_label = SettingsChange { dedup: Some(Deduplication::Label("team".into())), ..<_>::default() };
    settings.change(ONE, &of_label).unwrap();
    assert_eq!(settings.reduced_inline(), BTreeMap::new(), "a disk without the label is compared with nothing");
    settings.change(ONE, &labelled(&[("team", "a")])).unwrap();
    assert_eq!(settings.reduced_inline(), [(ONE.to_owned(), ())].into());
    let off = SettingsChange { dedup: Some(Deduplication::Off), ..at(ReduceAt::Idle) };
    settings.change(ONE, &off).unwrap();
    assert_eq!(version(&directory), Some('2'));
    let defaults =
        DefaultsChange { dedup: Some(Deduplication::Disk), dedup_at: Some(ReduceAt::Inline), ..<_>::default() };
    settings.change_defaults(&defaults).unwrap();
    assert_eq!(version(&directory), Some('5'));
}

/// Data that is compared only later is not compressed before.
#[test]
fn both_reductions_are_at_write_back_if_both_settings_say_so() {
    let settings = Settings::open(directory());
    for (compress_at, dedup_at, both) in [
        (ReduceAt::WriteBack, ReduceAt::WriteBack, true),
        (ReduceAt::WriteBack, ReduceAt::Idle, false),
        (ReduceAt::Idle, ReduceAt::WriteBack, false),
    ] {
        let change = SettingsChange {
            compress_at: Some(compress_at),
            dedup: Some(Deduplication::Datastore),
            dedup_at: Some(dedup_at),
            ..compressed(Compression::Lz4)
        };
        settings.change(ONE, &change).unwrap();
        assert_eq!(settings.compressed_at_write_back().contains_key(ONE), both);
        assert_eq!(settings.deduplicated_at_write_back().contains_key(ONE), !dedup_at.is_idle());
    }
}

#[test]
fn deduplication_at_write_back_has_a_version_of_its_own() {
    let directory = directory();
    let settings = Settings::open(Arc::clone(&directory));
    let set = |dedup_at| SettingsChange {
        dedup: Some(Deduplication::Datastore),
        dedup_at: Some(dedup_at),
        ..SettingsChange::default()
    };
    settings.change(ONE, &set(ReduceAt::WriteBack)).unwrap();
    settings.change(TWO, &set(ReduceAt::Idle)).unwrap();
    assert_eq!(version(&directory), Some('4'));
    assert_eq!(settings.deduplicated_at_write_back(), [(ONE.to_owned(), Domain::Datastore)].into());
    let again = Settings::open(Arc::clone(&directory));
    assert_eq!([again.of(ONE), again.of(TWO)], [settings.of(ONE), settings.of(TWO)]);
    settings.change(ONE, &set(ReduceAt::Idle)).unwrap();
    assert_eq!((version(&directory), settings.deduplicated_at_write_back()), (Some('3'), BTreeMap::new()));
    let defaults = DefaultsChange { dedup: Some(Deduplication::Disk), ..DefaultsChange::default() };
    settings.change_defaults(&defaults).unwrap();
    assert_eq!(version(&directory), Some('4'));
    assert_eq!(Settings::open(Arc::clone(&directory)).defaults().dedup_at, ReduceAt::WriteBack);
    settings.change(ONE, &SettingsChange { dedup: Some(Deduplication::Off), ..SettingsChange::default() }).unwrap();
    assert_eq!(settings.of(ONE), DiskSettings::default());
}

#[test]
fn only_a_record_with_deduplication_has_the_version_of_deduplication() {
    let directory = directory();
    let settings = Settings::open(Arc::clone(&directory));
    let set = |dedup: Deduplication| SettingsChange {
        dedup_at: (!dedup.is_off()).then_some(ReduceAt::Idle),
        dedup: Some(dedup),
        ..SettingsChange::default()
    };
    settings.change(ONE, &compressed(Compression::Lz4)).unwrap();
    settings.change(TWO, &set(Deduplication::Label("tenant".into()))).unwrap();
    assert_eq!((version(&directory), settings.deduplicated()), (Some('3'), BTreeMap::new()));
    settings.change(TWO, &labelled(&[("tenant", "a")])).unwrap();
    let of_label = Domain::Label("tenant".into(), "a".into());
    assert_eq!((settings.deduplicated(), settings.domain(ONE)), ([(TWO.to_owned(), of_label)].into(), None));
    let again = Settings::open(Arc::clone(&directory));
    assert_eq!([again.of(ONE), again.of(TWO)], [settings.of(ONE), settings.of(TWO)]);
    // Each version is written again when the settings of the later ones are removed.
    settings.change(TWO, &set(Deduplication::Off)).unwrap();
    assert_eq!(version(&directory), Some('2'));
    let defaults = |dedup: Deduplication| DefaultsChange {
        dedup_at: (!dedup.is_off()).then_some(ReduceAt::Idle),
        dedup: Some(dedup),
        ..DefaultsChange::default()
    };
    settings.change_defaults(&defaults(Deduplication::Datastore)).unwrap();
    settings.change(ONE, &compressed(Compression::Off)).unwrap();
    assert_eq!(version(&directory), Some('3'));
    let again = Settings::open(Arc::clone(&directory));
    assert_eq!(again.defaults(), DiskDefaults { dedup: Deduplication::Datastore, ..DiskDefaults::default() });
    // A record of an earlier version never has deduplication.
    let record = SettingsRecord { new_disks: settings.defaults(), ..SettingsRecord::default() };
    for kind in [&KIND, SettingsRecord { new_disks: compressing(), ..SettingsRecord::default() }.kind()] {
        let wrong = decode(&kind.encode(&record).unwrap()).unwrap_err();
        assert!(wrong.kind() == ErrorKind::Corrupt && wrong.to_string().contains("later version"), "{wrong}");
    }
    settings.change_defaults(&defaults(Deduplication::Off)).unwrap();
    assert_eq!(version(&directory), Some('1'));
}

fn compressing() -> DiskDefaults {
    DiskDefaults { compression: Compression::Lz4, ..DiskDefaults::default() }
}

#[test]
fn clones_and_migrated_disks_keep_compression_and_deduplication() {
    let (here, there) = (Settings::open(directory()), Settings::open(directory()));
    let dedup = Some(Deduplication::Datastore);
    here.change(ONE, &SettingsChange { dedup, ..compressed(Compression::Zstd(5)) }).unwrap();
    here.inherit(ONE, &[TWO.into()]).unwrap();
    there.adopt(ONE, &here).unwrap();
    there.take_over(TWO, &here, ONE);
    for settings in [&here, &there] {
        let DiskSettings { compression, dedup, .. } = settings.of(TWO);
        assert_eq!((compression, dedup), (Compression::Zstd(5), Deduplication::Datastore));
    }
}

#[test]
fn records_with_names_instead_of_uuids_are_refused() {
    let record =
        SettingsRecord { disks: [("web".to_owned(), DiskSettings::default())].into(), ..SettingsRecord::default() };
    assert_eq!(decode(&KIND.encode(&record).unwrap()).unwrap_err().kind(), ErrorKind::Corrupt);
}

#[test]
fn a_record_that_could_not_be_read_again_is_not_written() {
    let directory = directory();
    let settings = Settings::open(Arc::clone(&directory));
    let text = |c: char| c.to_string().repeat(60);
    let labels: Vec<(String, String)> = ('a'..='z').map(|c| (text(c), text(c))).collect();
    let labels: Vec<(&str, &str)> = labels.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
    settings.change(ONE, &labelled(&labels)).unwrap();
    let clones: Vec<String> = (0..20_000).map(|n| format!("{n:08x}-0b0a-4908-8706-050403020101")).collect();
    let refused = settings.inherit(ONE, &clones).unwrap_err();
    assert!(refused.to_string().contains("settings record cannot grow"), "{refused}");
    assert_eq!(settings.of(&clones[0]), DiskSettings::default());
    assert_eq!(Settings::open(directory).of(ONE), settings.of(ONE));
    settings.inherit(ONE, &clones[..100]).unwrap();
}

fn labelled(labels: &[(&str, &str)]) -> SettingsChange {
    let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    SettingsChange { labels, ..SettingsChange::default() }
}

#[test]
fn labels_are_set_replaced_removed_and_checked() {
    let directory = directory();
    let settings = Settings::open(Arc::clone(&directory));
    settings.change(ONE, &labelled(&[("tenant", "a"), ("tier", "gold")])).unwrap();
    settings.change(TWO, &labelled(&[("tenant", "a")])).unwrap();
    settings.change(ONE, &labelled(&[("tier", "silver")])).unwrap();
    assert_eq!(settings.labels(), [("tenant=a".to_owned(), 2), ("tier=silver".to_owned(), 1)].into());
    let one = settings.of(ONE).labels;
    for (wanted, has) in [("tenant", true), ("tenant=a", true), ("tenant=b", false), ("a", false), ("tier=gold", false)]
    {
        assert_eq!(has_label(&one, wanted), has, "{wanted}");
    }
    let remove = SettingsChange { remove_labels: vec!["tier".into(), "none".into()], ..SettingsChange::default() };
    settings.change(ONE, &remove).unwrap();
    assert_eq!(Settings::open(directory).of(ONE).labels, [("tenant".to_owned(), "a".to_owned())].into());
    for (key, value) in [("", "a"), ("a", ""), ("a=b", "c"), ("a b", "c"), ("a", "b/c")] {
        let error = settings.change(ONE, &labelled(&[(key, value)])).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{key:?} {value:?}");
    }
    for text in ["tenant", "=a", "tenant=", "a b=c"] {
        assert_eq!(parse_label(text).unwrap_err().kind(), ErrorKind::Invalid, "{text}");
    }
    let many: Vec<String> = (0..LABELS_MAX).map(|number| format!("key{number}")).collect();
    let many: Vec<(&str, &str)> = many.iter().map(|key| (key.as_str(), "x")).collect();
    assert_eq!(settings.change(ONE, &labelled(&many)).unwrap_err().kind(), ErrorKind::Invalid);
}

#[test]
fn limits_are_stored_and_a_reservation_stays_below_its_quota() {
    let directory = directory();
    let settings = Settings::open(Arc::clone(&directory));
    let limits = |quota, reservation| LimitsChange { quota, reservation };
    settings.change_label("tenant=a", &limits(Some(10), Some(5))).unwrap();
    assert_eq!(settings.change_label("tenant=a", &limits(Some(4), None)).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(settings.change_label("tenant", &limits(Some(4), None)).unwrap_err().kind(), ErrorKind::Invalid);
    let change = SettingsChange { limits: limits(Some(7), Some(7)), ..SettingsChange::default() };
    settings.change(ONE, &change).unwrap();
    settings.inherit(ONE, &[TWO.into()]).unwrap();
    assert_eq!(settings.of(TWO).limits, Limits { quota: Some(7), reservation: None }, "the reservation is not shared");
    let again = Settings::open(Arc::clone(&directory));
    assert_eq!(again.of(ONE).limits, Limits { quota: Some(7), reservation: Some(7) });
    assert_eq!(again.labels(), [("tenant=a".to_owned(), 0)].into());
    again.change_label("tenant=a", &limits(Some(0), Some(0))).unwrap();
    assert_eq!(again.labels(), BTreeMap::new());
}

#[test]
fn the_format_page_shows_the_record() {
    let mut settings = DiskSettings::default();
    let change = SettingsChange {
        limits: LimitsChange { quota: Some(10 << 30), reservation: None },
        ..labelled(&[("tenant", "a")])
    };
    waits(600).apply(&mut settings).unwrap();
    change.apply(&mut settings).unwrap();
    let labels = [("tenant=a".to_owned(), Limits { quota: Some(100 << 30), reservation: Some(20 << 30) })].into();
    let record = SettingsRecord { disks: [(ONE.to_owned(), settings)].into(), labels, ..SettingsRecord::default() };
    let disks = [(ONE.to_owned(), DiskSettings { compression: Compression::Zstd(3), ..DiskSettings::default() })];
    let second = SettingsRecord { disks: disks.into(), new_disks: compressing(), ..SettingsRecord::default() };
    let dedup = Deduplication::Label("tenant".into());
    let disks = [(ONE.to_owned(), DiskSettings { dedup, ..DiskSettings::default() })];
    let new_disks = DiskDefaults { dedup: Deduplication::Disk, ..DiskDefaults::default() };
    let third = SettingsRecord { disks: disks.into(), new_disks, ..SettingsRecord::default() };
    for record in [record, second, third] {
        let written = String::from_utf8(record.kind().encode(&record).unwrap()).unwrap();
        let page = include_str!("../../../../docs/format/settings.md");
        assert!(page.contains(&written), "docs/format/settings.md should show:\n{written}");
    }
}
