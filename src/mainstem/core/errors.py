"""Errors that the engine raises on purpose; some packages define more.

MainstemError
  ConfigError      a setting is out of range or does not fit the others
  InvalidRequest   the caller's fault: 4xx at the server, an error row in a batch
    MissingPackage   a field of the request needs an optional package that is not installed
    TooManyForms     forms of answers in use hold too much memory: 429 at the server
    WeightsLost      no weights are in force: 503 at the server, until they are updated
    EngineAsleep     the engine sleeps: 503 at the server, until it is woken up
  UnsupportedModel a checkpoint with an architecture that this engine does not have
  ModelNotFound    a model argument that leads to no model
  OutOfPages       too few free pages: the scheduler catches it and waits
  OutOfStates      no slot for a state: likewise
  StoreError       a folder or server for saved pages that cannot be used
  OutOfDeviceMemory  a step did not fit the device: the engine retries with smaller ones
  AnswerFailed     steps failed on a request, or its form cannot be followed; others are answered
  EngineLost       every step fails, or a rank has ended: nothing can be answered any more
  ForkedProcess    an engine was called in a child of the process that loaded it
"""

from collections.abc import Sequence


class MainstemError(Exception):
    """The root; catch it to catch everything below."""


class ConfigError(MainstemError):
    """A setting is out of range or contradicts another."""


class InvalidRequest(MainstemError):
    """The caller asked for something impossible; `field` names the field that is wrong."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class MissingPackage(InvalidRequest):
    """A field is valid, but the package that it needs is not installed."""


class TooManyForms(InvalidRequest):
    """The forms of the caller's answers use all the memory allowed. Memory is freed as answers
    end."""


class WeightsLost(InvalidRequest):
    """No weights are in force, or not those that the caller believes in."""

    def __init__(self, reason: str) -> None:
        super().__init__("weights", reason)


class EngineAsleep(InvalidRequest):
    """The engine has given its memory back."""

    def __init__(self) -> None:
        super().__init__("engine", "it sleeps; call wake_up first")


class UnsupportedModel(MainstemError):
    """A checkpoint with an architecture, or a variant of one, that this engine does not have."""


class ModelNotFound(MainstemError):
    """A model argument that leads to no model; the message says what to do."""


class OutOfPages(MainstemError):
    """Fewer pages are free than were asked for; none was given."""

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"wanted {wanted} pages, {free} are free")
        self.wanted = wanted
        self.free = free


class OutOfStates(MainstemError):
    """All slots for states of recurrent layers are in use."""


class OutOfDeviceMemory(MainstemError):
    """A step needed more device memory than was reserved for it."""


class AnswerFailed(MainstemError):
    """Steps failed on a request whenever it was tried, or its form cannot be followed; the message
    names the error.

    `results` has every answer of a call of `LLM`; for streams and AsyncLLM it is empty. The answers
    that failed have the finish reason `error`.
    """

    def __init__(self, message: str, results: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.results = results


class EngineLost(MainstemError):
    """Nothing can be answered any more: every step fails (`__cause__` is the last failure), or one
    of the ranks of a model has ended."""


class ForkedProcess(MainstemError):
    """An engine was called in a forked child of the process that loaded it."""

    def __init__(self, owner: int, caller: int) -> None:
        super().__init__(
            f"the model was loaded in process {owner} and is called in process {caller}, a fork of "
            "it, which has neither its threads nor its device: the call would hang. Load the model "
            'after the fork, or start processes with multiprocessing.get_context("spawn")'
        )


class StoreError(MainstemError):
    """A folder or server for saved pages cannot be used; the message says why."""
