#!/usr/bin/env python3
"""Exit status 1, with a line for each fault, where a Dockerfile does not parse or breaks a rule.

Usage: dockerfile.py [FILE]; by default the one of this tree. Checked: instructions and their order; base images with a tag that is a
version; names of stages, and copies from earlier ones; lists in JSON; files that are copied; packages without recommended ones and without
their lists; and for each stage that can be run an entry point and a user who is not root. Nothing is built.
"""
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
INSTRUCTIONS = {"FROM", "ARG", "ENV", "RUN", "COPY", "WORKDIR", "USER", "ENTRYPOINT", "CMD", "LABEL", "EXPOSE", "VOLUME", "SHELL", "HEALTHCHECK"}


def instructions_of(text):
    """(line, instruction, words) in order; a line that ends with a backslash goes on, and comments within it are left out."""
    started, parts = 0, []
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or not line.strip():
            continue
        started = started or number
        parts.append(line.rstrip().removesuffix("\\").strip())
        if not line.rstrip().endswith("\\"):
            name, _, rest = " ".join(parts).partition(" ")
            yield started, name, rest.strip()
            started, parts = 0, []
    if parts:
        yield started, "", "the last line ends with a backslash"


class Lint:
    def __init__(self, folder):
        self.folder = folder
        self.faults = []
        self.stages = []  # (line, name, {instruction: words of its last})

    def fault(self, line, text):
        self.faults.append(f"{line}: {text}")

    def take(self, line, name, words):
        if name not in INSTRUCTIONS:
            self.fault(line, f"{name or 'a line'}: {words if not name else 'no instruction that is used here'}")
        elif name == "FROM":
            self.take_from(line, words)
        elif not self.stages and name != "ARG":
            self.fault(line, f"{name} before the first FROM")
        elif self.stages:
            self.stages[-1][2][name] = words
            {"COPY": self.take_copy, "RUN": self.take_run, "ENTRYPOINT": self.take_list, "CMD": self.take_list}.get(
                name, lambda *_: None)(line, words)

    def take_from(self, line, words):
        found = re.fullmatch(r"(\S+) AS ([a-z][a-z0-9-]*)", words)
        if not found:
            self.fault(line, f"FROM {words}: must be IMAGE AS NAME")
            self.stages.append((line, "", {}))
            return
        image, name = found.groups()
        names = [stage[1] for stage in self.stages]
        if name in names:
            self.fault(line, f"stage {name}: there is one already")
        if image not in names and not re.search(r":[^:/]*\d[^:/]*$", image):
            self.fault(line, f"{image}: needs a tag that is a version")
        self.stages.append((line, name, {}))

    def take_copy(self, line, words):
        origin = re.match(r"--from=(\S+) ", words)
        paths = words[origin.end():].split() if origin else words.split()
        if origin and origin[1] not in [stage[1] for stage in self.stages[:-1]]:
            self.fault(line, f"COPY --from={origin[1]}: no earlier stage")
        if len(paths) < 2:
            self.fault(line, f"COPY {words}: must be SOURCE.. TARGET")
        if not origin:
            for path in paths[:-1]:
                if not (self.folder / path).exists():
                    self.fault(line, f"COPY {path}: no such file")

    def take_run(self, line, words):
        installs = re.search(r"apt-get install|install_packages", words)
        if installs and "rm -rf /var/lib/apt/lists/*" not in words[installs.end():]:
            self.fault(line, "RUN: lists of packages stay in the layer: rm -rf /var/lib/apt/lists/* behind what installs")
        if "apt-get install" in words and not ("--no-install-recommends" in words and " -y" in words):
            self.fault(line, "RUN: apt-get install needs -y --no-install-recommends")
        for script in re.findall(r"(?:^|&& )\. (\S+)", words):
            if "/" not in script:
                self.fault(line, f"RUN . {script}: sh looks in PATH: write ./{script}")
            elif not (self.folder / script).exists():
                self.fault(line, f"RUN . {script}: no such file")

    def take_list(self, line, words):
        try:
            good = all(isinstance(word, str) for word in json.loads(words)) and words.startswith("[")
        except ValueError:
            good = False
        if not good:
            self.fault(line, f"{words}: must be a list in JSON, so that signals reach the command")

    def finish(self):
        used = set()
        if not self.stages:
            self.fault(1, "no FROM")
        for line, name, found in self.stages:
            used.update(re.findall(r"--from=(\S+)", found.get("COPY", "")))
        for line, name, found in self.stages:
            if name in used:
                continue
            if "ENTRYPOINT" not in found:
                self.fault(line, f"stage {name}: no ENTRYPOINT, and no later stage copies from it")
            if found.get("USER", "root") in ("root", "0"):
                self.fault(line, f"stage {name}: runs as root: needs a USER")
            if "COPY" in found and "--from=" not in found["COPY"]:
                self.fault(line, f"stage {name}: holds sources: copy what was built from another stage")


def main(arguments):
    path = pathlib.Path(arguments[0]) if arguments else ROOT / "Dockerfile"
    lint = Lint(path.resolve().parent)
    count = 0
    for line, name, words in instructions_of(path.read_text(encoding="utf-8")):
        lint.take(line, name, words)
        count += 1
    lint.finish()
    for fault in lint.faults:
        print(f"{path.name}:{fault}")
    if not lint.faults:
        print(f"{count} instructions of {len(lint.stages)} stages are sound.")
    return 1 if lint.faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
