//! Plants all mutants of a file at once, each behind a switch that is read at run time.
//!
//! If mutants change a function, its body becomes a choice between several bodies: one per mutant, and the original
//! body. The environment variable [`VARIABLE`] has the name of the mutant that takes effect. The switch is local to the
//! function, so that it works in every crate that compiles the file. The switch uses only the standard library, so that
//! schedulers that simulate threads in tests do not see it.

use crate::list::Mutant;
use proc_macro2::extra::DelimSpan;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::ops::Range;
use syn::visit::{self, Visit};

/// The environment variable that switches a mutant on.
pub const VARIABLE: &str = "LAMINA_MUTANT";

/// A file with mutants behind switches.
#[derive(Clone, Debug, Default)]
pub struct Switched {
    /// The text of the file.
    pub text: String,
    /// Parts of the text: the file, its changed functions, and the bodies with a fault.
    pub regions: Vec<Region>,
    /// The mutants that are not in the text, by name, each with the reason.
    pub alone: BTreeMap<String, String>,
}

/// A part of a file with switches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// The range of the part in the text.
    pub bytes: Range<usize>,
    /// The mutants that the part contains. A body with a fault contains exactly one.
    pub mutants: Vec<String>,
}

/// A function of the original file.
struct Function {
    /// The range of the body, including the braces.
    body: Range<usize>,
    /// The reason why the body cannot be behind a switch.
    fixed: Option<&'static str>,
    /// The mutants that change the function: their names, and the bodies with the faults.
    variants: Vec<(String, String)>,
}

impl Switched {
    /// The mutants in the smallest part that contains a place of the text.
    pub fn at(&self, byte: usize) -> &[String] {
        let around = self.regions.iter().filter(|region| region.bytes.contains(&byte));
        around.min_by_key(|region| region.bytes.len()).map_or(&[], |region| &region.mutants)
    }

    /// All mutants of the text.
    pub fn mutants(&self) -> &[String] {
        self.regions.first().map_or(&[], |file| &file.mutants)
    }
}

/// Plants mutants into the text of their file.
pub fn switch(text: &str, mutants: &[&Mutant]) -> Switched {
    let mut alone = BTreeMap::new();
    let mut functions = match syn::parse_file(text) {
        Ok(file) => functions(&file),
        Err(error) => {
            let why = format!("its file cannot be parsed: {error}");
            alone.extend(mutants.iter().map(|mutant| (mutant.name.clone(), why.clone())));
            return Switched { text: text.to_string(), regions: Vec::new(), alone };
        }
    };
    for mutant in mutants {
        if let Err(why) = add(text, &mut functions, mutant) {
            alone.insert(mutant.name.clone(), why);
        }
    }
    functions.retain(|function| !function.variants.is_empty());
    functions.sort_by_key(|function| function.body.start);
    let names = |function: &Function| function.variants.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    let file = Region { bytes: 0..usize::MAX, mutants: functions.iter().flat_map(names).collect() };
    let mut writer = Writer { source: text, functions: &functions, text: String::new(), regions: vec![file] };
    writer.copy(0..text.len());
    Switched { text: writer.text, regions: writer.regions, alone }
}

/// Adds a mutant to the smallest function that contains the whole change.
fn add(text: &str, functions: &mut [Function], mutant: &Mutant) -> Result<(), String> {
    let (range, new) = mutant.change(text).map_err(|stale| stale.explain(mutant))?;
    let around = functions.iter_mut().filter(|one| one.body.start < range.start && range.end < one.body.end);
    let function = around.min_by_key(|one| one.body.len()).ok_or("it changes more than the body of a function")?;
    if let Some(why) = function.fixed {
        return Err(why.into());
    }
    let body = format!("{}{new}{}", &text[function.body.start..range.start], &text[range.end..function.body.end]);
    // A replacement can end the function and begin another one, which a switch cannot contain.
    syn::parse_str::<syn::Block>(&body).map_err(|_| "the body with the fault is not one block")?;
    function.variants.push((mutant.name.clone(), body));
    Ok(())
}

/// Writes the file with the switches.
struct Writer<'a> {
    source: &'a str,
    /// The functions with mutants, in the order of their beginnings.
    functions: &'a [Function],
    text: String,
    regions: Vec<Region>,
}

impl Writer<'_> {
    /// Copies a part of the original file. Functions with mutants in this part receive a switch.
    fn copy(&mut self, part: Range<usize>) {
        let mut from = part.start;
        for function in self.functions {
            if function.body.start >= from && function.body.end <= part.end {
                self.text.push_str(&self.source[from..function.body.start]);
                self.switch(function);
                from = function.body.end;
            }
        }
        self.text.push_str(&self.source[from..part.end]);
    }

    fn switch(&mut self, function: &Function) {
        let begin = self.text.len();
        self.text.push_str("{ static SWITCH_OF_MUTANTS: ::std::sync::LazyLock<usize> = ::std::sync::LazyLock::new(|| ");
        // Writing into a string does not fail.
        let _ = write!(self.text, "match ::std::env::var({VARIABLE:?}).as_deref() {{ ");
        for (number, (name, _)) in function.variants.iter().enumerate() {
            let _ = write!(self.text, "Ok({name:?}) => {}, ", number + 1);
        }
        self.text.push_str("_ => 0 }); match *SWITCH_OF_MUTANTS { ");
        for (number, (name, body)) in function.variants.iter().enumerate() {
            let _ = write!(self.text, "{} => ", number + 1);
            let bytes = self.text.len()..self.text.len() + body.len();
            self.text.push_str(body);
            self.text.push_str(", ");
            self.regions.push(Region { bytes, mutants: vec![name.clone()] });
        }
        self.text.push_str("_ => {");
        self.copy(function.body.start + 1..function.body.end - 1);
        self.text.push_str("} } }");
        let mutants = function.variants.iter().map(|(name, _)| name.clone()).collect();
        self.regions.push(Region { bytes: begin..self.text.len(), mutants });
    }
}

/// All functions of a file: also methods, and functions in modules and in other functions.
fn functions(file: &syn::File) -> Vec<Function> {
    let mut found = Functions(Vec::new());
    found.visit_file(file);
    found.0
}

struct Functions(Vec<Function>);

impl Functions {
    fn add(&mut self, signature: &syn::Signature, brace: DelimSpan) {
        let mut opaque = Opaque(false);
        opaque.visit_return_type(&signature.output);
        let fixed = match signature.constness {
            Some(_) => Some("it changes a const fn"),
            // The bodies would have different types.
            None if opaque.0 => Some("it changes a function that returns an impl Trait"),
            None => None,
        };
        let body = brace.open().byte_range().start..brace.close().byte_range().end;
        self.0.push(Function { body, fixed, variants: Vec::new() });
    }
}

impl<'ast> Visit<'ast> for Functions {
    fn visit_item_fn(&mut self, function: &'ast syn::ItemFn) {
        self.add(&function.sig, function.block.brace_token.span);
        visit::visit_item_fn(self, function);
    }

    fn visit_impl_item_fn(&mut self, function: &'ast syn::ImplItemFn) {
        self.add(&function.sig, function.block.brace_token.span);
        visit::visit_impl_item_fn(self, function);
    }

    fn visit_trait_item_fn(&mut self, function: &'ast syn::TraitItemFn) {
        if let Some(block) = &function.default {
            self.add(&function.sig, block.brace_token.span);
        }
        visit::visit_trait_item_fn(self, function);
    }
}

/// Whether a type contains an `impl Trait`.
struct Opaque(bool);

impl<'ast> Visit<'ast> for Opaque {
    fn visit_type_impl_trait(&mut self, _: &'ast syn::TypeImplTrait) {
        self.0 = true;
    }
}

#[cfg(test)]
mod tests;
