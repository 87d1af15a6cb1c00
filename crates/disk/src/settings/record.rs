//! The record of settings: what is stored for each disk, how it is changed, and the versions of the file.

use crate::compression::{Compression, change_compression};
use crate::deduplication::{Deduplication, change_deduplication};
use crate::full::OnFull;
use crate::names;
use crate::quota::Limits;
use crate::reduce_at::ReduceAt;
use crate::sealed::Kind;
use crate::zeros::DetectZeroes;
use error::text::size;
use error::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Kind of the file. The limit is sufficient for a hundred thousand disks.
pub(super) const KIND: Kind = Kind { word: "settings", version: 1, length_max: 64 << 20 };
/// The later kinds of the file, in the order of their versions: with compression; with deduplication, or with
/// compression at write-back; with deduplication at write-back; and with inline compression or deduplication.
const LATER: [Kind; 4] = [
    Kind { version: 2, ..KIND },
    Kind { version: 3, ..KIND },
    Kind { version: 4, ..KIND },
    Kind { version: 5, ..KIND },
];

/// The settings of a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskSettings {
    /// What happens to writes that need space while there is none.
    #[serde(default)]
    pub on_full: OnFull,
    /// Whether writes of zeros become requests to zero their range.
    #[serde(default)]
    pub detect_zeroes: DetectZeroes,
    /// The disk's labels: keys with values.
    #[serde(default)]
    pub labels: Labels,
    /// The disk's quota and reservation.
    #[serde(default)]
    pub limits: Limits,
    /// How servers compress data that was not written for a while.
    #[serde(default, skip_serializing_if = "Compression::is_off")]
    pub compression: Compression,
    /// When new data is compressed.
    #[serde(default, skip_serializing_if = "ReduceAt::is_idle")]
    pub compress_at: ReduceAt,
    /// Among which disks servers find data of the disk that is equal to other data, once it was not written for a
    /// while.
    #[serde(default, skip_serializing_if = "Deduplication::is_off")]
    pub dedup: Deduplication,
    /// When new data is compared with other data.
    #[serde(default, skip_serializing_if = "ReduceAt::is_idle")]
    pub dedup_at: ReduceAt,
}

impl DiskSettings {
    /// Whether clients of the disk with this UUID wait until new data is compressed and compared with other data.
    pub(crate) fn reduces_inline(&self, uuid: &str) -> bool {
        // A disk without the label of its setting is compared with nothing.
        let compared = self.dedup_at == ReduceAt::Inline && self.dedup.domain(uuid, &self.labels).is_some();
        compared || self.compress_at == ReduceAt::Inline && self.compresses_writes()
    }

    /// Whether new data is compressed at write-back. Data that is compared with other data only later is not compressed
    /// before, because a share of a compressed block frees space only when most of its pack is shared.
    pub(crate) fn compresses_writes(&self) -> bool {
        !self.compress_at.is_idle() && (self.dedup.is_off() || !self.dedup_at.is_idle())
    }
}

/// Changes of settings; `None` leaves a setting unchanged.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SettingsChange {
    /// What happens to writes that need space while there is none.
    #[serde(default)]
    pub on_full: Option<OnFull>,
    /// Whether writes of zeros become requests to zero their range.
    #[serde(default)]
    pub detect_zeroes: Option<DetectZeroes>,
    /// Labels to set.
    #[serde(default)]
    pub labels: Labels,
    /// Keys of labels to remove.
    #[serde(default)]
    pub remove_labels: Vec<String>,
    /// The quota and the reservation.
    #[serde(default)]
    pub limits: LimitsChange,
    /// How servers compress data that was not written for a while.
    #[serde(default)]
    pub compression: Option<Compression>,
    /// When new data is compressed. Compression that is switched on is at write-back, unless this is given.
    #[serde(default)]
    pub compress_at: Option<ReduceAt>,
    /// Among which disks servers find equal data.
    #[serde(default)]
    pub dedup: Option<Deduplication>,
    /// When new data is compared with other data. Deduplication that is switched on is at write-back, unless this is
    /// given.
    #[serde(default)]
    pub dedup_at: Option<ReduceAt>,
}

/// The settings that new disks get, unless others are given.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskDefaults {
    /// How servers compress data of the disk; only thin native disks get this setting.
    #[serde(default)]
    pub compression: Compression,
    /// When new data of the disk is compressed.
    #[serde(default, skip_serializing_if = "ReduceAt::is_idle")]
    pub compress_at: ReduceAt,
    /// Among which disks servers find equal data; only thin native disks get this setting.
    #[serde(default, skip_serializing_if = "Deduplication::is_off")]
    pub dedup: Deduplication,
    /// When new data of the disk is compared with other data.
    #[serde(default, skip_serializing_if = "ReduceAt::is_idle")]
    pub dedup_at: ReduceAt,
}

impl DiskDefaults {
    fn are_none(&self) -> bool {
        *self == Self::default()
    }
}

/// Changes of the settings that new disks get; `None` leaves a setting unchanged.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DefaultsChange {
    /// How servers compress data of the disk.
    #[serde(default)]
    pub compression: Option<Compression>,
    /// When new data of the disk is compressed. Compression that is switched on is at write-back, unless this is given.
    #[serde(default)]
    pub compress_at: Option<ReduceAt>,
    /// Among which disks servers find equal data.
    #[serde(default)]
    pub dedup: Option<Deduplication>,
    /// When new data of the disk is compared with other data. Deduplication that is switched on is at write-back,
    /// unless this is given.
    #[serde(default)]
    pub dedup_at: Option<ReduceAt>,
}

impl DefaultsChange {
    pub(super) fn apply(&self, defaults: &mut DiskDefaults) -> Result<()> {
        change_compression(self.compression, self.compress_at, &mut defaults.compression, &mut defaults.compress_at)?;
        change_deduplication(self.dedup.as_ref(), self.dedup_at, &mut defaults.dedup, &mut defaults.dedup_at)
    }
}

/// Labels of a disk: keys with values.
pub type Labels = BTreeMap<String, String>;

/// Changes of limits; `None` leaves a limit unchanged, and 0 removes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LimitsChange {
    /// Most bytes that may be mapped.
    #[serde(default)]
    pub quota: Option<u64>,
    /// Bytes that can be mapped whatever other disks write.
    #[serde(default)]
    pub reservation: Option<u64>,
}

impl LimitsChange {
    pub(super) fn apply(&self, limits: &mut Limits) -> Result<()> {
        let changed = |new: Option<u64>, old: Option<u64>| new.map_or(old, |new| (new > 0).then_some(new));
        limits.quota = changed(self.quota, limits.quota);
        limits.reservation = changed(self.reservation, limits.reservation);
        match (limits.quota, limits.reservation) {
            (Some(quota), Some(reservation)) if reservation > quota => Err(Error::new(
                ErrorKind::Invalid,
                format!("a reservation of {} is above the quota of {}", size(reservation), size(quota)),
            )),
            _ => Ok(()),
        }
    }
}

impl SettingsChange {
    pub(super) fn apply(&self, settings: &mut DiskSettings) -> Result<()> {
        settings.on_full = self.on_full.unwrap_or(settings.on_full);
        settings.detect_zeroes = self.detect_zeroes.unwrap_or(settings.detect_zeroes);
        change_compression(self.compression, self.compress_at, &mut settings.compression, &mut settings.compress_at)?;
        change_deduplication(self.dedup.as_ref(), self.dedup_at, &mut settings.dedup, &mut settings.dedup_at)?;
        self.limits.apply(&mut settings.limits)?;
        for key in &self.remove_labels {
            settings.labels.remove(key);
        }
        for (key, value) in &self.labels {
            check_label(key, value)?;
            settings.labels.insert(key.clone(), value.clone());
        }
        match settings.labels.len() {
            0..=LABELS_MAX => Ok(()),
            count => {
                Err(Error::new(ErrorKind::Invalid, format!("a disk has at most {LABELS_MAX} labels, not {count}")))
            }
        }
    }
}

/// Most labels of one disk.
pub(super) const LABELS_MAX: usize = 32;

/// Checks a label: key and value have the form of names of disks.
fn check_label(key: &str, value: &str) -> Result<()> {
    check_label_key(key)?;
    names::check("label", value)
}

/// Checks the key of a label.
pub(crate) fn check_label_key(key: &str) -> Result<()> {
    names::check("label", key)?;
    match key.contains('=') {
        true => {
            Err(Error::new(ErrorKind::Invalid, format!("the key '{}' of a label contains '='", key.escape_debug())))
        }
        false => Ok(()),
    }
}

/// Splits `key=value`, and checks both.
pub fn parse_label(text: &str) -> Result<(String, String)> {
    let Some((key, value)) = text.split_once('=') else {
        let text = format!("'{}' is no label: write KEY=VALUE, such as tenant=a", text.escape_debug());
        return Err(Error::new(ErrorKind::Invalid, text));
    };
    check_label(key, value)?;
    Ok((key.to_owned(), value.to_owned()))
}

/// Whether a disk with `labels` has the label `wanted`: `key=value`, or a key with any value.
pub fn has_label(labels: &Labels, wanted: &str) -> bool {
    match wanted.split_once('=') {
        Some((key, value)) => labels.get(key).is_some_and(|own| own == value),
        None => labels.contains_key(wanted),
    }
}

/// The record of settings.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SettingsRecord {
    /// The settings of each disk that has other settings than the defaults, by its UUID.
    pub(super) disks: BTreeMap<String, DiskSettings>,
    /// Limits for all disks with a label, by `key=value`.
    #[serde(default)]
    pub(super) labels: BTreeMap<String, Limits>,
    /// The settings that new disks get.
    #[serde(default, skip_serializing_if = "DiskDefaults::are_none")]
    pub(super) new_disks: DiskDefaults,
}

impl SettingsRecord {
    /// The kind of the file: the lowest version that has the settings in use.
    pub(super) fn kind(&self) -> &'static Kind {
        let any = |is: fn(&DiskSettings) -> bool| self.disks.values().any(is);
        let DiskDefaults { dedup, dedup_at, compress_at, .. } = &self.new_disks;
        let is_third = |settings: &DiskSettings| !settings.dedup.is_off() || !settings.compress_at.is_idle();
        let is_inline = |at: [ReduceAt; 2]| at.contains(&ReduceAt::Inline);
        let [second, third, fourth, fifth] = &LATER;
        if is_inline([*compress_at, *dedup_at])
            || self.disks.values().any(|settings| is_inline([settings.compress_at, settings.dedup_at]))
        {
            fifth
        } else if !dedup_at.is_idle() || any(|settings| !settings.dedup_at.is_idle()) {
            fourth
        } else if !dedup.is_off() || !compress_at.is_idle() || any(is_third) {
            third
        } else if !self.new_disks.are_none() || any(|settings| !settings.compression.is_off()) {
            second
        } else {
            &KIND
        }
    }
}

/// Decodes a record of any version.
pub(super) fn decode(bytes: &[u8]) -> Result<SettingsRecord> {
    let of_kind = |kind: &Kind| kind.decode::<SettingsRecord>(bytes).map(|record| (kind.version, record));
    let is_other = |error: &Error| error.kind() == ErrorKind::Unsupported;
    let later = |kind, error: Error| if is_other(&error) { of_kind(kind) } else { Err(error) };
    let mut decoded = of_kind(&KIND);
    for kind in &LATER {
        decoded = decoded.or_else(|error| later(kind, error));
    }
    let (version, record) = decoded?;
    if record.kind().version > version {
        return Err(KIND.corrupt("has a setting of a later version"));
    }
    match record.disks.keys().all(|uuid| names::parse_uuid(uuid).is_some()) {
        true => Ok(record),
        false => Err(KIND.corrupt("has a disk without a UUID")),
    }
}

/// Decodes a record of any version. If one byte is damaged, mends it, and also returns the error that was mended.
pub(super) fn decode_mending(bytes: &[u8]) -> Result<(SettingsRecord, Option<Error>)> {
    let [earlier @ .., last] = &LATER;
    let mut outcome = last.decode_mending(bytes, decode);
    for kind in earlier.iter().rev().chain([&KIND]) {
        match outcome {
            Err(error) if error.kind() == ErrorKind::Corrupt => outcome = kind.decode_mending(bytes, decode),
            _ => break,
        }
    }
    outcome
}
