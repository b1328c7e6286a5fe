#!/usr/bin/env python3
"""floor.py OUT: writes link-time stub libraries with the symbols of glibc 2.28 and GCC 8 and
nothing newer.

A manylinux_2_28 wheel must not need newer symbol versions, but a linker takes the newest one. The
stubs have the newest permitted version of each symbol, and no code. Pass OUT to the linker with -L.
floor.c and floor.cpp define newer functions used by current headers and compilers; link both into
every library. A missing function is then an undefined symbol at link time, not a failure on the
user's machine. Needs readelf and a C and a C++ compiler.
"""

import os
import pathlib
import re
import subprocess
import sys

# Versions of manylinux_2_28, as in auditwheel.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
LIBRARIES = ("libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6", "ld-linux-x86-64.so.2")
# Moved into libc.so.6 by glibc 2.34; before, programs had to link these libraries.
MOVED = {
    "libpthread.so.0": re.compile(r"(__)?(pthread|sem)_"),
    "libdl.so.2": re.compile(r"dl(addr1?|close|error|info|mopen|open|sym|vsym)$"),
    "librt.so.1": re.compile(r"(aio|lio|mq|timer)_|shm_(open|unlink)"),
    "libutil.so.1": re.compile(r"(forkpty|login|login_tty|logout|logwtmp|openpty)$"),
}
# Symbols without a default version today, but called by floor.c.
KEPT = {"__xstat64", "__lxstat64", "__fxstat64", "__fxstatat64"}
HERE = pathlib.Path(__file__).resolve().parent


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def number(version):
    """Returns ("GLIBC", (2, 28)) for GLIBC_2.28; None for names without a number, such as
    GLIBC_PRIVATE."""
    found = re.fullmatch(r"([A-Z]+)_(\d+(?:\.\d+)*)", version)
    return found and (found[1], tuple(int(part) for part in found[2].split(".")))


def old_enough(version):
    known = number(version)
    return bool(known) and known[0] in NEWEST and known[1] <= NEWEST[known[0]]


def symbols(library):
    """Returns name -> (kind, [(version, whether it is the default)])."""
    found = {}
    for line in output("readelf", "--dyn-syms", "-W", library).splitlines():
        fields = line.split()
        if len(fields) < 8 or not fields[0].endswith(":") or fields[6] == "UND" or "@" not in fields[7]:
            continue
        name, _, version = fields[7].partition("@")
        found.setdefault(name, (fields[3], []))[1].append((version.lstrip("@"), version.startswith("@")))
    return found


def chosen(library):
    """Returns name -> (kind, version, whether glibc 2.34 moved the symbol to this library)."""
    picked = {}
    for name, (kind, versions) in symbols(library).items():
        old = [version for version, _ in versions if old_enough(version)]
        # A symbol without a default version exists for old programs only.
        if old and (any(default for _, default in versions) or name in KEPT):
            version = max(old, key=lambda each: number(each)[1])
            picked[name] = kind, version, not any(default and version == each for each, default in versions)
    return picked


def write(out, soname, names):
    """Writes a shared library without code that defines these symbols: {name: (kind, version)}."""
    assembly, nodes = [".text"], {}
    for name, (kind, version) in sorted(names.items()):
        shape = {"OBJECT": "object", "TLS": "tls_object"}.get(kind, "function")
        section = ' .section .tbss,"awT",@nobits' if kind == "TLS" else " .text"
        assembly.append(f"{section}\n .globl {name}\n .type {name},@{shape}\n .size {name},8\n{name}: .zero 8")
        nodes.setdefault(version, []).append(name)
    source, script = out / f"{soname}.s", out / f"{soname}.map"
    source.write_text("\n".join(assembly) + '\n .section .note.GNU-stack,"",@progbits\n')
    lines = [f"{version} {{ global: {' '.join(f'{name};' for name in group)} }};" for version, group in nodes.items()]
    script.write_text("\n".join(lines) + "\n")
    versioned = [f"-Wl,--version-script={script}"] if nodes else []
    compiler = os.environ.get("CC", "cc")
    subprocess.run(
        [compiler, "-shared", "-nostdlib", f"-Wl,-soname,{soname}", *versioned, "-o", out / soname, source], check=True
    )


def main(out):
    out = pathlib.Path(out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    cc, cxx = os.environ.get("CC", "cc"), os.environ.get("CXX", "c++")
    moved = {soname: {} for soname in MOVED}
    for soname in LIBRARIES:
        path = output(cc, f"-print-file-name={soname}").strip()
        own = {}
        for name, (kind, version, was_moved) in chosen(path).items():
            home = next(
                (each for each, pattern in MOVED.items() if was_moved and soname == "libc.so.6" and pattern.match(name)), None
            )
            (own if home is None else moved[home])[name] = kind, version
        write(out, soname, own)
    for soname, names in moved.items():
        write(out, soname, names)
    flags = ["-O2", "-fPIC", "-fvisibility=hidden", "-c"]
    subprocess.run([cc, *flags, HERE / "floor.c", "-o", out / "floor_c.o"], check=True)
    subprocess.run([cxx, "-std=c++20", *flags, HERE / "floor.cpp", "-o", out / "floor_cpp.o"], check=True)
    archive = out / "libvmmgraph_floor.a"
    archive.unlink(missing_ok=True)
    subprocess.run(["ar", "rcs", archive, out / "floor_c.o", out / "floor_cpp.o"], check=True)
    # Files a linker finds by -l. libc_nonshared.a has symbols that were never in the shared
    # library, such as atexit.
    nonshared = output(cc, "-print-file-name=libc_nonshared.a").strip()
    group = f"{out}/libc.so.6 {archive} {nonshared} AS_NEEDED ( {out}/ld-linux-x86-64.so.2 )"
    (out / "libc.so").write_text(f"/* GNU ld script */\nGROUP ( {group} )\n")
    (out / "libstdc++.so").write_text(f"/* GNU ld script */\nGROUP ( {out}/libstdc++.so.6 {archive} )\n")
    for name, soname in (("m", "libm.so.6"), ("gcc_s", "libgcc_s.so.1"), *((each[3:].split(".")[0], each) for each in MOVED)):
        (out / f"lib{name}.so").write_text(f"/* GNU ld script */\nINPUT ( {out}/{soname} )\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
