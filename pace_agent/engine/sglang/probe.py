"""What a server is asked before it may serve: whether the keys fit, what it serves, and with which weights."""

import asyncio
import json
import secrets
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pace_agent.engine.sglang.client import OLDEST, Refused, ServerClient, Unreachable
from pace_agent.errors import EngineError

T = TypeVar("T")
ANSWER_SECONDS = 30.0
SHAPE = (
    *("hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "vocab_size"),
)


@dataclass(frozen=True, slots=True)
class Facts:
    """`context_length` is the model's, as the server was started; `usable` is what of it prompt and answer may fill.

    `dtype` is as the server was told, so it may be "auto".
    """

    version: str
    context_length: int
    usable: int
    dtype: str
    sglang: str


async def check_server(client: ServerClient, version: int, model_folder: Path) -> Facts:
    """Learn what a server is, let it go on if it was left paused, and make `version` the name of its weights.

    `model_folder` holds the model that it should serve, with whatever weights.

    EngineError says what keeps it from serving: no answer, a key, its age, its model.
    """
    try:
        model, server, models = await all_of(
            client.get(path, timeout=ANSWER_SECONDS) for path in ("/model_info", "/server_info", "/v1/models")
        )
    except Unreachable as error:
        raise EngineError(f"{error}. Is the server running? `pace-agent serve` starts one") from error
    facts = _facts(client.url, model, server, models)
    if wrong := _difference(model, model_folder):
        raise EngineError(
            f"{client.url} serves {model.get('model_path')}, which is not the model of this run: {wrong}. "
            f"Start the server with {model_folder}"
        )
    if int(server.get("dp_size") or 1) != 1:
        raise EngineError(
            f"{client.url} runs with --dp-size {server['dp_size']}, which takes no weight updates: start more servers"
        )
    # Unknown ids are fine, so this asks for nothing but whether the key opens control.
    await client.post("/abort_request", {"rid": secrets.token_hex(12)}, timeout=ANSWER_SECONDS)
    await client.post("/continue_generation", {}, timeout=ANSWER_SECONDS)
    if facts.version != str(version):
        body = {"new_version": str(version), "abort_all_requests": False}
        await client.post("/update_weight_version", body, timeout=ANSWER_SECONDS)
    return facts


def _difference(served: Mapping[str, Any], folder: Path) -> str:
    """What of a served model is not as in `folder`; nothing where all that can be seen from here agrees."""
    ours = read_config(folder)
    theirs = {**read_config(Path(str(served.get("model_path")))), "architectures": served.get("architectures")}
    for key in ("architectures", *SHAPE):
        if ours.get(key) and theirs.get(key) and ours[key] != theirs[key]:
            return f"its {key} is {theirs[key]}, ours {ours[key]}"
    return ""


def read_config(folder: Path) -> dict[str, Any]:
    """The text model's part of a folder's config.json; empty where there is none to be seen."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {**config, **config.get("text_config", {})}


def _facts(url: str, model: dict[str, Any], server: dict[str, Any], models: dict[str, Any]) -> Facts:
    try:
        return Facts(
            version=str(model["weight_version"]),
            context_length=int(models["data"][0]["max_model_len"]),
            usable=int(server["max_req_input_len"]),
            dtype=str(server["dtype"]),
            sglang=str(server["version"]),
        )
    except (KeyError, IndexError, TypeError) as error:
        raise EngineError(
            f"{url} does not tell its {error.args[0]!r}: its SGLang {server.get('version', '')} is older than {OLDEST}"
        ) from error


async def all_of(calls: Iterable[Awaitable[T]]) -> list[T]:
    """What all of them return; once all have ended, the first error of any."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if not isinstance(answer, BaseException)]


async def reported_version(client: ServerClient, timeout: float) -> str:
    """The version of the weights that a server says it has."""
    answer = await client.get("/model_info", timeout=timeout)
    return str(answer.get("weight_version"))


async def generates(client: ServerClient, timeout: float) -> None:
    """Let the server produce a token: its HTTP side answers long after its scheduler died. EngineError if it can't."""
    try:
        await client.get("/health_generate", timeout=timeout)
    except Refused as error:
        raise EngineError(f"{client.url} answers, but produces no token") from error
