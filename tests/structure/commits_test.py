"""Tests of commits.py on a repository of three commits."""
import os
import shutil
import subprocess
import sys
import unittest

from counts import run_unittest
from tree import TreeTest


@unittest.skipUnless(shutil.which("git"), "needs git")
class Commits(TreeTest):
    def git(self, *arguments):
        # In a hook GIT_DIR and its like name the project's own repository, which these commits are not for.
        for name in [name for name in os.environ if name.startswith("GIT_")]:
            del os.environ[name]
        subprocess.run(["git", "-C", str(self.root), "-c", "user.name=T", "-c", "user.email=t@example.org", *arguments],
                       check=True, capture_output=True)

    def commit(self, subject):
        self.git("commit", "-q", "--allow-empty", "-m", subject, "-m", "A body may have lines of any length. " * 4)

    def setUp(self):
        super().setUp()
        self.git("init", "-q")
        self.commit("a" * 73)
        self.git("tag", "base")
        self.commit("b" * 72)

    def test_only_commits_since_the_base_count(self):
        self.passes("commits.py", "base", self.root)

    def test_long_subject(self):
        self.commit("c" * 73)
        self.fails("a subject of 73 characters", "commits.py", "base", self.root)

    def test_message_that_is_being_written(self):
        self.write("message", "# a comment of git\n" + "d" * 72 + "\n\nBody.\n")
        self.passes("commits.py", "--message", self.root / "message")
        self.write("message", "d" * 73 + "\n")
        self.fails("message: a subject of 73 characters", "commits.py", "--message", self.root / "message")

    def test_unknown_base_and_no_base(self):
        self.assertEqual(self.run_script("commits.py", "nowhere", self.root).returncode, 2)
        self.assertEqual(self.run_script("commits.py").returncode, 2)


if __name__ == "__main__":
    sys.exit(run_unittest("commits_test"))
