"""Administration of an instance, on its own port, with a token.

GET  /state                                  models, bytes, costs; nothing about any user
POST /drain                                  not ready any more
POST /swap     {"run", "step"}               new requests get this model; with "prefill_ms_per_s" after its prefixes are stored
POST /prefill  {"users", "rate_ms_per_s"}    the KV prefixes of these users are stored, near-line
POST /compare  {"run", "step", "share"}      this share of the users gets it, the others keep theirs
POST /compare  {"share": 0}                  everybody gets the same model again
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import UNSET
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nestpipe.errors import NestPipeError
from nestpipe.serve.http_instance import HttpInstance
from nestpipe.serve.model_versions import Load, ParityError, VersionFile
from nestpipe.serve.request_errors import BadRequestError
from nestpipe.serve.request_guard import http_refusal, lacks_token, parse, read_json, refuse_with
from nestpipe.serve.schemas import CompareRequest, NearlineRequest, Request, SwapRequest
from nestpipe.serve.versioned_worker import ModelVersions, VersionedWorker

_log = logging.getLogger("nestpipe.serve")
_MAX_USERS_BYTES = 1 << 20  # of a list of users


class Admin:
    """The admin handlers; one model is loaded at a time."""

    def __init__(
        self,
        instance: HttpInstance,
        engine: VersionedWorker[Any],
        *,
        token: str,
        load: Load,
        file: VersionFile | None = None,
    ):
        """`load` brings models of the kind that `engine` serves."""
        self._instance, self._engine, self._token, self._load = instance, engine, token, load
        self._file = file or VersionFile()
        self._is_loading = False

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/state", self._handle),
                *(
                    Route(f"/{name}", self._handle, methods=["POST"])
                    for name in ("drain", "swap", "compare", "prefill")
                ),
            ],
            exception_handlers={404: http_refusal, 405: http_refusal},
        )

    async def _handle(self, http: HttpRequest) -> Response:
        if (refused := lacks_token(http, self._token)) is not None:
            return refused
        try:
            await self._act(http)
        except BadRequestError as error:
            return refuse_with(error.status, error.code, str(error))
        except ParityError as error:
            return refuse_with(409, "parity", str(error))
        except (NestPipeError, OSError) as error:
            return refuse_with(400, "bad_model", str(error))
        except Exception as error:
            _log.exception("an admin call failed; the models in use stay")
            return refuse_with(500, "failed", f"{type(error).__name__}: {error}; the log says where.")
        return JSONResponse(self._instance.state())

    async def _act(self, http: HttpRequest) -> None:
        match http.url.path:
            case "/drain":
                self._instance.is_draining = True
            case "/swap":
                await self._swap(await _read(http, SwapRequest))
            case "/compare":
                await self._compare(await _read(http, CompareRequest))
            case "/prefill":
                self._instance.prefill_users(await _read(http, NearlineRequest, max_bytes=_MAX_USERS_BYTES))

    async def _swap(self, request: SwapRequest) -> None:
        new = await self._loaded(request.run, request.step, prefill_ms_per_s=request.prefill_ms_per_s)
        self._file.store(replace(self._file.record, run=request.run, step=request.step))
        self._engine.use(replace(self._engine.versions, main=new))

    async def _compare(self, request: CompareRequest) -> None:
        engine, file, share = self._engine, self._file, request.share
        names_model = (request.run, request.step) != (UNSET, UNSET)
        if share == 0:
            file.store(replace(file.record, compared=None, compared_step=None, share=0.0))
            engine.use(ModelVersions(engine.versions.main))
        elif not names_model and engine.versions.other is not None:
            file.store(replace(file.record, share=share))
            engine.use(replace(engine.versions, share=share))
        else:
            if request.run is UNSET:
                raise BadRequestError("field 'run' is missing; name the folder of the run to compare.", code="bad_run")
            step = None if request.step is UNSET else request.step
            new = await self._loaded(request.run, step)
            file.store(replace(file.record, compared=request.run, compared_step=step, share=share))
            engine.use(replace(engine.versions, other=new, share=share))

    async def _loaded(self, run: str, step: int | None, *, prefill_ms_per_s: float | None = None) -> Any:
        if self._is_loading:
            raise BadRequestError("another model is being loaded; wait for it.", status=409, code="busy")
        self._is_loading = True
        try:
            model = await run_in_threadpool(self._load, Path(run), step)
            if prefill_ms_per_s is not None:
                await run_in_threadpool(self._instance.prefill_version, model, prefill_ms_per_s)
            return model
        finally:
            self._is_loading = False


async def _read(http: HttpRequest, kind: type[Request], *, max_bytes: int = 4096) -> Request:
    return parse(await read_json(http, max_bytes=max_bytes, timeout_s=5.0), kind)
