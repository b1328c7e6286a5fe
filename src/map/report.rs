use std::fmt;

use super::{ArenaMap, MapPage, MapSpace, PageClass};

const MIB: u64 = 1 << 20;

/// Of page columns and of rows.
const COLUMNS: usize = 40;
const ROWS: usize = 40;

/// Whole numbers, or one decimal if small.
struct Mib(u64);

impl fmt::Display for Mib {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self.0 {
            0 => "-".to_owned(),
            bytes if bytes < MIB / 10 => "<0.1".to_owned(),
            bytes if bytes < 10 * MIB && bytes % MIB != 0 => format!("{:.1}", bytes as f64 / MIB as f64),
            bytes => (bytes.saturating_add(MIB / 2) / MIB).to_string(),
        };
        f.pad(&text)
    }
}

impl MapSpace {
    /// Label without control characters; or the number.
    pub(super) fn name(&self) -> String {
        match &self.label {
            Some(label) => label.chars().map(|c| if c.is_control() { ' ' } else { c }).collect(),
            None => format!("space {}", self.id),
        }
    }
}

fn cut(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    text.chars().take(most.saturating_sub(1)).chain(['~']).collect()
}

fn is_column(page: &MapPage) -> bool {
    matches!(page.class, PageClass::Large | PageClass::Tape)
}

impl ArenaMap {
    /// Returns the map as a text table: three lines with the held memory, its use and the possible
    /// savings, then one line for each of the 40 largest spaces. A column stands for one or several
    /// adjacent large pages.
    #[must_use]
    pub fn report(&self) -> String {
        let mut text = String::new();
        let _ = self.write_report(&mut text);
        text
    }

    fn write_report(&self, f: &mut impl fmt::Write) -> fmt::Result {
        let floor = self.floor_bytes;
        write!(f, "arena {}", self.arena)?;
        if !self.title.is_empty() {
            write!(
                f,
                ", {}",
                self.title.chars().map(|c| if c.is_control() { ' ' } else { c }).collect::<String>()
            )?;
        }
        write!(f, ": {} MiB held for {} shapes", Mib(self.held_bytes), self.spaces.len())?;
        let absent: u64 = self.pages.iter().filter(|page| page.absent).map(|page| page.bytes).sum();
        if absent > 0 {
            write!(f, ", paused: {} MiB more when it comes back", Mib(absent))?;
        } else if floor > 0 {
            write!(
                f,
                ", {:.3} x the largest shape ({} MiB)",
                self.held_bytes as f64 / floor as f64,
                Mib(floor)
            )?;
        }
        let lent = self.pages.iter().filter(|page| page.lease.is_some()).map(|page| page.bytes);
        let lent = lent.fold(0, u64::saturating_add);
        if lent > 0 {
            write!(f, ", {} MiB of it on lease", Mib(lent))?;
        }
        writeln!(f, "; apart they need {} MiB at least", Mib(self.apart_bytes))?;
        write!(f, "{} device {}", self.driver, self.device)?;
        match self.device_free_bytes {
            Some(free) => write!(f, ": {} of {} MiB free", Mib(free), Mib(self.device_total_bytes))?,
            None => write!(f, ": {} MiB", Mib(self.device_total_bytes))?,
        }
        for holder in &self.holders {
            let name = if holder.name.is_empty() { &holder.kind } else { &holder.name };
            write!(f, ", {name} {} MiB", Mib(holder.bytes))?;
        }
        if let Some(bytes) = self.executables_bytes {
            write!(f, ", executables {} MiB", Mib(bytes))?;
        }
        writeln!(f)?;
        self.write_drops(f)?;
        self.write_table(f)
    }

    /// Writes the savings, largest first.
    fn write_drops(&self, f: &mut impl fmt::Write) -> fmt::Result {
        let mut drops: Vec<&MapSpace> =
            self.spaces.iter().filter(|space| space.drop_gives_bytes > 0).collect();
        drops.sort_by_key(|space| (std::cmp::Reverse(space.drop_gives_bytes), space.id));
        write!(f, "dropping gives back:")?;
        for space in drops.iter().take(3) {
            write!(f, " {} {} MiB,", cut(&space.name(), 40), Mib(space.drop_gives_bytes))?;
        }
        match drops.len() {
            0 => write!(f, " nothing for any one shape")?,
            1..=3 => write!(f, " other shapes nothing")?,
            more => write!(f, " {} other shapes less", more - 3)?,
        }
        if let Some(point) = self.curve.get(2) {
            write!(f, "; without the 3 largest shapes: {} MiB", Mib(point.without_bytes))?;
        }
        writeln!(f)
    }

    fn write_table(&self, f: &mut impl fmt::Write) -> fmt::Result {
        if self.spaces.is_empty() {
            return Ok(());
        }
        let columns: Vec<usize> =
            (0..self.pages.len()).filter(|page| is_column(&self.pages[*page])).collect();
        let each = columns.len().div_ceil(COLUMNS).max(1);
        let width = columns.len().div_ceil(each).max(7);
        let order = self.curve.iter().filter_map(|point| self.spaces.iter().find(|s| s.id == point.space));
        let rows: Vec<&MapSpace> = order.take(ROWS).collect();
        let names = rows.iter().map(|space| cut(&space.name(), 28).chars().count()).max().unwrap_or(0).max(5);
        let heading = format!("pages 0..{}", columns.len().saturating_sub(1));
        writeln!(
            f,
            "{:names$}  {heading:width$} {:>6} {:>8} {:>9} {:>8} {:>8} {:>10}",
            "MiB", "small", "retained", "peak live", "mapped", "alone", "drop gives"
        )?;
        for space in &rows {
            let mut covered = vec![0_u64; self.pages.len()];
            let mut shown = vec![false; self.pages.len()];
            let mut small = 0;
            for tile in &space.maps {
                let page = tile.page as usize;
                let first = !std::mem::replace(&mut shown[page], true);
                covered[page] = covered[page].saturating_add(tile.covered_bytes);
                small +=
                    u64::from(first && matches!(self.pages[page].class, PageClass::Slab | PageClass::Filler));
            }
            let cells = columns.chunks(each).map(|pages| {
                let bytes: u64 = pages.iter().map(|page| self.pages[*page].bytes).sum();
                let covered: f64 = pages.iter().map(|page| covered[*page] as f64).sum();
                match covered / bytes.max(1) as f64 {
                    part if part >= 0.75 => '#',
                    part if part >= 0.25 => '+',
                    _ if pages.iter().any(|page| shown[*page]) => '-',
                    _ => '.',
                }
            });
            let cells: String = cells.collect();
            writeln!(
                f,
                "{:names$}  {cells:width$} {small:>6} {:>8} {:>9} {:>8} {:>8} {:>10}",
                cut(&space.name(), 28),
                Mib(space.retained_bytes),
                Mib(space.peak_live_bytes),
                Mib(space.mapped_bytes),
                Mib(space.alone_bytes),
                Mib(space.drop_gives_bytes)
            )?;
        }
        if self.spaces.len() > rows.len() {
            let needs = rows.last().map_or(0, |space| space.shown_bytes);
            let more = self.spaces.len() - rows.len();
            writeln!(f, "and {more} more shapes, none of which needs more than {} MiB", Mib(needs))?;
        }
        let used: Vec<u64> = columns
            .chunks(each)
            .map(|pages| pages.iter().map(|p| self.pages[*p].spaces).max().unwrap_or(0))
            .collect();
        // In ninths; 9 is all.
        let most = self.spaces.len() as u64;
        let digits: String = used
            .iter()
            .map(|n| char::from(b'0' + n.saturating_mul(9).div_ceil(most.max(1)).min(9) as u8))
            .collect();
        writeln!(
            f,
            "{:names$}  {digits:width$} shapes on a page, in ninths of all; # covered at the peak, + partly, - shown, . not",
            ""
        )
    }
}
