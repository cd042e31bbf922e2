"""What is wrong with something a client sent, as OpenAI reports it."""

from mainstem.core.errors import InvalidRequest


class WireError(Exception):
    """Why a body or a row cannot be answered: an HTTP error at the server, an error row in a batch.

    `param` is the field at fault, where there is one.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


def from_invalid(error: InvalidRequest) -> WireError:
    """A value that the engine does not take."""
    return WireError("invalid_value", str(error), error.field)
