//! The map as one HTML file that fetches nothing: the template, and the data as JSON in it.

use super::ArenaMap;

const TEMPLATE: &str = include_str!("page/map.html");
const STYLE: &str = include_str!("page/map.css");
/// One scope: a file may use what another declares, and `facts.js` comes before, `page.js` behind all others.
const SCRIPT: &str = concat!(
    include_str!("page/facts.js"),
    include_str!("page/figures.js"),
    include_str!("page/matrix.js"),
    include_str!("page/choice.js"),
    include_str!("page/inside.js"),
    include_str!("page/page.js"),
);

impl ArenaMap {
    /// The map as a web page: one file, which needs no network and no other file.
    #[must_use]
    pub fn to_html(&self) -> String {
        // Within JSON, `<` stands in strings only, and nothing in there can end the script element or begin a comment.
        let data = self.to_json().replace('<', "\\u003c");
        let mut page = String::with_capacity(TEMPLATE.len() + STYLE.len() + SCRIPT.len() + data.len());
        let mut rest = TEMPLATE;
        for (mark, text) in [("/*style*/", STYLE), ("/*data*/", data.as_str()), ("/*script*/", SCRIPT)] {
            let (before, behind) = rest.split_once(mark).unwrap_or((rest, ""));
            page.push_str(before);
            page.push_str(text);
            rest = behind;
        }
        page + rest
    }
}
