"""`/admin/`: the apps of a server, and its cache."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mainstem.core.errors import InvalidRequest
from mainstem.server.gateway import Gateway
from mainstem.server.http.body import read_json
from mainstem.server.http.faults import ApiError, disk_is_needed, from_invalid, unavailable
from mainstem.server.link.answering import EngineFault
from mainstem.text.encoding import App
from mainstem.wire.bodies import AppBody
from mainstem.wire.fields import read_fields

T = TypeVar("T")


class AdminRoutes:
    """The handlers, over one Gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def listed(self) -> list[Route]:
        return [
            Route("/admin/apps", self.list_apps, methods=["GET"]),
            Route("/admin/apps/{name}", self.put_app, methods=["PUT"]),
            Route("/admin/apps/{name}", self.delete_app, methods=["DELETE"]),
            Route("/admin/reset_prefix_cache", self.reset_cache, methods=["POST"]),
        ]

    async def list_apps(self, request: Request) -> Response:
        return JSONResponse({"apps": self._gateway.apps.names})

    async def put_app(self, request: Request) -> Response:
        """Add an app, or change its prompt; replies when its prefix is computed."""
        body = await read_json(request, self._gateway.limits)
        apps, filler = self._gateway.apps, self._gateway.filler
        try:
            app = App(request.path_params["name"], read_fields(body, AppBody).prompt)
            async with filler.changing:
                num_tokens = await filler.fill(app)
                try:
                    with disk_is_needed():
                        await asyncio.to_thread(apps.add, app)
                except (ApiError, InvalidRequest):
                    before = apps.find(app.name)
                    await (filler.forget(app.name) if before is None else filler.fill(before))
                    raise
        except InvalidRequest as error:
            raise from_invalid(error) from None
        except EngineFault as fault:
            raise unavailable(str(fault)) from None
        return JSONResponse({"name": app.name, "prefix_tokens": num_tokens})

    async def delete_app(self, request: Request) -> Response:
        name = request.path_params["name"]
        async with self._gateway.filler.changing:
            with disk_is_needed():
                was_there = await asyncio.to_thread(self._gateway.apps.remove, name)
            if not was_there:
                raise ApiError(404, f"there is no app {name!r}", "name", "app_not_found")
            await self._on_engine(self._gateway.filler.forget(name))
        return JSONResponse({"name": name, "deleted": True})

    async def reset_cache(self, request: Request) -> Response:
        """Unpin the prefixes of clients, forget every cached page that no sequence holds, then
        compute the pages of the apps again."""
        gateway = self._gateway
        gateway.pins.end_all()
        count = await self._on_engine(gateway.engine.clear_cache())
        await gateway.filler.fill_all()
        return JSONResponse({"forgotten_pages": count})

    async def _on_engine(self, work: Awaitable[T]) -> T:
        """The engine's answer to a command; 503 if it cannot answer."""
        try:
            return await work
        except EngineFault as fault:
            raise unavailable(str(fault)) from None
