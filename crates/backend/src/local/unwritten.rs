//! How much the operating system has left to write out, against what it lets anybody leave.
//!
//! Linux starts to write on its own account when what is cached and unwritten exceeds `nr_dirty_background_threshold`,
//! and halfway from there to `nr_dirty_threshold` it begins to have writers wait: up to 200 ms at a time, whoever they
//! are (`mm/page-writeback.c`). Work in the background that stays out of that half leaves it to those in front.

/// From 0 where the system need not write yet to 100 where it has writers wait; above, while it does.
#[cfg(target_os = "linux")]
pub(super) fn percent() -> u32 {
    use parking_lot::Mutex;
    use std::time::{Duration, Instant};

    /// Asking takes some 50 us: no oftener than this.
    const FRESH: Duration = Duration::from_millis(10);
    static LAST: Mutex<Option<(Instant, u32)>> = Mutex::new(None);

    let mut last = LAST.lock();
    match *last {
        Some((asked, percent)) if asked.elapsed() < FRESH => percent,
        _ => {
            let percent = std::fs::read_to_string("/proc/vmstat").map_or(0, |text| of(&text));
            *last = Some((Instant::now(), percent));
            percent
        }
    }
}

#[cfg(not(target_os = "linux"))]
pub(super) fn percent() -> u32 {
    0
}

/// The same of the text of `/proc/vmstat`; 0 of any other.
#[cfg(target_os = "linux")]
fn of(text: &str) -> u32 {
    let (mut unwritten, mut background, mut limit) = (0u64, 0u64, 0u64);
    for line in text.lines() {
        let Some((name, value)) = line.split_once(' ') else { continue };
        let Ok(pages) = value.parse::<u64>() else { continue };
        match name {
            "nr_dirty" | "nr_writeback" => unwritten = unwritten.saturating_add(pages),
            "nr_dirty_background_threshold" => background = pages,
            "nr_dirty_threshold" => limit = pages,
            _ => {}
        }
    }
    let room = limit.saturating_sub(background) / 2;
    let over = unwritten.saturating_sub(background);
    over.saturating_mul(100).checked_div(room).map_or(0, |percent| percent.min(1000) as u32)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn from_where_it_writes_to_where_others_wait() {
        let text = |dirty: u64, writeback: u64| {
            format!(
                "nr_free_pages 7\nnr_dirty {dirty}\nnr_writeback {writeback}\nnr_dirty_threshold 2000\n\
                 nr_dirty_background_threshold 1000\nnr_writeback_temp 900000\n"
            )
        };
        assert_eq!(of(&text(900, 100)), 0);
        assert_eq!(of(&text(1000, 125)), 25);
        assert_eq!(of(&text(1500, 0)), 100);
        assert_eq!(of(&text(2000, 0)), 200);
        assert_eq!(of(&text(u64::MAX, 1)), 1000);
        assert_eq!(of("nr_dirty many\nnr_dirty"), 0);
        assert!(percent() <= 1000);
    }
}
