// Runs in a copy of the page map (tests/tree/map_page.rs): uses it as a person would, and compares what it shows with its data.
"use strict";
{
  const errors = [];
  addEventListener("error", (event) => errors.push(`${event.message} at line ${event.lineno}`));
  addEventListener("unhandledrejection", (event) => errors.push(String(event.reason)));
  for (const name of ["error", "warn"]) console[name] = (...what) => errors.push(what.join(" "));
  let checks = 0;
  const same = (found, expected, what) => {
    checks += 1;
    if (found !== expected) errors.push(`${what}: ${JSON.stringify(found)} and not ${JSON.stringify(expected)}`);
  };
  const at = (target, kind, x, y) => target.dispatchEvent(new MouseEvent(kind, { bubbles: true, clientX: x, clientY: y, view: window }));
  const key = (name, target = document.activeElement) => target.dispatchEvent(new KeyboardEvent("keydown", { bubbles: true, cancelable: true, key: name }));
  const $ = (selector, inside = document) => inside.querySelector(selector);
  const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
  const pixels = (canvas) => canvas.toDataURL();

  const probe = () => {
    const map = JSON.parse($("#map").textContent);
    same(window.bad, undefined, "a label was run");
    const most = map.spaces.reduce((best, space) => (space.drop_gives_bytes > best.drop_gives_bytes ? space : best));
    const size = (n) => (n < 10240 * 1048576 ? `${Math.round(n / 1048576)} MiB` : `${(n / 1073741824).toFixed(1)} GiB`);
    const gain = `; dropping ${most.label} gives ${size(most.drop_gives_bytes)} back`;
    same($("h1").textContent, `${size(map.held_bytes)} instead of ${size(map.apart_bytes)}${gain}`, "headline");
    same($("#subtitle").textContent.startsWith(`${map.title}  ·  `), true, "title");
    const terms = all("#terms dt").map((term) => term.textContent).join();
    same(terms, all("#matrix thead th").slice(2).map((head) => head.textContent).join(), "a meaning for each column");
    for (const [id, n] of [["held", map.held_bytes], ["floor", map.floor_bytes], ["apart", map.apart_bytes]]) same(+$(`#${id}`).dataset.bytes, n, id);

    // Every number of every row.
    const rows = all("#matrix tbody tr");
    same(rows.length, map.spaces.length, "rows");
    const byId = new Map(map.spaces.map((space) => [space.id, space]));
    for (const row of rows) {
      const space = byId.get(+row.dataset.space);
      same($(".name", row).firstChild.textContent, space.label || `space ${space.id}`, "label");
      const said = Object.fromEntries(all("td[data-bytes]", row).map((cell) => [cell.dataset.of, +cell.dataset.bytes]));
      same(JSON.stringify(said), JSON.stringify({ peak: space.peak_live_bytes, retained: space.retained_bytes, mapped: space.mapped_bytes, alone: space.alone_bytes, gives: space.drop_gives_bytes }), space.label);
      if (space.drop_gives_bytes >= 1048576) same(/[1-9]/.test($(".gives", row).textContent), true, "a number that is not shown");
    }

    // Orders.
    const order = () => all("#matrix tbody tr").map((row) => +row.dataset.space).join();
    same(order(), map.curve.map((point) => point.space).join(), "the largest first");
    $("[data-sort=order]").click();
    same(order(), map.spaces.map((space) => space.id).join(), "in the order of capture");
    $("[data-sort=gives]").click();
    const gives = all("#matrix .gives").map((cell) => +cell.dataset.bytes);
    same(gives.every((n, index) => !index || gives[index - 1] >= n), true, "what gives the most first");
    $("[data-sort=label]").click();
    const names = all("#matrix tbody .name").map((cell) => cell.firstChild.textContent).filter((name) => /^(decode|prefill) \d+$/.test(name));
    const numbers = names.filter((name) => name.startsWith("prefill")).map((name) => +name.split(" ")[1]);
    same(numbers.every((n, index) => !index || numbers[index - 1] <= n), true, "labels by number");
    $("[data-sort=need]").click();

    // Hover: the first cell of the largest shape.
    const largest = byId.get(map.curve[0].space);
    const first = () => $("#matrix tbody tr");
    const canvas = () => $("canvas", first());
    const box = canvas().getBoundingClientRect();
    at(canvas(), "mousemove", box.left + 0.5, box.top + 5);
    same($("#tip").hidden, false, "a cell says nothing");
    const page = map.pages.findIndex((one) => one.class !== "own");
    const tile = largest.maps.find((one) => one.page === page);
    same($("#tip b").textContent.endsWith(` ${map.pages[page].number}`), true, "the page's number");
    if (tile) {
      same($("#tip").textContent.includes(`0x${tile.address.toString(16)}`), true, "the address");
      const block = largest.blocks.find((one) => one.address < tile.address + map.pages[page].bytes && one.address + one.bytes > tile.address);
      same(!block || /allocation \d+/.test($("#tip").textContent), true, "the blocks");
    }
    const lent = map.pages.filter((one) => one.lease !== null);
    same($("#tip").textContent.includes("on lease"), lent.length > 0 && map.pages[page].lease !== null, "whether the page is on lease");
    same($("#lent")?.textContent.includes(`${lent.length} page`) ?? false, lent.length > 0, "how many are");
    at(canvas(), "mouseleave", 0, 0);
    same($("#tip").hidden, true, "a pointer that left");

    // Click: the shape's pages light up everywhere, and the inside is its own.
    const last = all("#matrix tbody tr").at(-1);
    const before = pixels($("canvas", last));
    const third = map.spaces[2];
    const row = $(`tr[data-space="${third.id}"]`);
    row.click();
    same(row.classList.contains("picked"), true, "the row that was chosen");
    same(pixels($("canvas", last)) !== before, true, "its pages elsewhere");
    same($("#inside-title").textContent, `Inside ${third.label}`, "the inside");
    same(+$("#inside .give b").dataset.bytes, third.drop_gives_bytes, "what it gives back");
    same($("#picked").hidden, false, "what is chosen");
    same($("#inside .site code").textContent, third.site, "where it was captured");
    same($(".name", row).title, `${third.label}, captured at ${third.site}`, "and beside its name");
    const plot = $("#inside canvas"), where = plot.getBoundingClientRect();
    let seen = new Set();
    for (let x = 1; x < where.width; x += 3) for (let y = 1; y < where.height - 30; y += 6) {
      at(plot, "mousemove", where.left + x, where.top + y);
      const text = $("#tip b")?.textContent;
      if (!$("#tip").hidden && text) seen.add(text.split(":")[0]);
    }
    same([...seen].some((text) => text.startsWith("Allocation ")), true, "a traced block under the pointer");
    at(plot, "mouseleave", 0, 0);
    row.click();
    same($("#picked").hidden, true, "nothing is chosen");
    same(pixels($("canvas", last)), before, "as it was");

    // The curve.
    const curve = $("#curve canvas"), there = curve.getBoundingClientRect();
    at(curve, "mousemove", there.right - 9, there.top + 20);
    same($("#tip b").textContent.startsWith(`${map.curve.length} largest`), true, "the curve's end");
    at(curve, "click", there.right - 9, there.top + 20);
    same(+$("tr.picked").dataset.space, map.curve.at(-1).space, "a click on the curve");

    // Keys.
    key("Escape", document.body);
    same($("tr.picked"), null, "Escape");
    first().focus();
    key("ArrowDown");
    same(document.activeElement, all("#matrix tbody tr")[1], "the next row");
    key("Enter");
    same(document.activeElement.classList.contains("picked"), true, "Enter");
    key("ArrowUp");
    key("ArrowRight");
    same($("#tip").hidden, false, "the first cell by key");
    key("Escape");
    key("/", document.body);
    same(document.activeElement, $("#find"), "find");
    $("#find").value = "Capture.py:77";
    $("#find").dispatchEvent(new Event("input", { bubbles: true }));
    same(all("#matrix tbody tr").map((one) => +one.dataset.space).join(), `${third.id}`, "a row found by where it was captured");
    $("#find").value = "PREFILL 2";
    $("#find").dispatchEvent(new Event("input", { bubbles: true }));
    same(all("#matrix tbody tr").length, map.spaces.filter((space) => (space.label || "").includes("prefill 2")).length, "rows found");
    key("Escape", $("#find"));
    same(all("#matrix tbody tr").length, map.spaces.length, "all rows again");

    // Holders, themes, print.
    const held = all("#holders td[data-bytes]").map((cell) => +cell.dataset.bytes);
    for (const holder of map.holders) same(held.includes(holder.bytes), true, `holder ${holder.name}`);
    same(held.includes(map.executables_bytes), true, "executables");
    const sum = held.reduce((all, n) => all + n, 0);
    same(sum >= map.device_total_bytes && sum <= map.device_total_bytes + map.executables_bytes, true, "the whole device");
    const theme = document.documentElement.dataset.theme;
    const light = getComputedStyle(document.body).backgroundColor;
    $("#theme").click();
    same(document.documentElement.dataset.theme !== theme && getComputedStyle(document.body).backgroundColor !== light, true, "the other theme");
    dispatchEvent(new Event("beforeprint"));
    same(document.documentElement.dataset.theme, "light", "print is light");
    dispatchEvent(new Event("afterprint"));
    $("#theme").click();
    same(document.documentElement.dataset.theme, theme, "back again");
    same(document.documentElement.scrollWidth <= innerWidth, true, "no sideways scrolling");
    same(innerWidth > 640 || $("#matrix").scrollWidth <= $("#matrix").clientWidth, true, "a row fits a narrow screen");
    same(performance.getEntriesByType("resource").length, 0, "requests");
    return rows.length;
  };
  addEventListener("load", () => {
    let rows = 0;
    try {
      rows = probe();
    } catch (error) {
      errors.push(error.stack);
    }
    document.body.append(`PROBE[${errors.length ? errors.slice(0, 6).join("; ") : `ok ${rows} rows, ${checks} checks`}]PROBE`);
  });
}
