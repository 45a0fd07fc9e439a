"""Administration of an instance, on its own port, for who knows the token.

GET  /state                                  models, bytes, costs; nothing about any user
POST /drain                                  not ready any more
POST /swap     {"run", "step"}               new requests get this model
POST /compare  {"run", "step", "share"}      this share of the users gets it, the others go on as before
POST /compare  {"share": 0}                  everybody gets the same model again
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nestpipe.errors import NestPipeError
from nestpipe.serve.api import Instance
from nestpipe.serve.model_versions import Load, ModelVersions, ParityError, VersionFile
from nestpipe.serve.prefill import ServedModel
from nestpipe.serve.schemas import (
    BadRequestError,
    RequestFields,
    answer_of,
    http_refusal,
    lacks_token,
    read_json,
    refusal,
)

_log = logging.getLogger("nestpipe.serve")


class Admin:
    """The handlers; one model is loaded at a time."""

    def __init__(self, instance: Instance, token: str, load: Load, notes: VersionFile | None = None):
        self._instance, self._token, self._load = instance, token, load
        self._notes = notes or VersionFile()
        self._is_loading = False

    def app(self) -> Starlette:
        """What a server runs."""
        return Starlette(
            routes=[
                Route("/state", self._handle),
                *(Route(f"/{name}", self._handle, methods=["POST"]) for name in ("drain", "swap", "compare")),
            ],
            exception_handlers={404: http_refusal, 405: http_refusal},
        )

    async def _handle(self, http: Request) -> Response:
        if (refused := lacks_token(http, self._token)) is not None:
            return refused
        try:
            await self._act(http)
        except BadRequestError as error:
            return answer_of(*refusal(error.status, error.code, str(error)))
        except ParityError as error:
            return answer_of(*refusal(409, "parity", str(error)))
        except (NestPipeError, OSError) as error:
            return answer_of(*refusal(400, "bad_model", str(error)))
        except Exception as error:
            _log.exception("a call of the administration failed; the models in use go on")
            return answer_of(*refusal(500, "failed", f"{type(error).__name__}: {error}; the log says where."))
        return JSONResponse(self._instance.state())

    async def _act(self, http: Request) -> None:
        match http.url.path:
            case "/drain":
                self._instance.is_draining = True
            case "/swap":
                body = await read_json(http, max_bytes=4096, timeout_s=5.0)
                new, run, step = await self._loaded(body, RequestFields(body, frozenset({"run", "step"})))
                self._notes.keep(replace(self._notes.told, run=run, step=step))
                engine = self._instance.engine
                engine.use(replace(engine.versions, main=new))
            case "/compare":
                body = await read_json(http, max_bytes=4096, timeout_s=5.0)
                await self._compare(body, RequestFields(body, frozenset({"run", "step", "share"})))

    async def _compare(self, body: dict[str, Any], fields: RequestFields) -> None:
        engine, notes, share = self._instance.engine, self._notes, fields.share("share")
        if share == 0:
            notes.keep(replace(notes.told, compared=None, compared_step=None, share=0.0))
            engine.use(ModelVersions(engine.versions.main))
        elif not body.keys() & {"run", "step"} and engine.versions.other is not None:
            notes.keep(replace(notes.told, share=share))
            engine.use(replace(engine.versions, share=share))
        else:
            new, run, step = await self._loaded(body, fields)
            notes.keep(replace(notes.told, compared=run, compared_step=step, share=share))
            engine.use(replace(engine.versions, other=new, share=share))

    async def _loaded(self, body: dict[str, Any], fields: RequestFields) -> tuple[ServedModel, str, int | None]:
        """A model, and what it is known by."""
        run = fields.text("run", most=1024)
        step = None if body.get("step") is None else fields.integer("step", low=0)
        if self._is_loading:
            raise BadRequestError("another model is being loaded; wait for it.", status=409, code="busy")
        self._is_loading = True
        try:
            return await run_in_threadpool(self._load, Path(run), step), run, step
        finally:
            self._is_loading = False
