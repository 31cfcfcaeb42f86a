#!/usr/bin/env python3
"""Reports commit subjects of more than 72 characters.

Usage: commits.py BASE [ROOT]: among the commits of HEAD that BASE does not have; or commits.py --message FILE: in a message
that is being written, as git's hook commit-msg is given it. Exit status 1 when there are any, each on a line as
COMMIT: WHAT; 2 where git does not know BASE.
"""
import pathlib
import subprocess
import sys

MOST_CHARACTERS = 72


def fault_of(name, subject):
    if len(subject) > MOST_CHARACTERS:
        return f"{name}: a subject of {len(subject)} characters, at most {MOST_CHARACTERS}: {subject}"
    return None


def subject_of(message):
    """The first line that is no comment of a commit message, empty where there is none."""
    lines = [line for line in message.splitlines() if line.strip() and not line.startswith("#")]
    return lines[0] if lines else ""


def main(arguments):
    if arguments[:1] == ["--message"] and len(arguments) == 2:
        faults = [fault_of("message", subject_of(pathlib.Path(arguments[1]).read_text(encoding="utf-8")))]
    elif len(arguments) in (1, 2) and not arguments[0].startswith("-"):
        root = arguments[1] if len(arguments) == 2 else pathlib.Path(__file__).resolve().parents[2]
        log = subprocess.run(["git", "-C", str(root), "log", "--format=%h %s", f"{arguments[0]}..HEAD"],
                             capture_output=True, text=True)
        if log.returncode:
            print(log.stderr.strip(), file=sys.stderr)
            return 2
        faults = [fault_of(*line.split(" ", 1)) for line in log.stdout.splitlines()]
    else:
        print(__doc__.strip(), file=sys.stderr)
        return 2
    faults = [fault for fault in faults if fault]
    for fault in faults:
        print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
