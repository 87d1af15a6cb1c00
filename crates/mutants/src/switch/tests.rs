//! Tests of the switches.

use super::*;

/// Mutants that replace a text by another text. Their names are `a`, `b`, `c` and so on.
fn mutants(changes: &[(&str, &str)]) -> Vec<Mutant> {
    let one = |(number, (find, replace)): (usize, &(&str, &str))| Mutant {
        name: char::from(b'a' + number as u8).to_string(),
        breaks: "a test".into(),
        file: "a.rs".into(),
        test: Vec::new(),
        find: find.to_string(),
        replace: replace.to_string(),
    };
    changes.iter().enumerate().map(one).collect()
}

fn switched(text: &str, changes: &[(&str, &str)]) -> Switched {
    let mutants = mutants(changes);
    let switched = switch(text, &mutants.iter().collect::<Vec<_>>());
    syn::parse_file(&switched.text).expect("the file is still one");
    switched
}

/// The text in a short form, in which the code of a switch is only a choice of bodies: `[a {…} b {…} else {…}]`.
fn brief(switched: &Switched) -> String {
    let mut out = String::new();
    let mut rest = switched.text.as_str();
    while let Some((before, after)) = rest.split_once("{ static SWITCH_OF_MUTANTS") {
        let (_, after) = after.split_once("match *SWITCH_OF_MUTANTS { ").expect("a choice");
        out.push_str(before);
        out.push('[');
        rest = after;
    }
    out.push_str(rest);
    out.replace("} } }", "}]").replace("_ => {", "else {")
}

#[test]
fn a_body_gets_a_variant_per_mutant() {
    let text = "fn one() -> u8 { 1 }\nfn two() -> u8 { 2 + 2 }\n";
    let switched = switched(text, &[("2 + 2", "2 - 2"), ("2 + 2", "2 * 2")]);
    let expected = "fn one() -> u8 { 1 }\n\
                    fn two() -> u8 [1 => { 2 - 2 }, 2 => { 2 * 2 }, else { 2 + 2 }]\n";
    assert_eq!(brief(&switched), expected);
    assert!(switched.text.contains("Ok(\"a\") => 1, Ok(\"b\") => 2, _ => 0"));
    assert!(switched.alone.is_empty());
    assert_eq!(switched.mutants(), ["a", "b"]);
}

#[test]
fn the_smallest_function_is_doubled() {
    let text = "fn outer() { fn inner() { x(); } let f = || { y() }; inner(); f() }";
    let only_inner = switched(text, &[("x()", "z()")]);
    let expected = "fn outer() { fn inner() [1 => { z(); }, else { x(); }] let f = || { y() }; inner(); f() }";
    assert_eq!(brief(&only_inner), expected);
    let closure = switched(text, &[("y()", "z()")]);
    let expected = "fn outer() [1 => { fn inner() { x(); } let f = || { z() }; inner(); f() }, \
                    else { fn inner() { x(); } let f = || { y() }; inner(); f() }]";
    assert_eq!(brief(&closure), expected);
    let both = switched(text, &[("x()", "z()"), ("y()", "z()"), ("x(); } let", "z(); } let ()=(); let")]);
    let expected = "fn outer() [1 => { fn inner() { x(); } let f = || { z() }; inner(); f() }, \
                    2 => { fn inner() { z(); } let ()=(); let f = || { y() }; inner(); f() }, \
                    else { fn inner() [1 => { z(); }, else { x(); }] let f = || { y() }; inner(); f() }]";
    assert_eq!(brief(&both), expected);
}

#[test]
fn braces_in_texts_and_comments_are_not_counted() {
    let text = "fn a() -> char { let ä = \"} fn b() {\"; /* } */ // }\n '{' }\nfn b() {}";
    let switched = switched(text, &[("'{'", "'}'")]);
    let expected = "fn a() -> char [1 => { let ä = \"} fn b() {\"; /* } */ // }\n '}' }, \
                    else { let ä = \"} fn b() {\"; /* } */ // }\n '{' }]\nfn b() {}";
    assert_eq!(brief(&switched), expected);
}

#[test]
fn methods_in_modules_are_found() {
    let text = "mod m { impl<T> S<T> { pub(crate) fn f(&self) -> T { self.t } } trait U { fn g() { h() } fn i(); } }";
    let switched = switched(text, &[("self.t", "self.u"), ("h()", "k()")]);
    let expected = "mod m { impl<T> S<T> { pub(crate) fn f(&self) -> T [1 => { self.u }, else { self.t }] } \
                    trait U { fn g() [1 => { k() }, else { h() }] fn i(); } }";
    assert_eq!(brief(&switched), expected);
}

#[test]
fn what_cannot_be_switched_is_planted_alone() {
    let text = "const A: u8 = 1;\nconst fn b() -> u8 { 2 }\nfn c() -> Option<impl Fn()> { three() }\n\
                fn d() { four(); }\nfn e(x: u8) {}\nmacro_rules! f { () => { fn g() { six() } } }";
    let changes = [
        ("= 1", "= 0"),
        ("{ 2 }", "{ 0 }"),
        ("three()", "zero()"),
        ("four();", "} fn other() {"),
        ("x: u8", "x: u16"),
        ("six()", "zero()"),
        ("seven", "zero"),
        ("four();", ""),
    ];
    let switched = switched(text, &changes);
    assert_eq!(switched.alone.keys().map(String::as_str).collect::<String>(), "abcdefg");
    assert!(switched.alone["b"].contains("const fn"));
    assert!(switched.alone["c"].contains("impl Trait"));
    assert_eq!(switched.mutants(), ["h"]);
    let nothing = switch("fn {", &mutants(&changes[..1]).iter().collect::<Vec<_>>());
    assert_eq!((nothing.text.as_str(), nothing.alone.len()), ("fn {", 1));
}

#[test]
fn a_place_in_the_text_leads_to_its_mutants() {
    let text = "fn a() { one(); two() }\nfn b() { three() }\nfn c() {}";
    let switched = switched(text, &[("one", "eins"), ("two", "zwei"), ("three", "drei")]);
    let at = |what: &str| switched.at(switched.text.find(what).expect("it is in the text")).concat();
    assert_eq!(at("eins"), "a");
    assert_eq!(at("zwei"), "b");
    assert_eq!(at("drei"), "c");
    assert_eq!(at("one(); two()"), "ab");
    assert_eq!(at("three()"), "c");
    assert_eq!(at("fn c"), "abc");
}

#[test]
fn the_variable_selects_a_body() {
    // The switch as it is written, here without a mutant.
    let text = switched("fn f() -> u8 { 1 }", &[("1", "2")]).text;
    assert_eq!(
        text,
        "fn f() -> u8 { static SWITCH_OF_MUTANTS: ::std::sync::LazyLock<usize> = ::std::sync::LazyLock::new(|| \
         match ::std::env::var(\"LAMINA_MUTANT\").as_deref() { Ok(\"a\") => 1, _ => 0 }); \
         match *SWITCH_OF_MUTANTS { 1 => { 2 }, _ => { 1 } } }"
    );
}
