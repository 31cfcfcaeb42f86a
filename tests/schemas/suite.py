"""Runs the functions of a module whose names begin with "test_" and counts them in the words of doctest."""
import traceback


def run(tests):
    """tests: functions, or (name, function) pairs. Returns the exit status."""
    failed = 0
    for test in tests:
        name, call = test if isinstance(test, tuple) else (test.__name__, test)
        try:
            call()
        except Exception:  # a failed case must not end the others
            failed += 1
            print(f"FAILED: {name}")
            traceback.print_exc()
    print(f"[doctest] test cases: {len(tests)} | {len(tests) - failed} passed | {failed} failed | 0 skipped")
    return 1 if failed else 0
