//! Readers for public traces. Traces are not bundled; each reader takes a file's text.

use std::fmt;

use serde::Deserialize;

use crate::model::Ns;
use crate::traffic::Request;

/// Format of a trace file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Azure LLM inference traces: `TIMESTAMP,ContextTokens,GeneratedTokens` with date and time of
    /// day. Other columns are ignored.
    Azure,
    /// BurstGPT: `Timestamp,Model,Request tokens,Response tokens,...` in seconds, columns in any
    /// order. Failed requests (0 response tokens) are skipped.
    BurstGpt,
    /// Mooncake: one JSON object per line with `timestamp` in milliseconds, `input_length`,
    /// `output_length`.
    Mooncake,
}

/// Error of an unreadable file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable {
    /// Line number, from 1.
    pub line: usize,
    /// Description of the error.
    pub what: String,
}

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.what)
    }
}

impl std::error::Error for Unreadable {}

impl Format {
    /// Detects the format by the first line.
    #[must_use]
    pub fn of(text: &str) -> Option<Self> {
        let first = text.lines().next()?;
        if first.starts_with('{') {
            Some(Self::Mooncake)
        } else if first.contains("ContextTokens") {
            Some(Self::Azure)
        } else {
            first.contains("Request tokens").then_some(Self::BurstGpt)
        }
    }
}

#[derive(Deserialize)]
struct Line {
    timestamp: f64,
    input_length: u64,
    output_length: u64,
}

/// Reads requests in order of arrival, the first at 0.
///
/// # Errors
/// [`Unreadable`] names the first invalid line.
pub fn read(text: &str) -> Result<Vec<Request>, Unreadable> {
    let wrong = |line: usize, what: String| Unreadable { line: line + 1, what };
    let format = Format::of(text).ok_or_else(|| {
        wrong(0, "neither Azure's header, nor BurstGPT's, nor a line of Mooncake's JSON".to_owned())
    })?;
    let mut found: Vec<(f64, u64, u64)> = Vec::new();
    let mut columns = [0; 3];
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        if format == Format::Mooncake {
            let line: Line = serde_json::from_str(line).map_err(|error| wrong(number, error.to_string()))?;
            found.push((line.timestamp / 1e3, line.input_length, line.output_length));
            continue;
        }
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        if number == 0 {
            let names = match format {
                Format::Azure => ["TIMESTAMP", "ContextTokens", "GeneratedTokens"],
                Format::BurstGpt | Format::Mooncake => ["Timestamp", "Request tokens", "Response tokens"],
            };
            for (column, name) in columns.iter_mut().zip(names) {
                let place = fields.iter().position(|field| *field == name);
                *column = place.ok_or_else(|| wrong(number, format!("no column {name}")))?;
            }
            continue;
        }
        let field = |column: usize| {
            fields
                .get(columns[column])
                .copied()
                .ok_or_else(|| wrong(number, format!("{} columns", fields.len())))
        };
        let time = field(0)?;
        let seconds = if format == Format::Azure { time_of_day(time) } else { time.parse().ok() };
        let seconds = seconds.ok_or_else(|| wrong(number, format!("no time: {time}")))?;
        let tokens = |column| {
            let text = field(column)?;
            text.parse::<u64>().map_err(|_| wrong(number, format!("no number of tokens: {text}")))
        };
        let (prompt, output) = (tokens(1)?, tokens(2)?);
        if format == Format::Azure || output > 0 {
            found.push((seconds, prompt, output));
        }
    }
    found.sort_by(|a, b| a.0.total_cmp(&b.0));
    let start = found.first().map_or(0.0, |first| first.0);
    let request = |(at, prompt, output): (f64, u64, u64)| Request {
        arrival: ((at - start) * 1e9).round() as Ns,
        prompt: prompt.max(1),
        output: output.max(1),
    };
    Ok(found.into_iter().map(request).collect())
}

/// Parses `2023-11-16 18:15:46.6805900` to seconds. The time zone is ignored.
fn time_of_day(text: &str) -> Option<f64> {
    let (date, time) = text.split_once([' ', 'T'])?;
    let mut date = date.split('-').map(|part| part.parse::<i64>().ok());
    let (year, month, day) = (date.next()??, date.next()??, date.next()??);
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day;
    let time = time.split(['+', 'Z']).next()?;
    let mut seconds = 0.0;
    for part in time.split(':') {
        seconds = seconds * 60.0 + part.parse::<f64>().ok()?;
    }
    Some(days as f64 * 86400.0 + seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Ns = 1_000_000_000;

    fn request(arrival: Ns, prompt: u64, output: u64) -> Request {
        Request { arrival, prompt, output }
    }

    #[test]
    fn the_three_formats_are_read() {
        let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-02-28 23:59:59.5000000,374,44\n\
                     2024-02-29 00:00:01.0000000,396,109\n2024-03-01 00:00:01.0000000+00:00,20,0\n";
        let day = 86_400 * SECOND;
        let expected =
            [request(0, 374, 44), request(SECOND * 3 / 2, 396, 109), request(day + SECOND * 3 / 2, 20, 1)];
        assert_eq!(read(azure).unwrap(), expected);
        let more = "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2025-01-01 00:00:00,2,10,5";
        assert_eq!(read(more).unwrap(), [request(0, 10, 5)]);

        let burst = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n\
                     45,GPT-4,100,30,130,Conversation log\n5,ChatGPT,472,18,490,Conversation log\n\
                     50,ChatGPT,9,0,9,API log\n";
        assert_eq!(read(burst).unwrap(), [request(0, 472, 18), request(40 * SECOND, 100, 30)]);

        let mooncake = "{\"timestamp\": 27482, \"input_length\": 6955, \"output_length\": 52, \"hash_ids\": [46, 47]}\n\
                        {\"timestamp\": 30535, \"input_length\": 6472, \"output_length\": 26, \"hash_ids\": [46]}\n\n";
        assert_eq!(read(mooncake).unwrap(), [request(0, 6955, 52), request(3_053_000_000, 6472, 26)]);
    }

    #[test]
    fn what_is_none_of_them_is_refused_by_its_line() {
        for (text, line) in [
            ("", 1),
            ("a,b\n1,2\n", 1),
            ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", 2),
            ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1\n", 2),
            ("TIMESTAMP,ContextTokens\n", 1),
            ("Timestamp,Model,Request tokens,Response tokens\n1,m,2,3\n2,m,x,3\n", 3),
            ("{\"timestamp\": 1, \"input_length\": 2}\n", 1),
        ] {
            assert_eq!(read(text).unwrap_err().line, line, "{text:?}");
        }
    }
}
