//! The blocks of a page: commands with the output that the page shows for them.

/// A page with its blocks in order.
#[derive(Debug, Default)]
pub struct Page {
    pub blocks: Vec<Block>,
    /// Errors of the page itself.
    pub complaints: Vec<String>,
}

/// A block of a page.
#[derive(Debug)]
pub enum Block {
    /// Commands in a setup comment, which run before the blocks that follow.
    Setup { line: usize, commands: String },
    /// Commands to run, each with its output.
    Console { commands: Vec<Command> },
    /// Commands that the test does not run.
    NotRun { line: usize, reason: String },
}

/// A command, which may span several lines, and the output that the page shows.
#[derive(Debug, PartialEq, Eq)]
pub struct Command {
    /// Line number on the page, from 1.
    pub line: usize,
    pub text: String,
    pub output: Vec<String>,
}

const PROMPT: &str = "$ ";
const FENCE: &str = "```";
const NOT_RUN: &str = "console not-run:";
const SETUP: &str = "<!-- test setup";

impl Page {
    /// Parses the blocks of a page.
    pub fn parse(path: &str, text: &str) -> Page {
        let mut page = Page::default();
        let mut lines = (1..).zip(text.lines());
        while let Some((number, line)) = lines.next() {
            if line == SETUP {
                let commands: Vec<&str> = lines.by_ref().map(|(_, l)| l).take_while(|l| *l != "-->").collect();
                page.blocks.push(Block::Setup { line: number, commands: commands.join("\n") });
            } else if let Some(info) = line.trim_start().strip_prefix(FENCE) {
                let closing = |(_, l): &(usize, &str)| !l.trim_start().starts_with(FENCE);
                let body: Vec<(usize, &str)> = lines.by_ref().take_while(closing).collect();
                if let Err(complaint) = page.add(number, info, &body) {
                    page.complaints.push(format!("{path}:{number}: {complaint}"));
                }
            }
        }
        page
    }

    fn add(&mut self, line: usize, info: &str, body: &[(usize, &str)]) -> Result<(), &'static str> {
        if let Some(reason) = info.strip_prefix(NOT_RUN).map(str::trim) {
            self.blocks.push(Block::NotRun { line, reason: reason.into() });
            return if reason.is_empty() { Err("a block that is not run has no reason") } else { Ok(()) };
        }
        match info {
            "console" => {
                self.blocks.push(Block::Console { commands: commands(body)? });
                Ok(())
            }
            "" => Err("a block without a language: write console, or the language of its content"),
            _ if body.iter().any(|(_, l)| l.starts_with(PROMPT)) => Err("commands in a block that is not `console`"),
            _ => Ok(()),
        }
    }
}

fn commands(body: &[(usize, &str)]) -> Result<Vec<Command>, &'static str> {
    let mut out: Vec<Command> = Vec::new();
    let mut goes_on = false;
    for (line, text) in body {
        if goes_on {
            let command = out.last_mut().ok_or("output before the first command")?;
            command.text += "\n";
            command.text += text;
        } else if let Some(text) = text.strip_prefix(PROMPT) {
            out.push(Command { line: *line, text: text.into(), output: Vec::new() });
        } else {
            out.last_mut().ok_or("output before the first command")?.output.push((*text).into());
            continue;
        }
        goes_on = text.ends_with('\\');
    }
    if out.is_empty() { Err("a block console without commands") } else { Ok(out) }
}

#[test]
fn a_page_is_parsed_into_blocks() {
    let text = "<!-- test setup\ntrue\n-->\n```console\n$ a \\\n  b\nx\n\n$ c\n```\n```console not-run: why\n$ d\n```\n```xml\n<a/>\n```\n";
    let page = Page::parse("p", text);
    assert!(page.complaints.is_empty());
    let [Block::Setup { line: 1, commands: setup }, Block::Console { commands }, Block::NotRun { line: 11, reason }] =
        &page.blocks[..]
    else {
        panic!("{page:?}");
    };
    assert_eq!((setup.as_str(), reason.as_str()), ("true", "why"));
    let command = |line, text: &str, output: &[&str]| Command {
        line,
        text: text.into(),
        output: output.iter().map(|line| line.to_string()).collect(),
    };
    assert_eq!(commands, &[command(5, "a \\\n  b", &["x", ""]), command(9, "c", &[])]);
    for bad in
        ["```\n$ a\n```", "```console\nx\n$ a\n```", "```console not-run:\n```", "```text\n$ a\n```", "```console\n```"]
    {
        assert_eq!(Page::parse("p", bad).complaints.len(), 1, "{bad}");
    }
}
