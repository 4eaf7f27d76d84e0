//! The keys of `vramq status --watch`.

use crossterm::event::{Event, KeyCode, KeyEventKind, KeyModifiers};

use crate::exit;

/// Lines that a page key scrolls.
const PAGE: u16 = 10;

/// The action of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeyAction {
    End(u8),
    /// Closes the open view. Ends the command if none is open.
    Back,
    Up(u16),
    Down(u16),
    Letters,
    Open,
    Nothing,
}

pub(super) fn key_action(event: &Event) -> KeyAction {
    let Event::Key(key) = event else { return KeyAction::Nothing };
    if key.kind == KeyEventKind::Release {
        return KeyAction::Nothing;
    }
    match key.code {
        // In raw mode Ctrl-C is a key, not a signal.
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => {
            KeyAction::End(exit::INTERRUPTED)
        }
        KeyCode::Char('q') => KeyAction::End(exit::DONE),
        KeyCode::Esc => KeyAction::Back,
        KeyCode::Enter => KeyAction::Open,
        KeyCode::Char('d') => KeyAction::Letters,
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
        assert_eq!(key(KeyCode::Esc, KeyModifiers::NONE), KeyAction::Back);
        assert_eq!(key(KeyCode::Enter, KeyModifiers::NONE), KeyAction::Open);
        assert_eq!(key(KeyCode::Char('d'), KeyModifiers::NONE), KeyAction::Letters);
        assert_eq!(key(KeyCode::Char('c'), KeyModifiers::CONTROL), KeyAction::End(exit::INTERRUPTED));
        assert_eq!(key(KeyCode::Char('c'), KeyModifiers::NONE), KeyAction::Nothing);
        assert_eq!(key(KeyCode::Down, KeyModifiers::NONE), KeyAction::Down(1));
        assert_eq!(key(KeyCode::PageUp, KeyModifiers::NONE), KeyAction::Up(PAGE));
        assert_eq!(key_action(&Event::Resize(80, 24)), KeyAction::Nothing);
    }
}
