"""Link libraries of an older system, made from this one's, so that a wheel built here loads there.

    python stubs.py FOLDER [--cxx g++]     writes FOLDER, prints what to link in place of the default ones

glibc and libstdc++ keep the older versions of their symbols.  Each stub holds the names of one library, every
name at its newest version that manylinux_2_28 has, and no code: it is linked against, never loaded.  The
few functions that libstdc++ got later come from the compiler's own `libstdc++.a`, as in the compilers that
build torch.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
"""The newest symbol versions of manylinux_2_28."""

SOURCES = {
    "libstdc++.so.6": ("libstdc++.so.6",),
    "libm.so.6": ("libm.so.6",),
    "libc.so.6": ("libc.so.6", "libpthread.so.0", "libdl.so.2"),
}
SPLIT = {"libdl.so.2": re.compile(r"dl[a-z]"), "libpthread.so.0": re.compile(r"pthread_|sem_")}
"""Libraries of their own until glibc 2.34, and the names that they had."""

# Headers of glibc 2.32 and later read it to leave out atomic instructions.  Threads are always there.
SINGLE_THREADED = """
.data
.hidden __libc_single_threaded
.globl __libc_single_threaded
.type __libc_single_threaded, %object
.size __libc_single_threaded, 1
__libc_single_threaded: .byte 0
.section .note.GNU-stack,"",%progbits
"""


def version_key(version: str) -> tuple[str, tuple[int, ...]] | None:
    """Family and numbers of a symbol version such as ``GLIBC_2.28``; None for private ones."""
    match = re.fullmatch(r"([A-Z]+)_([0-9.]+)", version)
    return (match[1], tuple(int(n) for n in match[2].split("."))) if match else None


def symbols(library: Path, nm: str) -> Iterator[tuple[str, str, str]]:
    """Name, kind and version of each symbol of a library whose version is old enough."""
    lines = subprocess.check_output(
        [nm, "-D", "--defined-only", "--with-symbol-versions", library], text=True
    ).splitlines()
    for line in lines:
        kind, versioned = line.split()[-2:]
        name, _, version = versioned.partition("@")
        key = version_key(version.lstrip("@"))
        if kind != "A" and key is not None and key[0] in NEWEST and key[1] <= NEWEST[key[0]]:
            yield name, "object" if kind in "BDRVuG" else "function", version.lstrip("@")


def newest(found: Iterator[tuple[str, str, str]]) -> dict[str, tuple[str, str]]:
    """Kind and newest version by name."""
    chosen: dict[str, tuple[str, str]] = {}
    for name, kind, version in found:
        known = chosen.get(name)
        if known is None or (version_key(known[1]) or ("", ())) < (version_key(version) or ("", ())):
            chosen[name] = (kind, version)
    return chosen


def write_stub(file: Path, names: dict[str, tuple[str, str]], cxx: str) -> None:
    """Writes a library that defines the names, each at its version."""
    assembly = file.with_suffix(".s")
    text = ["".join(f".globl {n}\n.type {n}, %{kind}\n{n}:\n" for n, (kind, _) in names.items())]
    assembly.write_text("\n".join([".text", *text, '.section .note.GNU-stack,"",%progbits', ""]))
    script = file.with_suffix(".map")
    versions = sorted({version for _, version in names.values()}, key=lambda v: version_key(v) or ("", ()))
    nodes = [
        f"{v} {{ global: {' '.join(f'{chr(34)}{n}{chr(34)};' for n, (_, w) in names.items() if w == v)} }};"
        for v in versions
    ]
    script.write_text("\n".join(nodes) + "\n")
    link = ["-shared", "-nostdlib", f"-Wl,-soname,{file.name}", f"-Wl,--version-script={script}"]
    subprocess.check_call([cxx, *link, "-o", file, assembly])


def build(folder: Path, cxx: str) -> list[Path]:
    """Writes the stubs; returns what to link, in order, with ``-nodefaultlibs``."""

    def ask(option: str) -> str:
        return subprocess.check_output([cxx, option], text=True).strip()

    folder.mkdir(parents=True, exist_ok=True)
    nm = ask("-print-prog-name=nm")
    for stub, sources in SOURCES.items():
        files = [Path(ask(f"-print-file-name={source}")) for source in sources]
        names = newest(entry for file in files if file.is_absolute() for entry in symbols(file, nm))
        for part, pattern in SPLIT.items() if stub == "libc.so.6" else ():
            write_stub(folder / part, {n: v for n, v in names.items() if pattern.match(n)}, cxx)
            names = {n: v for n, v in names.items() if not pattern.match(n)}
        write_stub(folder / stub, names, cxx)
    threaded = folder / "single_threaded.s"
    threaded.write_text(SINGLE_THREADED)
    subprocess.check_call([cxx, "-c", "-o", threaded.with_suffix(".o"), threaded])
    loader = Path(
        ask(
            "-print-file-name="
            + ("ld-linux-aarch64.so.1" if "aarch64" in ask("-dumpmachine") else "ld-linux-x86-64.so.2")
        )
    )
    names = ["libgcc_s.so.1", "libgcc.a", "libc_nonshared.a"]
    return [
        threaded.with_suffix(".o"),
        folder / "libstdc++.so.6",
        Path(ask("-print-file-name=libstdc++.a")),
        *(folder / name for name in ("libm.so.6", "libdl.so.2", "libpthread.so.0", "libc.so.6")),
        *(path for path in [loader] if path.is_absolute()),
        *(Path(ask(f"-print-file-name={name}")) for name in names),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cxx", default="g++")
    options = parser.parse_args()
    print(";".join(str(path) for path in build(options.folder.resolve(), options.cxx)))
