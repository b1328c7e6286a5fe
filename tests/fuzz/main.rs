//! Fuzzing: calls decoded from byte strings. `--test fuzz hostile`, `model` or `streams` runs one.

mod hostile;
mod input;
mod model;
mod platforms;
mod streams;
