//! Validation of a page map read from JSON; later code relies on valid indices and sums.

use serde::Deserialize;

use super::{ArenaMap, MAP_FORMAT};
use crate::error::{Error, Result};

fn invalid<T>(problem: String) -> Result<T> {
    Err(Error::InvalidMap { problem })
}

pub(super) fn format_of(text: &str) -> Option<u64> {
    #[derive(Deserialize)]
    struct Head {
        format: u64,
    }
    serde_json::from_str::<Head>(text).ok().map(|head| head.format)
}

pub(super) fn other_format(format: u64) -> Error {
    Error::InvalidMap { problem: format!("its format is {format}, and this library reads {MAP_FORMAT}") }
}

impl ArenaMap {
    /// Checks all indices and sizes.
    pub(super) fn check(&self) -> Result<()> {
        if self.format != MAP_FORMAT {
            return Err(other_format(self.format));
        }
        // The sum of page bytes must be exact in JavaScript.
        let mut all = 0_u64;
        for (number, page) in self.pages.iter().enumerate() {
            all = all.saturating_add(page.bytes);
            if all > 1 << 53 {
                let bytes = page.bytes;
                return invalid(format!(
                    "page {number} has {bytes} bytes, {all} with those before it, and 2^53 is the most"
                ));
            }
        }
        let pages = self.pages.len();
        for space in &self.spaces {
            let id = space.id;
            let tiles = space.maps.iter().map(|tile| (tile.page, tile.covered_bytes));
            for (page, covered) in tiles.chain(space.kept_pages.iter().map(|page| (*page, 0))) {
                let Some(found) = usize::try_from(page).ok().and_then(|page| self.pages.get(page)) else {
                    return invalid(format!("space {id} shows page {page}, and there are {pages}"));
                };
                if covered > found.bytes {
                    let bytes = found.bytes;
                    return invalid(format!(
                        "space {id} covers {covered} bytes of page {page}, which has {bytes}"
                    ));
                }
            }
        }
        for point in &self.curve {
            if !self.spaces.iter().any(|space| space.id == point.space) {
                return invalid(format!("the curve names space {}, which is not there", point.space));
            }
        }
        Ok(())
    }
}
