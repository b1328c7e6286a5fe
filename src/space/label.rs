//! What the owner of a space calls it, a shape in the words of an engine, and where in the owner's program it was captured.

use super::{Core, Space};
use crate::error::{Error, Result};

/// Most bytes of a label, and of a site.
const MOST: u64 = 1 << 10;

/// The text as it is kept; none if it is empty.
fn kept(what: &'static str, text: &str) -> Result<Option<String>> {
    let bytes = text.len() as u64;
    if bytes > MOST {
        return Err(Error::InvalidSize { what, bytes, limit: MOST });
    }
    Ok((!text.is_empty()).then(|| text.to_owned()))
}

impl Space {
    /// Names the space after the shape that it is for ("decode 64"): in its statistics, in log lines, in what an allocation or a seal
    /// says when memory is short, and on the page map. The text is copied; an empty one takes the name away. At any time.
    ///
    /// # Errors
    /// [`Error::InvalidSize`] for a text of more than 1024 bytes, with nothing changed.
    pub fn set_label(&self, label: &str) -> Result<()> {
        let label = kept("the label of a space", label)?;
        self.core().state.lock().label = label;
        Ok(())
    }

    /// Says where in the program the capture is ("model.py:120"), for the page map. The text is copied; an empty one takes it away. At any
    /// time.
    ///
    /// # Errors
    /// [`Error::InvalidSize`] for a text of more than 1024 bytes, with nothing changed.
    pub fn set_site(&self, site: &str) -> Result<()> {
        let site = kept("the site of a space", site)?;
        self.core().state.lock().site = site;
        Ok(())
    }

    /// What [`set_label`](Self::set_label) was given last, if there is something.
    #[must_use]
    pub fn label(&self) -> Option<String> {
        self.core().label()
    }
}

impl Core {
    pub(super) fn label(&self) -> Option<String> {
        self.state.lock().label.clone()
    }
}
