// Matrix of graphs (rows) and pages (columns).

// ---- the matrix ----
const BANDS = { large: 1, tape: 1, spare: 1, kept: 1, exclusive: 1, slab: 0.55, filler: 0.55 };
const layOut = () => {
  const [, pen] = canvas(1, 1);
  pen.font = getComputedStyle(document.body).font;
  const longest = Math.min(240, spaces.reduce((most, space) => Math.max(most, pen.measureText(space.name).width), 60) + 30);
  const numbers = narrow() ? 2 * NARROW_NUMBER : 5 * NUMBER;
  const least = narrow() ? 1 : 2;
  const room = Math.max(narrow() ? 60 : 240, $("matrix").clientWidth - numbers - longest);
  const gaps = new Set(shared.map((page) => page.class)).size + (mostOwn ? 1 : 0);
  const weight = shared.reduce((sum, page) => sum + BANDS[page.class], 0) + 0.55 * mostOwn;
  const unit = Math.min(18, Math.max(least, (room - 10 * gaps) / Math.max(1, weight)));
  let x = 0;
  columns = [];
  let last = null;
  for (const page of shared) {
    if (last !== null && last !== page.class) x += 10;
    last = page.class;
    const width = Math.max(least, unit * BANDS[page.class]);
    columns.push({ page: page.index, x, width, class: page.class });
    x += width;
  }
  if (mostOwn) {
    x += last === null ? 0 : 10;
    for (let n = 0; n < mostOwn; n++) {
      const width = Math.max(least, unit * 0.55);
      columns.push({ own: n, x, width, class: "own" });
      x += width;
    }
  }
  matrixWidth = Math.max(40, x);
};
const pageAt = (space, column) => (column.own === undefined ? column.page : space.own[column.own]);
const gap = (width) => (width >= 5 ? 1 : width >= 3 ? 0.5 : 0);

const drawRow = (space, pen) => {
  pen.clearRect(0, 0, matrixWidth, ROW);
  for (const column of columns) {
    const page = pageAt(space, column);
    const tile = page === undefined ? undefined : space.tiles.get(page);
    if (!tile) continue;
    const facts = map.pages[page];
    const part = tile.covered / facts.bytes;
    const gives = picked === space && facts.spaces === 1;
    const lit = picked && pickedPages.has(page);
    pen.globalAlpha = !picked || picked === space ? 1 : lit ? 0.62 : ink.dim;
    const [pale, deep] = gives || (!picked && facts.class === "own") ? ["give-shown", "give"] : lit ? ["pick-shown", "pick"] : ["shown", "deep"];
    pen.fillStyle = blend(pale, deep, part);
    pen.fillRect(column.x, 1, column.width - gap(column.width), ROW - 2);
  }
  pen.globalAlpha = 1;
};

const drawHead = () => {
  const height = 62;
  const [made, pen] = canvas(matrixWidth, height);
  const most = Math.max(1, map.spaces.length);
  let begin = 0;
  columns.forEach((column, index) => {
    const users = column.own === undefined ? map.pages[column.page].spaces : 1;
    const tall = users ? Math.max(2, (34 * users) / most) : 0;
    const lit = picked && column.own === undefined && pickedPages.has(column.page);
    pen.fillStyle = column.class === "own" ? ink.give : lit ? ink.pick : ink.faint;
    if (users) pen.fillRect(column.x, height - 3 - tall, column.width - gap(column.width), tall);
    else pen.strokeRect(column.x + 0.5, height - 6, Math.max(1, column.width - 2), 3);
    if (column.own === undefined && onLease(map.pages[column.page])) {
      pen.fillStyle = ink.waste;
      pen.fillRect(column.x, height - 8 - tall, column.width - gap(column.width), 3);
    }
    const next = columns[index + 1];
    if (!next || next.class !== column.class) {
      const from = columns[begin].x;
      const width = column.x + column.width - from;
      pen.fillStyle = ink.rule;
      pen.fillRect(from, height - 1, width - 1, 1);
      pen.fillStyle = ink.soft;
      const count = index - begin + 1;
      const size = column.own === undefined ? ` of ${bytes(map.pages[column.page].bytes)}` : "";
      const texts = column.own === undefined ? [`${column.class}: ${count}${size}`, column.class] : ["private pages", "private"];
      // The last band's label may start in the gap before the band.
      const room = width + (next ? 8 : 18);
      const text = texts.find((one) => pen.measureText(one).width <= room);
      pen.textAlign = next ? "left" : "right";
      if (text && pen.measureText(text).width > width) pen.fillText(text, next ? from : from + width, 12);
      else if (text) {
        pen.textAlign = "left";
        pen.fillText(text, from, 12);
      }
      pen.textAlign = "left";
      begin = index + 1;
    }
  });
  made.setAttribute("role", "img");
  made.setAttribute("aria-label", "How many shapes use each page");
  listen(made, null);
  return made;
};

const SORTS = {
  need: ["largest", (a, b) => b.shown_bytes - a.shown_bytes || b.peak_live_bytes - a.peak_live_bytes || a.id - b.id],
  order: ["order of capture", (a, b) => a.id - b.id],
  label: ["label", (a, b) => a.name.localeCompare(b.name, "en", { numeric: true }) || a.id - b.id],
  gives: ["gives back", (a, b) => b.drop_gives_bytes - a.drop_gives_bytes || b.shown_bytes - a.shown_bytes || a.id - b.id],
};
// Number columns: name, meaning, and "wide" for columns that a narrow screen has no room for.
const TERMS = [
  ["peak live", "bytes of tensors at the shape's peak.", ""],
  ["retained", "bytes of tensors alive after the capture, such as outputs.", "wide"],
  ["mapped", "bytes of addresses with memory; a page at three addresses counts three times.", "wide"],
  ["alone", "bytes of shared pages that no other shape uses.", "wide"],
  ["drop gives", "bytes that return if the shape's graph and all its tensors are dropped.", ""],
];
let rows = new Map();

const drawMatrix = () => {
  layOut();
  rows = new Map();
  const wanted = spaces.filter((space) => `${space.name}\n${space.site || ""}`.toLowerCase().includes(find)).sort(SORTS[sortedBy][1]);
  const there = all || printing ? wanted : wanted.slice(0, MOST_ROWS);
  const body = el("tbody");
  for (const space of there) {
    const [made, pen] = canvas(matrixWidth, ROW);
    listen(made, space);
    const name = el("th", { className: "name", scope: "row", title: space.site ? `${space.name}, captured at ${space.site}` : space.name }, space.name);
    if (space.phase !== "sealed") name.append(el("span", { className: "phase" }, space.phase));
    const row = el("tr", { tabIndex: -1, "data-space": space.id },
      name,
      el("td", { className: "cells" }, made),
      amount("td", space.peak_live_bytes, { "data-of": "peak" }),
      amount("td", space.retained_bytes, { "data-of": "retained", className: "wide" }),
      amount("td", space.mapped_bytes, { "data-of": "mapped", className: "wide" }),
      amount("td", space.alone_bytes, { "data-of": "alone", className: "wide" }),
      amount("td", space.drop_gives_bytes, { className: "gives", "data-of": "gives" }));
    row.setAttribute("aria-label", `${space.name}: peak ${bytes(space.peak_live_bytes)}, ${plural(space.tiles.size, "page")}, dropping the shape gives ${bytes(space.drop_gives_bytes)} back`);
    row.addEventListener("click", () => pick(picked === space ? null : space));
    rows.set(space, { row, pen });
    body.append(row);
  }
  const head = el("tr", {}, el("th", { className: "name", scope: "col" }, plural(wanted.length, "shape")), el("th", { className: "cells", scope: "col" }), ...TERMS.map(([text, , kind]) => el("th", { scope: "col", className: kind }, text)));
  const table = el("table", {}, el("thead", {}, head), body);
  $("matrix").replaceChildren(table);
  const first = body.querySelector("tr");
  if (first) first.tabIndex = 0;
  const more = wanted.length - there.length;
  $("more").replaceChildren(...(more ? [el("button", { onclick: () => { all = true; drawMatrix(); } }, `Show ${more} more`)] : []));
  paintMatrix();
};
const paintMatrix = () => {
  for (const [space, { row, pen }] of rows) {
    drawRow(space, pen);
    row.classList.toggle("picked", space === picked);
    row.setAttribute("aria-selected", space === picked);
  }
  document.querySelector("#matrix thead .cells")?.replaceChildren(drawHead());
};
const drawTools = () => {
  $("sort").replaceChildren(...Object.entries(SORTS).map(([key, [text]]) =>
    el("button", { type: "button", role: "radio", "aria-checked": key === sortedBy, "data-sort": key, onclick: () => { sortedBy = key; drawTools(); drawMatrix(); } }, text)));
  const swatch = (colour, text) => { const box = el("i"); box.style.background = colour; return el("span", {}, box, text); };
  const key = [el("span", {}, "mapped, idle at the peak", el("i", { className: "scale" }), "covered"), swatch(ink.pick, "pages of the chosen shape"), swatch(ink.give, "private, or given back by dropping the shape"), swatch(ink.faint, "above: number of shapes with the page")];
  const lent = map.pages.filter(onLease);
  if (lent.length) {
    const made = swatch(ink.waste, `on lease: ${plural(lent.length, "page")}, ${bytes(lent.reduce((sum, page) => sum + page.bytes, 0))}`);
    made.id = "lent";
    key.push(made);
  }
  $("key").replaceChildren(...key);
  $("terms").replaceChildren(...TERMS.map(([text, meaning, kind]) => el("div", { className: kind }, el("dt", {}, text), el("dd", {}, meaning))));
};
