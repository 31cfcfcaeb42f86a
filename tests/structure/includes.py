#!/usr/bin/env python3
"""Holds the sources to the include order of folders.txt.

Usage: includes.py [ROOT]. Exit status 1 when a rule is broken, each fault on a line as PATH:LINE: WHAT.
The rules:
  includes   a source includes only files of its own folder, of folders before it, and of floors that its floor may include;
             an included file of a floor exists
  listed     every folder of an ordered floor that holds sources is in the list, and every listed folder exists
  readme     every listed folder has a README.md
  lists      every listed folder that holds more than headers has a meson.build
  order      the meson.build of a floor enters the listed folders in the order of the list
  parsers    text becomes JSON in planner/base/json.cpp alone (streams of events aside), and no source calls std::stoi and
             its kin or atoi, whose exceptions and silence name no file
  document   the table of docs/architecture.md below "Include order of folders" is the list
A floor without listed folders is one folder to these rules.
"""
import pathlib
import re
import sys

from counts import print_counts

SOURCES = {".cpp", ".hpp", ".cu", ".cuh"}
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"')
SUBDIR = re.compile(r"^\s*subdir\('([^']+)'\)")


class Order:
    """The floors, which of them each may include, and the listed folders in their order."""

    def __init__(self, path):
        self.floors, self.folders = {}, []
        for line in path.read_text(encoding="utf-8").splitlines():
            line = line.split("#")[0].strip()
            if line.startswith("floor "):
                name, _, others = line[len("floor "):].partition(":")
                self.floors[name.strip()] = {name.strip(), *others.split()}
            elif line:
                self.folders.append(line)
        self.rank = {folder: i for i, folder in enumerate(self.folders)}

    def floor_of(self, path):
        """The floor that a path relative to the root lies on, or None."""
        floor = path.split("/")[0]
        return floor if floor in self.floors else None

    def ordered(self, floor):
        return [folder for folder in self.folders if self.floor_of(folder) == floor]


def sources_of(root, order):
    """Paths relative to the root of all sources on the floors."""
    found = []
    for floor in order.floors:
        for path in sorted((root / floor).rglob("*")):
            if path.suffix in SOURCES and path.is_file():
                found.append(path.relative_to(root).as_posix())
    return found


def folder_of(path):
    return path.rpartition("/")[0]


def fault_of(root, order, source, included):
    """Why `source` may not include `included`, or None."""
    source_floor, floor = order.floor_of(source), order.floor_of(included)
    if floor is None:
        return f"{included} is a test" if included.startswith("tests/") else None
    if not (root / included).is_file():
        return f"{included} does not exist"
    if floor not in order.floors[source_floor]:
        return f"{source_floor}/ may not include {floor}/ ({included})"
    here, there = order.rank.get(folder_of(source)), order.rank.get(folder_of(included))
    if source_floor == floor and here is not None and there is not None and there > here:
        return f"upward include: {folder_of(included)} comes after {folder_of(source)} in the list ({included})"
    return None


def check_includes(root, order):
    for source in sources_of(root, order):
        text = (root / source).read_text(encoding="utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), 1):
            match = INCLUDE.match(line)
            fault = match and fault_of(root, order, source, match.group(1))
            if fault:
                yield f"{source}:{number}: {fault}"


def check_listed(root, order):
    unlisted = {folder_of(source) for source in sources_of(root, order)} - set(order.folders)
    for folder in sorted(unlisted):
        if order.ordered(order.floor_of(folder)):
            yield f"{folder}:1: holds sources and is not in the list of folders"
    for folder in order.folders:
        if not (root / folder).is_dir():
            yield f"{folder}:1: is in the list of folders and does not exist"


def check_readme(root, order):
    for folder in order.folders:
        if not (root / folder / "README.md").is_file():
            yield f"{folder}/README.md:1: does not exist"


def check_lists(root, order):
    for folder in order.folders:
        more = [p for p in (root / folder).glob("*") if p.suffix in {".cpp", ".cu"}]
        if more and not (root / folder / "meson.build").is_file():
            yield f"{folder}/meson.build:1: does not exist, but the folder holds {more[0].name}"


def check_order(root, order):
    for floor in order.floors:
        build = root / floor / "meson.build"
        last = -1
        for number, line in enumerate(build.read_text().splitlines() if build.is_file() else [], 1):
            match = SUBDIR.match(line)
            rank = order.rank.get(f"{floor}/{match.group(1)}") if match else None
            if rank is None:
                continue
            if rank < last:
                yield f"{floor}/meson.build:{number}: {match.group(1)} comes earlier in the list of folders"
            last = max(last, rank)


def check_document(root, order):
    path = root / "docs/architecture.md"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    _, _, section = text.partition("# Include order of folders\n")
    table = re.findall(r"^\| `([^`]+)` \|", section.partition("\n#")[0], re.MULTILINE)
    for i in range(max(len(table), len(order.folders))):
        written, listed = (names[i] if i < len(names) else "nothing" for names in (table, order.folders))
        if written != listed:
            yield f"docs/architecture.md:1: row {i + 1} of the include order says {written}, the list says {listed}"
            return


PARSERS = re.compile(r"\bjson::(?:parse|accept)\(|\bJson::(?:parse|accept)\(|\bstd::sto(?:i|l|ll|ul|ull|f|d|ld)\(|\bato[ifl]l?\(")


def check_parsers(root, order):
    for source in sources_of(root, order):
        if source == "planner/base/json.cpp" or source.startswith("tools/bench/"):
            continue
        text = (root / source).read_text(encoding="utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), 1):
            found = PARSERS.search(line.split("//")[0])
            if found:
                yield f"{source}:{number}: {found.group(0)}...): read JSON by planner/base/json.hpp, numbers by std::from_chars"


RULES = [check_includes, check_parsers, check_listed, check_readme, check_lists, check_order, check_document]


def main(arguments):
    root = pathlib.Path(arguments[0] if arguments else pathlib.Path(__file__).resolve().parents[2])
    order = Order(root / "tests/structure/folders.txt")
    if not sources_of(root, order):
        print(f"{root}:1: no sources on any floor")
        print_counts(0, 1)
        return 1
    failed = 0
    for rule in RULES:
        faults = list(rule(root, order))
        failed += bool(faults)
        for fault in faults:
            print(fault)
    print_counts(len(RULES) - failed, failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
