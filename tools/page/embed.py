#!/usr/bin/env python3
"""Assembles the page from its parts into one HTML document, as a C++ source file that holds its bytes.

    embed.py OUT.cpp page.html STYLE.css.. SCRIPT.js..

Scripts become one module, in the order given: a module may import what a module before it exports, so that the lines
of import and the words export fall away. Style and script stand in the content security policy by their hashes.
"""
import base64
import hashlib
import pathlib
import re
import sys


def joined(paths):
    """One text of modules, each of which imports from earlier ones alone; names of all modules differ."""
    seen, owners, parts = set(), {}, []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        for source in re.findall(r'^import .* from "\./(.+)";$', text, re.MULTILINE):
            if source not in seen:
                sys.exit(f"{path}: imports {source}, which does not stand before it")
        seen.add(path.name)
        text = re.sub(r'^import [^;]* from "[^"]*";\n', "", text, flags=re.MULTILINE)
        text = re.sub(r"^export (?=function|const|let|class|async)", "", text, flags=re.MULTILINE)
        for name in re.findall(r"^(?:async )?(?:function|const|let|class) ([A-Za-z_$][\w$]*)", text, re.MULTILINE):
            if name in owners:
                sys.exit(f"{path}: {name} is declared in {owners[name]} as well")
            owners[name] = path.name
        parts.append(text)
    return "\n".join(parts)


def policy_hash(text):
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def main():
    out, document, *parts = map(pathlib.Path, sys.argv[1:])
    style = "\n".join(path.read_text(encoding="utf-8") for path in parts if path.suffix == ".css")
    script = joined([path for path in parts if path.suffix == ".js"])
    html = document.read_text(encoding="utf-8")
    for mark, text in {"STYLE_HASH": policy_hash(style), "SCRIPT_HASH": policy_hash(script), "STYLE": style, "SCRIPT": script}.items():
        html = html.replace(f"@{mark}@", text)
    # Long strings are beyond what C++ promises to take, arrays are not.
    rows = html.encode()
    lines = [",".join(map(str, rows[at : at + 64])) for at in range(0, len(rows), 64)]
    out.write_text(
        '#include "tools/page/page_document.hpp"\n\nnamespace moe::tools {\n\nnamespace {\nconst unsigned char bytes[] = {\n'
        + ",\n".join(lines)
        + "};\n}\n\nstd::string_view page_document() { return {reinterpret_cast<const char*>(bytes), sizeof bytes}; }\n\n"
        + "} // namespace moe::tools\n"
    )


main()
