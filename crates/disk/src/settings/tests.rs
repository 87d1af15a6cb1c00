//! The record of settings: what is stored, and what a record means that cannot be read.
#![allow(clippy::unwrap_used)]

use super::*;
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{File, IoMode};
use std::time::Duration;

const ONE: &str = "0f0e0d0c-0b0a-4908-8706-050403020101";
const TWO: &str = "1f1e1d1c-1b1a-4918-9716-151413121111";

fn directory() -> Arc<dyn Directory> {
    SimulatedDisk::new(1, SimulatedOptions::default()).directory()
}

fn waits(seconds: u64) -> SettingsChange {
    SettingsChange { on_full: Some(OnFull::Wait(Some(Duration::from_secs(seconds)))) }
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
    assert_eq!(open.policy(), OnFull::Wait(Some(Duration::from_secs(60))), "open disks get the new policy");
    settings.change(ONE, &SettingsChange::default()).unwrap();
    settings.inherit(ONE, &[TWO.into()]).unwrap();
    let again = Settings::open(Arc::clone(&directory));
    assert_eq!([again.of(ONE), again.of(TWO)], [settings.of(ONE), settings.of(ONE)]);
    assert_eq!(again.open_disk(TWO, "two").policy(), open.policy());

    settings.forget(ONE);
    settings.change(TWO, &SettingsChange { on_full: Some(OnFull::Error) }).unwrap();
    let bytes = KIND.read(&*directory, FILE).unwrap().unwrap();
    assert_eq!(decode(&bytes).unwrap(), SettingsRecord::default());
}

#[test]
fn a_migrated_disk_keeps_its_settings_and_its_waiting_writes() {
    let (here, there) = (Settings::open(directory()), Settings::open(directory()));
    here.change(ONE, &waits(60)).unwrap();
    let open = here.open_disk(ONE, "one");
    there.adopt(ONE, &here).unwrap();
    here.forget(ONE);
    open.begin(512, &Error::new(ErrorKind::NoSpace, "full"));
    assert_eq!(there.all_waiting().len(), 1);
    there.change(ONE, &waits(7)).unwrap();
    assert_eq!(open.policy(), OnFull::Wait(Some(Duration::from_secs(7))));
}

#[test]
fn a_record_that_cannot_be_read_is_kept_until_a_repair() {
    for damage in [&b"lamina settings 2 crc32c=00000000\n{}\n"[..], b"lamina settings 1 crc32c=00000000\n{}\n", b"x"] {
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
    let directory = directory();
    Settings::open(Arc::clone(&directory)).change(ONE, &waits(60)).unwrap();
    let mut bytes = KIND.read(&*directory, FILE).unwrap().unwrap();
    let last = bytes.len() - 20;
    bytes[last] ^= 0x55;
    sealed::put(&*directory, FILE, &bytes).unwrap();
    assert_eq!(Settings::open(directory).of(ONE).on_full, waits(60).on_full.unwrap());
}

#[test]
fn records_with_names_instead_of_uuids_are_refused() {
    let record = SettingsRecord { disks: [("web".to_owned(), DiskSettings::default())].into() };
    assert_eq!(decode(&KIND.encode(&record).unwrap()).unwrap_err().kind(), ErrorKind::Corrupt);
}

#[test]
fn the_format_page_shows_the_record() {
    let mut settings = DiskSettings::default();
    waits(600).apply(&mut settings);
    let record = SettingsRecord { disks: [(ONE.to_owned(), settings)].into() };
    let written = String::from_utf8(KIND.encode(&record).unwrap()).unwrap();
    let page = include_str!("../../../../docs/format/settings.md");
    assert!(page.contains(&written), "docs/format/settings.md should show:\n{written}");
}
