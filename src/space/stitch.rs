//! Carries out what a layout plans: maps the pages, and undoes that exactly if it fails.

use super::layout::Place;
use super::{Phase, Placement, State};
use crate::error::{Error, Result};
use crate::pages::{PageNo, Reservation, SharedSet};
use crate::units::{BlockBytes, Stream};

impl State {
    /// Stitches pages together behind new addresses for a block that the layout finds no room for. On failure exactly what was
    /// done is undone, last first.
    pub(super) fn stitch(&mut self, shared: &SharedSet, bytes: BlockBytes, stream: Stream) -> Result<Place> {
        let State { phase, placement, ranges, work, .. } = self;
        let Placement::Stitched(layout) = placement else {
            return Err(Error::Internal { what: "a bump space stitches nothing".into() });
        };
        let growth = layout.plan(bytes, stream);
        let fresh = growth.range == ranges.len();
        if fresh {
            ranges.push(Reservation::new(shared.pool(), growth.range_bytes)?);
        }
        let mut done: Vec<(u64, PageNo, bool)> = Vec::with_capacity(growth.pages.len());
        let mut offset = growth.offset;
        let mut failure = None;
        for page in &growth.pages {
            let range = &mut ranges[growth.range];
            let mapped = shared.acquire(*page).and_then(|acquired| {
                let (bytes, created) = (acquired.pin.bytes(), acquired.created);
                let result = range.map(offset, acquired.pin);
                result.map(|()| (bytes, created)).map_err(|(error, pin)| {
                    drop(pin);
                    if created {
                        shared.discard(*page);
                    }
                    error
                })
            });
            match mapped {
                Ok((bytes, created)) => {
                    done.push((offset, *page, created));
                    offset += bytes;
                }
                Err(error) => {
                    failure = Some(error);
                    break;
                }
            }
        }
        let Some(error) = failure else {
            let created = done.iter().filter(|(.., created)| *created).count();
            work.maps += done.len() as u64;
            work.calls += (usize::from(fresh) + created + 2 * done.len()) as u64;
            return Ok(layout.commit(&growth));
        };
        tracing::debug!(%error, mapped = done.len(), "growing a space failed and is undone");
        for (offset, page, created) in done.into_iter().rev() {
            match ranges[growth.range].unmap(offset) {
                Ok(pin) => {
                    drop(pin);
                    if created {
                        shared.discard(page);
                    }
                }
                Err(undo) => tracing::error!(error = %undo, "undoing a mapping failed"),
            }
        }
        // A mapping that could not be undone stands where the next plan would put its pages.
        if ranges[growth.range].mapped().any(|(at, _)| at >= growth.offset) {
            *phase = Phase::Broken;
        }
        if fresh && *phase != Phase::Broken {
            ranges.pop();
        }
        Err(error)
    }
}
