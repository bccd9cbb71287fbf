//! Escapes invisible and control characters in external text (a server's error, a message, a row, an argument) before
//! it reaches the log, a page or a terminal.
//!
//! Pure. Every output uses it: log lines (`logging.rs`), the pages (`http/`), standard output and standard error
//! (`cli/`, `main.rs`). What is stored or sent keeps its text.

use std::borrow::Cow;
use std::fmt::Write;

/// The text with each hidden character as a JSON escape, such as `\u001b` or `\u202e`, so that JSON text keeps its
/// meaning. Line feeds stay.
#[must_use]
pub fn visible(text: &str) -> Cow<'_, str> {
    if !text.contains(|character| character != '\n' && is_hidden(character)) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for character in text.chars() {
        if character != '\n' && is_hidden(character) {
            escape(character, &mut shown);
        } else {
            shown.push(character);
        }
    }
    Cow::Owned(shown)
}

/// The same in one line: line breaks, tabs and the spaces around them become one space, and are removed at both ends.
#[must_use]
pub fn one_line(text: &str) -> Cow<'_, str> {
    if !text.contains(breaks_a_line) {
        return visible(text);
    }
    let lines = text.split(breaks_a_line).map(str::trim).filter(|line| !line.is_empty());
    Cow::Owned(visible(&lines.collect::<Vec<_>>().join(" ")).into_owned())
}

/// The white space among the ASCII control characters.
fn breaks_a_line(character: char) -> bool {
    matches!(character, '\t'..='\r')
}

/// Whether a character is invisible: control characters, line and paragraph separators, and what the Unicode Standard
/// calls "default ignorable" (`DerivedCoreProperties.txt`, which includes the directional characters) or an invisible
/// format character. Letters, marks, spaces, and emoji without a joiner or selector are not. An id that looks like another
/// one costs more than a flag that is not shown.
#[must_use]
pub fn is_hidden(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}' | '\u{180b}'..='\u{180f}'
            | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{3164}'
            | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}'
            | '\u{13430}'..='\u{1343f}' | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}'
        )
}

fn escape(character: char, into: &mut String) {
    for unit in character.encode_utf16(&mut [0; 2]) {
        write!(into, "\\u{unit:04x}").expect("writing to a String cannot fail");
    }
}

#[cfg(test)]
mod tests {
    use super::{is_hidden, one_line, visible};
    use proptest::prelude::*;
    use std::borrow::Cow;

    #[test]
    fn escapes_hidden_characters() {
        for (text, shown) in [
            ("\u{1b}[31mred", r"\u001b[31mred"),
            ("a\u{202e}b\u{2066}c\u{61c}", r"a\u202eb\u2066c\u061c"),
            ("a\u{2028}b\u{9b}c\u{7f}", r"a\u2028b\u009bc\u007f"),
            ("\u{e0041}", r"\udb40\udc41"),
            ("\u{feff}a\0", r"\ufeffa\u0000"),
        ] {
            assert_eq!((visible(text), one_line(text)), (shown.into(), shown.into()), "{text:?}");
        }
    }

    #[test]
    fn one_line_joins_lines_with_spaces() {
        assert_eq!(one_line("\n two \r\n\n lines\tand a  gap \n"), "two lines and a  gap");
        assert_eq!(visible("two\nlines\t"), "two\nlines\\u0009");
    }

    fn mixed_text() -> impl Strategy<Value = String> {
        let odd =
            ['\u{1b}', '\n', '\r', '\u{85}', '\u{200d}', '\u{202a}', '\u{2029}', '\u{2069}', '\u{e007f}', '"', '\\'];
        proptest::collection::vec(prop_oneof![any::<char>(), proptest::sample::select(odd.to_vec())], 0..40)
            .prop_map(String::from_iter)
    }

    proptest! {
        #[test]
        fn output_has_no_hidden_character(text in mixed_text()) {
            prop_assert!(!visible(&text).contains(|character| character != '\n' && is_hidden(character)));
            let line = one_line(&text).into_owned();
            prop_assert!(!line.contains(is_hidden));
            prop_assert_eq!(&one_line(&line), &line);
        }

        #[test]
        fn plain_text_is_unchanged(text in mixed_text()) {
            let plain: String = text.chars().filter(|character| !is_hidden(*character)).collect();
            prop_assert!(matches!(visible(&plain), Cow::Borrowed(shown) if shown == plain));
            prop_assert!(matches!(one_line(&plain), Cow::Borrowed(shown) if shown == plain));
        }

        #[test]
        fn json_keeps_its_meaning(text in mixed_text()) {
            let json = serde_json::to_string(&text).unwrap();
            for shown in [visible(&json), one_line(&json)] {
                prop_assert!(!shown.contains(is_hidden));
                prop_assert_eq!(&serde_json::from_str::<String>(&shown).unwrap(), &text);
            }
        }
    }
}
