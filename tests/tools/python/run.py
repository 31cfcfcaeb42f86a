"""Runs the tests of the Python package by pytest, or says why they are skipped.

    run.py [WHY]    # WHY: what the build lacks for the package, empty for nothing
"""
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
SKIPPED = 77  # Meson's exit status for it

sys.path.insert(0, str(HERE.parents[1] / "structure"))
from counts import print_counts  # noqa: E402


class Counts:
    """A plugin of pytest that counts as tools/check does."""

    def __init__(self):
        self.passed = self.failed = self.skipped = 0

    def pytest_runtest_logreport(self, report):
        if report.skipped:
            self.skipped += 1
            print(f"\nskipped: {report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr}")
        elif report.failed:
            self.failed += 1
        elif report.when == "call":
            self.passed += 1


def main(arguments):
    missing = "".join(arguments)
    if not missing:
        try:
            import pytest
        except ModuleNotFoundError:
            missing = "no pytest for " + sys.executable
    if missing:
        print(f"skipped: the Python package: {missing}")
        return SKIPPED
    counts = Counts()
    status = pytest.main(["-q", "-p", "no:cacheprovider", "--durations=3", str(HERE)], plugins=[counts])
    print_counts(counts.passed, counts.failed, counts.skipped)
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
