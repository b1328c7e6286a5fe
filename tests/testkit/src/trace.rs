//! Allocation traces: what a model's captures asked torch for.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::{fmt, fs};

/// One step of a capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A tensor's storage is allocated.
    Allocate {
        /// Its number within the shape, counted from 0.
        id: usize,
        /// Bytes as requested.
        bytes: u64,
    },
    /// It is freed; an id never freed is live when the capture ends.
    Free {
        /// Its number.
        id: usize,
    },
}

/// One captured shape.
#[derive(Clone, Debug)]
pub struct Shape {
    /// `d` for a decode batch, `p` for a prefill.
    pub kind: char,
    /// Its tokens.
    pub tokens: u32,
    /// What happened, in order.
    pub events: Vec<Event>,
}

/// The shapes of one run.
#[derive(Clone, Debug)]
pub struct Trace {
    /// The file's name without its ending.
    pub name: String,
    /// The shapes in the order they were captured.
    pub shapes: Vec<Shape>,
}

/// An order of capturing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// As in the trace: small shapes first.
    Ascending,
    /// Large shapes first.
    Descending,
    /// Shuffled by this seed.
    Random(u64),
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ascending => f.write_str("ascending"),
            Self::Descending => f.write_str("descending"),
            Self::Random(_) => f.write_str("random"),
        }
    }
}

impl Shape {
    /// The shape as a person would call it: "decode 64", "prefill 8192".
    #[must_use]
    pub fn label(&self) -> String {
        format!("{} {}", if self.kind == 'd' { "decode" } else { "prefill" }, self.tokens)
    }

    /// The blocks that are still live when the capture ends.
    #[must_use]
    pub fn kept(&self) -> HashSet<usize> {
        let mut kept = HashSet::new();
        for event in &self.events {
            match event {
                Event::Allocate { id, .. } => kept.insert(*id),
                Event::Free { id } => kept.remove(id),
            };
        }
        kept
    }

    /// Their bytes, each rounded up to 512.
    #[must_use]
    pub fn kept_bytes(&self) -> u64 {
        let kept = self.kept();
        let bytes = self.events.iter().map(|event| match event {
            Event::Allocate { id, bytes } if kept.contains(id) => bytes.next_multiple_of(512),
            _ => 0,
        });
        bytes.sum()
    }

    /// The most bytes live at once, each block rounded up to 512 as torch does: the floor of what the shape needs.
    #[must_use]
    pub fn peak_live_bytes(&self) -> u64 {
        let mut live = HashMap::new();
        let (mut now, mut peak) = (0, 0);
        for event in &self.events {
            match *event {
                Event::Allocate { id, bytes } => {
                    let bytes = bytes.next_multiple_of(512);
                    live.insert(id, bytes);
                    now += bytes;
                    peak = peak.max(now);
                }
                Event::Free { id } => now -= live.remove(&id).unwrap_or(0),
            }
        }
        peak
    }
}

impl Trace {
    /// Reads one of the checked-in traces by name.
    ///
    /// # Errors
    /// A sentence that says what is wrong with the file.
    pub fn load(folder: &Path, name: &str) -> Result<Self, String> {
        let path = folder.join(format!("{name}.txt"));
        let text = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        let mut shapes: Vec<Shape> = Vec::new();
        for (number, line) in text.lines().enumerate() {
            let wrong = || format!("{}:{}: {line:?} is no trace line", path.display(), number + 1);
            let words: Vec<&str> = line.split_whitespace().collect();
            match words[..] {
                [] => {}
                [first, ..] if first.starts_with('#') => {}
                ["shape", kind, tokens] => shapes.push(Shape {
                    kind: kind.chars().next().ok_or_else(wrong)?,
                    tokens: tokens.parse().map_err(|_| wrong())?,
                    events: Vec::new(),
                }),
                ["a", id, bytes] => {
                    let (id, bytes) = (id.parse().map_err(|_| wrong())?, bytes.parse().map_err(|_| wrong())?);
                    shapes.last_mut().ok_or_else(wrong)?.events.push(Event::Allocate { id, bytes });
                }
                ["f", id] => {
                    let id = id.parse().map_err(|_| wrong())?;
                    shapes.last_mut().ok_or_else(wrong)?.events.push(Event::Free { id });
                }
                _ => return Err(wrong()),
            }
        }
        Ok(Self { name: name.to_owned(), shapes })
    }

    /// The decode batches alone.
    #[must_use]
    pub fn decode_only(&self) -> Self {
        let shapes = self.shapes.iter().filter(|shape| shape.kind == 'd').cloned().collect();
        Self { name: format!("{}-decode", self.name), shapes }
    }

    /// The same shapes in another order.
    #[must_use]
    pub fn ordered(&self, order: Order) -> Self {
        let mut trace = self.clone();
        match order {
            Order::Ascending => {}
            Order::Descending => trace.shapes.reverse(),
            Order::Random(seed) => shuffle(&mut trace.shapes, seed),
        }
        trace
    }

    /// The floor: the peak live bytes of the hungriest shape.
    #[must_use]
    pub fn floor_bytes(&self) -> u64 {
        self.shapes.iter().map(Shape::peak_live_bytes).max().unwrap_or(0)
    }

    /// The floor if every shape's kept blocks stay: beside the hungriest shape there is what all the others keep.
    #[must_use]
    pub fn floor_with_kept_bytes(&self) -> u64 {
        let kept: u64 = self.shapes.iter().map(Shape::kept_bytes).sum();
        self.shapes.iter().map(|shape| shape.peak_live_bytes() - shape.kept_bytes() + kept).max().unwrap_or(0)
    }
}

/// Shuffles by a seed, the same on every machine (Fisher-Yates over xorshift64*).
pub fn shuffle<T>(items: &mut [T], seed: u64) {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for last in (1..items.len()).rev() {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        let pick = (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % (last + 1);
        items.swap(last, pick);
    }
}
