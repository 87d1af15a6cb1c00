//! Charges against quotas and reservations, with counts that the test decides.
#![allow(clippy::unwrap_used)]

use super::*;

/// What disks map, and the free space.
#[derive(Default)]
struct Numbers {
    mapped: BTreeMap<String, u64>,
    free: u64,
    counts: u64,
    /// The disk that cannot be counted.
    damaged: Option<String>,
}

struct Given(Arc<Mutex<Numbers>>);

impl Accounting for Given {
    fn count(&self, uuid: &str) -> Result<u64> {
        let mut numbers = self.0.lock();
        numbers.counts += 1;
        if numbers.damaged.as_deref() == Some(uuid) {
            return Err(Error::new(ErrorKind::Corrupt, "a page is damaged"));
        }
        Ok(numbers.mapped.get(uuid).copied().unwrap_or_default())
    }

    fn free(&self) -> Result<u64> {
        Ok(self.0.lock().free)
    }

    fn name(&self, uuid: &str) -> Option<String> {
        Some(uuid.to_uppercase())
    }

    fn names(&self) -> BTreeMap<String, String> {
        ["a", "b", "c"].into_iter().map(|uuid| (uuid.to_owned(), uuid.to_uppercase())).collect()
    }
}

/// Quotas of disks (UUID, value of the label `t`, quota, reservation) and of values of that label.
fn quotas(disks: &[(&str, &str, u64, u64)], labels: &[(&str, u64, u64)]) -> (Arc<Quotas>, Arc<Mutex<Numbers>>) {
    let numbers = Arc::<Mutex<Numbers>>::default();
    let quotas = Arc::<Quotas>::default();
    quotas.set_accounting(Box::new(Given(Arc::clone(&numbers))));
    set(&quotas, disks, labels);
    (quotas, numbers)
}

fn set(quotas: &Quotas, disks: &[(&str, &str, u64, u64)], labels: &[(&str, u64, u64)]) {
    let some = |number: u64| (number > 0).then_some(number);
    let limits = |quota, reservation| Limits { quota: some(quota), reservation: some(reservation) };
    let own: Vec<BTreeMap<String, String>> =
        disks.iter().map(|(_, value, ..)| [("t".to_owned(), (*value).to_owned())].into()).collect();
    let disks = disks.iter().zip(&own).map(|((uuid, _, quota, reservation), labels)| LimitedDisk {
        uuid,
        labels,
        limits: limits(*quota, *reservation),
    });
    let labels = labels.iter().map(|(value, quota, reservation)| (format!("t={value}"), limits(*quota, *reservation)));
    quotas.set(disks, &labels.collect());
}

fn gate(quotas: &Arc<Quotas>, uuid: &str) -> Option<Arc<Gate>> {
    let slot = GateSlot::default();
    quotas.set_gate(uuid, &slot);
    slot.gate()
}

fn refused(gate: &Gate, new: u64) -> String {
    let error = gate.charge(new).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    error.to_string()
}

#[test]
fn a_disk_without_limits_has_no_gate() {
    let (quotas, numbers) = quotas(&[("a", "x", 10, 0), ("b", "y", 0, 0)], &[]);
    assert!(gate(&quotas, "a").is_some());
    assert!(gate(&quotas, "b").is_none());
    assert!(gate(&quotas, "c").is_none());
    assert_eq!(numbers.lock().counts, 0);
}

#[test]
fn a_quota_is_exact_and_overwrites_are_never_refused() {
    let (quotas, numbers) = quotas(&[("a", "x", 10, 0)], &[]);
    numbers.lock().mapped.insert("a".into(), 4);
    let gate = gate(&quotas, "a").unwrap();
    drop(gate.charge(6).unwrap());
    let text = refused(&gate, 1);
    assert!(text.contains("quota of disk 'A'") && text.contains("10 bytes of 10 bytes"), "{text}");
    assert_eq!(numbers.lock().counts, 1, "nothing was freed since the count");
    assert!(quotas.info(false).unwrap()[0].exceeded);
    drop(gate.charge(0).unwrap());
    // After a discard the disk is counted again before a refusal.
    gate.may_shrink();
    numbers.lock().mapped.insert("a".into(), 9);
    drop(gate.charge(1).unwrap());
    assert!(!quotas.info(false).unwrap()[0].exceeded);
    assert_eq!(numbers.lock().counts, 2);
    refused(&gate, 1);
    assert_eq!(numbers.lock().counts, 2);
}

#[test]
fn what_failed_writes_were_charged_for_is_returned() {
    let (quotas, numbers) = quotas(&[("a", "x", 10, 0)], &[]);
    let gate = gate(&quotas, "a").unwrap();
    gate.charge(10).unwrap().failed();
    drop(gate.charge(10).unwrap());
    // Two writes that are charged for the same holes at the same time.
    numbers.lock().mapped.insert("a".into(), 4);
    gate.may_shrink();
    let (one, two) = (gate.charge(3).unwrap(), gate.charge(3).unwrap());
    drop((one, two));
    numbers.lock().mapped.insert("a".into(), 7);
    drop(gate.charge(3).unwrap());
}

#[test]
fn a_count_includes_what_is_charged_and_not_mapped_yet() {
    let (quotas, numbers) = quotas(&[("a", "x", 10, 0)], &[]);
    numbers.lock().mapped.insert("a".into(), 2);
    let gate = gate(&quotas, "a").unwrap();
    let under_way = gate.charge(6).unwrap();
    gate.may_shrink();
    refused(&gate, 3);
    numbers.lock().mapped.insert("a".into(), 8);
    drop(under_way);
    drop(gate.charge(2).unwrap());
    numbers.lock().mapped.insert("a".into(), 10);
    refused(&gate, 1);
}

#[test]
fn a_disk_that_the_datastore_has_changed_is_counted_before_the_next_charge() {
    let (quotas, numbers) = quotas(&[("a", "x", 10, 0)], &[]);
    let gate = gate(&quotas, "a").unwrap();
    drop(gate.charge(1).unwrap());
    numbers.lock().mapped.insert("a".into(), 9);
    quotas.has_changed("a");
    assert_eq!(quotas.info(false).unwrap()[0].used, None);
    refused(&gate, 2);
    drop(gate.charge(1).unwrap());
    assert_eq!(quotas.info(false).unwrap()[0].used, Some(10));
    quotas.has_changed("b");
}

#[test]
fn a_label_limits_all_its_disks_together() {
    let (quotas, numbers) = quotas(&[("a", "x", 0, 0), ("b", "x", 5, 0), ("c", "y", 0, 0)], &[("x", 12, 0)]);
    numbers.lock().mapped.extend([("a".to_owned(), 6), ("b".to_owned(), 3)]);
    let (a, b) = (gate(&quotas, "a").unwrap(), gate(&quotas, "b").unwrap());
    assert!(gate(&quotas, "c").is_none());
    assert!(refused(&b, 3).contains("quota of disk 'B'"));
    assert!(refused(&a, 4).contains("quota of label 't=x'"));
    drop(b.charge(2).unwrap());
    assert!(refused(&a, 2).contains("11 bytes of 12 bytes"));
    drop(a.charge(1).unwrap());
    let info = quotas.info(true).unwrap();
    let label = info.iter().find(|one| one.is_label).unwrap();
    assert_eq!((label.used, label.disks), (Some(12), 2));
    // A higher quota applies at once, and what was counted is kept.
    set(&quotas, &[("a", "x", 0, 0), ("b", "x", 5, 0)], &[("x", 13, 0)]);
    let a = gate(&quotas, "a").unwrap();
    drop(a.charge(1).unwrap());
    assert_eq!(numbers.lock().counts, 2);
}

#[test]
fn space_that_is_reserved_for_others_is_not_used() {
    let (quotas, numbers) = quotas(&[("a", "x", 0, 8), ("b", "y", 0, 0), ("c", "z", 0, 0)], &[("z", 0, 5)]);
    {
        let mut numbers = numbers.lock();
        numbers.mapped.insert("a".into(), 2);
        numbers.free = 12;
    }
    let [a, b, c] = ["a", "b", "c"].map(|uuid| gate(&quotas, uuid).unwrap());
    // 6 bytes are reserved for `a`, and 5 for `c`.
    drop(b.charge(1).unwrap());
    let text = refused(&b, 2);
    // The client of a disk may be another tenant than those of other disks.
    assert!(text.contains("reserved for other disks") && !text.contains('A') && !text.contains("12 bytes"), "{text}");
    drop(b.charge(0).unwrap());
    drop(c.charge(6).unwrap());
    refused(&c, 7);
    drop(a.charge(7).unwrap());
    // Both reservations are used up, so all disks can use free space.
    numbers.lock().free = 6;
    drop(a.charge(6).unwrap());
    drop(b.charge(6).unwrap());
    let used: Vec<_> = quotas.info(false).unwrap().iter().map(|one| (one.name.clone(), one.used)).collect();
    assert_eq!(used, [("A".to_owned(), Some(15)), ("t=z".to_owned(), Some(6))], "refused writes are not charged");
}

#[test]
fn charges_of_many_threads_stay_within_the_quota() {
    let (quotas, _) = quotas(&[("a", "x", 1000, 0)], &[]);
    let gate = gate(&quotas, "a").unwrap();
    // The disk never maps anything, so that a recount would allow more: only charges that were granted are counted.
    let granted = AtomicU64::new(0);
    let current = quotas.current.lock().uses["a"].clone();
    gate.charge(0).map(drop).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while let Ok(charge) = gate.try_charge(7) {
                    granted.fetch_add(7, Ordering::Relaxed);
                    drop(charge);
                }
            });
        }
    });
    let granted = granted.into_inner();
    assert!((994..=1000).contains(&granted), "{granted}");
    assert_eq!(current.bytes.load(Ordering::Relaxed), granted);
}

#[test]
fn a_disk_that_cannot_be_counted_fails_no_write() {
    // What is reserved for `b` is more than the free space.
    let (quotas, numbers) = quotas(&[("a", "x", 0, 0), ("b", "x", 0, 8 << 30), ("c", "y", 0, 0)], &[("x", 4 << 20, 0)]);
    {
        let mut numbers = numbers.lock();
        numbers.damaged = Some("b".into());
        numbers.mapped.insert("a".into(), 1 << 20);
        numbers.free = 1 << 30;
    }
    let [of_a, of_b, of_c] = ["a", "b", "c"].map(|uuid| gate(&quotas, uuid).unwrap());
    drop(of_a.charge(0).unwrap());
    assert_eq!(numbers.lock().counts, 0, "an overwrite needs no count");
    drop(of_a.charge(1 << 20).unwrap());
    drop(of_b.charge(1 << 20).unwrap());
    drop(of_c.charge(1 << 20).unwrap());
    assert_eq!(numbers.lock().counts, 2, "a failed count is not repeated for each write");
    // What is written from now on counts.
    assert_eq!(of_a.charge(2 << 20).err().unwrap().kind(), ErrorKind::NoSpace);
    let used = || quotas.info(true).unwrap().into_iter().map(|info| (info.name, info.used)).collect::<BTreeMap<_, _>>();
    assert_eq!(used(), [("B".to_owned(), None), ("t=x".to_owned(), None)].into());
    numbers.lock().damaged = None;
    numbers.lock().mapped.insert("b".into(), 3 << 20);
    assert_eq!(used()["B"], Some(3 << 20));
    assert_eq!(of_c.charge(1 << 20).err().unwrap().kind(), ErrorKind::NoSpace);
}
