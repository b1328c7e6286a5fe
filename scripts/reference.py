#!/usr/bin/env python3
"""reference.py FOLDER: writes the reference of C, C++ and Python into a copy of docs/ in FOLDER.

Reads include/vmmgraph and python/vmmgraph without importing or compiling anything. Adds the pages
to the part Reference of SUMMARY.md. `make docs` copies the Rust reference beside the site.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INCLUDE = ROOT / "include/vmmgraph"
PACKAGE = ROOT / "python/vmmgraph"
PAGES = {
    "reference-c.md": "C",
    "reference-cpp.md": "C++",
    "reference-python.md": "Python",
    "reference-rust.md": "Rust",
}
RUST = """# Rust

[The reference of the crate](rust/vmmgraph/index.html) is made by `cargo doc`. The functions of the C
interface are on [the page of C](reference-c.md).
"""


def prose(lines):
    """Returns comment lines as Markdown: identifiers as code, an indented block as a code block."""
    text, block = [], []
    for line in [*lines, None]:
        if line is not None and (line.startswith("  ") or (block and not line)):
            block.append(line[2:])
            continue
        if block and block[0].startswith("- "):
            text += ["", *block]
        elif block:
            text += ["", "```cpp", *"\n".join(block).strip("\n").split("\n"), "```", ""]
        block = []
        text.append(line or "")
    whole = "\n".join(text).strip()
    parts = re.split(r"(```cpp.*?```|`[^`\n]+`)", whole, flags=re.DOTALL)
    for number in range(0, len(parts), 2):
        part = parts[number].replace("<", "&lt;").replace("*", "\\*")
        parts[number] = re.sub(
            r"\b((?:\w+::)+\w+(?:\(\))?|\w*[a-z0-9]_\w+(?:\(\))?|[A-Z][A-Z0-9]*_[A-Z0-9_]+|\w+\(\))(?!\w)", r"`\1`", part
        )
    return "".join(parts)


def code(text, language):
    return f"```{language}\n{text}\n```\n"


# ---- C


def c_items(text):
    """Yields comment lines and code of each declaration, separated by empty lines."""
    for part in re.split(r"\n\n+", text):
        lines = part.split("\n")
        comment = [line[2:].removeprefix(" ") for line in lines if line.startswith("//")]
        body = "\n".join(line for line in lines if not line.startswith("//"))
        if body and not re.fullmatch(r"typedef struct (\w+) \1;|#define VMMGRAPH_VERSION_.*", body, re.DOTALL):
            yield comment, body.replace("VMMGRAPH_API\n", "").replace("VMMGRAPH_API ", "")


def c_page():
    header = (INCLUDE / "vmmgraph.h").read_text()
    opening = re.match(r"/\*\n(.*?)\*/", header, re.DOTALL)[1]
    conventions = [re.sub(r"^ \* ?", "", line) for line in opening.splitlines()][4:]
    conventions = [
        prose([re.sub(r"^  (?=- )", "", line)]) if line[:4].strip() else f"  {prose([line.strip()])}" for line in conventions
    ]
    conventions = [f"\n**{line}**\n" if re.fullmatch(r"[A-Z]\w*(,.*)?", line) else line for line in conventions]
    numbers, types, functions = {}, [], {}
    handles = set(re.findall(r"^typedef struct \w+ \*vmmgraph_(\w+)_t;$", header, re.MULTILINE))
    for comment, body in c_items(header[header.index("// Version of the C ABI") :]):
        if define := re.fullmatch(r"#define (VMMGRAPH_(\w+?)_?\w*) (\S+)", body):
            group = re.match(r"VMMGRAPH_[A-Z]+", define[1])[0]
            numbers.setdefault(group, []).append(f"| `{define[1]}` | {define[3]} | {' '.join(prose(comment).split())} |")
        elif function := re.search(r"\bvmmgraph_(\w+)\(", body) if not body.startswith("typedef") else None:
            name = function[1]
            noun = max((one for one in handles if name.startswith(f"{one}_")), key=len, default="general")
            functions.setdefault(noun, []).append((f"vmmgraph_{name}", comment, body))
        elif name := re.search(r"(?:\*|\} |\b)(vmmgraph_\w+)(\)\(.*\))?;$", body, re.DOTALL):
            types.append((name[1], comment, body))
    page = ["# C", "", "One header: `#include <vmmgraph/vmmgraph.h>`. Written from its comments.", "", "## Conventions", ""]
    page += conventions
    page += ["", "## Functions", ""]
    page += [f"- [{noun}](#functions-{noun}): {len(members)}" for noun, members in functions.items()]
    for noun, members in functions.items():
        page += ["", f"### Functions: {noun}", ""]
        for name, comment, body in members:
            page += [f"#### {name}", "", code(body, "c"), prose(comment).replace("\nArguments:\n", "\n*Arguments:* "), ""]
    page += ["", "## Types", ""]
    for name, comment, body in types:
        page += [f"### {name}", "", *([prose(comment), ""] if comment else []), code(body, "c")]
    page += ["", "## Numbers", ""]
    for group, rows in numbers.items():
        page += [f"### {group}", "", "| name | value | meaning |", "|---|---|---|", *rows, ""]
    return "\n".join(page), sum(map(len, functions.values()))


# ---- C++


def scan(lines):
    """Yields (comment, declaration, body) of one scope. The body has the text between the braces."""
    comment, text, depth, start = [], "", 0, None
    for number, line in enumerate(lines):
        stripped = line.strip()
        if not text:
            if stripped.startswith("//"):
                comment.append(stripped[2:].removeprefix(" "))
                continue
            if not stripped or stripped.startswith("#") or re.fullmatch(r"(public|private|protected):", stripped):
                if re.fullmatch(r"(public|private|protected):", stripped):
                    yield [], stripped, []
                comment = []
                continue
        bare = re.sub(r'"(\\.|[^"\\])*"|\'(\\.|[^\'\\])\'', '""', line)
        bare = re.sub(r"\s*//.*", "", bare)
        for sign in bare:
            if sign == "{" and depth == 0:
                start = start if start is not None else number
            depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(sign, 0)
        text += ("\n" if text else "") + re.sub(r"\s*//.*", "", line)
        ended = bare.rstrip().endswith((";", "}"))
        following = lines[number + 1].strip() if number + 1 < len(lines) else ""
        if depth == 0 and ended and not following.startswith(("{", ", ")) and not text.rstrip().endswith(","):
            body = lines[start + 1 : number] if start is not None and number > start else []
            yield comment, text, body
            comment, text, start = [], "", None


def signature(text):
    """Returns a declaration without its body, initialisers and attributes."""
    depth, end = 0, len(text)
    for at, sign in enumerate(text):
        depth += {"(": 1, ")": -1}.get(sign, 0)
        if depth == 0 and (
            sign == "{" or (sign == ":" and text[:at].rstrip().endswith((")", "noexcept")) and text[at + 1] != ":")
        ):
            end = at
            break
    short = re.sub(r"\[\[nodiscard\]\] |\binline |VMMGRAPH_API |\bexplicit (?=operator)", "", text[:end]).rstrip()
    indent = len(short) - len(short.lstrip())
    short = re.sub(rf"(?m)^ {{0,{indent}}}", "", short)
    return short if short.endswith(";") else f"{short};"


def cpp_scope(lines, level):
    """Returns the Markdown of the public declarations of a namespace or class."""
    page, public = [], True
    for comment, text, body in scan(lines):
        first = text.strip()
        if re.fullmatch(r"(public|private|protected):", first):
            public = first == "public:"
            continue
        if not public or first.startswith(("friend ", "namespace detail", "extern ", "template class", "static_assert")):
            continue
        if space := re.match(r"namespace ([\w:]+) \{", first):
            inner = cpp_scope(body, level)
            page += [f"{'#' * level} namespace {space[1]}", "", *inner] if space[1] != "vmmgraph" and inner else inner
            continue
        if kind := re.match(r"(?:template <.*?>\s*)?(?:class|struct) (?:VMMGRAPH_API )?(\w+)[^;]*?\{", first, re.DOTALL):
            page += [f"{'#' * level} {kind[1]}", "", prose(comment), "", code(signature(text), "cpp")]
            default = re.match(r"(template <.*?>\s*)?class", first, re.DOTALL)
            page += members(["private:" if default else "public:", *body])
            continue
        if not comment:
            continue
        if kind := re.match(r"enum class (\w+)", first):
            page += [
                f"{'#' * level} {kind[1]}",
                "",
                prose(comment),
                "",
                code("\n".join([text.split("\n")[0], *body, "};"]) if body else text, "cpp"),
            ]
        else:
            page += [code(signature(text), "cpp"), prose(comment), ""]
    return page


def members(lines):
    """Returns the public members of a class: one list entry for each, with its first sentence."""
    page, public = [], True
    for comment, text, _ in scan(lines):
        first = text.strip()
        if re.fullmatch(r"(public|private|protected):", first):
            public = first == "public:"
            continue
        if (
            not public
            or "= delete" in first
            or "~" in first
            or "operator=" in first
            or first.startswith(("friend ", "template class"))
        ):
            continue
        short = " ".join(signature(text).split())
        said = re.match(r".*?\.(?=\s|$)", " ".join(prose(comment).split()))
        page.append(f"- `` {short} ``" + (f"<br>{said[0]}" if said else ""))
    return [*page, ""]


def cpp_page():
    page = [
        "# C++",
        "",
        "C++17 headers over [the C functions](reference-c.md). Members have the first sentence of their comment.",
        "",
    ]
    order = [
        "vmmgraph",
        "base",
        "device",
        "arena",
        "region",
        "elastic",
        "blocks",
        "lease",
        "ring",
        "share",
        "plan",
        "dispatch",
        "policies",
    ]
    order += ["torch", "torch_region", "torch_elastic", "torch_eager", "inputs", "engine", "callback", "torch_npu"]
    found = {path.stem for path in INCLUDE.glob("*.hpp")}
    assert found == set(order), f"reference.py lists other headers: {found ^ set(order)}"
    for name in order:
        lines = (INCLUDE / f"{name}.hpp").read_text().split("\n")
        opening = []
        while lines and lines[0].startswith("//"):
            opening.append(lines.pop(0)[2:].removeprefix(" "))
        page += [f"## vmmgraph/{name}.hpp", "", prose(opening), "", *cpp_scope(lines, 3)]
    return "\n".join(page)


# ---- Python


def docstring(node):
    return re.sub(r":\w+:`", "`", (ast.get_docstring(node) or "").replace("<", "&lt;").replace("``", "`"))


def python_function(node, name, method=False):
    arguments = node.args
    if method and arguments.args:
        arguments.args = arguments.args[1:]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    text = ast.unparse(arguments)
    if len(text) > 80:
        # One argument a line: commas outside brackets.
        text = "\n    " + re.sub(r", (?=[\w*])(?![^\[(]*[\])])", ",\n    ", text) + ",\n"
    return f"{name}({text}){returns}"


def definition(path, name):
    """Returns the node that defines a name of a file, following imports within its folder."""
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            for alias in node.names:
                if (alias.asname or alias.name) == name and node.module:
                    return definition(path.parent / f"{node.module}.py", alias.name)
    return None


def exported(tree):
    """Returns `__all__`, or the public functions and classes of a module without one."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return ast.literal_eval(node.value)
    return [
        node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
    ]


def python_page():
    page = ["# Python", "", "[Python package](python.md) explains the use. Written from the docstrings.", ""]
    modules = {
        "vmmgraph": "__init__.py",
        "vmmgraph.memory_saver": "memory_saver/__init__.py",
        "vmmgraph.sharing": "sharing.py",
    }
    for title, file in modules.items():
        tree = ast.parse((PACKAGE / file).read_text())
        page += [f"## {title}", "", docstring(tree), ""]
        for name in exported(tree):
            node = definition(PACKAGE / file, name)
            if node is None:
                continue
            page += [f"### {title}.{name}", ""]
            if isinstance(node, ast.FunctionDef):
                page += [code(python_function(node, name), "python"), docstring(node), ""]
                continue
            functions = [one for one in node.body if isinstance(one, ast.FunctionDef)]
            made = next((python_function(one, name, True) for one in functions if one.name == "__init__"), name)
            page += [code(f"class {made}".removesuffix(" -> None"), "python"), docstring(node), ""]
            for one in functions:
                if not one.name.startswith("_"):
                    shown = (
                        one.name
                        if any(ast.unparse(by) == "property" for by in one.decorator_list)
                        else python_function(one, one.name, True)
                    )
                    page += [
                        f"- `` {' '.join(shown.split())} ``"
                        + (f"<br>{' '.join(docstring(one).split())}" if docstring(one) else "")
                    ]
            page += [""]
    return "\n".join(page)


def main(folder):
    c, count = c_page()
    for name, text in zip(PAGES, (c, cpp_page(), python_page(), RUST), strict=True):
        (folder / name).write_text(text)
    summary = folder / "SUMMARY.md"
    entries = "".join(f"- [{title}]({name})\n" for name, title in PAGES.items())
    summary.write_text(summary.read_text().replace("# Reference\n\n", f"# Reference\n\n{entries}", 1))
    print(f"{count} C functions, {', '.join(PAGES)} in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
