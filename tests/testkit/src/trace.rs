//! Allocation traces: requests of a model's captures to torch.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::{fmt, fs};

/// One step of a capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The storage of a tensor is allocated.
    Allocate {
        /// Number within the shape, counted from 0.
        id: usize,
        /// Requested bytes.
        bytes: u64,
    },
    /// The storage is freed; a block never freed is live-out.
    Free {
        /// Number within the shape.
        id: usize,
    },
}

/// One captured shape.
#[derive(Clone, Debug)]
pub struct Shape {
    /// `d` for a decode batch, `p` for a prefill.
    pub kind: char,
    /// Number of tokens.
    pub tokens: u32,
    /// The events in order.
    pub events: Vec<Event>,
}

/// The shapes of one run.
#[derive(Clone, Debug)]
pub struct Trace {
    /// The file's name without extension.
    pub name: String,
    /// The shapes in capture order.
    pub shapes: Vec<Shape>,
}

/// An order of captures.
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
    /// Returns a readable label: "decode 64", "prefill 8192".
    #[must_use]
    pub fn label(&self) -> String {
        format!("{} {}", if self.kind == 'd' { "decode" } else { "prefill" }, self.tokens)
    }

    /// Returns the ids of the live-out blocks.
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

    /// Returns the bytes of the live-out blocks, each rounded up to 512.
    #[must_use]
    pub fn kept_bytes(&self) -> u64 {
        let kept = self.kept();
        let bytes = self.events.iter().map(|event| match event {
            Event::Allocate { id, bytes } if kept.contains(id) => bytes.next_multiple_of(512),
            _ => 0,
        });
        bytes.sum()
    }

    /// Returns the peak of live bytes, each block rounded up to 512 as in torch: the lower bound of
    /// the shape's memory.
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
    /// Reads a recorded trace by name.
    ///
    /// # Errors
    /// A sentence that names the wrong line.
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

    /// Returns the decode batches alone.
    #[must_use]
    pub fn decode_only(&self) -> Self {
        let shapes = self.shapes.iter().filter(|shape| shape.kind == 'd').cloned().collect();
        Self { name: format!("{}-decode", self.name), shapes }
    }

    /// Returns the same shapes in another order.
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

    /// Returns the lower bound: the peak live bytes of the peak shape.
    #[must_use]
    pub fn floor_bytes(&self) -> u64 {
        self.shapes.iter().map(Shape::peak_live_bytes).max().unwrap_or(0)
    }

    /// Returns the lower bound if the live-out blocks of every shape persist.
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
