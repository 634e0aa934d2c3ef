"""How a command ends when it does not end well.

CommandError
  x WorkFailed      exit status 1: the request was understood, the work did not succeed
  x UsageError      exit status 2: the request was wrong
"""

from __future__ import annotations


class CommandError(Exception):
    """One line for people; `hint` says what to do."""

    exit_status = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    @property
    def line(self) -> str:
        """The whole error as one line."""
        text = f"{self} ({self.hint})" if self.hint else str(self)
        return " ".join(text.split())


class WorkFailed(CommandError):
    """The work did not succeed."""

    exit_status = 1


class UsageError(CommandError):
    """The request was wrong."""

    exit_status = 2
