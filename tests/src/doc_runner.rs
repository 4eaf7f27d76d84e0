//! Runs a page of the documentation: types its commands into a terminal, in their order, answers questions, and compares the
//! output with the page.
//!
//! A fence `sh` has commands, one per line, which exit with 0 unless their comment says `exits with N`. A fence `text` has the
//! output of the fence before it: its lines must occur in this order; other lines may stand between them, and figures may differ.
//! A line that ends in `…` may continue, also within its last word. A fence `python` shows a program that a command runs, and is not
//! typed.

use anyhow::{Context as _, Result, bail, ensure};

use crate::terminal::Terminal;
use crate::wait::until;

/// Units that stand beside figures, and vary with them.
const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];

/// Fingerprints are hexadecimal, and not shorter.
const HEX_MIN: usize = 8;

/// A fence of commands and what the page says they show.
#[derive(Debug, Default)]
struct Step {
    line: usize,
    commands: Vec<String>,
    example: Vec<String>,
}

/// Somebody at a terminal who reads a page.
#[derive(Debug)]
pub struct DocRunner {
    terminal: Terminal,
}

impl DocRunner {
    /// Sits down; `preparations` are typed before anything is read.
    ///
    /// # Errors
    /// There is no terminal.
    pub async fn new(preparations: &[String]) -> Result<Self> {
        // Larger than any output, so that nothing wraps or scrolls away.
        let terminal = Terminal::open(400, 1000).await?;
        for line in preparations {
            terminal.type_line(line).await?;
        }
        // The number of the next command, and the last one's exit code.
        terminal.type_line(r"PS1='[\#:$?] '; clear").await?;
        terminal.shows("the prompt", |screen| prompt(screen).is_some()).await?;
        Ok(Self { terminal })
    }

    /// Walks through the page. Fences with one of the words in `not_run` are left out. How many commands were run.
    ///
    /// # Errors
    /// A command does not end as the page says, or shows something else; or the page has a fence of another kind.
    pub async fn walk(&self, page: &str, not_run: &[&str]) -> Result<usize> {
        let mut count = 0;
        for step in steps(page)? {
            if step.commands.iter().any(|command| not_run.iter().any(|word| command.contains(word))) {
                continue;
            }
            let mut shown = String::new();
            for command in &step.commands {
                let (output, code) = self.run(command).await?;
                let expected = exit_code(command)?;
                ensure!(code == expected, "`{command}` exits with {code}, not {expected}:\n{output}");
                shown += &output;
                count += 1;
            }
            looks_like(&step.example, &shown).with_context(|| format!("the fence at line {}", step.line))?;
        }
        Ok(count)
    }

    /// Types a command, and answers what it asks; what it showed, and its exit code.
    async fn run(&self, command: &str) -> Result<(String, u8)> {
        let (number, _) = prompt(&self.terminal.screen().await?).context("no prompt")?;
        self.terminal.type_line("clear").await?;
        let is_clear =
            |screen: &str| screen.lines().count() == 1 && prompt(screen).is_some_and(|(at, _)| at > number);
        self.terminal.shows("nothing but the prompt", is_clear).await?;
        self.terminal.type_line(command).await?;
        let mut answered = false;
        let ended = until(&format!("`{command}` to end"), async || {
            let screen = self.terminal.screen().await?;
            if let Some((_, code)) = prompt(&screen).filter(|(at, _)| *at > number + 1) {
                let lines: Vec<_> = screen.lines().skip(1).collect();
                let output: String = lines[..lines.len() - 1].iter().flat_map(|line| [*line, "\n"]).collect();
                return Ok(Some((output, code)));
            }
            if !answered && let Some(answer) = answer(&screen) {
                answered = true;
                match answer {
                    Answer::Line(text) => self.terminal.type_line(&text).await?,
                    Answer::Key(key) => self.terminal.press(key).await?,
                }
            }
            Ok(None)
        })
        .await;
        match ended {
            Ok(ended) => Ok(ended),
            Err(error) => Err(error.context(self.terminal.screen().await?)),
        }
    }
}

/// The number and the exit code in the prompt, if the screen ends with one.
fn prompt(screen: &str) -> Option<(u32, u8)> {
    let (number, code) = screen.lines().last()?.strip_prefix('[')?.strip_suffix(']')?.split_once(':')?;
    Some((number.parse().ok()?, code.parse().ok()?))
}

enum Answer {
    Line(String),
    Key(&'static str),
}

/// The reader's answer to a prompt: yes, the requested number, or `q` for a full-screen view.
fn answer(screen: &str) -> Option<Answer> {
    let last = screen.lines().last()?;
    if last.ends_with("[y/N]") {
        return Some(Answer::Line("y".to_owned()));
    }
    if let Some(count) = last.strip_prefix("Type ").and_then(|rest| rest.strip_suffix(" to drop them:")) {
        return Some(Answer::Line(count.to_owned()));
    }
    let watched = screen.starts_with("vramq status") && screen.contains("\nWORKER ");
    watched.then_some(Answer::Key("q"))
}

fn steps(page: &str) -> Result<Vec<Step>> {
    let mut steps: Vec<Step> = Vec::new();
    let mut lines = page.lines().enumerate();
    while let Some((at, line)) = lines.next() {
        let Some(kind) = line.strip_prefix("```") else { continue };
        let body = lines.by_ref().map(|(_, line)| line).take_while(|line| *line != "```").map(str::to_owned);
        match (kind, steps.last_mut()) {
            ("sh", _) => {
                steps.push(Step { line: at + 1, commands: body.collect(), ..Step::default() });
            }
            ("text", Some(step)) if step.example.is_empty() => step.example = body.collect(),
            ("python", _) => body.for_each(drop),
            _ => bail!("line {}: a fence of `{kind}` that shows the output of no commands", at + 1),
        }
    }
    Ok(steps)
}

fn exit_code(command: &str) -> Result<u8> {
    match command.split_once("exits with ") {
        None => Ok(0),
        Some((_, rest)) => rest.trim_end().parse().with_context(|| format!("`{command}`: no exit code")),
    }
}

fn looks_like(example: &[String], shown: &str) -> Result<()> {
    let mut lines = shown.lines();
    for expected in example.iter().filter(|line| !line.trim().is_empty() && line.trim() != "…") {
        let (start, goes_on) =
            expected.strip_suffix('…').map_or((expected.as_str(), false), |start| (start, true));
        let wanted = shape(start);
        let found = lines.any(|line| {
            let shape = shape(line);
            shape == wanted || goes_on && begins(&shape, &wanted, !start.ends_with(' '))
        });
        ensure!(found, "there is no line like `{expected}`, or not there, in:\n{shown}");
    }
    Ok(())
}

/// Whether the words of a line begin with those of an example, whose last word may be the beginning of the line's.
fn begins(words: &[&str], example: &[&str], breaks_a_word: bool) -> bool {
    match example.split_last() {
        Some((last, before)) if breaks_a_word => {
            words.starts_with(before) && words.get(before.len()).is_some_and(|word| word.starts_with(*last))
        }
        _ => words.starts_with(example),
    }
}

/// The words of a line, with every run of figures replaced by one mark.
fn shape(line: &str) -> Vec<&str> {
    let mut shape: Vec<_> =
        line.split_whitespace().map(|word| if is_figure(word) { "#" } else { word }).collect();
    shape.dedup_by(|word, before| *word == "#" && *before == "#");
    shape
}

fn is_figure(word: &str) -> bool {
    let bare = word.trim_end_matches([',', ';', ':', '.', ')', '%']).trim_start_matches('(');
    bare == "-"
        || UNITS.contains(&bare)
        || bare.starts_with(|c: char| c.is_ascii_digit())
        || bare.len() >= HEX_MIN && bare.bytes().all(|b| b.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example(lines: &str) -> Vec<String> {
        lines.lines().map(str::to_owned).collect()
    }

    #[test]
    fn figures_may_differ_and_words_may_not() {
        let shown = "HEAD  SIZE\na  1.5 GiB  -  deadbeef01\n\nw-1: gone for 3s, at last\n";
        for good in [
            "HEAD SIZE\na 20 MiB 17 0a1b2c3d",
            "w-1: gone for 99m, at last",
            "…\nw-1: gone …",
            "w-1: go…",
            "",
        ] {
            looks_like(&example(good), shown).unwrap_or_else(|error| panic!("{good}: {error:#}"));
        }
        for bad in [
            "HEAD",
            "b 1",
            "w-1: gone for 3s",
            "w-2: gone …",
            "w-1: go …",
            "w-1: one…",
            "w-1: gone …\nHEAD SIZE",
        ] {
            assert!(looks_like(&example(bad), shown).is_err(), "{bad}");
        }
    }

    #[test]
    fn fences_are_commands_and_what_they_show() {
        let page = "text\n```sh\na  # exits with 3\nb\n```\nmore\n```text\nx\n```\n```python\nimport a\n```\n```sh\nc\n```\n";
        let [one, two] = &steps(page).unwrap()[..] else { panic!("not two") };
        assert_eq!(
            (&one.commands[..], &one.example[..], one.line),
            (&["a  # exits with 3", "b"].map(str::to_owned)[..], &["x".to_owned()][..], 2)
        );
        assert!(two.commands == ["c"] && two.example.is_empty());
        assert_eq!((exit_code(&one.commands[0]).unwrap(), exit_code("b").unwrap()), (3, 0));
        for bad in ["```\nx\n```\n", "```text\nx\n```\n", "```json\n{}\n```\n"] {
            assert!(steps(bad).is_err(), "{bad}");
        }
    }
}
