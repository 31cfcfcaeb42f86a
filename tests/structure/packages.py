#!/usr/bin/env python3
"""Exit status 1 where a document's `apt-get install` leaves out a package without which tools/setup.sh would not build."""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCUMENTS = ["README.md", "CONTRIBUTING.md"]


def needed():
    """The packages that tools/setup.sh installs before a build."""
    return set(re.search(r'^build_packages="([^"]+)"', (ROOT / "tools/setup.sh").read_text(), re.MULTILINE)[1].split())


def named(text):
    """The packages of each `apt-get install` of a document, whose lines may go on after a backslash."""
    commands = re.findall(r"^    apt-get install (.*)$", text.replace("\\\n", " "), re.MULTILINE)
    return [set(command.split()) for command in commands]


def main():
    wrong = []
    for document in DOCUMENTS:
        commands = named((ROOT / document).read_text())
        if not commands:
            wrong.append(f"{document}: no line `apt-get install`")
        wrong += [f"{document}: without {' '.join(sorted(needed() - packages))}" for packages in commands if needed() - packages]
    print("\n".join(wrong) if wrong else f"{len(needed())} packages are named by {' and '.join(DOCUMENTS)}.")
    return 1 if wrong else 0


sys.exit(main())
