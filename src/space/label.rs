//! Label of a space (such as the graph group of an engine), and the place of the capture in the
//! user's program.

use super::{Core, Space};
use crate::error::{Error, Result};

/// Limit of a label and of a site, in bytes.
const MOST: u64 = 1 << 10;

/// Checks a text; an empty text is `None`.
fn kept(what: &'static str, text: &str) -> Result<Option<String>> {
    let bytes = text.len() as u64;
    if bytes > MOST {
        return Err(Error::InvalidSize { what, bytes, limit: MOST });
    }
    Ok((!text.is_empty()).then(|| text.to_owned()))
}

impl Space {
    /// Names the space after its graph group ("decode 64"), for statistics, log lines,
    /// out-of-memory errors and the page map. The text is copied; an empty text removes the label.
    /// Callable at any time.
    ///
    /// # Errors
    /// [`Error::InvalidSize`] for a text of more than 1024 bytes, with nothing changed.
    pub fn set_label(&self, label: &str) -> Result<()> {
        let label = kept("the label of a space", label)?;
        self.core().state.lock().label = label;
        Ok(())
    }

    /// Sets the place of the capture in the program ("model.py:120"), for the page map. The text is
    /// copied; an empty text removes the place. Callable at any time.
    ///
    /// # Errors
    /// [`Error::InvalidSize`] for a text of more than 1024 bytes, with nothing changed.
    pub fn set_site(&self, site: &str) -> Result<()> {
        let site = kept("the site of a space", site)?;
        self.core().state.lock().site = site;
        Ok(())
    }

    /// Returns the last label of [`set_label`](Self::set_label), if any.
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
