//! Draws `vramq status --watch` on a frame. Pure.

use std::time::Instant;

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line as Row, Span};
use ratatui::widgets::Paragraph;

use super::fleet::Fleet;
use super::lines::lines;
use super::severity::{Line, Severity};
use super::worker_snapshot::Presence;
use crate::output::text::safe;

/// The state of the view.
#[derive(Clone, Copy, Debug)]
pub(super) struct ViewState {
    pub(super) colours: bool,
    /// Lines above the visible ones.
    pub(super) scrolled: u16,
}

/// Draws a title, as many lines as fit, and the keys.
pub(super) fn draw(frame: &mut Frame<'_>, broker: &str, fleet: &Fleet, view: &mut ViewState, now: Instant) {
    let [title, body, keys] =
        Layout::vertical([Constraint::Length(2), Constraint::Min(0), Constraint::Length(1)])
            .areas(frame.area());
    let here = fleet.workers(now).filter(|(_, presence)| *presence == Presence::Here).count();
    let name = Span::styled("vramq status", Modifier::BOLD);
    let about = format!("  {}  workers: {here}", safe(broker));
    frame.render_widget(Paragraph::new(Row::from(vec![name, Span::raw(about)])), title);

    let lines = lines(fleet, now);
    let hidden_max = u16::try_from(lines.len()).unwrap_or(u16::MAX).saturating_sub(body.height);
    view.scrolled = view.scrolled.min(hidden_max);
    let rows: Vec<_> = lines.iter().map(|line| row(line, view.colours)).collect();
    frame.render_widget(Paragraph::new(rows).scroll((view.scrolled, 0)), body);

    let below = hidden_max - view.scrolled;
    let mut text = "q quits   d dead letters".to_owned();
    if hidden_max > 0 {
        text += &format!("   up, down: {} lines above, {below} below", view.scrolled);
    }
    frame.render_widget(Paragraph::new(Row::styled(text, Modifier::DIM)), keys);
}

/// A line with the style of its severity.
pub(super) fn row(line: &Line, colours: bool) -> Row<'_> {
    let colour = |style: Style, colour| if colours { style.fg(colour) } else { style };
    let plain = Style::default();
    // The words repeat what the colour says, for terminals and readers without colours.
    let style = match line.severity {
        Severity::Normal => plain,
        Severity::Header => plain.add_modifier(Modifier::BOLD),
        Severity::Ok => colour(plain, Color::Green),
        Severity::Warning => colour(plain, Color::Yellow),
        Severity::Error => colour(plain, Color::Red).add_modifier(Modifier::BOLD),
        Severity::Dim => plain.add_modifier(Modifier::DIM),
    };
    Row::styled(line.text.as_str(), style)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use vramq_schemas::status::{Heartbeat, WorkerState};

    use super::*;

    /// What the terminal shows, line by line.
    fn shown(terminal: &Terminal<TestBackend>) -> Vec<String> {
        let buffer = terminal.backend().buffer();
        let row = |y| (0..buffer.area.width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
        (0..buffer.area.height).map(|y| row(y).trim_end().to_owned()).collect()
    }

    fn fleet(workers: usize, now: Instant) -> Fleet {
        let mut fleet = Fleet::new(&[], now);
        fleet.connected(now);
        for number in 0..workers {
            let heartbeat = Heartbeat {
                worker: format!("w{number:02}"),
                interval_ms: 1_000,
                state: WorkerState::Consuming,
                ..Heartbeat::default()
            };
            fleet.heard(&serde_json::to_vec(&heartbeat).unwrap(), now);
        }
        fleet
    }

    fn drawn(
        width: u16,
        height: u16,
        fleet: &Fleet,
        view: &mut ViewState,
        now: Instant,
    ) -> Terminal<TestBackend> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, "amqp://host:5672/v", fleet, view, now)).unwrap();
        terminal
    }

    #[test]
    fn title_workers_and_keys() {
        let now = Instant::now();
        let mut view = ViewState { colours: true, scrolled: 0 };
        let terminal = drawn(120, 8, &fleet(2, now), &mut view, now);
        let shown = shown(&terminal);
        assert_eq!(shown[0], "vramq status  amqp://host:5672/v  workers: 2");
        assert!(shown[2].starts_with("WORKER  STATE      DEVICE"), "{shown:?}");
        assert!(shown[3].starts_with("w00     consuming"), "{shown:?}");
        assert!(shown[4].starts_with("w01     consuming"), "{shown:?}");
        assert_eq!(shown[7], "q quits   d dead letters");
        assert_eq!(terminal.backend().buffer()[(0, 3)].fg, Color::Green);
    }

    #[test]
    fn the_silent_are_red_and_not_counted_and_no_colour_is_none() {
        let start = Instant::now();
        let later = start + Duration::from_secs(4);
        let fleet = fleet(1, start);
        let mut view = ViewState { colours: true, scrolled: 0 };
        let terminal = drawn(120, 8, &fleet, &mut view, later);
        assert_eq!(shown(&terminal)[0], "vramq status  amqp://host:5672/v  workers: 0");
        assert!(shown(&terminal)[3].starts_with("w00     silent"), "{:?}", shown(&terminal));
        assert_eq!(terminal.backend().buffer()[(0, 3)].fg, Color::Red);
        view.colours = false;
        let terminal = drawn(120, 8, &fleet, &mut view, later);
        assert!(terminal.backend().buffer().content.iter().all(|cell| cell.fg == Color::Reset));
    }

    #[test]
    fn more_than_fits_is_scrolled_and_any_size_is_drawn() {
        let now = Instant::now();
        let fleet = fleet(20, now);
        let mut view = ViewState { colours: true, scrolled: 0 };
        let top = shown(&drawn(60, 10, &fleet, &mut view, now));
        assert!(top[2].starts_with("WORKER"), "{top:?}");
        assert_eq!(top[9], "q quits   d dead letters   up, down: 0 lines above, 14 below");
        // Further than there is to go.
        view.scrolled = 100;
        let end = shown(&drawn(60, 10, &fleet, &mut view, now));
        assert_eq!(view.scrolled, 14);
        assert!(end[8].starts_with("w19"), "{end:?}");
        for (width, height) in [(1, 1), (3, 2), (1, 40), (200, 3)] {
            drawn(width, height, &fleet, &mut view, now);
        }
    }
}
