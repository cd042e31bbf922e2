"""Answers the bodies of HTTP requests: everything between the routes and the engine."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, time
from typing import TypeVar

import numpy as np
from filelock import BaseFileLock
from starlette.requests import Request
from starlette.responses import Response

from mainstem.core.errors import InvalidRequest
from mainstem.core.ids import RequestId
from mainstem.core.json import Json
from mainstem.core.request import Overflow
from mainstem.core.request import Request as EngineRequest
from mainstem.server.answering import SHUTTING_DOWN, Answering, EngineFault
from mainstem.server.apps_registry import AppRegistry
from mainstem.server.auth import Access, Tenant
from mainstem.server.batch_runner import BatchRunner
from mainstem.server.batch_store import BatchStore
from mainstem.server.body import read_json
from mainstem.server.engine_client import EngineClient
from mainstem.server.faults import ApiError, from_fault, from_invalid, unavailable
from mainstem.server.file_store import FileStore, lock_folder
from mainstem.server.filling import AppFiller
from mainstem.server.ids import unique_ids
from mainstem.server.limits import Gate, ServerLimits
from mainstem.server.live import Live, Record, RequestState
from mainstem.server.metrics import ServerMetrics
from mainstem.server.pins import PrefixPins
from mainstem.server.pruning import Pruner
from mainstem.server.recording import Recorder
from mainstem.server.replies import MakeWriter, ReplyWriter
from mainstem.server.response_file import ResponseFile
from mainstem.server.response_store import Kept, ResponseStore
from mainstem.server.saver import Saver
from mainstem.server.served_model import ServedModel
from mainstem.server.stream import ClientLeft, EventStream, while_connected
from mainstem.server.turns import Turn, owner_of
from mainstem.text.encoding import (
    App,
    BegunPrompt,
    Chat,
    Prompt,
    PromptTooLong,
    begin_prompt,
    is_short,
)
from mainstem.text.session_file import SessionFile
from mainstem.text.sessions import MAX_SESSION_TOKENS, Session, Sessions
from mainstem.wire.answers import Heading
from mainstem.wire.bodies import DetokenizeBody, tokenize_options
from mainstem.wire.calls import Call, CallKind
from mainstem.wire.chat.logprobs import token_text
from mainstem.wire.chat.parsing import CallParser
from mainstem.wire.chat.rendering import CompletionReply, Echo
from mainstem.wire.fields import read_fields

# more work than this would block the event loop for over 1 ms
INLINE_CHARS = 1 << 10  # characters to encode
INLINE_KNOWN_CHARS = 1 << 16  # characters to scan
INLINE_IDS = 1 << 10  # ids to write out
MAX_WINDOWS = 32  # a conversation may be this many times as long as the context
CLIENT_LEFT = 499  # a status for logs and metrics, which is never sent

Written = TypeVar("Written")

log = logging.getLogger("mainstem.server")


@dataclass(frozen=True, slots=True)
class BatchService:
    """Files and batches, with their runner and their pruner."""

    files: FileStore
    batches: BatchStore
    runner: BatchRunner
    pruner: Pruner


class Gateway:
    """Answers requests. Lives on the event loop."""

    def __init__(  # the parts of a server, which build.py joins
        self,
        engine: EngineClient,
        model: ServedModel,
        access: Access,
        apps: AppRegistry,
        limits: ServerLimits,
        live: Live,
        metrics: ServerMetrics,
        sessions: Sessions,
    ) -> None:
        self.engine = engine
        self.model = model
        self.access = access
        self.apps = apps
        self.limits = limits
        self.live = live
        self.metrics = metrics
        self.sessions = sessions
        self.gate = Gate(limits)
        self.responses = ResponseStore(limits)
        self.filler = AppFiller(engine, apps)
        self.pins = PrefixPins(engine, limits.pinned_share)
        self.batches: BatchService | None = None  # None: there is no folder for them
        self.is_ready = False  # True when the apps are filled
        self.is_draining = False
        self._ends_answers = False  # True: requests that were let in earlier are refused, too
        formats = model.formats_of(engine.tokenizer)
        self.parser = CallParser(model.sampling, limits.body, lambda: formats)
        self._ids = unique_ids()
        self._fingerprint = model.fingerprint
        engine.on_tokens = live.rate.add
        engine.on_recovered = self._refill
        self.recorder: Recorder | None = None  # records requests, for a benchmark
        self._savers: list[Saver[Session] | Saver[Kept]] = []
        self._folder_lock: BaseFileLock | None = None  # held until `close`
        self._refilling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start after the engine is connected; the server is ready when the apps are filled."""
        await asyncio.to_thread(self.engine.tokenizer.prepare)
        await self.filler.fill_all()
        if self.is_draining:  # closed meanwhile
            return
        if self.batches is not None:
            self.batches.runner.start()
            self.batches.pruner.start()
        for saver in self._savers:
            saver.start()
        self.is_ready = True
        log.info("ready", extra={"facts": {"apps": self.apps.names}})

    async def close(self) -> None:
        """End running requests; batches continue in a later process."""
        self.is_draining = True
        self.pins.forget()
        if self.batches is not None:
            await self.batches.pruner.close()
            await self.batches.runner.close()
        await self.engine.close()
        for saver in self._savers:
            await saver.close()
        if self._folder_lock is not None:
            self._folder_lock.release()
        if self.recorder is not None:
            self.recorder.close()

    def end_answers(self) -> None:
        """End open answers with an error, and from now on refuse requests that are still being
        encoded. Rows of batches are tried again."""
        self._ends_answers = True
        self.engine.fail_open(SHUTTING_DOWN)

    def open_batches(self, folder: Path) -> None:
        """Accept files and batches, which are stored in `folder`; called before the server starts.
        Raises ConfigError if another process uses the folder.
        """
        self._folder_lock = lock_folder(folder)
        files, batches = FileStore(folder / "files"), BatchStore(folder / "batches")
        runner = BatchRunner(
            self.engine,
            self.gate,
            self.access.tenants,
            self.filler,
            self.model,
            files,
            batches,
            self.metrics,
            lambda: self.is_draining,
        )
        pruner = Pruner(files, batches, self.limits.file_ttl_s)
        self.batches = BatchService(files, batches, runner, pruner)

    def keep_sessions(self, file: SessionFile) -> None:
        """Load sessions from a file and save them there; called before the server starts. Raises
        ConfigError if the file cannot be read.
        """
        self.sessions.restore(file.load())
        self._savers.append(Saver("sessions", self.sessions, file))

    def keep_responses(self, file: ResponseFile) -> None:
        """Load responses from a file and save them there; see `keep_sessions`."""
        self.responses.restore(file.load())
        self._savers.append(Saver("responses", self.responses, file))

    def _refill(self) -> None:
        """Compute the apps' prefixes again, because the engine lost its cache."""
        self.pins.forget()
        before = self._refilling

        async def refill() -> None:
            if before is not None:
                await before  # refills run one after the other
            await self.filler.fill_all()

        self._refilling = asyncio.ensure_future(refill())

    # --- completions ----------------------------------------------------------------------------

    async def answer(self, request: Request, kind: CallKind) -> Response:
        """Return the reply to a chat or completion, whole or as a stream; raises WireError or
        ApiError."""
        self.gate.allow(request.state.tenant)
        call, prompts = self.parser.parse(await read_json(request, self.limits), kind)
        prefix = "chatcmpl" if kind is CallKind.CHAT else "cmpl"
        reply_id = f"{prefix}-{next(self._ids)}"
        return await self.reply(request, call, prompts, reply_id, ReplyWriter)

    async def reply(
        self,
        request: Request,
        call: Call,
        prompts: Sequence[Prompt],
        reply_id: str,
        make_writer: MakeWriter,
    ) -> Response:
        """Return the reply to a call of any API, in the format of its writer; raises WireError or
        ApiError. The caller has already counted the request in the tenant's rate."""
        tenant: Tenant = request.state.tenant
        asked_s = monotonic()
        model, app = self.apps.resolve(call, self.model.names)
        if self.is_draining:
            raise unavailable(SHUTTING_DOWN)
        heading = Heading(reply_id, model, int(time()), self._fingerprint)
        with ExitStack() as held:
            held.enter_context(self.gate.enter(tenant, call.num_answers))
            turn = self._turn(call, tenant)
            salt = tenant.page_salt(call.cache_salt)
            prompt_ids = await self.encode(call, prompts, app, turn, salt)
            prompt_ids = self._kept(call, prompt_ids, app)
            self._check_lengths(call, prompt_ids)
            requests = self._requests(call, heading.reply_id, prompt_ids, tenant, app, turn)
            if self.recorder is not None:
                self.recorder.note(asked_s, requests)
            answering = await self.submit(requests, tenant)
            exchange = Exchange(self, answering, heading, request, app)
            held.push(exchange)
            echoes = self._echoes(call, prompts, prompt_ids)
            told_ids = prompt_ids if call.returns_token_ids else ()
            reply = CompletionReply(call, heading, self.engine.tokenizer, echoes, told_ids)
            writer = make_writer(reply, [len(ids) for ids in prompt_ids], turn)
            if call.is_streaming:
                return EventStream(
                    writer.events(answering),
                    lambda error: writer.last_words(exchange.failure(error)),
                    held.pop_all(),
                    self.limits.write_s,
                    writer.ping,
                )
            try:
                whole = await while_connected(request.receive, writer.whole(answering))
            except ClientLeft:
                exchange.state = RequestState.ABORTED
                return Response(status_code=CLIENT_LEFT)
            except EngineFault as fault:
                exchange.state = RequestState.FAILED
                raise from_fault(fault) from None
            exchange.state = RequestState.FINISHED
        return Response(whole, media_type="application/json")

    def _turn(self, call: Call, tenant: Tenant) -> Turn | None:
        if call.session_id is None:
            return None
        return Turn(self.sessions, tenant, call.session_id, self.engine.tokenizer)

    async def encode(
        self,
        call: Call,
        prompts: Sequence[Prompt],
        app: App | None,
        turn: Turn | None,
        salt: bytes,
    ) -> list[list[int]]:
        """Return the ids of the prompts; long prompts are encoded on another thread. Raises
        ApiError."""
        tokenizer, session = self.engine.tokenizer, None if turn is None else turn.session
        most = self._most_tokens(call)

        def begin() -> list[BegunPrompt]:
            return [begin_prompt(tokenizer, each, app, session, salt, most) for each in prompts]

        def finish() -> list[list[int]]:
            ids = [each.pending.finish() for each in begun]
            if turn is not None:
                turn.begin(begun[0], ids[0])
            return ids

        try:
            is_quick = is_short(prompts, INLINE_KNOWN_CHARS)
            begun = begin() if is_quick else await asyncio.to_thread(begin)
            is_quick &= sum(each.pending.num_new_chars for each in begun) < INLINE_CHARS
            return finish() if is_quick else await asyncio.to_thread(finish)
        except PromptTooLong as error:
            raise self._too_long(call, f"at least {error.least_tokens}") from None
        except InvalidRequest as error:
            raise from_invalid(error) from None

    def _kept(self, call: Call, prompts: list[list[int]], app: App | None) -> list[list[int]]:
        """Cut prompts to their last tokens, as many as the call asks for."""
        if call.kept_prompt_tokens is not None and app is not None:
            message = "truncate_prompt_tokens: would cut off the app's prompt; use context_overflow"
            raise ApiError(400, message, "truncate_prompt_tokens", "invalid_value")
        return [call.kept_prompt(ids, self.engine.max_model_len) for ids in prompts]

    def _most_tokens(self, call: Call) -> int:
        """The maximum number of tokens in a prompt. More would leave no room for an answer, or take
        so long to truncate that all requests would wait."""
        window = self.engine.max_model_len
        most = window - 1
        if call.overflow is not Overflow.ERROR or call.kept_prompt_tokens is not None:
            most = self._most_read
        return most

    @property
    def _most_read(self) -> int:
        """The maximum number of tokens of a prompt that may be truncated."""
        window = self.engine.max_model_len
        return max(window - 1, min(MAX_WINDOWS * window, MAX_SESSION_TOKENS))

    def _check_lengths(self, call: Call, prompts: Sequence[Sequence[int]]) -> None:
        longest = max(map(len, prompts))
        if longest > self._most_tokens(call):
            raise self._too_long(call, f"{longest}")

    def _too_long(self, call: Call, num_tokens: str) -> ApiError:
        # clients look for the first words, which are OpenAI's
        message = (
            f"This model's maximum context length is {self.engine.max_model_len} tokens; "
            f"the prompt has {num_tokens} tokens and may have at most {self._most_tokens(call)}"
        )
        return ApiError(400, message, call.kind.prompt_field, "context_length_exceeded")

    def _echoes(
        self, call: Call, prompts: Sequence[Prompt], prompt_ids: Sequence[Sequence[int]]
    ) -> list[Echo]:
        """The prompts as text, if the caller wants them in the reply."""
        if not call.has_echo:
            return []
        decode, skips_special = self.engine.tokenizer.decode, call.sampling.skip_special_tokens
        is_whole = call.kept_prompt_tokens is None
        return [
            Echo(
                prompt if is_whole and isinstance(prompt, str) else decode(ids, skips_special), ids
            )
            for prompt, ids in zip(prompts, prompt_ids, strict=True)
        ]

    def _requests(
        self,
        call: Call,
        reply_id: str,
        prompts: Sequence[Sequence[int]],
        tenant: Tenant,
        app: App | None,
        turn: Turn | None,
    ) -> list[EngineRequest]:
        """Make the engine's requests for a call. The app's prompt is public, and is kept when a
        conversation outgrows the context."""
        num_public = [self.filler.public_tokens(app, ids) for ids in prompts]
        try:
            return [
                EngineRequest(
                    RequestId(f"{reply_id}-{place}"),
                    np.asarray(ids),
                    call.sampling,
                    salt=tenant.page_salt(call.cache_salt),
                    public_tokens=num_public[place],
                    priority=call.priority,
                    session=None if turn is None else turn.engine_id,
                    overflow=call.overflow,
                    keep_tokens=num_public[place],
                    rendering=call.rendering(ids, self.engine.tokenizer),
                )
                for place, ids in enumerate(prompts)
            ]
        except InvalidRequest as error:
            raise from_invalid(error) from None

    async def submit(self, requests: Sequence[EngineRequest], tenant: Tenant) -> Answering:
        """Queue all prompts of one HTTP request, or none; raises ApiError."""
        if self._ends_answers:  # its prompts were still being encoded when others were ended
            raise unavailable(SHUTTING_DOWN)
        try:
            return await self.engine.submit(requests, owner_of(tenant))
        except InvalidRequest as error:
            raise from_invalid(error) from None
        except EngineFault as fault:
            raise from_fault(fault) from None

    # --- tokens ---------------------------------------------------------------------------------

    async def tokenize(self, body: Json, tenant: Tenant) -> Json:
        """Return the ids of a text (`prompt`) or of a conversation (`messages`)."""
        kind = CallKind.CHAT if body.get("messages") is not None else CallKind.COMPLETION
        options, fields = tokenize_options(body)
        call, prompts = self.parser.parse(fields, kind)
        if len(prompts) != 1:
            message = f"prompt: must be one text or one list of ids, got {len(prompts)}"
            raise ApiError(400, message, "prompt", "invalid_value")
        _, app = self.apps.resolve(call, self.model.names)
        tokenizer = self.engine.tokenizer
        prompt, wants_special = prompts[0], options.add_special_tokens
        if wants_special and isinstance(prompt, Chat):
            message = "add_special_tokens: must not be true for a chat: its template writes them"
            raise ApiError(400, message, "add_special_tokens", "invalid_value")
        call = replace(call, overflow=Overflow.RECOMPUTE)  # the prompt may exceed the context
        salt = tenant.page_salt(call.cache_salt)
        all_ids = await self.encode(call, prompts, app, None, salt)
        if wants_special is False and isinstance(prompt, str):
            text = app.prompt + prompt if app else prompt
            all_ids = [await asyncio.to_thread(tokenizer.encode_plain, text)]
        self._check_lengths(call, all_ids)
        [ids] = self._kept(call, all_ids, app)
        found = {"tokens": ids, "count": len(ids), "max_model_len": self.engine.max_model_len}
        if options.return_token_strs:
            found["token_strs"] = await _on_thread_if_many(
                ids, lambda: [token_text(token_id, tokenizer) for token_id in ids]
            )
        return found

    async def count(self, call: Call, prompts: Sequence[Prompt], tenant: Tenant) -> int:
        """Return the number of tokens in the only prompt of a call, which may exceed the context
        window."""
        _, app = self.apps.resolve(call, self.model.names)
        call = replace(call, overflow=Overflow.RECOMPUTE)
        ids = await self.encode(call, prompts, app, None, tenant.page_salt(call.cache_salt))
        self._check_lengths(call, ids)
        return len(ids[0])

    async def detokenize(self, body: Json) -> Json:
        """Return the text of ids (`tokens`), including special tokens."""
        tokens = read_fields(body, DetokenizeBody).tokens
        if len(tokens) > self._most_read:
            message = f"tokens: {len(tokens)} ids; at most {self._most_read} are allowed"
            raise ApiError(400, message, "tokens", "invalid_value")
        return {"prompt": await _on_thread_if_many(tokens, lambda: self._text(tokens))}

    def _text(self, token_ids: Sequence[int]) -> str:
        tokenizer = self.engine.tokenizer
        if not all(0 <= token_id < tokenizer.vocab_size for token_id in token_ids):
            message = f"tokens: must be token ids from 0 to {tokenizer.vocab_size - 1}"
            raise ApiError(400, message, "tokens", "invalid_value")
        return tokenizer.decode_all(token_ids)


async def _on_thread_if_many(ids: Sequence[int], write: Callable[[], Written]) -> Written:
    """Render a reply with ids; on a thread if there are many, so that other requests do not
    wait."""
    return write() if len(ids) <= INLINE_IDS else await asyncio.to_thread(write)


class Exchange:
    """A request between its acceptance and its end; a context manager that cleans up."""

    def __init__(
        self,
        gateway: Gateway,
        answering: Answering,
        heading: Heading,
        request: Request,
        app: App | None,
    ) -> None:
        self.state = RequestState.OPEN
        self._facts: Json = request.state.facts  # logged with the request
        tenant, app_name = request.state.tenant, None if app is None else app.name
        self._facts |= {"reply_id": heading.reply_id, "app": app_name}
        self._gateway = gateway
        self._answering = answering
        self._records = [
            Record(heading.reply_id, tenant, app_name, ticket) for ticket in answering.tickets
        ]
        for record in self._records:
            gateway.live.begin(record)

    def failure(self, error: Exception) -> ApiError:
        """The error for the client of a stream that cannot continue."""
        self.state = RequestState.FAILED
        if not isinstance(error, EngineFault):
            log.error("a stream failed", exc_info=error)
            error = EngineFault("internal error")
        return from_fault(error)

    def __enter__(self) -> "Exchange":
        return self

    def __exit__(self, *_: object) -> None:
        is_finished = all(ticket.is_finished for ticket in self._answering.tickets)
        if self.state is RequestState.OPEN:
            self.state = RequestState.FINISHED if is_finished else RequestState.ABORTED
        self._gateway.engine.abandon(self._answering)
        for record in self._records:
            record.state = self.state
            self._gateway.metrics.observe_ticket(record.ticket)
        tickets = self._answering.tickets
        self._facts |= {
            "state": self.state.value,
            "prompt_tokens": sum(len(ticket.request.prompt_ids) for ticket in tickets),
            "cached_tokens": sum(ticket.num_cached_tokens for ticket in tickets),
            "output_tokens": sum(ticket.num_output_tokens for ticket in tickets),
        }
