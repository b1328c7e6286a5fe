//! Writer of Prometheus's text exposition format, for counters and gauges.

use std::fmt::Write as _;

pub(crate) struct Metric {
    pub(crate) name: &'static str,
    pub(crate) help: &'static str,
}

#[derive(Clone, Copy)]
pub(crate) enum Kind {
    /// The name ends in `_total`.
    Counter,
    Gauge,
}

pub(crate) struct Exposition {
    text: String,
    /// Without braces.
    common: String,
}

impl Exposition {
    /// Skips labels with an invalid name, duplicates, and names in `reserved`.
    pub(crate) fn new(labels: &[(&str, &str)], reserved: &[&str]) -> Self {
        let mut common = String::new();
        for (place, (name, value)) in labels.iter().enumerate() {
            let again = labels[..place].iter().any(|(earlier, _)| earlier == name);
            if is_label_name(name) && !again && !reserved.contains(name) {
                push(&mut common, name, value);
            }
        }
        Self { text: String::new(), common }
    }

    pub(crate) fn family(&mut self, metric: &Metric, kind: Kind) {
        let kind = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
        };
        let Metric { name, help } = metric;
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// `labels` follow the common ones.
    pub(crate) fn sample(&mut self, metric: &Metric, labels: &[(&str, &str)], value: u64) {
        let mut all = self.common.clone();
        labels.iter().for_each(|(name, value)| push(&mut all, name, value));
        let labels = if all.is_empty() { all } else { format!("{{{all}}}") };
        let _ = writeln!(self.text, "{}{labels} {value}", metric.name);
    }

    pub(crate) fn single(&mut self, metric: &Metric, kind: Kind, value: u64) {
        self.family(metric, kind);
        self.sample(metric, &[], value);
    }

    pub(crate) fn finish(self) -> String {
        self.text
    }
}

fn push(labels: &mut String, name: &str, value: &str) {
    let comma = if labels.is_empty() { "" } else { "," };
    let _ = write!(labels, "{comma}{name}=\"{}\"", Escaped(value));
}

pub(super) fn is_label_name(name: &str) -> bool {
    let mut letters = name.chars();
    letters.next().is_some_and(|first| first.is_ascii_alphabetic() || first == '_')
        && letters.all(|letter| letter.is_ascii_alphanumeric() || letter == '_')
        && !name.starts_with("__")
}

/// Label value with escaped backslash, quote and line feed.
struct Escaped<'a>(&'a str);

impl std::fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for letter in self.0.chars() {
            match letter {
                '\\' => f.write_str("\\\\")?,
                '"' => f.write_str("\\\"")?,
                '\n' => f.write_str("\\n")?,
                other => f.write_char(other)?,
            }
        }
        Ok(())
    }
}
