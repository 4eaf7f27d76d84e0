//! The dead letters in `vramq status --watch`: a list, and the explanation of the one that is open. Pure.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line as Row, Span};
use ratatui::widgets::Paragraph;
use unicode_width::{UnicodeWidthChar as _, UnicodeWidthStr as _};

use super::keys::KeyAction;
use super::severity::{Line, Severity};
use super::view::row;
use crate::dlq::browse::{Letter, Letters};

/// What is shown of dead letters.
#[derive(Debug, Default)]
pub(super) struct LettersView {
    /// `None` while they are read.
    letters: Option<Letters>,
    /// The number of the marked letter, from 0.
    marked: usize,
    /// The scroll position in lines, if the marked letter is open.
    open: Option<u16>,
}

impl LettersView {
    /// Shows letters that have been read.
    pub(super) fn show(&mut self, letters: Letters) {
        *self = Self { letters: Some(letters), ..Self::default() };
    }

    /// Handles a key. Returns whether the view stays open.
    pub(super) fn press(&mut self, action: KeyAction) -> bool {
        let count = self.letters.as_ref().map_or(0, |letters| letters.kept.len());
        match action {
            KeyAction::Back if self.open.is_none() => return false,
            KeyAction::Back => self.open = None,
            KeyAction::Open if self.open.is_none() && self.marked < count => self.open = Some(0),
            KeyAction::Up(lines) => match &mut self.open {
                Some(above) => *above = above.saturating_sub(lines),
                None => self.marked = self.marked.saturating_sub(lines.into()),
            },
            KeyAction::Down(lines) => match &mut self.open {
                Some(above) => *above = above.saturating_add(lines),
                None => {
                    let last = count.saturating_sub(1);
                    self.marked = self.marked.saturating_add(lines.into()).min(last);
                }
            },
            _ => {}
        }
        true
    }

    /// Draws a title, the list or the open letter, and the keys. Ages are computed from `now_ms`, Unix time in milliseconds.
    pub(super) fn draw(&mut self, frame: &mut Frame<'_>, colours: bool, now_ms: u64) {
        let [title, body, keys] =
            Layout::vertical([Constraint::Length(2), Constraint::Min(0), Constraint::Length(1)])
                .areas(frame.area());
        let letters = self.letters.as_ref();
        let about = match letters {
            None => "  being read …".to_owned(),
            Some(Letters { kept, more: 0, .. }) => format!("  {}", kept.len()),
            Some(Letters { kept, more, .. }) => {
                let all = kept.len() as u64 + more;
                format!("  {} of {all}: `vramq dlq list --limit 0` lists all", kept.len())
            }
        };
        let name = Span::styled("dead letters", Modifier::BOLD);
        frame.render_widget(Paragraph::new(Row::from(vec![name, Span::raw(about)])), title);
        let marked = letters.and_then(|letters| letters.kept.get(self.marked));
        let text = match (letters, marked, self.open.as_mut()) {
            (_, Some(letter), Some(above)) => draw_letter(frame, body, letter, above, colours),
            (Some(letters), _, _) => {
                draw_list(frame, body, letters, self.marked, colours, now_ms);
                "Enter opens   up, down   Esc goes back   q quits".to_owned()
            }
            (None, _, _) => "Esc goes back   q quits".to_owned(),
        };
        frame.render_widget(Paragraph::new(Row::styled(text, Modifier::DIM)), keys);
    }
}

/// Draws the list; the marked letter is always visible.
fn draw_list(
    frame: &mut Frame<'_>,
    area: Rect,
    letters: &Letters,
    marked: usize,
    colours: bool,
    now_ms: u64,
) {
    let faults = letters.faults.iter().map(|fault| Line::new(fault, Severity::Error));
    let mut above: Vec<_> = faults.collect();
    let table = letters.table(now_ms);
    match table.split_first() {
        Some((head, [_, ..])) => above.push(Line::new(head, Severity::Header)),
        _ if above.is_empty() => above.push(Line::new("no dead letters", Severity::Normal)),
        _ => {}
    }
    let height = u16::try_from(above.len()).unwrap_or(u16::MAX);
    let [top, rows] = Layout::vertical([Constraint::Length(height), Constraint::Min(0)]).areas(area);
    frame.render_widget(Paragraph::new(above.iter().map(|line| row(line, colours)).collect::<Vec<_>>()), top);
    let of_letters = table.iter().skip(1).enumerate().map(|(at, text)| {
        let style = if at == marked { Style::from(Modifier::REVERSED) } else { Style::default() };
        Row::styled(text.as_str(), style)
    });
    let hidden = (marked + 1).saturating_sub(rows.height.into());
    let visible: Vec<_> = of_letters.skip(hidden).take(rows.height.into()).collect();
    frame.render_widget(Paragraph::new(visible), rows);
}

/// Draws the lines of the letter that fit, from line `above` on. Returns the keys.
fn draw_letter(frame: &mut Frame<'_>, area: Rect, letter: &Letter, above: &mut u16, colours: bool) -> String {
    let lines: Vec<_> = letter
        .dossier
        .iter()
        .flat_map(|text| {
            let severity = if text.starts_with(' ') { Severity::Normal } else { Severity::Header };
            wrapped(text, area.width.into()).into_iter().map(move |text| Line::new(text, severity))
        })
        .collect();
    let hidden_max = u16::try_from(lines.len()).unwrap_or(u16::MAX).saturating_sub(area.height);
    *above = (*above).min(hidden_max);
    let rows: Vec<_> = lines.iter().map(|line| row(line, colours)).collect();
    frame.render_widget(Paragraph::new(rows).scroll((*above, 0)), area);
    let mut keys = "Esc goes back   q quits".to_owned();
    if hidden_max > 0 {
        keys += &format!("   up, down: {above} lines above, {} below", hidden_max - *above);
    }
    keys
}

/// A text in rows of at most so many columns, each with the indentation of the first.
fn wrapped(text: &str, columns: usize) -> Vec<String> {
    let mut rest = text.trim_start_matches(' ');
    let indentation = &text[..text.len() - rest.len()];
    let room = columns.saturating_sub(indentation.len()).max(1);
    let mut rows = Vec::new();
    while rest.width() > room {
        let (row, after) = rest.split_at(row_end(rest, room));
        rows.push(format!("{indentation}{}", row.trim_end()));
        rest = after.trim_start();
    }
    if !rest.is_empty() || rows.is_empty() {
        rows.push(format!("{indentation}{rest}"));
    }
    rows
}

/// Where the first row of a text ends, in bytes: behind the last space that fits, else where the columns end. At least one
/// character.
fn row_end(text: &str, columns: usize) -> usize {
    let first = text.chars().next().map_or(0, char::len_utf8);
    let (mut width, mut behind_space) = (0, None);
    for (at, c) in text.char_indices() {
        if c == ' ' {
            behind_space = Some(at + 1);
        }
        width += c.width().unwrap_or(0);
        if width > columns {
            return behind_space.unwrap_or_else(|| at.max(first));
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use lapin::BasicProperties;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use vramq_dlq::dead_letter::DeadLetter;

    use super::*;

    fn letters(count: usize) -> Letters {
        let letter = |n: usize| {
            let properties = BasicProperties::default().with_message_id(format!("job-{n:02}").into());
            let summary = DeadLetter::new("vramq.dead.minilm", properties, b"{}".to_vec()).summary();
            let dossier = vec![
                format!("Dead letter {n}"),
                String::new(),
                "Why".to_owned(),
                "  one two three".to_owned(),
            ];
            Letter { summary, dossier }
        };
        Letters { kept: (0..count).map(letter).collect(), ..Letters::default() }
    }

    /// The lines of the screen, and the one that is marked.
    fn drawn(view: &mut LettersView, width: u16, height: u16) -> (Vec<String>, Option<u16>) {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| view.draw(frame, true, 0)).unwrap();
        let buffer = terminal.backend().buffer();
        let text = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
        let marked = (0..height).find(|y| buffer[(0, *y)].modifier.contains(Modifier::REVERSED));
        ((0..height).map(text).collect(), marked)
    }

    #[test]
    fn a_list_whose_marked_letter_is_visible_and_opens() {
        let mut view = LettersView::default();
        assert!(drawn(&mut view, 80, 6).0[0].starts_with("dead letters  being read"));
        assert!(view.press(KeyAction::Open), "nothing to open yet");
        view.show(letters(20));
        let (shown, marked) = drawn(&mut view, 80, 6);
        assert_eq!((shown[0].as_str(), marked), ("dead letters  20", Some(3)));
        assert!(shown[2].starts_with("FINGERPRINT") && shown[3].contains("job-00"), "{shown:?}");
        view.press(KeyAction::Down(10));
        let (shown, marked) = drawn(&mut view, 80, 6);
        assert!(shown[4].contains("job-10") && marked == Some(4), "{shown:?}");
        // Further than there is to go.
        view.press(KeyAction::Down(50));
        assert!(drawn(&mut view, 80, 6).0[4].contains("job-19"));
        view.press(KeyAction::Open);
        let (shown, _) = drawn(&mut view, 14, 8);
        assert_eq!(shown[2..7], ["Dead letter 19", "", "Why", "  one two", "  three"]);
        view.press(KeyAction::Down(9));
        assert_eq!(drawn(&mut view, 80, 5).0[3], "  one two three");
        assert!(view.press(KeyAction::Back), "back to the list");
        assert!(drawn(&mut view, 80, 6).0[4].contains("job-19"));
        assert!(!view.press(KeyAction::Back), "back to the workers");
    }

    #[test]
    fn none_faults_and_any_size_are_drawn() {
        let mut view = LettersView::default();
        view.show(letters(0));
        assert_eq!(drawn(&mut view, 80, 6).0[2], "no dead letters");
        view.show(Letters { more: 7, ..letters(3) });
        assert!(drawn(&mut view, 80, 6).0[0].starts_with("dead letters  3 of 10: "));
        view.show(Letters::unread("minilm: refused".to_owned()));
        assert_eq!(drawn(&mut view, 80, 6).0[2], "minilm: refused");
        view.show(letters(3));
        for open in [false, true] {
            if open {
                view.press(KeyAction::Open);
            }
            for (width, height) in [(1, 1), (3, 2), (1, 40), (200, 3)] {
                drawn(&mut view, width, height);
            }
        }
    }

    #[test]
    fn long_texts_are_wrapped_between_words_where_there_are_some() {
        assert_eq!(wrapped("  one two three", 9), ["  one two", "  three"]);
        assert_eq!(wrapped("abcdefgh", 3), ["abc", "def", "gh"]);
        assert_eq!(wrapped("日本語", 3), ["日", "本", "語"]);
        assert_eq!(wrapped("日本", 1), ["日", "本"]);
        assert_eq!(wrapped("", 5), [""]);
    }
}
