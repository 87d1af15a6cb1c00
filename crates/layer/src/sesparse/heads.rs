//! Repairing the headers of an image that has lamina's mark, before anything else in it is used.
//!
//! Every word of the constant header follows from the capacity, and the header states the capacity twice. In the
//! volatile header the magic number and the padding are known, and the sequence number is in the journal header and in
//! the mark, too. The journal is empty, so the replay flag must be zero. One wrong word is repaired. With several wrong
//! words, there is no proof that lamina wrote the header.

use super::header::{Layout, Volatile, Words, journal_sequence, put};
use super::touched;
use crate::SECTOR;

/// Words of a sector.
const WORDS: usize = SECTOR as usize / 8;
const VOLATILE: usize = SECTOR as usize;
const JOURNAL: usize = 2 * SECTOR as usize;

/// Whether lamina can have written the constant header. Only for an image with a mark, which shows that no other
/// program has changed it since.
pub(super) fn is_believable(layout: &Layout, block: &[u8]) -> bool {
    let ours = touched::is_marked(block) && journal_sequence(&block[JOURNAL..]) == Some(touched::sequence(block));
    !ours || *layout == Layout::for_capacity(layout.capacity)
}

/// Corrects one wrong word of the constant header, and one of the volatile header; returns what was wrong, as text.
/// `journal` is the beginning of the journal area.
pub(super) fn mend(block: &mut [u8], journal: &[u8]) -> Vec<String> {
    let mut mended = Vec::new();
    if !touched::is_marked(block) {
        return mended;
    }
    let mut tell = |word: Option<usize>, header: &str| {
        let sentence = word.map(|word| format!("the word at byte {} of the {header} header was wrong", word * 8));
        mended.extend(sentence);
    };
    tell(mend_constant(block), "constant");
    tell(mend_volatile(block, journal), "volatile");
    mended
}

fn mend_constant(block: &mut [u8]) -> Option<usize> {
    let capacities = [Words(block).get(16), Words(block).get(200)];
    for capacity in capacities.into_iter().filter(|capacity| (1..=crate::CAPACITY_MAX / SECTOR).contains(capacity)) {
        let mut expected = vec![0; SECTOR as usize];
        Layout::for_capacity(capacity).encode(&mut expected);
        match only_difference(&block[..SECTOR as usize], &expected) {
            Difference::None => return None,
            Difference::Word(word) => {
                block[..SECTOR as usize].copy_from_slice(&expected);
                return Some(word);
            }
            Difference::More => {}
        }
    }
    None
}

fn mend_volatile(block: &mut [u8], journal: &[u8]) -> Option<usize> {
    let words = Words(&block[VOLATILE..]);
    let mut header = Volatile { free_table: words.get(8), next_sequence: words.get(16), replay: words.get(24) };
    // A program that writes transactions updates the sequence number in both headers.
    let counted = journal_sequence(&block[JOURNAL..]);
    let marked = touched::sequence(block);
    if counted == Some(marked) {
        header.next_sequence = marked;
    }
    if header.next_sequence == marked && journal.iter().all(|byte| *byte == 0) {
        header.replay = 0;
    }
    let mut expected = vec![0; SECTOR as usize];
    header.encode(&mut expected);
    match only_difference(&block[VOLATILE..JOURNAL], &expected) {
        Difference::Word(word) => {
            block[VOLATILE..JOURNAL].copy_from_slice(&expected);
            Some(word)
        }
        _ => None,
    }
}

enum Difference {
    None,
    Word(usize),
    More,
}

fn only_difference(one: &[u8], other: &[u8]) -> Difference {
    let mut differing = (0..WORDS).filter(|word| Words(one).get(word * 8) != Words(other).get(word * 8));
    match (differing.next(), differing.next()) {
        (None, _) => Difference::None,
        (Some(word), None) => Difference::Word(word),
        _ => Difference::More,
    }
}

/// Clears the number of allocated tables, so that recovery determines it from the slots of the directory.
pub(super) fn recount_tables(block: &mut [u8]) {
    put(&mut block[VOLATILE..], 8, 0);
}
