//! Recovery after a crash: reads the log from its tail, and applies each change again, in order.
//!
//! A page in the file may be newer than the log's tail, if a checkpoint was interrupted. Applying older and then newer
//! changes again gives the same result: each change states the new content of entries and not a difference, and every
//! change that a page contains is in the log, or older than its tail.

use super::VsanSparse;
use super::layout::PAGE_GRAINS;
use super::log::{Log, Record};
use super::map::PageState;
use super::page::{DATA, RESERVED, ZERO, ZERO_RESERVED};
use crate::runs::RunList;
use crate::{ErrorKind, Result};
use std::ops::Range;

/// The most pages that a log can change; a writer makes a checkpoint long before this number is reached.
const CHANGED_PAGES_MAX: usize = 1 << 16;

/// Limits the time of a replay: the most visits of pages by all changes together, in addition to four times the number
/// of pages of the disk.
const VISITS_MAX: u64 = 1 << 26;

/// The result of zeroing entries.
pub(super) struct Zeroed {
    /// Entries that were not zeros before.
    pub(super) changed: Vec<Range<u32>>,
    /// Blocks that hold no data any more: first block and count.
    pub(super) places: Vec<(u64, u64)>,
}

/// Makes entries zeros and keeps their blocks. Absent entries are changed only if the image has a parent.
pub(super) fn zero_entries(list: &mut RunList, entries: Range<u32>, parent: bool) -> Zeroed {
    let mut zeroed = Zeroed { changed: Vec::new(), places: Vec::new() };
    let pieces: Vec<_> = list.pieces(entries).collect();
    for piece in pieces {
        let range = piece.first..piece.first + piece.count;
        match piece.what {
            Some((DATA, place)) => {
                list.set(range.clone(), ZERO, place);
                zeroed.places.push((place, u64::from(piece.count)));
            }
            Some((RESERVED, place)) if parent => list.set(range.clone(), ZERO_RESERVED, place),
            None if parent => list.set(range.clone(), ZERO, 0),
            _ => continue,
        }
        match zeroed.changed.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => zeroed.changed.push(range),
        }
    }
    zeroed
}

impl VsanSparse {
    /// Replays the log if the object was not closed properly. Afterwards the header in memory states the end of the
    /// used part. With `salvage`, pages that cannot be read are given up.
    pub(super) fn recover(&mut self, salvage: bool) -> Result<Log> {
        let header = &self.header;
        let mut log = Log {
            id: header.id,
            incarnation: header.incarnation,
            tail: header.tail,
            head: header.tail,
            number: header.tail_number,
        };
        let mut next = header.next;
        if !header.clean {
            let mut visits = VISITS_MAX + 4 * u64::from(self.map.layout.pages);
            log.replay(&self.file, |record| {
                next = next.max(record.place.map_or(0, |place| place.saturating_add(record.count)));
                self.apply(record, salvage, &mut visits)
            })
            .map_err(|error| error.context(&self.image))?;
        }
        self.map.replayed();
        self.header.next = next;
        Ok(log)
    }

    fn apply(&self, record: Record, salvage: bool, visits: &mut u64) -> Result<()> {
        let end = record.grain + record.count;
        let valid = self.map.layout.data..self.map.limit();
        let fits = |place: u64| place >= valid.start && place.saturating_add(record.count) <= valid.end;
        if record.count == 0 || end > self.map.layout.grains || !record.place.is_none_or(fits) {
            return Err(self.map.corrupt("the log names grains or blocks outside the object".to_owned()));
        }
        for (index, entries) in self.map.layout.split(record.grain..end) {
            *visits = visits.saturating_sub(1);
            if *visits == 0 || self.map.pages.changed() > CHANGED_PAGES_MAX {
                return Err(self.map.corrupt("the log changes more pages than a valid log of its size can".to_owned()));
            }
            let whole = entries.len() as u32 == self.map.layout.page_grains(index);
            let first = u64::from(index) * PAGE_GRAINS + u64::from(entries.start);
            if self.map.state(index) == PageState::Lost {
                continue;
            }
            let changed = match record.place {
                Some(place) => {
                    let place = place + (first - record.grain);
                    self.map.change(&self.file, index, |page| (page.set(entries, DATA, place), 1))
                }
                None if whole && self.map.zero_whole(index, || ()) => Ok(()),
                None => self.map.change(&self.file, index, |page| {
                    zero_entries(page, entries, true);
                    ((), 1)
                }),
            };
            match changed {
                Err(error) if salvage && matches!(error.kind(), ErrorKind::Io | ErrorKind::Corrupt) => {
                    self.map.give_up(index);
                }
                changed => changed?,
            }
        }
        Ok(())
    }
}
