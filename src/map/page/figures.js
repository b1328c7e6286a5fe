// Held memory, the curve of the largest graphs, and the owners of device memory.

// ---- the sums ----
const headline = () => {
  const held = bytes(map.held_bytes);
  const saved = map.apart_bytes > map.held_bytes ? `${held} instead of ${bytes(map.apart_bytes)}` : `${held} for ${plural(spaces.length, "shape")}`;
  const most = [...spaces].sort(SORTS.gives[1])[0];
  return most?.drop_gives_bytes ? `${saved}; dropping ${most.name} gives ${bytes(most.drop_gives_bytes)} back` : saved;
};
const drawSums = () => {
  const title = map.title || `Arena ${map.arena}`;
  $("headline").textContent = headline();
  document.title = `${title} – VmmGraph page map`;
  const parts = [title, map.title ? `arena ${map.arena}` : "", `${map.device_name} (${map.driver} device ${map.device})`, plural(map.spaces.length, "shape"), plural(map.pages.length, "page")];
  if (!map.settled) parts.push("taken during captures");
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
      figure(map.held_bytes, `held for ${plural(map.spaces.length, "shape")} together`, "held"),
      figure(map.floor_bytes, ratio ? `the largest shape alone: ${ratio.toFixed(3)} times as much is held` : "the largest shape alone", "floor"),
      figure(map.apart_bytes, times >= 1.5 ? `with separate memory for each shape: ${times.toFixed(1)} times as much` : "with separate memory for each shape", "apart")),
    el("div", { className: "bars" }, ...bar("separate", map.apart_bytes, "apart"), ...bar("held", map.held_bytes, "held")));
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
  const note = [el("span", {}, "Blue: memory of the k largest shapes together. Amber: memory of the remaining shapes after these are dropped.")];
  if (half) note.push(el("span", {}, ` Without the ${plural(points.indexOf(half) + 1, "largest shape")}, ${bytes(half.without_bytes)} remain.`));
  $("curve-note").replaceChildren(...note);
  made.setAttribute("aria-label", $("curve-note").textContent);
  const at = (event) => Math.round(((event.clientX - made.getBoundingClientRect().left - left) / Math.max(1, width - left - 8)) * points.length) - 1;
  made.addEventListener("mousemove", (event) => {
    const k = at(event);
    if (!points[k]) return hush();
    say(event.clientX, event.clientY, `${plural(k + 1, "largest shape")}, down to ${byId.get(points[k].space).name}`, [`together: ${bytes(points[k].with_bytes)}`, `the remaining shapes: ${bytes(points[k].without_bytes)}`], []);
  });
  made.addEventListener("mouseleave", hush);
  made.addEventListener("click", (event) => { const point = points[at(event)]; if (point) pick(byId.get(point.space)); });
  $("curve").replaceChildren(made);
};

// ---- the device ----
const drawHolders = () => {
  const colours = { arena: "soft", region: "give", elastic: "pick", free: "rule", leaving: "waste" };
  const parts = [{ name: `this arena`, bytes: map.held_bytes, colour: ink.deep, pages: map.pages.length }];
  const kinds = { free: "free in the pool", leaving: "unmap refused by the driver" };
  for (const holder of map.holders) parts.push({ name: holder.name || kinds[holder.kind] || holder.kind, bytes: holder.bytes, colour: ink[colours[holder.kind] || "soft"], pages: holder.pages });
  if (map.executables_bytes) parts.push({ name: "executables", bytes: map.executables_bytes, colour: blend("waste", "card", 0.3) });
  if (map.device_free_bytes !== null) {
    const known = parts.reduce((sum, part) => sum + part.bytes, 0);
    const rest = map.device_total_bytes - map.device_free_bytes - known;
    if (rest > 0) parts.push({ name: "driver and other programs", bytes: rest, colour: ink.faint });
    parts.push({ name: "free", bytes: map.device_free_bytes, colour: ink.line });
  }
  const whole = parts.reduce((sum, part) => sum + part.bytes, 0) || 1;
  const stack = el("div", { className: "stack", role: "img", "aria-label": "The device's memory by owner" }, ...parts.map((part) => {
    const made = el("div", { title: `${part.name}: ${bytes(part.bytes)}` });
    made.style.width = `${(100 * part.bytes) / whole}%`;
    made.style.background = part.colour;
    return made;
  }));
  const table = el("table", { className: "list" }, el("tr", {}, el("th", {}, "owner"), el("th", {}, "pages"), el("th", {}, "bytes"), el("th", {}, "of the device")),
    ...parts.map((part) => {
      const box = el("i");
      box.style.background = part.colour;
      return el("tr", {}, el("td", {}, box, part.name), el("td", {}, part.pages === undefined ? "" : `${part.pages}`), amount("td", part.bytes), el("td", {}, whole && part.bytes ? (100 * part.bytes / whole).toFixed(1) + " %" : "–"));
    }));
  $("holders").replaceChildren(stack, table);
};
