//! Escapes for strings that servers and other processes choose: a terminal must not act on them.

use std::fmt::Write as _;

/// True for control characters, and for invisible characters that change the order or the lines of text.
fn is_unprintable(c: char) -> bool {
    let is_format = matches!(c, '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}')
        || matches!(c, '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}');
    c.is_control() || is_format
}

/// The text with `\x1b` or `\u{202e}` for characters that are not printable; line ends are not, either.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        let _ = match c {
            c if !is_unprintable(c) => out.write_char(c),
            '\0'..='\u{ff}' => write!(out, "\\x{:02x}", u32::from(c)),
            _ => write!(out, "\\u{{{:x}}}", u32::from(c)),
        };
    }
    out
}

/// The same of each line.
pub(crate) fn escape_lines(text: &str) -> String {
    text.split('\n').map(escape).collect::<Vec<_>>().join("\n")
}

/// JSON with `\u009b` for what `serde_json` leaves as it is: the same document.
pub fn escape_json(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    for c in json.chars() {
        // The line ends are those between values.
        if c == '\n' || !is_unprintable(c) {
            out.push(c);
        } else {
            c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| out.push_str(&format!("\\u{unit:04x}")));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_printable_is_escaped() {
        assert_eq!(escape("größe\u{301} \\ \"日本\" 🦀"), "größe\u{301} \\ \"日本\" 🦀");
        assert_eq!(escape("\u{1b}[2J\r\n\t\0\u{7f}\u{9b}"), r"\x1b[2J\x0d\x0a\x09\x00\x7f\x9b");
        assert_eq!(escape("\u{202e}\u{2028}\u{200b}\u{e0041}"), r"\u{202e}\u{2028}\u{200b}\u{e0041}");
    }

    #[test]
    fn json_stays_the_same_document() {
        let text = "\u{1b}a\u{7f}\u{9b}\u{202e}\u{e0041}ö";
        let json = escape_json(&serde_json::to_string_pretty(&[text]).unwrap());
        assert!(json.chars().all(|c| c == '\n' || !is_unprintable(c)) && json.contains('ö'), "{json:?}");
        assert_eq!(serde_json::from_str::<[String; 1]>(&json).unwrap(), [text]);
    }
}
