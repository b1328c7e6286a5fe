// Draws the page; themes, keys and printing. Last file: starts the page.

// ---- page ----
const drawAll = () => {
  readInk();
  hush();
  drawSums();
  drawTools();
  drawMatrix();
  drawInside();
  drawCurve();
  drawHolders();
};
const theme = (name) => { document.documentElement.dataset.theme = name; drawAll(); };
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const wished = () => (/[#&]dark/.test(location.hash) ? "dark" : /[#&]light/.test(location.hash) ? "light" : dark.matches ? "dark" : "light");
dark.addEventListener("change", () => theme(wished()));
$("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
$("find").addEventListener("input", (event) => { find = event.target.value.toLowerCase(); drawMatrix(); });
// In print the page width is fixed, independent of the window.
const press = (on) => { printing = on; document.documentElement.classList.toggle("printing", on); };
let before = "light";
window.addEventListener("beforeprint", () => { before = document.documentElement.dataset.theme; press(true); theme("light"); });
window.addEventListener("afterprint", () => { press(false); theme(before); });
let waiting = 0;
window.addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(drawAll, 120); });

let cursor = -1;
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && event.target !== $("find")) { event.preventDefault(); $("find").focus(); return; }
  if (event.key === "Escape") { hush(); $("find").value = find = ""; pick(null); drawMatrix(); return; }
  const row = event.target.closest?.("#matrix tbody tr");
  if (!row) return;
  const space = byId.get(+row.dataset.space);
  const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
  if (step) {
    event.preventDefault();
    const next = row[step];
    if (next) { row.tabIndex = -1; next.tabIndex = 0; next.focus(); }
    hush();
  } else if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    pick(picked === space ? null : space);
  } else if (event.key === "ArrowRight" || event.key === "ArrowLeft") {
    event.preventDefault();
    cursor = (cursor + (event.key === "ArrowRight" ? 1 : -1) + columns.length) % Math.max(1, columns.length);
    const page = columns[cursor] && pageAt(space, columns[cursor]);
    const box = row.querySelector("canvas").getBoundingClientRect();
    if (page === undefined) hush();
    else tell(space, page, box.left + columns[cursor].x, box.bottom - 8);
  }
});
theme(wished());
const chosen = /[#&]shape=(\d+)/.exec(location.hash);
if (chosen && byId.has(+chosen[1])) pick(byId.get(+chosen[1]));
