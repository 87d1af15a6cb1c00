//! Bitmaps in which a set bit means that a block is in use, with the first block in the lowest bit of the first byte.

use std::ops::Range;

/// The runs of clear bits among the first `count` bits. Bits beyond the bytes count as set.
pub(crate) fn clear_runs(map: &[u8], count: u64) -> Vec<Range<u64>> {
    let count = count.min(map.len() as u64 * 8);
    let mut runs = Vec::new();
    let mut begin: Option<u64> = None;
    let mut at = 0;
    while at < count {
        let byte = map[(at / 8) as usize];
        // Whole bytes of one kind are the most frequent ones.
        let (is_set, step) = match byte {
            0xFF if at.is_multiple_of(8) => (true, 8),
            0 if at.is_multiple_of(8) => (false, 8),
            _ => (byte >> (at % 8) & 1 == 1, 1),
        };
        match (is_set, begin) {
            (false, None) => begin = Some(at),
            (true, Some(from)) => {
                runs.push(from..at);
                begin = None;
            }
            _ => {}
        }
        at += step;
    }
    runs.extend(begin.map(|from| from..count));
    runs
}

/// Whether every bit of a range is set. Bits beyond the bytes count as clear.
pub(crate) fn all_set(map: &[u8], range: Range<u64>) -> bool {
    range.into_iter().all(|at| map.get((at / 8) as usize).is_some_and(|byte| byte >> (at % 8) & 1 == 1))
}

/// The same numbers in ascending ranges that do not touch.
pub(crate) fn merged(ranges: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut sorted = ranges.to_vec();
    sorted.sort_unstable_by_key(|range| range.start);
    let mut merged: Vec<Range<u64>> = Vec::new();
    for range in sorted {
        match merged.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

/// Sets the bits of a range, as far as the bytes reach.
pub(crate) fn set(map: &mut [u8], range: Range<u64>) {
    for at in range {
        if let Some(byte) = map.get_mut((at / 8) as usize) {
            *byte |= 1 << (at % 8);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_those_of_a_bit_by_bit_walk() {
        let mut random = testkit::Random::new(7);
        for length in [0, 1, 2, 9, 64] {
            for _ in 0..50 {
                let map: Vec<u8> =
                    (0..length).map(|_| [0, 0xFF, random.below(256) as u8][random.below(3) as usize]).collect();
                for count in [0, 1, 7, 8, 13, 64, 512, 600] {
                    let found: Vec<u64> = clear_runs(&map, count).into_iter().flatten().collect();
                    let clear = |at: &u64| *at < length * 8 && map[(*at / 8) as usize] >> (at % 8) & 1 == 0;
                    let expected: Vec<u64> = (0..count).filter(clear).collect();
                    assert_eq!(found, expected);
                    assert!(clear_runs(&map, count).windows(2).all(|two| two[0].end < two[1].start));
                }
            }
        }
    }

    #[test]
    fn ranges_that_overlap_are_counted_once() {
        let whole: Vec<Range<u64>> = std::iter::repeat_n(0..1 << 40, 1000).collect();
        assert_eq!(merged(&whole).len(), 1);
        assert_eq!(merged(&[7..9, 2..4, 3..6, 9..12, 0..1]), [0..1, 2..6, 7..12]);
        assert!(merged(&[]).is_empty());
    }

    #[test]
    fn set_bits_are_found_set() {
        let mut map = [0; 4];
        set(&mut map, 3..17);
        assert!(all_set(&map, 3..17) && !all_set(&map, 2..17) && !all_set(&map, 3..18) && !all_set(&map, 31..33));
        assert_eq!(clear_runs(&map, 32), [0..3, 17..32]);
    }
}
