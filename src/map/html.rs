use super::ArenaMap;

const TEMPLATE: &str = include_str!("page/map.html");
const STYLE: &str = include_str!("page/map.css");
/// One scope. `facts.js` must be first, `page.js` last.
const SCRIPT: &str = concat!(
    include_str!("page/facts.js"),
    include_str!("page/figures.js"),
    include_str!("page/matrix.js"),
    include_str!("page/choice.js"),
    include_str!("page/inside.js"),
    include_str!("page/page.js"),
);

impl ArenaMap {
    /// Returns the map as one self-contained web page.
    #[must_use]
    pub fn to_html(&self) -> String {
        // In JSON, `<` occurs in strings only; escaped, none can end the script element.
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
