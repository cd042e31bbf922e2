"""The bodies of routes that return no answer, and the lines of batch files."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from mainstem.core.json import Json, JsonView
from mainstem.wire.fields import Anything, Metadata, read_fields

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/score"]


class TokenizeOptions(Struct, frozen=True):
    """Fields of `POST /tokenize` in addition to those of a chat or completion."""

    # whether to add the tokens that tokenizer.json puts around a prompt
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Struct, frozen=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: Anything = None


class AppBody(Struct, frozen=True):
    """`PUT /admin/apps/NAME`."""

    prompt: str


class WeightsBody(Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /admin/weights`: a folder below --weights-root; or `resume`, after the engine's process
    has ended and its weights are lost: to go on with those of --model."""

    folder: str | None = None
    mode: Literal["finish", "abort", "continue"] = "finish"
    resume: bool = False


class SleepBody(Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /admin/sleep`."""

    level: Literal[1, 2] = 1
    mode: Literal["finish", "abort"] = "finish"


class WakeBody(Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /admin/wake_up`; without tags, everything is woken up."""

    tags: list[Literal["weights", "kv_cache"]] | None = None


class ExpiresAfter(Struct, frozen=True, forbid_unknown_fields=True):
    """When a file is removed; the range is that of OpenAI's API."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3600, le=30 * 86400)]


class BatchBody(Struct, frozen=True):
    """`POST /v1/batches`."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None  # of the files with answers and errors


class RowEnvelope(Struct, frozen=True):
    """A line of a batch file, around the body of its request."""

    url: Endpoint | Literal["/v1/messages"]
    body: dict[str, object]
    custom_id: Anything = None
    method: Literal["POST"] = "POST"


def tokenize_options(body: JsonView) -> tuple[TokenizeOptions, Json]:
    """Split a body of /tokenize into its own fields and those of a chat or completion."""
    own = TokenizeOptions.__struct_fields__
    options = read_fields({name: body[name] for name in own if name in body}, TokenizeOptions)
    return options, {name: value for name, value in body.items() if name not in own}
