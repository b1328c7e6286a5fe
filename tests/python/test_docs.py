"""Documents: examples run, links lead to files and headings, the error catalogue is complete."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGE = DOCS / "python.md"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("bench/*/*.md"), *ROOT.glob("python/*.md")])
QUICKSTARTS = sorted(DOCS.glob("quickstart-*.md"))


def prose(text: str) -> str:
    """Returns a page without its code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def anchors(text: str) -> set[str]:
    """Returns the anchors of a page: headings, as in GitHub and mdBook, and `<a id>`."""
    found: set[str] = set(re.findall(r'<a id="([^"]+)"', text))
    for heading in re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        found.add(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return found


def test_the_examples_run(session) -> None:
    import vmmgraph

    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 5
    names = {"torch": session.torch, "vmmgraph": vmmgraph, "model": lambda x: x, "x": object(), "print": lambda *values: None}
    names |= {"project": lambda x: x, "all_reduce": lambda x: None}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)  # noqa: S102, the page is ours
    called = [entry[0] for entry in session.log]
    # Three pieces have one space.
    assert called.count("torch_group_open") == 4
    assert called.count("torch_replay") == 4
    assert called.count("torch_eager_enter") == called.count("torch_eager_leave_of") == 1
    assert called.count("torch_remote_enter") == called.count("torch_remote_leave") == 1


def test_every_public_name_is_explained() -> None:
    import vmmgraph

    for name in vmmgraph.__all__:
        assert getattr(vmmgraph, name).__doc__, name


def test_links_lead_to_files_and_headings() -> None:
    assert len(PAGES) > 25
    broken, count = [], 0
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text())):
            if re.match(r"[a-z]+:", link):
                continue
            count += 1
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists():
                broken.append(f"{page.relative_to(ROOT)}: {link}: no such file")
            elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text()):
                broken.append(f"{page.relative_to(ROOT)}: {link}: no such heading")
    assert count > 100
    assert not broken, "\n".join(broken)


def test_paths_in_code_exist() -> None:
    """Paths from the root, such as `tests/faults`, except files that a reader writes."""
    tops = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"build", "target"}
    absent, count = [], 0
    for page in {*PAGES} - {*QUICKSTARTS, DOCS / "porting.md"}:
        for name in re.findall(r"`([\w.-]+/[\w./-]*\w)`", page.read_text()):
            if name.split("/")[0] in tops:
                count += 1
                if not (ROOT / name).exists() and not (ROOT / f"{name}.rs").exists():
                    absent.append(f"{page.relative_to(ROOT)}: {name}")
    assert count > 100
    assert not absent, "\n".join(absent)


def test_the_site_has_every_page_once() -> None:
    listed = re.findall(r"\]\(([^)]+)\)", (DOCS / "SUMMARY.md").read_text())
    assert len(listed) == len(set(listed))
    assert {DOCS / name for name in listed} == {path for path in PAGES if DOCS in path.parents and path.name != "SUMMARY.md"}


@pytest.mark.parametrize("page", QUICKSTARTS, ids=lambda page: page.stem)
def test_a_quickstart_has_commands_and_their_output(page: Path) -> None:
    text = page.read_text()
    assert "```sh\n" in text and "```text\n" in text
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_the_program_for_rl_prints_what_its_page_shows() -> None:
    program = (ROOT / "examples/rl/rollout.py").read_text()
    compile(program, "rollout.py", "exec")
    page = (DOCS / "quickstart-rl.md").read_text()
    shown = page.split("```text\n")[1].split("```")[0].splitlines()
    printed = [" True ".join(parts) for parts in re.findall(r'print\("([^"]+)", .*, "([^"]+)"\)', program)]
    assert shown == printed


def test_every_status_is_in_the_catalogue() -> None:
    header = (ROOT / "include/vmmgraph/vmmgraph.h").read_text()
    statuses = {
        (number, name) for name, number in re.findall(r"^#define (VMMGRAPH_OK|VMMGRAPH_ERROR_\w+) (\d+)$", header, re.MULTILINE)
    }
    assert len(statuses) > 20
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", (DOCS / "errors.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(statuses)


def test_every_message_is_in_the_catalogue() -> None:
    catalogue = re.sub(r"\s+", " ", (DOCS / "errors.md").read_text())
    source = (ROOT / "src/error.rs").read_text()
    messages = re.findall(r'#\[error\(\s*"((?:[^"\\]|\\.)*)"', source, re.DOTALL)
    assert len(messages) > 25
    for message in messages:
        # The longest text between two values: "{sentence}" has none.
        fixed = max(re.split(r"\{[^}]*\}", re.sub(r"\\\n\s*", "", message)), key=len).strip()
        assert fixed in catalogue, fixed
