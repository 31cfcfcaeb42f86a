"""The closing line of a test in Python: doctest's words, so that tools/check adds up all tests alike."""
import unittest


def print_counts(passed, failed, skipped=0):
    print(f"[doctest] test cases: {passed + failed} | {passed} passed | {failed} failed | {skipped} skipped")


def run_unittest(module_name):
    """Runs the unit tests of a module and returns the exit status."""
    suite = unittest.defaultTestLoader.loadTestsFromName(module_name)
    result = unittest.TextTestRunner(verbosity=2).run(suite)
    failed = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses)
    print_counts(result.testsRun - failed - len(result.skipped), failed, len(result.skipped))
    return 1 if failed or result.testsRun == 0 else 0
