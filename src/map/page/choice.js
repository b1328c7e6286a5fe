// Pointer hover and graph selection.

// ---- hover ----
const tip = $("tip");
const say = (x, y, title, lines, codes) => {
  tip.replaceChildren(el("b", {}, title), ...lines.map((line) => el("p", {}, line)), ...codes.map((code) => el("code", {}, code)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + box.height + 24 > innerHeight ? Math.max(4, y - box.height - 12) : y + 16}px`;
};
const hush = () => { tip.hidden = true; };
const facts = (page) => map.pages[page];
const blocksOn = (space, page) => {
  const size = map.pages[page].bytes;
  const found = [];
  const kept = facts(page).class === "kept";
  for (const tile of kept ? [{ page, address: facts(page).address }] : space.maps) {
    if (tile.page !== page) continue;
    for (const block of kept ? space.kept : space.blocks) {
      if (block.address < tile.address + size && block.address + block.bytes > tile.address) {
        found.push({ ...block, from: Math.max(0, block.address - tile.address), to: Math.min(size, block.address + block.bytes - tile.address) });
      }
    }
  }
  return found.sort((a, b) => a.from - b.from);
};
const tell = (space, page, x, y) => {
  const facts = map.pages[page];
  const users = facts.owner === null ? `used by ${facts.spaces} of ${plural(map.spaces.length, "shape")}` : "private to this shape";
  const lines = [`${bytes(facts.bytes)}, ${users}`];
  if (onLease(facts)) lines.push(`on lease ${facts.lease}: shapes with this page are not replayed until the lease ends`);
  const codes = [];
  if (space) {
    const tile = space.tiles.get(page);
    if (!tile) lines.push(`${space.name} does not use this page`);
    else {
      lines.push(tile.kept ? `${space.name}: ${bytes(tile.covered)} of kept blocks` : `${space.name}: ${bytes(tile.covered)} covered at its peak (${percent(tile.covered, facts.bytes)})`);
      lines.push(`at ${tile.at.slice(0, 3).map(hex).join(", ")}${tile.at.length > 3 ? ` and ${tile.at.length - 3} more addresses` : ""}`);
      const blocks = blocksOn(space, page);
      for (const block of blocks.slice(0, 8)) codes.push(`${hex(block.address)}  ${bytes(block.bytes).padStart(9)}  allocation ${block.allocation}`);
      if (blocks.length > 8) codes.push(`and ${blocks.length - 8} more blocks`);
    }
  }
  say(x, y, pageName(facts)[0].toUpperCase() + pageName(facts).slice(1), lines, codes);
};
const columnAt = (x) => columns.findIndex((column) => x >= column.x && x < column.x + column.width);
const listen = (made, space) => {
  made.addEventListener("mousemove", (event) => {
    const column = columns[columnAt(event.clientX - made.getBoundingClientRect().left)];
    const page = column && (space ? pageAt(space, column) : column.page);
    if (page === undefined) hush();
    else tell(space, page, event.clientX, event.clientY);
  });
  made.addEventListener("mouseleave", hush);
};

// ---- selection ----
const pick = (space) => {
  picked = space;
  pickedPages = new Set(space ? space.tiles.keys() : []);
  paintMatrix();
  drawInside();
  drawCurve();
  $("picked").hidden = !space;
  if (space) {
    $("picked").replaceChildren(el("span", {}, el("b", {}, space.name), `: ${bytes(space.peak_live_bytes)} at its peak, on ${plural(space.tiles.size, "page")}. ${verdict(space)}`),
      el("button", { type: "button", onclick: () => $("inside").scrollIntoView({ behavior: "smooth" }) }, "Inside"),
      el("button", { type: "button", onclick: () => pick(null), title: "Esc" }, "Close"));
  }
};
const verdict = (space) => {
  const alone = [...space.tiles.keys()].filter((page) => map.pages[page].spaces === 1);
  if (!alone.length) return "Dropping this shape gives nothing back: other shapes need all of its pages.";
  return `Dropping this shape gives ${bytes(space.drop_gives_bytes)} back: ${plural(alone.length, "page")} that no other shape needs.`;
};
