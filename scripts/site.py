#!/usr/bin/env python3
"""site.py FOLDER: completes the site built by mdBook in FOLDER, and checks its links.

Shows linked files outside docs/ as pages under FOLDER/source; a linked folder gets a page with its
file names. Exits with 1 and a list if links are broken.
"""

import html
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r'(?<=\s)(href|src)="([^"#?:]*)(#[^"]*)?"')


def page(name, body):
    """Returns a web page with a file name as its title."""
    title = html.escape(str(name))
    return f'<!DOCTYPE html><meta charset="utf-8"><title>{title}</title><h1>{title}</h1>{body}'


def source(path, site):
    """Writes a page for a file or folder of the repository. Returns the page; None without a file."""
    # mdBook makes X.html of a link to X.md.
    there = next((one for one in (path, path.with_suffix(".md")) if one.exists()), None)
    if there is None or ROOT not in there.parents:
        return None
    copy = site / "source" / there.relative_to(ROOT)
    if there.is_file():
        copy = copy.with_name(f"{copy.name}.html")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(page(there.relative_to(ROOT), f"<pre>{html.escape(there.read_text())}</pre>"))
        return copy
    listed = subprocess.run(["git", "-C", there, "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines()
    for name in listed:
        source(there / name, site)
    copy.mkdir(parents=True, exist_ok=True)
    rows = "".join(f'<li><a href="{html.escape(name)}.html">{html.escape(name)}</a></li>' for name in listed)
    (copy / "index.html").write_text(page(there.relative_to(ROOT), f"<ul>{rows}</ul>"))
    return copy / "index.html"


def main(site):
    broken = []
    anchors = {}
    # The Rust reference in rust/ checks its own links.
    pages = [
        one
        for one in sorted(site.rglob("*.html"))
        if one.name not in ("404.html", "print.html", "toc.html") and one.relative_to(site).parts[0] != "rust"
    ]
    for one in pages:
        anchors[one] = set(re.findall(r'\bid="([^"]+)"', one.read_text()))
    for one in pages:

        def checked(link, one=one):
            name, anchor = unquote(link[2]), link[3] or ""
            target = Path(os.path.normpath(one.parent / name)) if name else one
            if target.is_dir() and (target / "index.html").exists():
                target /= "index.html"
            if target.exists():
                if anchor[1:] and target in anchors and unquote(anchor[1:]) not in anchors[target]:
                    broken.append(f"{one.relative_to(site)}: {name}{anchor}: no such heading")
                return link[0]
            copy = source(Path(os.path.normpath(ROOT / "docs" / one.parent.relative_to(site) / name)), site)
            if copy is None:
                broken.append(f"{one.relative_to(site)}: {name}: no such file")
                return link[0]
            return f'{link[1]}="{os.path.relpath(copy, one.parent)}{anchor}"'

        one.write_text(LINK.sub(checked, one.read_text()))
    print("\n".join(broken) or f"{len(pages)} pages in {site}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
