#!/usr/bin/env python3
"""standins.py OUT TORCH_LIB FOLDER...: stand-ins to load the libraries of a CUDA torch, also in
Python, without cuBLAS, cuDNN, NCCL, ... (2.5 GB).

For each library that torch's libraries need and that is neither in TORCH_LIB, in a FOLDER nor in
the system, OUT gets a small one with the same SONAME and symbol versions. Its functions print their
name on stderr and abort. Needs readelf, nm and a C compiler. An OUT newer than its inputs is kept.
"""

import os
import pathlib
import re
import subprocess
import sys

HEAD = r"""#include <stdio.h>
#include <stdlib.h>
__attribute__((noinline, noreturn)) static void called(const char* name) {
    fprintf(stderr, "stand-in called: %s of " SONAME "\n", name);
    abort();
}
#define STANDIN(name) void name(void) { called(#name); }
"""


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def needed(library):
    return re.findall(r"\(NEEDED\).*\[(.*)\]", output("readelf", "-dW", library))


def version_owners(library):
    """Library of each symbol version."""
    owners, owner = {}, None
    for line in output("readelf", "-VW", library).splitlines():
        if found := re.search(r"Version: \d+ +File: (\S+)", line):
            owner = found[1]
        elif owner and (found := re.search(r"Name: (\S+) +Flags:", line)):
            owners.setdefault(found[1], owner)
    return owners


def symbols(library, which):
    for line in output("nm", "-D", which, library).splitlines():
        kind, name = line.split()[-2:]
        if kind not in "wv":
            name, _, version = name.partition("@")
            yield name, version.lstrip("@")


def system(name):
    """Found by the dynamic linker."""
    return any((pathlib.Path(folder) / name).exists() for folder in system.folders)


system.folders = {os.path.dirname(path) for path in re.findall(r"=> (/\S+)", output("/sbin/ldconfig", "-p"))} | {"/lib64"}


def closure(roots, folders):
    there, missing, waiting = {}, set(), list(roots)
    while waiting:
        name = waiting.pop()
        if name in there or name in missing or system(name):
            continue
        path = next((folder / name for folder in folders if (folder / name).exists()), None)
        if path is None:
            missing.add(name)
        else:
            there[name] = path
            waiting += needed(path)
    return there, missing


def main(out, torch_lib, *folders):
    out, stamp = pathlib.Path(out), pathlib.Path(out) / "stamp"
    folders = [pathlib.Path(folder) for folder in (torch_lib, *folders)]
    extensions = [name for name in ("libtorch_npu.so",) if any((folder / name).exists() for folder in folders)]
    there, missing = closure(["libtorch.so", "libtorch_python.so", *extensions], folders)
    newest = max(os.stat(path).st_mtime for path in (*there.values(), __file__))
    if stamp.exists() and os.stat(stamp).st_mtime > newest:
        return
    out.mkdir(parents=True, exist_ok=True)
    if not missing:
        stamp.write_text("")
        return
    wanted = {name: {} for name in missing}
    unversioned = set()
    for path in there.values():
        owners = version_owners(path)
        for name, version in symbols(path, "--undefined-only"):
            if not version:
                if not name.startswith(("Py", "_Py")):
                    unversioned.add(name)
            elif owners.get(version) in missing:
                wanted[owners[version]].setdefault(version, set()).add(name)
    for path in there.values():
        unversioned.difference_update(name for name, _ in symbols(path, "--defined-only"))
    # Any library will do: the dynamic linker searches all for an unversioned symbol.
    wanted[min(missing)].setdefault("", set()).update(unversioned)
    for soname, versions in wanted.items():
        source, script = out / (soname + ".c"), out / (soname + ".map")
        names = sorted(name for group in versions.values() for name in group)
        source.write_text(f'#define SONAME "{soname}"\n' + HEAD + "".join(f"STANDIN({name})\n" for name in names))
        nodes = [(version, group) for version, group in versions.items() if version]
        script.write_text("".join(f"{version} {{ global: {'; '.join(sorted(group))}; }};\n" for version, group in nodes))
        versioned = [f"-Wl,--version-script={script}"] if nodes else []
        subprocess.run(
            [
                os.environ.get("CC", "cc"),
                "-shared",
                "-fPIC",
                "-fno-builtin",
                "-w",
                f"-Wl,-soname,{soname}",
                *versioned,
                "-o",
                str(out / soname),
                str(source),
            ],
            check=True,
        )
    stamp.write_text("")
    count = sum(len(group) for versions in wanted.values() for group in versions.values())
    print(f"{len(wanted)} stand-in libraries with {count} functions in {out}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
