"""A made-up tree of files for the tests of the scripts, and a way to run a script over it."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent


class TreeTest(unittest.TestCase):
    """Every test has a folder of its own, self.root."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)

    def write(self, path, text):
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text, encoding="utf-8")

    def run_script(self, script, *arguments):
        return subprocess.run([sys.executable, "-B", str(HERE / script), *map(str, arguments)], capture_output=True, text=True)

    def passes(self, script, *arguments):
        run = self.run_script(script, *arguments)
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)

    def fails(self, text, script, *arguments):
        """The script exits with status 1 and names the fault."""
        run = self.run_script(script, *arguments)
        self.assertEqual(run.returncode, 1, run.stdout + run.stderr)
        self.assertIn(text, run.stdout)
