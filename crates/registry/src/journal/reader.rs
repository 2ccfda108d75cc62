//! Reads the journal from a position, across rotations of its files.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use serde_json::{Map, Value};

use super::{Change, Event, Header, Journal, Token};

/// Bytes per read.
const READ_BYTES: usize = 16 << 10;

/// An event and the position after it.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Position after the event.
    pub token: Token,
    /// The event as this or another version of the program wrote it: `unix_ms`, `event` and more.
    pub event: Map<String, Value>,
}

impl Entry {
    /// Returns the event if this version has its kind.
    pub fn known(&self) -> Option<Event> {
        serde_json::from_value(Value::Object(self.event.clone())).ok()
    }

    /// Returns the event with its token, as one object.
    pub fn with_token(&self) -> Value {
        let mut all = Map::new();
        all.insert("token".to_owned(), self.token.to_string().into());
        all.extend(self.event.clone());
        Value::Object(all)
    }
}

/// A reader. It reports a [`Change::Gap`] in place of each missed event.
#[derive(Debug)]
pub struct Reader {
    journal: Journal,
    position: Position,
    /// Bytes of the open file from the position on.
    buffer: Vec<u8>,
}

#[derive(Debug)]
enum Position {
    /// Before the oldest event.
    Start,
    /// At a position that was not opened yet.
    At(Token),
    /// At a position in an open file.
    Open(File, Token),
}

impl Reader {
    /// Starts at the oldest event.
    pub fn from_start(journal: Journal) -> Self {
        Self::new(journal, Position::Start)
    }

    /// Starts after the newest event.
    ///
    /// # Errors
    /// If the journal can't be read.
    pub fn from_end(journal: Journal) -> io::Result<Self> {
        let newest = journal.files()?.pop();
        let position = match newest {
            None => Position::Start,
            Some((header, start, file)) => {
                let offset = end_of_lines(&file)?.max(start);
                Position::Open(file, header.token(offset))
            }
        };
        Ok(Self::new(journal, position))
    }

    /// Starts after the event of a token. A token whose event is gone, or never existed, yields a gap and
    /// then the oldest events.
    pub fn after(journal: Journal, token: Token) -> Self {
        Self::new(journal, Position::At(token))
    }

    fn new(journal: Journal, position: Position) -> Self {
        Self {
            journal,
            position,
            buffer: Vec::new(),
        }
    }

    /// Returns the current position; none while there is no journal.
    pub fn token(&self) -> Option<Token> {
        match &self.position {
            Position::Start => None,
            Position::At(token) | Position::Open(_, token) => Some(*token),
        }
    }

    /// Returns the next event; none if there is no further event yet.
    ///
    /// # Errors
    /// If the journal can't be read.
    pub fn next_entry(&mut self) -> io::Result<Option<Entry>> {
        loop {
            let (file, token) = match &mut self.position {
                Position::Start => match oldest(&self.journal)? {
                    None => return Ok(None),
                    Some((file, token)) => {
                        self.open(file, token);
                        continue;
                    }
                },
                Position::At(token) => {
                    let token = *token;
                    match find(&self.journal, token)? {
                        Some(file) => self.open(file, token),
                        None => {
                            return self.gap(token, "the events behind this token are not kept any more");
                        }
                    }
                    continue;
                }
                Position::Open(file, token) => (file, token),
            };
            let mut line = next_line(file, token.offset, &mut self.buffer)?;
            let mut newest = None;
            if line.is_none() {
                newest = self.journal.files()?.pop().map(|(header, ..)| header);
                // Reads again: a file that is not the newest gets no further event, but may have got one
                // since the first read.
                line = next_line(file, token.offset, &mut self.buffer)?;
            }
            if let Some(line) = line {
                token.offset += line.len() as u64;
                match line.trim_ascii() {
                    [] => continue,
                    line => return Ok(Some(entry(*token, line))),
                }
            }
            let token = *token;
            match newest {
                Some(newest) if newest == token.header() => return Ok(None),
                Some(newest) if newest.journal == token.journal => {
                    let was_cut = !self.buffer.is_empty();
                    self.advance(token)?;
                    if was_cut {
                        return Ok(Some(cut_off(self.token().unwrap_or(token))));
                    }
                }
                _ => return self.gap(token, "the journal was removed"),
            }
        }
    }

    /// Continues in the file after the one of `token`.
    fn advance(&mut self, token: Token) -> io::Result<()> {
        let wanted = Header {
            journal: token.journal,
            generation: token.generation + 1,
        };
        let files = self.journal.files()?;
        let next = files.into_iter().find(|(header, ..)| *header == wanted);
        match next {
            Some((header, start, file)) => self.open(file, header.token(start)),
            // Two files were started meanwhile. The position is not found, which yields the gap.
            None => {
                self.buffer.clear();
                self.position = Position::At(wanted.token(0));
            }
        }
        Ok(())
    }

    /// Continues with the oldest event, because no file continues from `token`.
    fn gap(&mut self, token: Token, why: &str) -> io::Result<Option<Entry>> {
        let why = why.to_owned();
        let token = match oldest(&self.journal)? {
            Some((file, oldest)) => {
                self.open(file, oldest);
                oldest
            }
            None => {
                self.position = Position::Start;
                token
            }
        };
        Ok(Some(made(token, Change::Gap { why })))
    }

    fn open(&mut self, file: File, token: Token) {
        self.buffer.clear();
        self.position = Position::Open(file, token);
    }
}

impl Header {
    fn token(self, offset: u64) -> Token {
        Token {
            journal: self.journal,
            generation: self.generation,
            offset,
        }
    }
}

impl Token {
    fn header(self) -> Header {
        Header {
            journal: self.journal,
            generation: self.generation,
        }
    }
}

fn oldest(journal: &Journal) -> io::Result<Option<(File, Token)>> {
    let oldest = journal.files()?.into_iter().next();
    Ok(oldest.map(|(header, start, file)| (file, header.token(start))))
}

/// Opens the file of a token, if the token is a position after one of its lines.
fn find(journal: &Journal, token: Token) -> io::Result<Option<File>> {
    let mut files = journal.files()?.into_iter();
    let found = files.find(|(header, ..)| *header == token.header());
    let Some((_, start, file)) = found else {
        return Ok(None);
    };
    let is_inside = token.offset >= start && token.offset <= file.metadata()?.len();
    let mut before = [0];
    let is_behind_a_line = is_inside && file.read_at(&mut before, token.offset - 1)? == 1 && before == *b"\n";
    Ok(is_behind_a_line.then_some(file))
}

/// Returns the next line with its terminator; none if no line ends after `offset`. `buffer` has bytes of the
/// file from `offset` on, and keeps those after the line.
fn next_line(file: &File, offset: u64, buffer: &mut Vec<u8>) -> io::Result<Option<Vec<u8>>> {
    let mut searched = 0;
    loop {
        if let Some(end) = buffer[searched..].iter().position(|byte| *byte == b'\n') {
            let rest = buffer.split_off(searched + end + 1);
            return Ok(Some(std::mem::replace(buffer, rest)));
        }
        searched = buffer.len();
        let mut more = vec![0; READ_BYTES];
        let count = file.read_at(&mut more, offset + searched as u64)?;
        if count == 0 {
            return Ok(None);
        }
        buffer.extend_from_slice(&more[..count]);
    }
}

/// Returns the offset after the last terminated line.
fn end_of_lines(file: &File) -> io::Result<u64> {
    let mut at = file.metadata()?.len();
    let mut byte = [0];
    while at > 0 {
        if file.read_at(&mut byte, at - 1)? == 1 && byte == *b"\n" {
            break;
        }
        at -= 1;
    }
    Ok(at)
}

fn entry(token: Token, line: &[u8]) -> Entry {
    match serde_json::from_slice(line) {
        Ok(Value::Object(event)) if event.contains_key("event") => Entry { token, event },
        _ => cut_off(token),
    }
}

fn cut_off(token: Token) -> Entry {
    let why = "an event was cut off, since its writer was killed or the disk was full".to_owned();
    made(token, Change::Gap { why })
}

fn made(token: Token, change: Change) -> Entry {
    let event = match serde_json::to_value(Event::now(change)) {
        Ok(Value::Object(event)) => event,
        _ => Map::new(),
    };
    Entry { token, event }
}
