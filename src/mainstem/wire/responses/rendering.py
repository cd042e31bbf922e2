"""Renders answers in the format of OpenAI's Responses API: output items, whole or as events of a
stream.

response.created, response.in_progress
for each item:  response.output_item.added
                its text or arguments, as .added, .delta ... and .done
                response.output_item.done
response.completed, or response.incomplete, or response.failed
"""

from collections.abc import Iterator

from mainstem.core.ids import RequestId
from mainstem.core.json import Json, JsonView
from mainstem.core.request import FinishReason, Output
from mainstem.text.parsers.counting import count_reasoning
from mainstem.text.tokenizer import Tokenizer
from mainstem.text.tools import Part, Reasoning, ToolCall
from mainstem.wire.answers import AnswerParts, Heading, PromptAnswers
from mainstem.wire.calls import Call
from mainstem.wire.events import named_event
from mainstem.wire.responses.bodies import ResponsesBody, TextConfig

_PREFIXES = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def input_item(item: JsonView, number: str) -> Json:
    """An item of a request's input as it is listed: complete, with an id."""
    kind = item.get("type") or "message"
    shown: Json = {"id": f"{_PREFIXES.get(str(kind), 'msg')}_{number}", "status": "completed"}
    shown |= {name: value for name, value in item.items() if value is not None} | {"type": kind}
    if kind == "message" and isinstance(text := item.get("content"), str):
        if item.get("role") == "assistant":
            part: Json = {"type": "output_text", "text": text, "annotations": []}
        else:
            part = {"type": "input_text", "text": text}
        shown["content"] = [part]
    if kind == "reasoning":
        shown.setdefault("summary", [])
    return shown


class _TextItem:
    """A message or a piece of reasoning that is being written."""

    def __init__(self, item_id: str, is_reasoning: bool) -> None:
        self.item_id = item_id
        self.is_reasoning = is_reasoning
        self.pieces: list[str] = []
        self.event = "response.reasoning_text" if is_reasoning else "response.output_text"

    def part(self) -> Json:
        text = "".join(self.pieces)
        if self.is_reasoning:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def item(self, status: str, content: list[Json]) -> Json:
        if self.is_reasoning:
            return {
                "id": self.item_id,
                "type": "reasoning",
                "summary": [],
                "content": content,
                "encrypted_content": None,
                "status": status,
            }
        return {
            "id": self.item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }


class ResponseStream:
    """One response while it is made. Each output of the engine is turned into events; after the
    last output, `response` is complete."""

    def __init__(self, call: Call, heading: Heading, body: ResponsesBody) -> None:
        self._item_ids = heading.reply_id.removeprefix("resp_")
        self._call = call
        self._parts = AnswerParts(call)
        self._num_events = 0
        self._num_reasoning_tokens = 0
        self._open: _TextItem | None = None
        self._output: list[Json] = []
        self.response = _response(call, heading, body)

    def opening(self) -> bytes:
        """The first events. They are sent while the prompt is still computed, so that the client
        knows that the request was accepted."""
        in_progress: Json = {"response": self.response}
        created = self._event("response.created", in_progress)
        return created + self._event("response.in_progress", in_progress)

    def events(self, output: Output, answers: PromptAnswers) -> bytes:
        """The events for an output that the caller has already added to `answers`."""
        is_last = output.finish_reason is not None
        parts = self._parts.read(output.text, is_last=is_last)
        events = [event for part in parts for event in self._part(part)]
        if self._open is not None and self._open.is_reasoning:
            self._num_reasoning_tokens += len(output.token_ids)
        if is_last:
            is_cut = output.finish_reason is FinishReason.LENGTH
            if not self._output and self._open is None:
                events += self._begin(is_reasoning=False)
            events += self._close("incomplete" if is_cut else "completed")
            events.append(self._end(is_cut, answers))
        return b"".join(events)

    def failure(self, message: str, *, is_callers_fault: bool) -> bytes:
        """The last event of a response that cannot be completed."""
        code = "invalid_prompt" if is_callers_fault else "server_error"
        self.response |= {
            "status": "failed",
            "error": {"code": code, "message": message},
            "output": self._output,
        }
        return self._event("response.failed", {"response": self.response})

    def whole(self, answers: PromptAnswers, tokenizer: Tokenizer) -> Json:
        """Return the response to a request whose answer is complete."""
        answer, reasoning = answers.answers[0], self._call.reasoning
        if reasoning is not None:
            ids = answer.token_ids
            count = count_reasoning(reasoning, answer.text, ids, tokenizer)
            self._num_reasoning_tokens = count or 0
        end = Output(RequestId(""), 0, (), finish_reason=answer.finish_reason, text=answer.text)
        self.events(end, answers)
        return self.response

    # --- items ----------------------------------------------------------------------------------

    def _part(self, part: Part) -> Iterator[bytes]:
        if isinstance(part, ToolCall):
            yield from self._close("completed")
            yield from self._called(part)
            return
        is_reasoning = isinstance(part, Reasoning)
        text = part.text if isinstance(part, Reasoning) else part
        if self._open is None or self._open.is_reasoning is not is_reasoning:
            is_first = self._open is None and not self._output
            if not (is_reasoning or is_first or text.strip()):
                return  # white space between items
            yield from self._close("completed")
            yield from self._begin(is_reasoning)
        assert self._open is not None
        self._open.pieces.append(text)
        logprobs: Json = {} if is_reasoning else {"logprobs": []}
        delta = self._in_text(self._open) | {"delta": text} | logprobs
        yield self._event(f"{self._open.event}.delta", delta)

    def _begin(self, is_reasoning: bool) -> Iterator[bytes]:
        prefix = "rs" if is_reasoning else "msg"
        opened = self._open = _TextItem(self._item_id(prefix), is_reasoning)
        yield self._item_event("added", opened.item("in_progress", []))
        part = self._in_text(opened) | {"part": opened.part()}
        yield self._event("response.content_part.added", part)

    def _close(self, status: str) -> Iterator[bytes]:
        """End the message or reasoning that is open, if one is."""
        opened, self._open = self._open, None
        if opened is None:
            return
        part, place = opened.part(), self._in_text(opened)
        logprobs: Json = {} if opened.is_reasoning else {"logprobs": []}
        yield self._event(f"{opened.event}.done", place | {"text": part["text"]} | logprobs)
        yield self._event("response.content_part.done", place | {"part": part})
        item = opened.item(status, [part])
        yield self._item_event("done", item)
        self._output.append(item)

    def _called(self, call: ToolCall) -> Iterator[bytes]:
        item: Json = {
            "id": self._item_id("fc"),
            "type": "function_call",
            "call_id": call.call_id,
            "name": call.name,
            "arguments": "",
            "status": "in_progress",
        }
        place = {"item_id": item["id"], "output_index": len(self._output)}
        yield self._item_event("added", item)
        name, arguments = "response.function_call_arguments", call.arguments
        yield self._event(f"{name}.delta", place | {"delta": arguments})
        yield self._event(f"{name}.done", place | {"name": call.name, "arguments": arguments})
        item = item | {"arguments": arguments, "status": "completed"}
        yield self._item_event("done", item)
        self._output.append(item)

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._item_ids}{len(self._output):03x}"

    def _in_text(self, item: _TextItem) -> Json:
        """Return the fields that say to which text an event belongs."""
        return {"item_id": item.item_id, "output_index": len(self._output), "content_index": 0}

    # --- events ---------------------------------------------------------------------------------

    def _end(self, is_cut: bool, answers: PromptAnswers) -> bytes:
        status = "incomplete" if is_cut else "completed"
        self.response |= {
            "status": status,
            "output": self._output,
            "usage": self._usage(answers),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        }
        return self._event(f"response.{status}", {"response": self.response})

    def _usage(self, answers: PromptAnswers) -> Json:
        num_output = len(answers.answers[0].token_ids)
        details = {"cached_tokens": answers.cached_tokens, "cache_write_tokens": 0}
        if answers.dropped_tokens:
            details["dropped_tokens"] = answers.dropped_tokens
        return {
            "input_tokens": answers.prompt_tokens,
            "input_tokens_details": details,
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
            "total_tokens": answers.prompt_tokens + num_output,
        }

    def _item_event(self, verb: str, item: Json) -> bytes:
        told: Json = {"output_index": len(self._output), "item": item}
        return self._event(f"response.output_item.{verb}", told)

    def _event(self, kind: str, fields: Json) -> bytes:
        told = {"type": kind, "sequence_number": self._num_events} | fields
        self._num_events += 1
        return named_event(told)


def _response(call: Call, heading: Heading, body: ResponsesBody) -> Json:
    """A response before its first token: the request's fields, with defaults filled in."""
    reasoning = body.reasoning
    return {
        "id": heading.reply_id,
        "object": "response",
        "created_at": heading.created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": heading.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": call.sampling.temperature,
        "text": _text_config(body.text),
        "tool_choice": body.tool_choice or "auto",
        "tools": [
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": tool.strict,
            }
            for tool in body.tools or ()
        ],
        "top_logprobs": 0,
        "top_p": call.sampling.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def _text_config(text: TextConfig | None) -> Json:
    given = None if text is None else text.format
    if given is None or given.type != "json_schema":
        format: Json = {"type": "text" if given is None else given.type}
    else:
        format = {
            "type": "json_schema",
            "name": given.name,
            "description": given.description,
            "schema": given.schema,
            "strict": given.strict,
        }
    return {"format": format, "verbosity": "medium"}
