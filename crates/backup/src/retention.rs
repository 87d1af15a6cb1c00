//! Retention: which backups of each disk and of each machine are kept, and which are deleted.
//!
//! 1. Each rule keeps the newest backup of each of its newest periods that have a backup. Periods are those of the
//!    calendar in UTC; weeks begin on Monday. The time of a backup is the time at which its snapshot was taken.
//! 2. A backup on which a kept backup is based is kept too, and so are the backups of the disks of a machine whose
//!    backup is kept.
//! 3. Without rules, no backup is deleted.

use crate::machine::MachineBackupInfo;
use crate::manifest::Manifest;
use crate::repository::{BackupInfo, Repository};
use error::{Error, ErrorKind, Result};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

/// How many backups of each disk and of each machine are kept.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Keep {
    /// The newest backups.
    pub last: u32,
    /// Hours of which the newest backup is kept.
    pub hourly: u32,
    /// Days of which the newest backup is kept.
    pub daily: u32,
    /// Weeks of which the newest backup is kept.
    pub weekly: u32,
    /// Months of which the newest backup is kept.
    pub monthly: u32,
    /// Years of which the newest backup is kept.
    pub yearly: u32,
}

/// A backup, and why it is kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Judged {
    /// The backup.
    pub backup: BackupInfo,
    /// The rules that keep the backup, such as `daily`; `base` if a kept backup is based on this backup, `machine` if
    /// the kept backup of a machine needs it, `restoring` if a disk is being restored from it. Empty for a backup that
    /// is deleted.
    pub reasons: Vec<String>,
}

/// The result of applying rules to a repository.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pruned {
    /// The backups, the oldest first.
    pub backups: Vec<Judged>,
    /// Number of backups that were deleted, or would be in a dry run.
    pub deleted: u64,
    /// Stored bytes of the deleted backups.
    pub freed: u64,
    /// Number of packs without a backup that were removed.
    pub swept: u64,
    /// Whether nothing was changed.
    pub dry_run: bool,
}

/// The period of a rule in which a time lies; periods are only compared.
type Period = (i64, i64, i64, i64);

/// Names the period of a time.
type PeriodOf = fn(u64) -> Period;

const RULES: [(&str, PeriodOf); 5] =
    [("hourly", hour), ("daily", day), ("weekly", week), ("monthly", month), ("yearly", year)];

fn date(seconds: u64) -> jiff::civil::DateTime {
    let time = i64::try_from(seconds).ok().and_then(|seconds| Timestamp::from_second(seconds).ok());
    TimeZone::UTC.to_datetime(time.unwrap_or(Timestamp::MAX))
}

fn hour(seconds: u64) -> Period {
    let date = date(seconds);
    (date.year().into(), date.month().into(), date.day().into(), date.hour().into())
}

fn day(seconds: u64) -> Period {
    let date = date(seconds);
    (date.year().into(), date.month().into(), date.day().into(), 0)
}

fn week(seconds: u64) -> Period {
    let week = date(seconds).date().iso_week_date();
    (week.year().into(), week.week().into(), 0, 0)
}

fn month(seconds: u64) -> Period {
    let date = date(seconds);
    (date.year().into(), date.month().into(), 0, 0)
}

fn year(seconds: u64) -> Period {
    (date(seconds).year().into(), 0, 0, 0)
}

impl FromStr for Keep {
    type Err = String;
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let mut keep = Self::default();
        for rule in text.split(',') {
            let wrong = || {
                format!(
                    "'{rule}' is not a rule: write last, hourly, daily, weekly, monthly or yearly with a number, such as \
                     daily=7,weekly=4"
                )
            };
            let (name, number) = rule.split_once('=').ok_or_else(wrong)?;
            let place = match name {
                "last" => &mut keep.last,
                "hourly" => &mut keep.hourly,
                "daily" => &mut keep.daily,
                "weekly" => &mut keep.weekly,
                "monthly" => &mut keep.monthly,
                "yearly" => &mut keep.yearly,
                _ => return Err(wrong()),
            };
            if *place > 0 {
                return Err(format!("'{name}' is given twice"));
            }
            *place = number.parse().ok().filter(|number| *number > 0).ok_or_else(wrong)?;
        }
        Ok(keep)
    }
}

impl Keep {
    fn rules(&self) -> [u32; 5] {
        [self.hourly, self.daily, self.weekly, self.monthly, self.yearly]
    }

    fn is_empty(&self) -> bool {
        self.last == 0 && self.rules() == [0; 5]
    }

    /// For each backup that is kept, the reasons.
    fn judge(&self, manifests: &[Manifest]) -> BTreeMap<String, Vec<String>> {
        // A machine and a disk can have the same name.
        let mut disks: BTreeMap<(bool, &str), Vec<&Manifest>> = BTreeMap::new();
        for manifest in manifests {
            let of = (manifest.backup.machine.is_some(), manifest.backup.disk.as_str());
            disks.entry(of).or_default().push(manifest);
        }
        let mut kept: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let mut keep = |manifest: &Manifest, reason: &str| {
            kept.entry(manifest.backup.id.clone()).or_default().push(reason.to_owned());
        };
        for backups in disks.values_mut() {
            backups.sort_by_key(|manifest| std::cmp::Reverse((manifest.backup.point.created, manifest.backup.number)));
            backups.iter().take(self.last as usize).for_each(|manifest| keep(manifest, "last"));
            for ((name, period), count) in RULES.into_iter().zip(self.rules()) {
                let mut seen = BTreeSet::new();
                for manifest in backups.iter() {
                    if seen.len() >= count as usize {
                        break;
                    }
                    if seen.insert(period(manifest.backup.point.created)) {
                        keep(manifest, name);
                    }
                }
            }
        }
        let machines: Vec<&Manifest> = manifests.iter().filter(|known| kept.contains_key(&known.backup.id)).collect();
        for disk in machines.into_iter().flat_map(|machine| &machine.disks) {
            let reasons = kept.entry(disk.backup.clone()).or_default();
            if !reasons.iter().any(|reason| reason == "machine") {
                reasons.push("machine".to_owned());
            }
        }
        let parents: BTreeMap<&String, &String> = manifests
            .iter()
            .filter_map(|manifest| Some((&manifest.backup.id, manifest.backup.parent.as_ref()?.backup.as_ref()?)))
            .collect();
        for mut id in kept.keys().cloned().collect::<Vec<_>>() {
            // Ends at a backup whose bases were marked before. So it also ends if damaged backups are based on each
            // other in a circle.
            while let Some(parent) = parents.get(&id) {
                let reasons = kept.entry((*parent).clone()).or_default();
                if reasons.iter().any(|reason| reason == "base") {
                    break;
                }
                reasons.push("base".to_owned());
                id = (*parent).clone();
            }
        }
        kept
    }
}

impl Repository {
    /// Deletes the backups that the rules do not keep, and packs without a backup. A dry run only reports them.
    ///
    /// # Errors
    /// `Invalid` without rules; `Corrupt` if a manifest cannot be read, because it is unknown then which backups are
    /// needed.
    pub fn prune(&self, keep: &Keep, dry_run: bool) -> Result<Pruned> {
        if keep.is_empty() {
            return Err(Error::new(ErrorKind::Invalid, "no rule is given, so all backups would be deleted"));
        }
        let lock = match dry_run {
            true => None,
            false => self.lock()?,
        };
        let manifests = self.manifests()?;
        let mut kept = keep.judge(&manifests);
        for id in self.read_backups()? {
            kept.entry(id).or_default().push("restoring".to_owned());
        }
        let gone: Vec<Manifest> =
            manifests.iter().filter(|manifest| !kept.contains_key(&manifest.backup.id)).cloned().collect();
        let mut swept = 0;
        if !dry_run {
            self.delete(&gone)?;
            swept = self.sweep()?;
        }
        drop(lock);
        let judged = |manifest: &Manifest| Judged {
            backup: BackupInfo::of(manifest),
            reasons: kept.get(&manifest.backup.id).cloned().unwrap_or_default(),
        };
        let mut backups: Vec<Judged> = manifests.iter().map(judged).collect();
        MachineBackupInfo::complete(&mut backups, |judged| &mut judged.backup);
        Ok(Pruned {
            backups,
            deleted: gone.len() as u64,
            freed: gone.iter().map(Manifest::stored).sum(),
            swept,
            dry_run,
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::testbed;

    /// Thursday, 2026-11-26, 02:00.
    const NOW: u64 = 1_795_658_400;

    /// A backup of a disk that was taken `hours` ago, based on another backup.
    fn backup(number: u32, disk: &str, hours: u64, parent: Option<u32>) -> Manifest {
        let id = |number: u32| format!("0f0e0d0c-0b0a-4908-8706-05040302{number:04}");
        let mut manifest = testbed::manifest(40 << 20);
        manifest.backup.id = id(number);
        manifest.backup.disk = disk.into();
        manifest.backup.point.created = NOW - hours * 3600;
        let like = manifest.backup.parent.take();
        manifest.backup.parent = parent.and_then(|parent| like.map(|like| (parent, like))).map(|(parent, mut like)| {
            like.backup = Some(id(parent));
            like
        });
        manifest
    }

    fn kept(rules: &str, manifests: &[Manifest]) -> Vec<u32> {
        let keep: Keep = rules.parse().unwrap();
        let kept = keep.judge(manifests);
        let number = |id: &String| id[id.len() - 4..].parse::<u32>().unwrap();
        kept.keys().map(number).collect()
    }

    #[test]
    fn rules_keep_the_newest_backup_of_each_period() {
        // One backup a day at 02:00, the first today; two more today.
        let mut all: Vec<Manifest> = (0..800).map(|day| backup(day as u32, "a", day * 24, None)).collect();
        all.push(backup(900, "a", 1, None));
        all.push(backup(901, "b", 5000, None));
        assert_eq!(kept("last=2", &all), [0, 900, 901]);
        assert_eq!(kept("hourly=2", &all), [0, 900, 901]);
        assert_eq!(kept("daily=3", &all), [0, 1, 2, 901]);
        // Sundays, and today as the newest day of this week.
        assert_eq!(kept("weekly=3", &all), [0, 4, 11, 901]);
        // The last days of October and September.
        assert_eq!(kept("monthly=3", &all), [0, 26, 57, 901]);
        assert_eq!(kept("yearly=3", &all), [0, 330, 695, 901]);
        assert_eq!(kept("daily=2,monthly=2", &all), [0, 1, 26, 901]);
        assert_eq!(kept("yearly=900", &all), [0, 330, 695, 901]);
    }

    #[test]
    fn what_kept_backups_are_based_on_is_kept() {
        let mut all: Vec<Manifest> =
            (0..9).map(|day| backup(day, "a", u64::from(day) * 24, (day < 8).then_some(day + 1))).collect();
        assert_eq!(kept("last=1", &all), (0..9).collect::<Vec<_>>());
        // A new chain begins with backup 3.
        all[3].backup.parent = None;
        assert_eq!(kept("last=2", &all), [0, 1, 2, 3]);
        assert_eq!(kept("last=3,daily=1", &all), [0, 1, 2, 3]);
        // A circle ends.
        all[8] = backup(8, "a", 200, Some(5));
        assert_eq!(kept("last=6", &all), (0..9).collect::<Vec<_>>());
    }

    #[test]
    fn rules_are_parsed() {
        let keep: Keep = "daily=7,weekly=4".parse().unwrap();
        assert_eq!((keep.daily, keep.weekly, keep.last), (7, 4, 0));
        for text in ["", "daily", "daily=", "daily=0", "daily=-1", "daily=7,daily=8", "days=7", "daily=7,", "daily 7"] {
            assert!(text.parse::<Keep>().is_err(), "{text}");
        }
    }
}
