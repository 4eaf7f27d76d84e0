//! `vramq status --watch`: takes over the terminal, redraws it, reads keys, and restores it.

use std::io::{self, IsTerminal as _};
use std::time::{Duration, Instant};

use crossterm::event::{Event, EventStream, KeyCode, KeyEventKind, KeyModifiers};
use futures_util::StreamExt as _;
use ratatui::DefaultTerminal;
use tokio::time::{MissedTickBehavior, interval};

use super::Session;
use super::view::{ViewState, draw};
use crate::exit;
use crate::signals::Signals;

/// How often the screen is redrawn to update ages.
const REDRAW_EVERY: Duration = Duration::from_millis(500);

/// Lines that a page key scrolls.
const PAGE: u16 = 10;

/// The terminal. It is restored however this ends; after a panic by ratatui's hook.
struct Screen(DefaultTerminal);

impl Screen {
    fn take() -> io::Result<Self> {
        Ok(Self(ratatui::try_init()?))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

/// The action of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KeyAction {
    End(u8),
    Up(u16),
    Down(u16),
    Nothing,
}

/// Shows the session until a key or signal ends it; the exit code.
pub(super) async fn run(mut session: Session) -> u8 {
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        eprintln!("error: --watch needs a terminal; without --watch the output can be redirected");
        return exit::USAGE;
    }
    let result = match Screen::take() {
        Ok(mut screen) => watch(&mut screen, &mut session).await,
        Err(error) => Err(error),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: the terminal: {error}");
        exit::FAILED
    })
}

async fn watch(screen: &mut Screen, session: &mut Session) -> io::Result<u8> {
    // NO_COLOR: https://no-color.org
    let colours = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let mut view = ViewState { colours, scrolled: 0 };
    let mut signals = Signals::new()?;
    let mut events = EventStream::new();
    let mut ticks = interval(REDRAW_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            (code, _) = signals.next() => return Ok(code),
            event = events.next() => match event {
                Some(event) => match key_action(&event?) {
                    KeyAction::End(code) => return Ok(code),
                    KeyAction::Up(lines) => view.scrolled = view.scrolled.saturating_sub(lines),
                    KeyAction::Down(lines) => view.scrolled = view.scrolled.saturating_add(lines),
                    KeyAction::Nothing => {}
                },
                // The terminal was closed.
                None => return Ok(exit::DONE),
            },
            _ = ticks.tick() => {}
            () = session.hear() => {}
        }
        // Redraw once for many heartbeats.
        session.hear_waiting();
        let now = Instant::now();
        session.fleet.forget(now);
        let Session { broker, fleet, .. } = session;
        screen.0.draw(|frame| draw(frame, broker, fleet, &mut view, now))?;
    }
}

fn key_action(event: &Event) -> KeyAction {
    let Event::Key(key) = event else { return KeyAction::Nothing };
    if key.kind == KeyEventKind::Release {
        return KeyAction::Nothing;
    }
    match key.code {
        // In raw mode Ctrl-C is a key, not a signal.
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => {
            KeyAction::End(exit::INTERRUPTED)
        }
        KeyCode::Char('q') | KeyCode::Esc => KeyAction::End(exit::DONE),
        KeyCode::Up | KeyCode::Char('k') => KeyAction::Up(1),
        KeyCode::Down | KeyCode::Char('j') => KeyAction::Down(1),
        KeyCode::PageUp => KeyAction::Up(PAGE),
        KeyCode::PageDown => KeyAction::Down(PAGE),
        _ => KeyAction::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use crossterm::event::KeyEvent;

    use super::*;

    #[test]
    fn keys() {
        let key = |code, modifiers| key_action(&Event::Key(KeyEvent::new(code, modifiers)));
        assert_eq!(key(KeyCode::Char('q'), KeyModifiers::NONE), KeyAction::End(exit::DONE));
        assert_eq!(key(KeyCode::Esc, KeyModifiers::NONE), KeyAction::End(exit::DONE));
        assert_eq!(key(KeyCode::Char('c'), KeyModifiers::CONTROL), KeyAction::End(exit::INTERRUPTED));
        assert_eq!(key(KeyCode::Char('c'), KeyModifiers::NONE), KeyAction::Nothing);
        assert_eq!(key(KeyCode::Down, KeyModifiers::NONE), KeyAction::Down(1));
        assert_eq!(key(KeyCode::PageUp, KeyModifiers::NONE), KeyAction::Up(PAGE));
        assert_eq!(key_action(&Event::Resize(80, 24)), KeyAction::Nothing);
    }
}
