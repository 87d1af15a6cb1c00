//! Checks that the pages of figures match the stored result files.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use study::figures::{FOLDER, PAGE, README, kept, page, with_headlines};

#[test]
fn the_pages_are_written_from_the_result_files() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let kept = kept(&root.join(FOLDER)).unwrap();
    assert!(!kept.is_empty(), "{FOLDER} holds no result file");
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
    let (figures, readme) = (read(PAGE), read(README));
    let renew = "run `lamina-study figures` at the root of the repository";
    assert!(figures == page(&kept), "{PAGE} is not what {FOLDER} says: {renew}");
    assert!(
        readme == with_headlines(&readme, &kept).unwrap(),
        "the table of {README} is not what {FOLDER} says: {renew}"
    );
}
