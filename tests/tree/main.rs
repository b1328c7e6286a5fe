//! The repository: layers, documents, messages, the page map and its web page.

mod dispatch;
mod guarantees;
mod layers;
mod map;
mod map_page;
mod messages;
mod readme;
