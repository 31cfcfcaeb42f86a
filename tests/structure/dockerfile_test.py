"""Tests of dockerfile.py: a sound file passes, and each broken rule fails with its line."""
import sys

from counts import run_unittest
from tree import TreeTest

SOUND = """# a comment
FROM debian:12-slim AS build
WORKDIR /source
COPY tools/setup.sh tools/setup.sh
RUN . tools/setup.sh && apt-get install -y --no-install-recommends g++ && \\
    # the lists are large
    rm -rf /var/lib/apt/lists/*
COPY . .
FROM debian:12-slim AS run
COPY --from=build /installed /
USER planner
ENTRYPOINT ["moe-plan"]
"""


class Dockerfile(TreeTest):
    def lint(self, text):
        self.write("tools/setup.sh", "")
        self.write("Dockerfile", text)
        return "dockerfile.py", self.root / "Dockerfile"

    def broken(self, before, after, fault):
        self.assertIn(before, SOUND)
        self.fails(fault, *self.lint(SOUND.replace(before, after)))

    def test_a_sound_file_passes(self):
        self.passes(*self.lint(SOUND))

    def test_the_file_of_this_tree_passes(self):
        self.passes("dockerfile.py")

    def test_unknown_instructions(self):
        self.broken("WORKDIR /source", "WORKDR /source", "Dockerfile:3: WORKDR: no instruction")

    def test_base_images_have_a_version(self):
        self.broken("debian:12-slim AS run", "debian AS run", "Dockerfile:9: debian: needs a tag")
        self.broken("debian:12-slim AS run", "debian:latest AS run", "Dockerfile:9: debian:latest: needs a tag")

    def test_stages_are_named_once_and_copied_from_later(self):
        self.broken(" AS run", "", "must be IMAGE AS NAME")
        self.broken(" AS run", " AS build", "stage build: there is one already")
        self.broken("--from=build", "--from=later", "Dockerfile:10: COPY --from=later: no earlier stage")

    def test_copied_files_exist(self):
        self.broken("COPY tools/setup.sh", "COPY tools/absent.sh", "Dockerfile:4: COPY tools/absent.sh: no such file")
        self.broken("RUN . tools/setup.sh", "RUN . tools/absent.sh", "Dockerfile:5: RUN . tools/absent.sh: no such file")
        self.broken("RUN . tools/setup.sh", "RUN . setup.sh", "write ./setup.sh")

    def test_packages_leave_nothing_behind(self):
        self.broken("rm -rf /var/lib/apt/lists/*", "true", "Dockerfile:5: RUN: lists of packages stay")
        self.broken(" --no-install-recommends", "", "Dockerfile:5: RUN: apt-get install needs")

    def test_what_runs_is_a_list_and_no_root(self):
        self.broken('["moe-plan"]', "moe-plan", "Dockerfile:12: moe-plan: must be a list in JSON")
        self.broken("USER planner\n", "", "Dockerfile:9: stage run: runs as root")
        self.broken("USER planner", "USER root", "Dockerfile:9: stage run: runs as root")
        self.broken('ENTRYPOINT ["moe-plan"]\n', "", "Dockerfile:9: stage run: no ENTRYPOINT")
        self.broken("COPY --from=build /installed /", "COPY . .", "Dockerfile:9: stage run: holds sources")

    def test_an_open_end(self):
        self.fails("the last line ends with a backslash", *self.lint(SOUND + "CMD [] \\\n"))
        self.fails("1: no FROM", *self.lint("# nothing\n"))
        self.fails("Dockerfile:1: RUN before the first FROM", *self.lint("RUN true\n" + SOUND))


if __name__ == "__main__":
    sys.exit(run_unittest("__main__"))
