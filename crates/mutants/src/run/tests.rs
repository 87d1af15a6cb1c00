//! Tests that build a small crate with its mutants.

use super::*;

const LIMIT: Duration = Duration::from_secs(5);
const MANIFEST: &str = "[package]\nname = \"small\"\nversion = \"0.1.0\"\nedition = \"2024\"\n\n[workspace]\n";
const LIBRARY: &str = r#"//! A crate with faults.

/// One.
pub fn one() -> u32 {
    1
}

/// A constant function.
pub const fn two() -> u32 {
    2
}

/// A function of a generic type, with another one in it.
pub fn sum<T: Into<u32>>(numbers: Vec<T>) -> u32 {
    fn add(one: u32, other: u32) -> u32 {
        one + other
    }
    numbers.into_iter().map(Into::into).fold(0, add)
}

#[cfg(test)]
mod tests {
    #[test]
    fn numbers() {
        assert_eq!((super::one(), super::two(), super::sum(vec![1u8, 2])), (1, 2, 3));
    }

    #[test]
    fn waiting() {
        (0..super::one()).skip(1).for_each(|_| std::thread::sleep(std::time::Duration::from_secs(600)));
    }
}
"#;

fn words(text: &str) -> Vec<String> {
    text.split(' ').map(String::from).collect()
}

fn mutant(name: &str, find: &str, replace: &str, test: &str) -> Mutant {
    Mutant {
        name: name.into(),
        breaks: "a test".into(),
        file: "src/lib.rs".into(),
        test: words(test),
        find: find.into(),
        replace: replace.into(),
    }
}

#[test]
fn a_selection_has_no_names_of_tests() {
    assert_eq!(selection(&words("-p a --test b c:: -- --skip d::")), words("-p a --test b"));
    assert_eq!(selection(&words("-p a --lib b")), words("-p a --lib"));
}

/// Builds a small crate with mutants of every kind, and runs its tests.
#[test]
fn each_mutant_gets_its_outcome() {
    let folder = std::env::temp_dir().join(format!("lamina-mutants-run-{}", std::process::id()));
    let root = folder.join("root");
    fs::create_dir_all(root.join("src")).expect("a folder");
    fs::write(root.join("Cargo.toml"), MANIFEST).expect("a file");
    fs::write(root.join("src/lib.rs"), LIBRARY).expect("a file");
    let numbers = "-p small --lib numbers";
    let mutants = [
        mutant("one", "    1\n", "    11\n", numbers),
        mutant("add", "one + other", "one * other", numbers),
        mutant("fold", "fold(0,", "fold(1,", numbers),
        mutant("const", "    2\n", "    22\n", numbers),
        mutant("survives", "one + other", "other + one", numbers),
        mutant("hangs", "    1\n", "    11 \n", "-p small --lib waiting"),
        mutant("types", "    1\n", "    \"1\"\n", numbers),
        mutant("stale", "three", "four", numbers),
        mutant("nothing", "one + other", "one - other", "-p small --lib no_such_test"),
    ];
    let mut plan = Plan::make(&root, &mutants);
    let scratch = Scratch::make(&root, &folder.join("target"), &plan, LIMIT).expect("a copy");
    let failures = scratch.build(&mut plan, mutants.iter().map(|mutant| mutant.test.as_slice())).expect("builds");
    assert_eq!(failures, BTreeMap::new());
    let alone = mutants.iter().filter(|mutant| plan.alone(mutant).is_some()).map(|mutant| mutant.name.as_str());
    assert_eq!(alone.collect::<Vec<_>>(), ["const", "types", "stale"]);

    assert!(scratch.baseline(&mutants[0].test).expect("it passes") < LIMIT);
    let empty = scratch.baseline(&mutants[8].test).expect_err("no test ran");
    assert!(empty.contains("names no test"), "{empty}");
    let judge = |mutant: &Mutant| match plan.alone(mutant) {
        None => scratch.judge_switched(mutant, LIMIT).word(),
        Some(_) => scratch.judge_alone(mutant, &plan, LIMIT).word(),
    };
    let outcomes: Vec<_> = mutants[..8].iter().map(judge).collect();
    let expected = ["killed", "killed", "killed", "killed", "SURVIVED", "killed (time)", "BROKEN", "BROKEN"];
    assert_eq!(outcomes, expected);
    // After mutants were planted alone, the switches are as they were before.
    scratch.baseline(&mutants[0].test).expect("it passes");
    assert_eq!(scratch.judge_switched(&mutants[0], LIMIT), Outcome::Killed);
    fs::remove_dir_all(&folder).expect("the folder is there");
}
