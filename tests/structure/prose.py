#!/usr/bin/env python3
"""Reports long sentences, long lines, broken relative links and files that are gone in the project's documents.

Usage: prose.py [ROOT]. Exit status 1 when there are any, each on a line as PATH:LINE: WHAT.

Sentences and lines are counted in README.md, every folder's README.md, CONTRIBUTING.md, SECURITY.md,
docs/architecture.md, docs/glossary.md, docs/guide/ and docs/reference/. Links are followed in every Markdown file of the tree, and files that code
spans name are looked for in all but CHANGELOG.md, which tells of old ones.
What counts:
  text      everything but fenced code, indented code (four spaces behind an empty line), HTML comments and table rows
            (lines that begin with "|")
  line      a line of text, of at most 140 characters as they stand in the file, the target of a link included
  sentence  a part of a heading, a paragraph or a list item that ends with ".", "!" or "?" before a space, or with the block;
            an abbreviation such as "e.g." ends none; at most 40 words
  word      what stands between spaces and holds a letter or a digit; a code span is one word, a link is its text
  link      [text](target) and [name]: target outside of code, table rows included; a target without a scheme names a file
            or folder relative to the document, and what follows "#" names a heading of a Markdown file
  file      a code span outside of code blocks that is a path with an ending below a folder of the sources, such as
            `planner/plan/plan.hpp`
"""
import pathlib
import re
import sys

from counts import print_counts

MOST_WORDS, MOST_CHARACTERS = 40, 140
ABBREVIATIONS = {"e.g.", "i.e.", "cf.", "vs.", "etc.", "approx.", "resp.", "no.", "fig.", "sec.", "al.", "ca.", "incl."}

FENCE = re.compile(r"^\s*(```+|~~~+)")
ITEM = re.compile(r"^\s*([-*+]|\d+[.)])\s+")
HEADING = re.compile(r"^#{1,6}\s+")
SPAN = re.compile(r"(`+)(.+?)\1", re.DOTALL)
LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]*)[^()]*\)")
DEFINITION = re.compile(r"^\s*\[[^\]]+\]:\s*(\S+)")
FILE = re.compile(r"(planner|simulator|engine|kernels|tools|tests|profiles|docs)/[\w./-]+\.\w+")
END = re.compile(r"[.!?][\"')\]*_]*(?=\s)")


def lines_of(text):
    """(number, line, kind) of every line; kind: "text", "table", "code" or "blank"."""
    fence, blank, indented, in_list, comment = None, True, False, False, False
    for number, line in enumerate(text.splitlines(), 1):
        match = FENCE.match(line)
        if fence:
            if match and match.group(1).startswith(fence):
                fence = None
            yield number, line, "code"
            continue
        if comment or line.lstrip().startswith("<!--"):
            comment = "-->" not in line
            yield number, line, "code"
            continue
        if match:
            fence, blank = match.group(1), False
            yield number, line, "code"
            continue
        if not line.strip():
            blank = True
            yield number, line, "blank"
            continue
        far = line.startswith(("    ", "\t"))
        indented = far and not in_list and (blank or indented)
        if ITEM.match(line) and not indented:
            in_list = True
        elif blank and not line.startswith(" "):
            in_list = False
        blank = False
        yield number, line, "code" if indented else "table" if line.lstrip().startswith("|") else "text"


def blocks_of(text):
    """(number, text) of every heading, paragraph and list item, where number is that of its first line."""
    first, parts = 0, []
    for number, line, kind in lines_of(text):
        begins = kind != "text" or HEADING.match(line) or ITEM.match(line)
        if begins and parts:
            yield first, "\n".join(parts)
            parts = []
        if kind != "text":
            continue
        if not parts:
            first = number
        parts.append(line.lstrip("> ") if line.lstrip().startswith(">") else line)
        if HEADING.match(line):
            yield first, "\n".join(parts)
            parts = []
    if parts:
        yield first, "\n".join(parts)


def sentences_of(block):
    """(offset in lines, words) of every sentence of a block."""
    # A span or a link becomes words without a full stop; line ends stay, so that lines can still be counted.
    text = SPAN.sub(lambda m: "code" + "\n" * m.group(2).count("\n"), block)
    text = LINK.sub(lambda m: m.group(1), text)
    text = ITEM.sub("", HEADING.sub("", text))
    begin = 0
    ends = [m.end() for m in END.finditer(text) if text[: m.end()].split()[-1].strip("(\"'*_").lower() not in ABBREVIATIONS]
    for end in [*ends, len(text)]:
        words = [word for word in text[begin:end].split() if any(c.isalnum() for c in word)]
        if words:
            lead = len(text[begin:end]) - len(text[begin:end].lstrip())
            yield text.count("\n", 0, begin + lead), len(words)
        begin = end


def is_held(path):
    """Whether the limits of sentences and lines hold for a document, by its path relative to the root."""
    return (path.rpartition("/")[2] == "README.md" or path.startswith(("docs/guide/", "docs/reference/")) or
            path in {"CONTRIBUTING.md", "SECURITY.md", "docs/architecture.md", "docs/glossary.md"})


def documents_of(root):
    for path in sorted(root.rglob("*.md")):
        parts = path.relative_to(root).parts
        # Builds and runs lie in folders of the root that git ignores.
        if not (len(parts) > 1 and (parts[0].startswith((".", "build")) or parts[0] == "runs")):
            yield "/".join(parts)


def check_sentences(root, path, text):
    if is_held(path):
        for first, block in blocks_of(text):
            for offset, words in sentences_of(block):
                if words > MOST_WORDS:
                    yield f"{path}:{first + offset}: a sentence of {words} words, at most {MOST_WORDS}"


def check_lines(root, path, text):
    if is_held(path):
        for number, line, kind in lines_of(text):
            if kind == "text" and len(line) > MOST_CHARACTERS:
                yield f"{path}:{number}: a line of {len(line)} characters, at most {MOST_CHARACTERS}"


def anchors_of(text):
    """Names of the headings of a Markdown file, as GitHub makes them."""
    names = set()
    for _, line, kind in lines_of(text):
        if kind == "text" and HEADING.match(line):
            title = LINK.sub(lambda m: m.group(1), HEADING.sub("", line)).strip().lower()
            name = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
            count = sum(other == name or re.fullmatch(re.escape(name) + r"-\d+", other) is not None for other in names)
            names.add(f"{name}-{count}" if count else name)
    return names


def targets_of(text):
    """(number, target) of every link outside of code."""
    for number, line, kind in lines_of(text):
        if kind in ("text", "table"):
            plain = SPAN.sub("code", line)
            yield from ((number, match.group(2)) for match in LINK.finditer(plain))
            definition = DEFINITION.match(plain)
            if definition:
                yield number, definition.group(1)


def check_links(root, path, text):
    for number, target in targets_of(text):
        if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*:", target):
            continue
        name, _, anchor = target.partition("#")
        there = (root / path).parent / name if name else root / path
        if name.startswith("/") or not there.exists():
            yield f"{path}:{number}: a link to {target}, which does not exist"
        elif anchor and there.suffix == ".md" and anchor not in anchors_of(there.read_text(encoding="utf-8")):
            yield f"{path}:{number}: a link to {target}, which has no such heading"


def check_files(root, path, text):
    if path != "CHANGELOG.md":
        for number, line, kind in lines_of(text):
            spans = SPAN.finditer(line) if kind in ("text", "table") else ()
            for name in (match.group(2) for match in spans):
                if FILE.fullmatch(name) and not (root / name).exists():
                    yield f"{path}:{number}: names {name}, which does not exist"


RULES = [check_sentences, check_lines, check_links, check_files]


def main(arguments):
    root = pathlib.Path(arguments[0] if arguments else pathlib.Path(__file__).resolve().parents[2])
    documents = list(documents_of(root))
    if not documents:
        print(f"{root}:1: no documents")
        print_counts(0, 1)
        return 1
    failed = 0
    for rule in RULES:
        faults = [fault for path in documents for fault in rule(root, path, (root / path).read_text(encoding="utf-8"))]
        failed += bool(faults)
        for fault in faults:
            print(fault)
    print_counts(len(RULES) - failed, failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
