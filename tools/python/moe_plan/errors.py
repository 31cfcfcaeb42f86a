"""What functions of the package raise: the command's one line, and its exit status."""


class Error(Exception):
    """A failure while running. `status` is the exit status of the command that meets it."""

    status = 1


class InvalidInput(Error):
    """The request or a file is wrong: the line names the place, the numbers and the remedy."""

    status = 2


class Unsatisfiable(Error):
    """The request is sound, and no plan satisfies it: the line names the constraint and the smallest change that helps."""

    status = 3


class PlanWarning(UserWarning):
    """What the command would warn of on stderr."""


def error_of(status: int, line: str) -> Error:
    """The exception for an exit status other than 0."""
    for kind in (InvalidInput, Unsatisfiable):
        if kind.status == status:
            return kind(line)
    return Error(line)
