#!/usr/bin/env python3
"""plot.py [--check]: draws h200-shootout.svg and h200-memory.svg from
docs/performance/h200-shootout.json, in the same folder, and writes the table of
docs/performance.md. --check fails if the existing files differ."""

import json
import math
import pathlib
import sys

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "docs" / "performance"
WAYS = {
    "eager": "eager, no graphs",
    "private": "private pool per graph",
    "shared": "one shared pool",
    "shared_expandable": "shared, expandable",
    "published": "published design",
    "mempool": "VmmGraph, MemPool route",
    "blocks": "VmmGraph, blocks route",
}
ORDERS = ("descending", "ascending", "random")
LEFT, RIGHT, ROW, WIDTH = 190, 80, 24, 860
# Middle tones without a background: readable on white and on black.
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #79828c }
  .title { font-weight: 600; font-size: 13px }
  .value { font-size: 11px }
  .grid { stroke: #8b949e; stroke-opacity: .3 }
  .floor { stroke: #d1543f; stroke-width: 1.5; stroke-dasharray: 5 3 }
  .floor-text { fill: #d1543f }
  .span, .mark { stroke: #87888a }
  .mark { fill: #87888a }
  .ours { stroke: #2f81d8; fill: #2f81d8 }
  .hollow { fill: none; stroke-width: 2 }
"""


def marker(order, x, y, ours):
    look = "mark ours" if ours else "mark"
    if order == "descending":
        return f'<circle class="{look}" cx="{x:.1f}" cy="{y}" r="4.5"/>'
    if order == "ascending":
        return f'<circle class="{look} hollow" cx="{x:.1f}" cy="{y}" r="6.5"/>'
    return f'<path class="{look} hollow" d="M{x - 5:.1f} {y - 5}L{x + 5:.1f} {y + 5}M{x - 5:.1f} {y + 5}L{x + 5:.1f} {y - 5}"/>'


def panel(top, title, rows, field, ticks, logarithmic, unit, floor=None):
    """Draws one chart: a line for each way, a mark for each order. Returns the chart's lines and
    its bottom coordinate."""
    low, high = ticks[0], ticks[-1]

    def at(value):
        share = math.log(value / low) / math.log(high / low) if logarithmic else (value - low) / (high - low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    ways = [way for way in WAYS if any(row["way"] == way and row[field] is not None for row in rows)]
    first = top + (46 if floor else 34)
    bottom = first + ROW * len(ways)
    lines = [f'<text class="title" x="{LEFT}" y="{top + 12}">{title}</text>']
    for tick in ticks:
        lines.append(f'<line class="grid" x1="{at(tick):.1f}" y1="{first - 8}" x2="{at(tick):.1f}" y2="{bottom}"/>')
        lines.append(f'<text x="{at(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{tick:,}</text>')
    lines.append(f'<text x="{WIDTH - RIGHT + 30}" y="{bottom + 16}">{unit}</text>')
    for index, way in enumerate(ways):
        y, ours = first + ROW * index + 8, way in ("mempool", "blocks")
        values = {row["order"]: row[field] for row in rows if row["way"] == way and row[field] is not None}
        lines.append(f'<text x="{LEFT - 12}" y="{y + 4}" text-anchor="end">{WAYS[way]}</text>')
        lines.append(
            f'<line class="span{" ours" if ours else ""}" x1="{at(min(values.values())):.1f}" y1="{y}" '
            f'x2="{at(max(values.values())):.1f}" y2="{y}"/>'
        )
        lines += [marker(order, at(values[order]), y, ours) for order in ORDERS if order in values]
        ends = sorted({min(values.values()), max(values.values())})
        label = " to ".join(f"{end:,.0f}" if unit == "MiB" else f"{end:.2f}" for end in ends)
        lines.append(f'<text class="value" x="{at(ends[-1]) + 12:.1f}" y="{y + 4}">{label}</text>')
    if floor:
        x = at(min(floor))
        label = " to ".join(f"{value:,.0f}" for value in sorted({min(floor), max(floor)}))
        lines.append(f'<line class="floor" x1="{x:.1f}" y1="{first - 8}" x2="{x:.1f}" y2="{bottom}"/>')
        lines.append(f'<text class="floor-text" x="{x:.1f}" y="{first - 12}" text-anchor="middle">floor {label}</text>')
    return lines, bottom + 34


def draw(rows):
    sets = {name: [row for row in rows if row["set"] == name] for name in ("mixed", "decode")}
    body, end = [], 34
    names = {"mixed": "65 shapes (51 decode, 14 prefill)", "decode": "51 decode shapes"}
    scales = {"mixed": (1000, 2000, 5000, 10000, 20000), "decode": (400, 1000, 2000, 5000, 10000, 20000)}
    for name, chosen in sets.items():
        title = f"Physical memory behind {names[name]}, logarithmic"
        floor = [row["floor_mib"] for row in chosen]
        lines, end = panel(end, title, chosen, "physical_mib", scales[name], True, "MiB", floor)
        body += lines
    for name, chosen in sets.items():
        title = f"Time to capture {names[name]}"
        lines, end = panel(end, title, chosen, "capture_s", (0, 0.5, 1, 1.5), False, "s")
        body += lines
    legend = []
    for index, order in enumerate(ORDERS):
        x = LEFT + 8 + 150 * index
        legend += [marker(order, x, 14, False), f'<text x="{x + 14}" y="18">{order} sizes</text>']
    what = f"{rows[0]['gpu']}, torch {rows[0]['torch_built_for']}: memory and capture time of each way to capture the same model"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {end}" width="{WIDTH}" height="{end}" role="img">',
            f"<title>{what}</title>",
            f"<style>{STYLE}</style>",
            *legend,
            *body,
            "</svg>",
            "",
        ]
    )


#: Ways of the bar chart in README.md, which are those that engines use today.
BARS = {
    "shared": "one shared pool",
    "shared_expandable": "shared pool, expandable segments",
    "published": "published design (xLLM's allocator)",
    "blocks": "VmmGraph",
}


def bars(rows):
    """Draws the memory of 65 shapes: a bar up to the best order of capture, a pale one up to the
    worst."""
    rows = [row for row in rows if row["set"] == "mixed"]
    left, scale, end = 250, (WIDTH - 250 - 150) / 7000, 34 * (len(BARS) + 1)
    lines = []
    values = {label: sorted({row["physical_mib"] for row in rows if row["way"] == way}) for way, label in BARS.items()}
    values["minimum: the largest graph alone"] = [max(row["floor_mib"] for row in rows if row["way"] == "blocks")]
    for index, (label, found) in enumerate(values.items()):
        y, look = 34 * index + 6, "ours" if label == "VmmGraph" else "least" if ":" in label else "bar"
        text = " to ".join(f"{value:,.0f}" for value in dict.fromkeys((found[0], found[-1])))
        lines.append(f'<text x="{left - 12}" y="{y + 15}" text-anchor="end">{label}</text>')
        if len(found) > 1:
            lines.append(f'<rect class="{look} worst" x="{left}" y="{y}" width="{found[-1] * scale:.1f}" height="22"/>')
        lines.append(f'<rect class="{look}" x="{left}" y="{y}" width="{found[0] * scale:.1f}" height="22"/>')
        lines.append(f'<text x="{left + found[-1] * scale + 8:.1f}" y="{y + 15}">{text} MiB</text>')
    style = "\n  .bar { fill: #87888a }\n  .worst { fill-opacity: .4 }\n  .ours { fill: #2f81d8 }\n  .least { fill: #d1543f }\n"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {end}" width="{WIDTH}" height="{end}" role="img">',
            f"<title>{rows[0]['gpu']}, torch {rows[0]['torch_built_for']}: memory of 65 captured graphs, each way</title>",
            f"<style>{STYLE.split('.title')[0].rstrip()}{style}</style>",
            *lines,
            "</svg>",
            "",
        ]
    )


def table(rows):
    lines = [
        "| set | way | order | MiB | x floor | capture s | driver calls | replay d64 ms | p2048 ms | wrong of |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:

        def cell(key, form, row=row):
            return "-" if row.get(key) is None else format(row[key], form)

        way = row["way"].replace("_", ", ")
        lines.append(
            f"| {row['set']} | {way} | {row['order']} | {cell('physical_mib', '.0f')} | {cell('ratio', '.2f')} | "
            f"{cell('capture_s', '.3f')} | {cell('driver_calls', 'd')} | {cell('replay_ms_d64', '.3f')} | "
            f"{cell('replay_ms_p2048', '.2f')} | {row['wrong_replays']} of {row['replays_checked']} |"
        )
    return "\n".join(lines)


def main():
    rows = json.loads((FOLDER / "h200-shootout.json").read_text())
    page = FOLDER.parent / "performance.md"
    before, rest = page.read_text().split("<!-- shootout -->\n")
    text = f"{before}<!-- shootout -->\n{table(rows)}\n\n<!-- end -->{rest.split('<!-- end -->')[1]}"
    made = {FOLDER / "h200-shootout.svg": draw(rows), FOLDER / "h200-memory.svg": bars(rows), page: text}
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    for path, content in made.items():
        if not sys.argv[1:]:
            path.write_text(content)
        elif path.read_text() != content:
            sys.exit(f"{path.name} is not what plot.py makes of h200-shootout.json: run bench/shootout/plot.py")


if __name__ == "__main__":
    main()
