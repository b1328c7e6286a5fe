// One capture: its pages and their blocks.

// ---- one capture ----
const drawInside = () => {
  const space = picked || [...spaces].sort(SORTS.need[1])[0];
  $("inside").hidden = !space;
  if (!space) return;
  $("inside-title").textContent = `Inside ${space.name}`;
  const events = space.events && space.events.length ? space.events : null;
  const shown = [...space.tiles.keys()].filter((page) => !space.tiles.get(page).kept).sort((a, b) => a - b);
  const total = shown.reduce((sum, page) => sum + map.pages[page].bytes, 0);
  // Traced: pages from top to bottom, to scale, events across. Else: one line per page, its bytes across.
  const least = shown.length > 30 ? 0 : 1;
  const height = events ? 360 : Math.min(720, Math.max(80, 15 * shown.length));
  const scale = shown.length ? (height - least * shown.length) / Math.max(1, total) : 0;
  const lanes = [];
  let top = 0;
  for (const page of shown) {
    const tall = events ? map.pages[page].bytes * scale : height / shown.length - least;
    lanes.push({ page, top, tall });
    top += tall + least;
  }
  const laneOf = new Map(lanes.map((lane) => [lane.page, lane]));
  const tiles = space.maps.map((tile) => ({ at: tile.address, end: tile.address + map.pages[tile.page].bytes, lane: laneOf.get(tile.page) }));
  const onPages = (block) => {
    const found = [];
    let low = 0, high = tiles.length;
    while (low < high) { const mid = (low + high) >> 1; if (tiles[mid].end <= block.address) low = mid + 1; else high = mid; }
    for (let i = low; i < tiles.length && tiles[i].at < block.address + block.bytes; i++) {
      const { at, end, lane } = tiles[i];
      const from = Math.max(block.address, at) - at, to = Math.min(block.address + block.bytes, end) - at;
      if (lane) found.push([lane, from, to]);
    }
    return found;
  };
  const parts = (block) => onPages(block).map(([lane, from, to]) => [lane.top + from * scale, Math.max(0.6, (to - from) * scale)]);
  const covered = [...space.tiles.values()].reduce((sum, tile) => sum + (tile.kept ? 0 : tile.covered), 0);
  const fact = (text, n, kind) => el("span", { className: kind || "" }, el("b", { "data-bytes": n }, bytes(n)), ` ${text}`);
  const facts = el("div", { className: "facts" },
    fact("live at the peak", space.peak_live_bytes), fact(`in ${plural(lanes.length, "page")}`, total), fact(`idle at the peak (${percent(total - covered, total)})`, total - covered, "waste"),
    fact("back if the shape is dropped", space.drop_gives_bytes, "give"), el("span", {}, el("b", {}, `${space.allocations}`), " allocations"),
    ...(space.site ? [el("span", { className: "site" }, "captured at ", el("code", {}, space.site))] : []));
  const [plot, pen] = canvas(Math.max(260, $("inside").clientWidth - 42 - (innerWidth > 980 ? 358 : 0)), height + 24);
  const width = parseFloat(plot.style.width);
  const strip = events ? 96 : width;
  const left = width - strip;
  for (const { top: y, tall } of lanes) {
    pen.fillStyle = blend("line", "card", 0.45);
    if (events) pen.fillRect(0, y, left - 26, tall);
    pen.fillStyle = blend("waste", "card", 0.25);
    pen.fillRect(left, y, strip, tall);
  }
  for (const block of space.blocks) {
    pen.fillStyle = blend("deep", "shown", [0.02, 0.22, 0.38][block.allocation % 3]);
    if (events) for (const [y, tall] of parts(block)) pen.fillRect(left, y, strip, tall);
    else {
      for (const [lane, from, to] of onPages(block)) {
        const size = map.pages[lane.page].bytes;
        pen.fillRect((strip * from) / size, lane.top, Math.max(0.7, (strip * (to - from)) / size), lane.tall);
      }
    }
  }
  pen.fillStyle = ink.soft;
  pen.fillText(events ? "at the peak" : width < 400 ? "a line is a page, at the peak" : "a line is a page from its first to its last byte, at the peak", left, height + 16);
  let steps = [];
  if (events) {
    const last = events.reduce((most, block) => Math.max(most, block.begin, block.end ?? 0), 0) + 1;
    const across = (left - 26) / last;
    const change = new Array(last + 1).fill(0);
    for (const block of events) {
      change[block.begin] += block.bytes;
      if (block.end !== null) change[block.end] -= block.bytes;
      const x = block.begin * across, wide = Math.max(0.7, ((block.end ?? last) - block.begin) * across - 0.4);
      pen.fillStyle = block.end === null ? ink.give : blend("deep", "shown", 0.12 + 0.5 * ((block.allocation * 7) % 10) / 10);
      const places = parts(block);
      for (const [y, tall] of places) pen.fillRect(x, y, wide, tall);
      steps.push({ x, wide, places, block });
    }
    let live = 0, most = -1, peak = 0;
    change.forEach((by, n) => { live += by; if (live > most) { most = live; peak = n; } });
    pen.strokeStyle = ink.waste;
    pen.lineWidth = 1.5;
    pen.setLineDash([5, 3]);
    pen.beginPath(); pen.moveTo(peak * across + 0.5, 0); pen.lineTo(peak * across + 0.5, height); pen.stroke();
    pen.setLineDash([]);
    pen.fillStyle = ink.soft;
    pen.fillText(`${last} allocations and frees, in order`, 0, height + 16);
    const text = "peak";
    pen.fillStyle = ink.waste;
    pen.fillText(text, Math.min(left - 60, Math.max(200, peak * across - 12)), height + 16);
  }
  plot.setAttribute("role", "img");
  plot.setAttribute("aria-label", `The pages of ${space.name} from top to bottom, and the blocks on them`);
  plot.addEventListener("mousemove", (event) => {
    const box = plot.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const lane = lanes.find((one) => y >= one.top && y < one.top + one.tall);
    const step = steps.find((one) => x >= one.x && x < one.x + one.wide && one.places.some(([at, tall]) => y >= at && y < at + tall));
    if (step) {
      const { block } = step;
      say(event.clientX, event.clientY, `Allocation ${block.allocation}: ${bytes(block.bytes)}`, [`events ${block.begin} to ${block.end ?? "the end"}`, lane ? `on ${pageName(map.pages[lane.page])}` : ""], [hex(block.address)]);
    } else if (lane && x >= left) tell(space, lane.page, event.clientX, event.clientY);
    else hush();
  });
  plot.addEventListener("mouseleave", hush);
  const largest = [...space.blocks].sort((a, b) => b.bytes - a.bytes || a.allocation - b.allocation).slice(0, 11);
  const list = el("table", { className: "list" },
    el("tr", {}, el("th", {}, "largest at the peak"), el("th", {}, "allocation"), el("th", {}, "bytes")),
    ...largest.map((block) => el("tr", {}, el("td", {}, el("code", {}, hex(block.address))), el("td", {}, `${block.allocation}`), amount("td", block.bytes))));
  $("inside-body").replaceChildren(facts, el("div", {}, plot), el("div", {}, list));
  $("inside-note").textContent = (picked ? "" : "The largest shape; choose another shape above. ") + `${verdict(space)} ` +
    (events ? "Left to right: its allocations and frees. Top to bottom: its pages, to scale. Dashed: the peak. Green: live after the capture. " : "Each line is a page with the blocks of the peak. Traced events show the whole capture (docs/map.md). ") +
    "Red: bytes that are mapped and idle at the peak (tails of pages, gaps between blocks).";
};
