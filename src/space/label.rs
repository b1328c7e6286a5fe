//! What the owner of a space calls it: a shape, in the words of an engine.

use super::{Core, Space};
use crate::error::{Error, Result};

/// Most bytes of a label.
const MOST: u64 = 1 << 10;

impl Space {
    /// Names the space after the shape that it is for ("decode 64"): in its statistics, in log lines, in what an allocation or a seal
    /// says when memory is short, and on the page map. The text is copied; an empty one takes the name away. At any time.
    ///
    /// # Errors
    /// [`Error::InvalidSize`] for a text of more than 1024 bytes, with nothing changed.
    pub fn set_label(&self, label: &str) -> Result<()> {
        let bytes = label.len() as u64;
        if bytes > MOST {
            return Err(Error::InvalidSize { what: "the label of a space", bytes, limit: MOST });
        }
        self.core().state.lock().label = (!label.is_empty()).then(|| label.to_owned());
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
