"use strict";
(() => {
  const map = JSON.parse(document.getElementById("map").textContent);
  const $ = (id) => document.getElementById(id);
  const MIB = 1048576;

  // ---- words and numbers ----
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
  const CLASSES = { large: "large page", tape: "tape page", slab: "slab", filler: "filler", spare: "spare page", own: "own page", kept: "kept page" };
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

  // ---- what is asked of the data again and again ----
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
  let picked = null; // a space
  let pickedPages = new Set();
  let sortedBy = "need";
  let find = "";
  let all = false;
  let printing = false;
  let columns = [];
  let matrixWidth = 0;
  const MOST_ROWS = 400;
  const ROW = 15;
  const NUMBER = 82; // pixels of a column of numbers, as in the style

  // ---- the sums ----
  const drawSums = () => {
    const title = map.title || `Arena ${map.arena}`;
    $("title").textContent = title;
    document.title = `${title} – VmmGraph page map`;
    const parts = [map.title ? `arena ${map.arena}` : "", `${map.device_name} (${map.driver} device ${map.device})`, plural(map.spaces.length, "shape"), plural(map.pages.length, "page")];
    if (!map.settled) parts.push("taken while captures went on");
    $("subtitle").textContent = parts.filter(Boolean).join("  ·  ");
    const ratio = map.floor_bytes ? map.held_bytes / map.floor_bytes : 0;
    const figure = (n, label, id) => el("div", { className: "figure" }, el("b", { id, "data-bytes": n }, bytes(n)), el("span", {}, label));
    const times = map.held_bytes ? map.apart_bytes / map.held_bytes : 0;
    const scale = Math.max(map.apart_bytes, map.held_bytes, 1);
    const bar = (label, n, kind) => {
      const made = el("div", { className: `bar ${kind}`, title: bytes(n) });
      made.style.width = `${(100 * n) / scale}%`;
      return [el("span", {}, label), made];
    };
    $("sums").replaceChildren(
      el("div", { className: "figures" },
        figure(map.held_bytes, `held for ${plural(map.spaces.length, "shape")}`, "held"),
        figure(map.floor_bytes, ratio ? `floor: held is ${ratio.toFixed(3)} of it` : "floor", "floor"),
        figure(map.apart_bytes, times >= 1.5 ? `apart at least, ${times.toFixed(1)} times held` : "apart at least", "apart")),
      el("div", { className: "bars" }, ...bar("apart", map.apart_bytes, "apart"), ...bar("held", map.held_bytes, "held")));
  };

  // ---- the matrix ----
  const BANDS = { large: 1, tape: 1, spare: 1, kept: 1, slab: 0.55, filler: 0.55 };
  const layOut = () => {
    const [, pen] = canvas(1, 1);
    pen.font = getComputedStyle(document.body).font;
    const longest = Math.min(240, spaces.reduce((most, space) => Math.max(most, pen.measureText(space.name).width), 60) + 30);
    const room = Math.max(240, $("matrix").clientWidth - 5 * NUMBER - longest);
    const gaps = new Set(shared.map((page) => page.class)).size + (mostOwn ? 1 : 0);
    const weight = shared.reduce((sum, page) => sum + BANDS[page.class], 0) + 0.55 * mostOwn;
    const unit = Math.min(18, Math.max(2.5, (room - 10 * gaps) / Math.max(1, weight)));
    let x = 0;
    columns = [];
    let last = null;
    for (const page of shared) {
      if (last !== null && last !== page.class) x += 10;
      last = page.class;
      const width = Math.max(2, unit * BANDS[page.class]);
      columns.push({ page: page.index, x, width, class: page.class });
      x += width;
    }
    if (mostOwn) {
      x += last === null ? 0 : 10;
      for (let n = 0; n < mostOwn; n++) {
        columns.push({ own: n, x, width: Math.max(2, unit * 0.55), class: "own" });
        x += Math.max(2, unit * 0.55);
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
      const next = columns[index + 1];
      if (!next || next.class !== column.class) {
        const from = columns[begin].x;
        const width = column.x + column.width - from;
        pen.fillStyle = ink.rule;
        pen.fillRect(from, height - 1, width - 1, 1);
        pen.fillStyle = ink.soft;
        const count = index - begin + 1;
        const size = column.own === undefined ? ` of ${bytes(map.pages[column.page].bytes)}` : "";
        const texts = column.own === undefined ? [`${column.class}: ${count}${size}`, column.class] : ["own pages", "own"];
        // The last band may begin its word in the gap before it.
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
    made.setAttribute("aria-label", "How many shapes show each page");
    listen(made, null);
    return made;
  };

  const SORTS = {
    need: ["hungriest", (a, b) => b.shown_bytes - a.shown_bytes || b.peak_live_bytes - a.peak_live_bytes || a.id - b.id],
    order: ["captured", (a, b) => a.id - b.id],
    label: ["label", (a, b) => a.name.localeCompare(b.name, "en", { numeric: true }) || a.id - b.id],
    gives: ["gives back", (a, b) => b.drop_gives_bytes - a.drop_gives_bytes || b.shown_bytes - a.shown_bytes || a.id - b.id],
  };
  let rows = new Map();

  const drawMatrix = () => {
    layOut();
    rows = new Map();
    const wanted = spaces.filter((space) => space.name.toLowerCase().includes(find)).sort(SORTS[sortedBy][1]);
    const there = all || printing ? wanted : wanted.slice(0, MOST_ROWS);
    const heads = ["peak live", "retained", "mapped", "alone", "drop gives"];
    const body = el("tbody");
    for (const space of there) {
      const [made, pen] = canvas(matrixWidth, ROW);
      listen(made, space);
      const name = el("th", { className: "name", scope: "row", title: space.name }, space.name);
      if (space.phase !== "sealed") name.append(el("span", { className: "phase" }, space.phase));
      const row = el("tr", { tabIndex: -1, "data-space": space.id },
        name,
        el("td", { className: "cells" }, made),
        amount("td", space.peak_live_bytes, { "data-of": "peak" }),
        amount("td", space.retained_bytes, { "data-of": "retained" }),
        amount("td", space.mapped_bytes, { "data-of": "mapped" }),
        amount("td", space.alone_bytes, { "data-of": "alone" }),
        amount("td", space.drop_gives_bytes, { className: "gives", "data-of": "gives" }));
      row.setAttribute("aria-label", `${space.name}: peak ${bytes(space.peak_live_bytes)}, shows ${plural(space.tiles.size, "page")}, dropping it gives back ${bytes(space.drop_gives_bytes)}`);
      row.addEventListener("click", () => pick(picked === space ? null : space));
      rows.set(space, { row, pen });
      body.append(row);
    }
    const head = el("tr", {}, el("th", { className: "name", scope: "col" }, plural(wanted.length, "shape")), el("th", { className: "cells", scope: "col" }), ...heads.map((text) => el("th", { scope: "col" }, text)));
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
    const key = [el("span", {}, "mapped, idle at the peak", el("i", { className: "scale" }), "covered"), swatch(ink.pick, "pages of the chosen shape"), swatch(ink.give, "its own, or given back by dropping it"), swatch(ink.faint, "above: how many shapes show the page")];
    $("key").replaceChildren(...key);
  };

  // ---- what is under the pointer ----
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
    const users = facts.owner === null ? `shown by ${facts.spaces} of ${plural(map.spaces.length, "shape")}` : "this shape's own";
    const lines = [`${bytes(facts.bytes)}, ${users}`];
    const codes = [];
    if (space) {
      const tile = space.tiles.get(page);
      if (!tile) lines.push(`${space.name} does not show it`);
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

  // ---- a choice ----
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
    if (!alone.length) return "Dropping it gives nothing back: every page that it shows, others need too.";
    return `Dropping it gives back ${bytes(space.drop_gives_bytes)}: ${plural(alone.length, "page")} that nobody else needs.`;
  };

  // ---- one capture from inside ----
  const drawInside = () => {
    const space = picked || [...spaces].sort(SORTS.need[1])[0];
    $("inside").hidden = !space;
    if (!space) return;
    $("inside-title").textContent = `Inside ${space.name}`;
    const events = space.events && space.events.length ? space.events : null;
    const shown = [...space.tiles.keys()].filter((page) => !space.tiles.get(page).kept).sort((a, b) => a - b);
    const total = shown.reduce((sum, page) => sum + map.pages[page].bytes, 0);
    // Traced: pages from top to bottom, true to scale, events across. Else: a line for each page, its bytes across.
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
      fact("live at the peak", space.peak_live_bytes), fact(`of pages shown (${lanes.length})`, total), fact(`idle on them at the peak (${percent(total - covered, total)})`, total - covered, "waste"),
      fact("back if it is dropped", space.drop_gives_bytes, "give"), el("span", {}, el("b", {}, `${space.allocations}`), " allocations"));
    const [plot, pen] = canvas(Math.max(300, $("inside").clientWidth - 42 - 358), height + 24);
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
    pen.fillText(events ? "at the peak" : "each line a page, from its first byte to its last, at the peak", left, height + 16);
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
    $("inside-note").textContent = (picked ? "" : "The hungriest shape; choose another above. ") + `${verdict(space)} ` +
      (events ? "Left to right: its allocations and frees. Top to bottom: its pages, true to scale. Dashed: the peak; green: live to the end. " : "Each line is a page with the blocks of the peak. For the whole course of a capture, trace events (docs/map.md). ") +
      "Red: bytes that are mapped and idle at the peak, which are tails of pages and gaps between blocks.";
  };

  // ---- the curve ----
  const drawCurve = () => {
    const points = map.curve;
    const [made, pen] = canvas(Math.max(260, $("curve").clientWidth), 210);
    const width = parseFloat(made.style.width);
    const [left, bottom, top] = [58, 184, 10];
    const most = Math.max(1, map.held_bytes, map.budget_bytes && map.budget_bytes < 1.5 * map.held_bytes ? map.budget_bytes : 0);
    const x = (k) => left + ((width - left - 8) * k) / Math.max(1, points.length);
    const y = (n) => bottom - ((bottom - top) * n) / most;
    pen.textAlign = "right";
    for (const part of [0, 0.25, 0.5, 0.75, 1]) {
      pen.fillStyle = ink.line;
      pen.fillRect(left, Math.round(y(part * most)), width - left, 1);
      pen.fillStyle = ink.soft;
      pen.fillText(bytes(Math.round(part * most)), left - 8, y(part * most) + 4);
    }
    pen.textAlign = "left";
    pen.fillText("0", left, bottom + 16);
    pen.textAlign = "right";
    pen.fillText(`${points.length} shapes`, width - 4, bottom + 16);
    const needed = points.length ? points[points.length - 1].with_bytes : 0;
    const line = (values, colour) => {
      pen.strokeStyle = colour;
      pen.lineWidth = 2;
      pen.beginPath();
      values.forEach((n, k) => { if (k) pen.lineTo(x(k), y(values[k - 1])); k ? pen.lineTo(x(k), y(n)) : pen.moveTo(x(0), y(n)); });
      pen.stroke();
      pen.lineWidth = 1;
    };
    line([0, ...points.map((point) => point.with_bytes)], ink.deep);
    line([needed, ...points.map((point) => point.without_bytes)], ink.pick);
    if (map.budget_bytes && map.budget_bytes <= most) {
      pen.fillStyle = ink.waste;
      pen.fillRect(left, y(map.budget_bytes), width - left, 1);
      pen.fillText("budget", width - 4, y(map.budget_bytes) - 4);
    }
    const chosen = picked ? points.findIndex((point) => point.space === picked.id) : -1;
    if (chosen >= 0) {
      pen.fillStyle = ink.pick;
      for (const n of [points[chosen].with_bytes, points[chosen].without_bytes]) { pen.beginPath(); pen.arc(x(chosen + 1), y(n), 4, 0, 7); pen.fill(); }
    }
    made.setAttribute("role", "img");
    const half = points.find((point) => point.without_bytes <= needed / 2);
    const note = [el("span", {}, "Blue: what the k hungriest shapes need together. Amber: what the others need once those are gone.")];
    if (half) note.push(el("span", {}, ` Without the ${plural(points.indexOf(half) + 1, "hungriest shape")}, ${bytes(half.without_bytes)} remain.`));
    $("curve-note").replaceChildren(...note);
    made.setAttribute("aria-label", $("curve-note").textContent);
    const at = (event) => Math.round(((event.clientX - made.getBoundingClientRect().left - left) / Math.max(1, width - left - 8)) * points.length) - 1;
    made.addEventListener("mousemove", (event) => {
      const k = at(event);
      if (!points[k]) return hush();
      say(event.clientX, event.clientY, `${plural(k + 1, "hungriest shape")}, to ${byId.get(points[k].space).name}`, [`they need ${bytes(points[k].with_bytes)}`, `the others need ${bytes(points[k].without_bytes)}`], []);
    });
    made.addEventListener("mouseleave", hush);
    made.addEventListener("click", (event) => { const point = points[at(event)]; if (point) pick(byId.get(point.space)); });
    $("curve").replaceChildren(made);
  };

  // ---- the device ----
  const drawHolders = () => {
    const colours = { arena: "soft", region: "give", elastic: "pick", free: "rule", leaving: "waste" };
    const parts = [{ name: `this arena`, bytes: map.held_bytes, colour: ink.deep, pages: map.pages.length }];
    const kinds = { free: "free in the pool", leaving: "refused by the driver" };
    for (const holder of map.holders) parts.push({ name: holder.name || kinds[holder.kind] || holder.kind, bytes: holder.bytes, colour: ink[colours[holder.kind] || "soft"], pages: holder.pages });
    if (map.executables_bytes) parts.push({ name: "executables", bytes: map.executables_bytes, colour: blend("waste", "card", 0.3) });
    if (map.device_free_bytes !== null) {
      const known = parts.reduce((sum, part) => sum + part.bytes, 0);
      const rest = map.device_total_bytes - map.device_free_bytes - known;
      if (rest > 0) parts.push({ name: "driver and others", bytes: rest, colour: ink.faint });
      parts.push({ name: "free", bytes: map.device_free_bytes, colour: ink.line });
    }
    const whole = parts.reduce((sum, part) => sum + part.bytes, 0) || 1;
    const stack = el("div", { className: "stack", role: "img", "aria-label": "The device's memory by holder" }, ...parts.map((part) => {
      const made = el("div", { title: `${part.name}: ${bytes(part.bytes)}` });
      made.style.width = `${(100 * part.bytes) / whole}%`;
      made.style.background = part.colour;
      return made;
    }));
    const table = el("table", { className: "list" }, el("tr", {}, el("th", {}, "holder"), el("th", {}, "pages"), el("th", {}, "bytes"), el("th", {}, "of the device")),
      ...parts.map((part) => {
        const box = el("i");
        box.style.background = part.colour;
        return el("tr", {}, el("td", {}, box, part.name), el("td", {}, part.pages === undefined ? "" : `${part.pages}`), amount("td", part.bytes), el("td", {}, whole && part.bytes ? (100 * part.bytes / whole).toFixed(1) + " %" : "–"));
      }));
    $("holders").replaceChildren(stack, table);
  };

  // ---- together ----
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
  // On paper the page has one width, whatever the window's is.
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
})();
