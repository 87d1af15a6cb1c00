//! Huge pages for memory that is used at random. A page of 2 MiB needs one page fault and one translation of its
//! address, where pages of 4 KiB need 512 of each.

/// Asks the kernel for huge pages for memory that has not been used yet. Without effect if the system has none.
#[cfg(target_os = "linux")]
pub fn prefer_huge_pages(words: &mut [u32]) {
    use rustix::mm::{Advice, madvise};

    let page = rustix::param::page_size();
    let before = words.as_ptr().align_offset(page);
    let Some(pages) = words.get_mut(before..) else { return };
    let bytes = size_of_val(pages) / page * page;
    if bytes > 0 {
        // SAFETY: the range is whole pages within memory that is borrowed for writing. The advice changes how the
        // kernel allocates the memory, and not its content.
        let advised = unsafe { madvise(pages.as_mut_ptr().cast(), bytes, Advice::LinuxHugepage) };
        // A failure is harmless: the pages stay small.
        let _ = advised;
    }
}

/// The advice is for Linux only.
#[cfg(not(target_os = "linux"))]
pub fn prefer_huge_pages(_words: &mut [u32]) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_keeps_its_content() {
        for length in [0, 1, 1023, 5000, 3 << 20] {
            let mut words: Vec<u32> = (0..length).collect();
            prefer_huge_pages(&mut words);
            assert!(words.iter().copied().eq(0..length));
        }
    }
}
