"""Answers the bodies of HTTP requests: everything between the routes and the engine."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, time
from typing import Protocol

import numpy as np
from filelock import BaseFileLock
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mainstem.core.errors import InvalidRequest
from mainstem.core.ids import RequestId
from mainstem.core.json import Json
from mainstem.core.request import Overflow, Request
from mainstem.server.apps import AppFiller, AppRegistry
from mainstem.server.batch_runner import BatchRunner
from mainstem.server.http.auth import Access, Tenant
from mainstem.server.http.faults import ApiError, from_fault, from_invalid, unavailable
from mainstem.server.http.limits import RequestGate, ServerLimits
from mainstem.server.http.stream import ClientLeft, EventStream, while_connected
from mainstem.server.kept.batch_store import BatchStore
from mainstem.server.kept.file_store import FileStore, lock_folder
from mainstem.server.kept.pruning import Pruner
from mainstem.server.kept.recording import Recorder
from mainstem.server.kept.response_store import KeptResponse, ResponseStore
from mainstem.server.kept.room import Room
from mainstem.server.kept.saver import Saver
from mainstem.server.kept.turns import SessionTurn
from mainstem.server.link.answering import SHUTTING_DOWN, Answering, EngineFault
from mainstem.server.link.engine_client import EngineClient
from mainstem.server.live import Live, Record, RequestState
from mainstem.server.metrics import ServerMetrics
from mainstem.server.pins import PrefixPins
from mainstem.server.served_model import ServedModel
from mainstem.text.encoding import (
    App,
    BegunPrompt,
    Prompt,
    PromptTooLong,
    begin_prompt,
    is_short,
)
from mainstem.text.kept_file import KeptFile
from mainstem.text.sessions import MAX_SESSION_TOKENS, Session, Sessions
from mainstem.wire.answers import Heading
from mainstem.wire.calls import Call
from mainstem.wire.chat.parsing import CallParser
from mainstem.wire.chat.rendering import CompletionReply, Echo

# more work than this would block the event loop for over 1 ms
INLINE_CHARS = 1 << 10  # characters to encode
INLINE_KNOWN_CHARS = 1 << 16  # characters to scan
MAX_WINDOWS = 32  # a conversation may be this many times as long as the context
CLIENT_LEFT = 499  # a status for logs and metrics, which is never sent

log = logging.getLogger("mainstem.server")


class Writer(Protocol):
    """Writes the reply to one request in the format of one API."""

    ping: bytes  # sent in a stream that would be silent for long

    async def whole(self, answering: Answering) -> bytes:
        """The reply as JSON when every answer is finished; raises what ended an answer early."""

    def events(self, answering: Answering) -> AsyncGenerator[bytes, None]:
        """The reply as server-sent events; raises the error that ended it early."""

    def last_words(self, error: ApiError) -> bytes:
        """The event that ends a stream which cannot continue."""


# makes a writer from a reply's call and heading, each prompt's number of tokens, and the turn of a
# session
MakeWriter = Callable[[CompletionReply, Sequence[int], SessionTurn | None], Writer]
# what the engine is asked, and the writer of its answers
Prepared = tuple[Sequence[Request], Writer]
# raises InvalidRequest or ApiError
Prepare = Callable[[Heading, Tenant, App | None], Awaitable[Prepared]]


@dataclass(frozen=True, slots=True)
class BatchService:
    """Files and batches, with their runner and their pruner."""

    files: FileStore
    batches: BatchStore
    room: Room
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
        sessions: Sessions,
    ) -> None:
        self.engine = engine
        self.model = model
        self.access = access
        self.apps = apps
        self.limits = limits
        self.metrics = ServerMetrics(engine.bus, model.names[0])
        self.live = Live(model.names[0], self.metrics.counters)
        self.sessions = sessions
        self.gate = RequestGate(limits)
        self.responses = ResponseStore(limits)
        self.filler = AppFiller(engine, apps)
        self.pins = PrefixPins(engine, limits.pinned_share)
        self.batches: BatchService | None = None  # None: there is no folder for them
        self.is_ready = False  # True when the apps are filled
        self.is_draining = False
        self._ends_answers = False  # True: requests that were let in earlier are refused, too
        formats = model.formats_of(engine.tokenizer)
        self.parser = CallParser(model.sampling, limits.body, lambda: formats)
        self._fingerprint = model.fingerprint
        engine.on_tokens = self.live.rate.add
        engine.on_recovered = self._refill
        self.weights_root: Path | None = None  # /admin/weights takes folders below it; None: none
        self.recorder: Recorder | None = None  # records requests, for a benchmark
        self._savers: list[Saver[Session] | Saver[KeptResponse]] = []
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
        self.batches = BatchService(
            files, batches, Room(files, batches, self.limits), runner, pruner
        )

    @property
    def batch_service(self) -> BatchService:
        """Files and batches; raises ApiError 404 if the server has no folder for them."""
        if self.batches is None:
            message = "this server keeps no files: it was started without --data-dir"
            raise ApiError(404, message, code="not_enabled")
        return self.batches

    def keep_sessions(self, file: KeptFile[Session]) -> None:
        """Load sessions from a file and save them there; called before the server starts. Raises
        ConfigError if the file cannot be read.
        """
        self.sessions.restore(file.load())
        self._savers.append(Saver("sessions", self.sessions, file))

    def keep_responses(self, file: KeptFile[KeptResponse]) -> None:
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

    # --- requests -------------------------------------------------------------------------------

    async def reply(
        self,
        request: HttpRequest,
        call: Call,
        prompts: Sequence[Prompt],
        reply_id: str,
        make_writer: MakeWriter,
    ) -> Response:
        """Return the reply to a chat or completion of any API, in the format of its writer; raises
        WireError or ApiError."""
        asked_s = monotonic()

        async def prepare(heading: Heading, tenant: Tenant, app: App | None) -> Prepared:
            turn = None
            if call.session_id is not None:
                session_id, tokenizer = call.session_id, self.engine.tokenizer
                turn = SessionTurn(self.sessions, tenant.owner, session_id, tokenizer)
            salt = tenant.page_salt(call.cache_salt)
            prompt_ids = await self.encode(call, prompts, app, turn, salt)
            prompt_ids = self.cut(call, prompt_ids, app)
            self.check_lengths(call, prompt_ids)
            requests = self._requests(call, heading.reply_id, prompt_ids, tenant, app, turn)
            if self.recorder is not None:
                self.recorder.note(asked_s, requests)
            echoes = self._echoes(call, prompts, prompt_ids)
            told_ids = prompt_ids if call.returns_token_ids else ()
            reply = CompletionReply(call, heading, self.engine.tokenizer, echoes, told_ids)
            return requests, make_writer(reply, [len(ids) for ids in prompt_ids], turn)

        return await self.exchange(request, call, call.num_answers, reply_id, prepare)

    async def exchange(
        self,
        request: HttpRequest,
        call: Call,
        num_answers: int,
        reply_id: str,
        prepare: Prepare,
    ) -> Response:
        """Return what a writer makes of the engine's answers, whole or as a stream; raises
        WireError or ApiError."""
        tenant: Tenant = request.state.tenant
        model, app = self.apps.resolve(call, self.model.names)
        if self.is_draining:
            raise unavailable(SHUTTING_DOWN)
        heading = Heading(reply_id, model, int(time()), self._fingerprint)
        with ExitStack() as held:
            held.enter_context(self.gate.enter(tenant, num_answers))
            try:
                requests, writer = await prepare(heading, tenant, app)
                if self._ends_answers:  # its prompts were being encoded when others were ended
                    raise unavailable(SHUTTING_DOWN)
                answering = await self.engine.submit(requests, tenant.owner)
            except InvalidRequest as error:
                raise from_invalid(error) from None
            except EngineFault as fault:
                raise from_fault(fault) from None
            exchange = held.enter_context(Exchange(self, answering, heading, request, app))
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
            except InvalidRequest as error:  # it waited for a change of the engine
                exchange.state = RequestState.FAILED
                raise from_invalid(error) from None
            exchange.state = RequestState.FINISHED
        return Response(whole, media_type="application/json")

    async def encode(
        self,
        call: Call,
        prompts: Sequence[Prompt],
        app: App | None,
        turn: SessionTurn | None,
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

    async def count(self, call: Call, prompt: Prompt, tenant: Tenant) -> int:
        """The number of tokens of a prompt, which may exceed the context. Raises ApiError."""
        call = replace(call, overflow=Overflow.RECOMPUTE)
        _, app = self.apps.resolve(call, self.model.names)
        ids = await self.encode(call, [prompt], app, None, tenant.page_salt(call.cache_salt))
        self.check_lengths(call, ids)
        return len(ids[0])

    def cut(self, call: Call, prompts: list[list[int]], app: App | None) -> list[list[int]]:
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
            most = self.most_read
        return most

    @property
    def most_read(self) -> int:
        """The maximum number of tokens of a prompt that may be truncated."""
        window = self.engine.max_model_len
        return max(window - 1, min(MAX_WINDOWS * window, MAX_SESSION_TOKENS))

    def check_lengths(self, call: Call, prompts: Sequence[Sequence[int]]) -> None:
        """Raise ApiError if a prompt is too long."""
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
        turn: SessionTurn | None,
    ) -> list[Request]:
        """Make the engine's requests for a call. The app's prompt is public, and is kept when a
        conversation outgrows the context."""
        num_public = [self.filler.public_tokens(app, ids) for ids in prompts]
        return [
            Request(
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


class Exchange:
    """A request between its acceptance and its end; a context manager that cleans up."""

    def __init__(
        self,
        gateway: Gateway,
        answering: Answering,
        heading: Heading,
        request: HttpRequest,
        app: App | None,
    ) -> None:
        self.state = RequestState.OPEN
        self._facts: Json = request.state.facts  # logged with the request
        tenant, app_name = request.state.tenant, None if app is None else app.name
        self._facts |= {"reply_id": heading.reply_id, "app": app_name}
        self._gateway = gateway
        self._answering = answering
        self._records = [
            Record(heading.reply_id, tenant, app_name, opened) for opened in answering.requests
        ]
        for record in self._records:
            gateway.live.begin(record)

    def failure(self, error: Exception) -> ApiError:
        """The error for the client of a stream that cannot continue."""
        self.state = RequestState.FAILED
        if isinstance(error, InvalidRequest):
            return from_invalid(error)
        if not isinstance(error, EngineFault):
            log.error("a stream failed", exc_info=error)
            error = EngineFault("internal error")
        return from_fault(error)

    def __enter__(self) -> "Exchange":
        return self

    def __exit__(self, *_: object) -> None:
        is_finished = all(opened.is_finished for opened in self._answering.requests)
        if self.state is RequestState.OPEN:
            self.state = RequestState.FINISHED if is_finished else RequestState.ABORTED
        self._gateway.engine.abandon(self._answering)
        for record in self._records:
            record.state = self.state
            self._gateway.metrics.observe_ended(record.opened)
        requests = self._answering.requests
        self._facts |= {
            "state": self.state.value,
            "prompt_tokens": sum(len(opened.request.prompt_ids) for opened in requests),
            "cached_tokens": sum(opened.num_cached_tokens for opened in requests),
            "output_tokens": sum(opened.num_output_tokens for opened in requests),
        }
