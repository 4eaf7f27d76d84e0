//! `vramq status --watch`: takes over the terminal, redraws it, reads keys, and restores it.

use std::io::{self, IsTerminal as _};
use std::time::{Duration, Instant};

use crossterm::event::EventStream;
use futures_util::StreamExt as _;
use ratatui::DefaultTerminal;
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval};
use vramq_dlq::text::unix_ms;
use vramq_program::{is_dumb_terminal, wants_colours};

use super::Session;
use super::keys::{KeyAction, key_action};
use super::letters::LettersView;
use super::view::{ViewState, draw};
use crate::dlq::browse::{self, Letters};
use crate::exit;
use crate::signals::Signals;

/// How often the screen is redrawn to update ages.
const REDRAW_EVERY: Duration = Duration::from_millis(500);

/// The terminal, restored on drop. After a panic ratatui's hook restores it.
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

/// What the terminal shows.
struct Views {
    workers: ViewState,
    /// The dead letters, while they are shown instead of the workers.
    letters: Option<LettersView>,
    /// The task that reads dead letters. It holds locks of queues, so it runs to its end even when its result is no longer shown.
    reading: Option<JoinHandle<Letters>>,
}

/// Shows the session until a key or signal ends it; the exit code.
pub(super) async fn run(session: &mut Session, signals: &mut Signals) -> u8 {
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        eprintln!("error: --watch needs a terminal; without --watch the output can be redirected");
        return exit::USAGE;
    }
    if is_dumb_terminal() {
        eprintln!(
            "error: --watch draws on the terminal, and TERM says that this one takes no such output; repeat it without --watch"
        );
        return exit::USAGE;
    }
    let result = match Screen::take() {
        Ok(mut screen) => watch(&mut screen, session, signals).await,
        Err(error) => Err(error),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: the terminal: {error}");
        exit::FAILED
    })
}

async fn watch(screen: &mut Screen, session: &mut Session, signals: &mut Signals) -> io::Result<u8> {
    let colours = wants_colours();
    let mut views = Views { workers: ViewState { colours, scrolled: 0 }, letters: None, reading: None };
    let mut events = EventStream::new();
    let mut ticks = interval(REDRAW_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            (code, _) = signals.next() => return Ok(code),
            event = events.next() => match event {
                Some(event) => if let Some(code) = views.press(key_action(&event?), session) {
                    return Ok(code);
                },
                // The terminal was closed.
                None => return Ok(exit::DONE),
            },
            _ = ticks.tick() => {}
            () = session.hear() => {}
            letters = read(&mut views.reading) => if let Some(view) = &mut views.letters {
                view.show(letters);
            },
        }
        // Redraw once for many heartbeats.
        session.hear_waiting();
        let now = Instant::now();
        session.fleet.forget(now);
        let Session { broker, fleet, .. } = session;
        screen.0.draw(|frame| match &mut views.letters {
            Some(letters) => letters.draw(frame, colours, unix_ms()),
            None => draw(frame, broker, fleet, &mut views.workers, now),
        })?;
    }
}

/// The dead letters, when they have been read. Never if they are not being read.
///
/// Cancel safety: the reading goes on.
async fn read(reading: &mut Option<JoinHandle<Letters>>) -> Letters {
    let Some(task) = reading else { return std::future::pending().await };
    let ended = task.await;
    *reading = None;
    // A task fails only by a panic.
    ended.unwrap_or_else(|error| Letters::unread(error.to_string()))
}

impl Views {
    /// Carries out a key; the exit code if it ends the command.
    fn press(&mut self, action: KeyAction, session: &Session) -> Option<u8> {
        if let KeyAction::End(code) = action {
            return Some(code);
        }
        if let Some(letters) = &mut self.letters {
            if !letters.press(action) {
                self.letters = None;
            }
            return None;
        }
        let scrolled = &mut self.workers.scrolled;
        match action {
            KeyAction::Back => return Some(exit::DONE),
            KeyAction::Up(lines) => *scrolled = scrolled.saturating_sub(lines),
            KeyAction::Down(lines) => *scrolled = scrolled.saturating_add(lines),
            KeyAction::Letters => {
                self.letters = Some(LettersView::default());
                if self.reading.is_none() {
                    let reading = browse::read(session.address.clone(), session.fleet.with_letters());
                    self.reading = Some(tokio::spawn(reading));
                }
            }
            KeyAction::End(_) | KeyAction::Open | KeyAction::Nothing => {}
        }
        None
    }
}
