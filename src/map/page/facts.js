// Shared by the other files: the map, texts, colours, and the selection.
const map = JSON.parse(document.getElementById("map").textContent);
const $ = (id) => document.getElementById(id);
const MIB = 1048576;

// ---- texts and numbers ----
const bytes = (n) => {
  if (n === 0) return "0";
  if (n < 1024) return `${n} B`;
  if (n < 100 * 1024) return `${+(n / 1024).toFixed(1)} KiB`;
  if (n < 10 * MIB) return `${+(n / MIB).toFixed(1)} MiB`;
  if (n < 10240 * MIB) return `${Math.round(n / MIB)} MiB`;
  return `${(n / MIB / 1024).toFixed(1)} GiB`;
};
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");
const hex = (n) => "0x" + n.toString(16);
const nameOf = (space) => space.label || `space ${space.id}`;
const CLASSES = { large: "large page", tape: "tape page", slab: "slab", filler: "filler", spare: "spare page", own: "private page", kept: "kept page", exclusive: "exclusive page" };
const onLease = (page) => page.lease !== null && page.lease !== undefined;
const pageName = (page) => `${CLASSES[page.class]} ${page.number}`;
const el = (tag, attributes, ...inside) => {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key in made && key !== "list") made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...inside);
  return made;
};
const amount = (tag, n, attributes) =>
  el(tag, { ...attributes, "data-bytes": n, className: `${attributes?.className || ""}${n ? "" : " none"}` }, n ? bytes(n) : "–");

// ---- derived data ----
const spaces = map.spaces.map((space, index) => {
  const tiles = new Map();
  for (const tile of space.maps) {
    const there = tiles.get(tile.page) || { covered: 0, at: [] };
    there.covered += tile.covered_bytes;
    there.at.push(tile.address);
    tiles.set(tile.page, there);
  }
  for (const page of space.kept_pages) {
    const { address, bytes: size } = map.pages[page];
    const inside = (block) => Math.max(0, Math.min(block.address + block.bytes, address + size) - Math.max(block.address, address));
    tiles.set(page, { covered: space.kept.reduce((sum, block) => sum + inside(block), 0), at: [address], kept: true });
  }
  const own = [...tiles.keys()].filter((page) => map.pages[page].class === "own").sort((a, b) => a - b);
  return { ...space, index, tiles, own, name: nameOf(space) };
});
const byId = new Map(spaces.map((space) => [space.id, space]));
const shared = map.pages.map((page, index) => ({ ...page, index })).filter((page) => page.class !== "own");
const mostOwn = Math.min(12, spaces.reduce((most, space) => Math.max(most, space.own.length), 0));

// ---- colours ----
let ink = {};
const parse = (text) => {
  const at = text.trim().replace("#", "");
  return [0, 2, 4].map((i) => parseInt(at.slice(i, i + 2), 16));
};
const readInk = () => {
  const style = getComputedStyle(document.documentElement);
  ink = {};
  for (const key of ["paper", "card", "ink", "soft", "faint", "line", "rule", "shown", "deep", "pick-shown", "pick", "give-shown", "give", "waste"]) {
    ink[key] = style.getPropertyValue(`--${key}`).trim();
  }
  ink.dim = +style.getPropertyValue("--dim");
};
const blend = (from, to, part) => {
  const [a, b] = [parse(ink[from]), parse(ink[to])];
  return `rgb(${a.map((x, i) => Math.round(x + (b[i] - x) * part)).join(" ")})`;
};
const canvas = (width, height) => {
  const scale = Math.max(window.devicePixelRatio || 1, printing ? 3 : 1);
  const made = el("canvas", { width: Math.ceil(width * scale), height: Math.ceil(height * scale) });
  made.style.width = `${width}px`;
  made.style.height = `${height}px`;
  const pen = made.getContext("2d");
  pen.scale(scale, scale);
  pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  return [made, pen];
};

// ---- state ----
let picked = null; // the selected space
let pickedPages = new Set();
let sortedBy = "need";
let find = "";
let all = false;
let printing = false;
let columns = [];
let matrixWidth = 0;
const MOST_ROWS = 400;
const ROW = 15;
// Widths of a number column in pixels, as in map.css.
const NUMBER = 82;
const NARROW_NUMBER = 68;
const narrow = () => innerWidth <= 640 && !printing;
