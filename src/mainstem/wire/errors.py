"""Errors in a client's request, in the format of OpenAI's API."""

from mainstem.core.errors import InvalidRequest


class WireError(Exception):
    """Why a body or a row cannot be answered: an HTTP error at the server, an error row in a batch.

    `param` is the wrong field, if there is one.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


def from_invalid(error: InvalidRequest) -> WireError:
    """The error for a value that the engine refuses."""
    return WireError("invalid_value", str(error), error.field)
