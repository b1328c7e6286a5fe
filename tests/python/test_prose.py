"""Style of comments and documents: words without a noun, and line length, per part of the project.

Counts over ``git ls-files``; SKIPPED without a git checkout. Code, string literals, inline code and
code blocks are not counted. Limits may only decrease.
"""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Pronouns and dummies: a reader has to guess the noun.
DUMMIES = re.compile(r"(what|who(ever|se)?|somebody|nobody|anybody|others|another|it|them|those|such|there|here|that)")
#: Limits per 100 words.
MOST_DUMMIES, MOST_WHAT = 3.5, 0.1
#: Limits for all comment words of a group.
MOST_WORDS = {"src": 53_500}
COLUMNS = 100
#: Paths of each group, and the limit for comment and prose lines over `COLUMNS`.
GROUPS: dict[str, tuple[tuple[str, ...], int]] = {
    "src": (("src",), 0),
    "cpp": (("cpp", "include"), 0),
    "python": (("python",), 0),
    "tests": (("tests",), 0),
    "docs": (("docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", ".github"), 0),
    "examples": (("examples", "bench", "benches", "conformance"), 0),
}
C_LIKE = (".rs", ".c", ".cc", ".cpp", ".cu", ".h", ".hpp")
#: Comments of Rust, C and C++. String and character literals are matched first, since comment
#: markers inside literals begin no comment.
TOKENS = re.compile(
    r"""(?P<literal>\bb?r(?P<hashes>\#*)".*?"(?P=hashes)
        |\bR"(?P<mark>[^(\s]*)\(.*?\)(?P=mark)"
        |"(?:\\.|[^"\\])*"
        |'(?:\\.[^'\n]*|[^\\'\n])')
       |(?P<comment>//[^\n]*|/\*.*?\*/)""",
    re.DOTALL | re.VERBOSE,
)
NO_BREAK = re.compile(r"[^\n]")


def c_comments(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yields the number and text of each comment line, and whether the line has no code."""
    rest = TOKENS.sub(lambda one: NO_BREAK.sub(" ", one[0]) if one["comment"] else NO_BREAK.sub("x", one[0]), text)
    code = rest.split("\n")
    for one in TOKENS.finditer(text):
        if one["comment"]:
            first = text.count("\n", 0, one.start())
            for number, line in enumerate(one[0].split("\n"), first):
                yield number, re.sub(r"^\s*(//[/!]?<?|/?\*+[!/]?)|\*/\s*$", "", line), not code[number].strip()


def python_comments(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yields lines as `c_comments` does, of comments and of docstrings."""
    begins = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        row, column = token.start
        if token.type == tokenize.COMMENT:
            yield row - 1, token.string.lstrip("#:!"), not token.line[:column].strip()
        elif token.type == tokenize.STRING and begins and token.string.endswith('"""'):
            for number, line in enumerate(token.string.strip('"').split("\n"), row - 1):
                yield number, line, True
        if token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            begins = True
        elif token.type not in (tokenize.NL, tokenize.COMMENT, tokenize.ENCODING):
            begins = False


def markdown_lines(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yields every line outside indented code blocks. A table line counts as code for its width."""
    blank, block, item = True, False, False
    for number, line in enumerate(text.split("\n")):
        indented = line.startswith("    ")
        block = (block or (blank and not item)) and (indented or not line.strip())
        if not block:
            yield number, line, not line.lstrip().startswith("|")
        blank = not line.strip()
        begins_item = re.match(r"\s*([-*]|\d+\.) ", line) is not None
        if begins_item or (not blank and not line.startswith(" ")):
            item = begins_item


def prose(name: str, text: str) -> list[tuple[int, str, bool]]:
    """Returns number, text and "without code" of each prose line, without code blocks."""
    if name.endswith(".md"):
        found = markdown_lines(text)
    else:
        found = python_comments(text) if name.endswith(".py") else c_comments(text)
    lines, fenced, last = [], False, 0
    for number, line, alone in found:
        # A code block of a comment ends with the comment.
        fenced, last = fenced and (name.endswith(".md") or number == last + 1), number
        if line.lstrip(" >").startswith("```"):
            fenced = not fenced
        elif not fenced:
            lines.append((number, line, alone))
    return lines


def count(name: str, text: str) -> Counter[str]:
    """Returns the words, the dummies, each "what" and the long lines of a file."""
    counts: Counter[str] = Counter()
    whole = text.split("\n")
    for number, line, alone in prose(name, text):
        line = re.sub(r"\]\([^)]*\)", "]", line)
        words = re.findall(r"[a-z']+", re.sub(r"`+[^`]*`+|https?://\S+", " ", line).lower())
        counts["words"] += len(words)
        counts["dummies"] += sum(bool(DUMMIES.fullmatch(word)) for word in words)
        counts["what"] += words.count("what")
        # A link's address cannot be wrapped.
        width = len(re.sub(r"\]\([^)]*\)|https?://\S+", "", whole[number]))
        counts["long"] += alone and width > COLUMNS
    return counts


def problems(name: str, counts: Counter[str], long_lines: int) -> list[str]:
    """Returns a sentence for each exceeded limit."""
    found = []
    for kind, limit in (("dummies", MOST_DUMMIES), ("what", MOST_WHAT)):
        rate = 100 * counts[kind] / max(counts["words"], 1)
        if rate > limit:
            found.append(f"{name}: {rate:.2f} {kind} per 100 words of comments, limit {limit}; name the nouns")
    if counts["long"] > long_lines:
        found.append(f"{name}: {counts['long']} comment lines over {COLUMNS} columns, limit {long_lines}; wrap the lines")
    return found


def tracked(paths: tuple[str, ...]) -> list[str]:
    """Returns the source files and documents below ``paths``. Skips the test without a checkout."""
    try:
        run = subprocess.run(["git", "ls-files", "-z", "--", *paths], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"SKIPPED: git does not run: {error}")
    if run.returncode or not (ROOT / ".git").exists():
        pytest.skip(f"SKIPPED: {ROOT} is no git checkout")
    names = run.stdout.split("\0")
    return [name for name in names if name.endswith((*C_LIKE, ".py", ".md")) and (ROOT / name).is_file()]


@pytest.mark.parametrize("group", GROUPS)
def test_comments_name_their_nouns_and_fit_the_columns(group: str) -> None:
    paths, long_lines = GROUPS[group]
    total: Counter[str] = Counter()
    long = {}
    for name in tracked(paths):
        counts = count(name, (ROOT / name).read_text(encoding="utf8"))
        total += counts
        if counts["long"]:
            long[name] = counts["long"]
    assert 0 < total["words"] <= MOST_WORDS.get(group, total["words"]), f"{group}: {total['words']} words of comments"
    assert not problems(group, total, long_lines), f"files with long lines: {long}"


VAGUE = "Whoever has what others gave it goes there"
LONG = "word " * 21


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.rs", f"/// {VAGUE}\n/// {LONG}\nfn a() {{}}\n"),
        ("a.c", f"int a;  // {VAGUE}\n/*\n * {LONG}\n */\n"),
        ("a.py", f'def a():\n    """{VAGUE}\n\n    {LONG}\n    """\n'),
        ("b.py", f"# {VAGUE}\n# {LONG}\na = 1\n"),
        ("a.md", f"{VAGUE}\n\n{LONG}\n"),
        ("b.md", f"- {VAGUE}\n\n    {LONG}\n"),
    ],
)
def test_vague_and_long_comments_are_found(name: str, text: str) -> None:
    counts = count(name, text)
    assert counts == {"words": 29, "dummies": 5, "what": 1, "long": 1}
    assert len(problems(name, counts, 0)) == 3
    assert len(problems(name, counts, 1)) == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.rs", f'const A: &str = "// {VAGUE}";\nconst B: &str = r#"/* {VAGUE} " {LONG}"#;\nlet c = \'"\'; // One.\n'),
        ("b.rs", f"/// One.\n/// ```\n/// {VAGUE} {LONG}\n/// ```\nfn a<'a>() {{}}\n"),
        ("a.cpp", f"int a = {' + '.join('1' * 60)};  // One.\n"),
        ("a.py", f'a = """{VAGUE}\n{LONG}"""\nb = "# {VAGUE}"  # One.\n'),
        ("a.md", f"One.\n\n```text\n{VAGUE} {LONG}\n```\n"),
        ("b.md", f"One.\n\n    {VAGUE}\n\n    {LONG}\n"),
        ("c.md", f"`{VAGUE}`\n[One](https://example.com/{'a' * 100})\n"),
    ],
)
def test_code_strings_and_addresses_are_not_counted(name: str, text: str) -> None:
    counts = count(name, text)
    assert counts == {"words": 1, "dummies": 0, "what": 0, "long": 0}
    assert problems(name, counts, 0) == []
