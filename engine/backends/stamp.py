#!/usr/bin/env python3
"""Writes what a build calls itself, and where it installs the CUDA engine's module, so that a program knows the module of its build.

    stamp.py OUT.cpp OUT.d ROOT FOLDER WORDS..

The name is the words (version, compiler, options), and a hash of all that the module and the program share or that the module is made of:
headers of the planner, the engine and the kernels, and sources of the CUDA engine. OUT.d names these files and their folders for Ninja.
"""
import hashlib
import pathlib
import sys

PARTS = [("planner", {".hpp"}), ("engine", {".hpp"}), ("kernels", {".hpp"}), ("kernels/cuda", {".cu", ".cuh"}),
         ("engine/backends/cuda", {".cpp"})]


def main(out, depfile, root, folder, words):
    root = pathlib.Path(root)
    found = {path for part, suffixes in PARTS for path in (root / part).rglob("*") if path.suffix in suffixes}
    files = sorted(found, key=lambda path: path.relative_to(root).as_posix())
    whole = hashlib.sha256()
    for path in files:
        whole.update(path.relative_to(root).as_posix().encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    stamp = " ".join([*words, whole.hexdigest()[:16]])
    pathlib.Path(out).write_text(
        "// What this build calls itself, and where it installs the module.\n#include \"engine/backends/cuda/module.hpp\"\n\n"
        "namespace moe::backends {\n\n"
        f'const char* build_stamp() {{ return "{stamp}"; }}\n'
        f'const char* modules_folder() {{ return "{folder}"; }}\n\n}} // namespace moe::backends\n', encoding="utf-8")
    folders = sorted({str(path.parent) for path in files})
    pathlib.Path(depfile).write_text(f"{out}: " + " ".join([*map(str, files), *folders]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5:])
