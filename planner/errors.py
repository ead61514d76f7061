"""What can go wrong for a user, and the exit status that says so.

    PlannerError              something a person can act on
    ├── InputError            2: what was given cannot be used
    │   └── SpecError         2: a file (which one, which key, what was expected)
    ├── NoPlanError           3: what was asked is well-formed, but no plan satisfies it
    │   └── NoneLeftError     3: of all plans that were looked at (in `ranking`: it has each with its reason)
    └── StoppedError        130: the user stopped a long run, which can be continued

Anything else that escapes is a fault of our own and exits with 1.
"""

from __future__ import annotations

from pathlib import Path


class PlannerError(Exception):
    """A sentence for the user; `exit_status` is what the command returns."""

    exit_status = 1


class InputError(PlannerError):
    """An option, a name or a file that cannot be used."""

    exit_status = 2


class SpecError(InputError):
    """A specification file that does not hold what it should.

    Args:
        path: the file.
        key: the path of keys to the value, "" for the file as a whole.
        problem: what was found and what was expected.
    """

    def __init__(self, path: Path | str, key: str, problem: str) -> None:
        self.path, self.key, self.problem = str(path), key, problem
        super().__init__(f"{path}: {key + ': ' if key else ''}{problem}")


class NoPlanError(PlannerError):
    """No plan satisfies the request: which limit, the numbers, and the smallest change that would do."""

    exit_status = 3


class StoppedError(PlannerError):
    """A long run was interrupted: how far it came, and how to go on."""

    exit_status = 130
