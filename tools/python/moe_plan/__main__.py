"""The command moe-plan, as pip installs it."""
import signal
import sys

from . import _core


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as any program: what Python's handler raises would wait for the verb's end
    return _core.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
