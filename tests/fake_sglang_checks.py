"""What the fake SGLang server lets in: paths, keys, bodies; and the answers of those that it does not."""

from typing import Any

from aiohttp import web

POST, EITHER = ("POST",), ("GET", "POST")
OPEN_SESSION = ("/open_session", "/close_session")
CONTROL = {
    "/pause_generation": POST,
    "/continue_generation": POST,
    "/abort_request": POST,
    "/flush_cache": EITHER,
    "/update_weights_from_disk": POST,
    "/update_weights_from_tensor": POST,
    "/update_weights_from_distributed": POST,
    "/begin_weight_update": POST,
    "/end_weight_update": POST,
    "/init_weights_update_group": POST,
    "/destroy_weights_update_group": POST,
    "/update_weight_version": POST,
    "/release_memory_occupation": EITHER,
    "/resume_memory_occupation": EITHER,
    "/slow_down": EITHER,
    "/open_session": EITHER,
    "/close_session": EITHER,
}
"""Control calls and their methods. All but the sessions want the admin key."""

REQUIRED: dict[str, dict[str, type]] = {
    "/update_weights_from_disk": {"model_path": str},
    "/update_weights_from_tensor": {"serialized_named_tensors": list},
    "/update_weights_from_distributed": {"names": list, "dtypes": list, "shapes": list},
    "/init_weights_update_group": {"master_address": str, "master_port": int, "rank_offset": int, "world_size": int},
    "/update_weight_version": {"new_version": str},
    "/open_session": {"capacity_of_str_len": int},
    "/close_session": {"session_id": str},
}
# fmt: off
PARAMETERS = (
    "max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "n", "json_schema", "regex",
    "ebnf", "structural_tag", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim",
    "stream_interval", "logit_bias", "sampling_seed", "custom_params", "beam_width", "watermark", "choice",
)
# fmt: on
WHOLE = ("max_new_tokens", "top_k", "min_new_tokens", "n", "stream_interval", "sampling_seed")


def decide(path: str, authorization: str, api_key: str, admin_key: str) -> int:
    """0, or the status to refuse with."""
    if path.startswith(("/health", "/ready", "/metrics")):
        return 0
    control = path in CONTROL and path not in OPEN_SESSION
    key = (admin_key or api_key) if control else api_key
    kind, _, given = authorization.partition(" ")
    return 401 if key and (kind.lower() != "bearer" or given != key) else 0


def invalid(kind: str, message: str, given: Any, *where: str) -> web.Response:
    """The answer to a body that doesn't fit."""
    problem = {"type": kind, "loc": ("body", *where), "msg": message, "input": given}
    text = f"1 validation error:\n  {problem} [{problem}]"
    body = {"object": "error", "message": text, "type": "Bad Request", "param": None, "code": 400}
    return web.json_response(body, status=400)


def refusal_of(body: Any) -> str:
    """What the schema of /generate says against a body, or nothing."""
    if not isinstance(body, dict):
        return "invalid type: sequence, expected struct GenerateRequest"
    for key, value in (body.get("sampling_params") or {}).items():
        if key not in PARAMETERS:
            return f"unknown field `{key}`, expected one of {', '.join(f'`{name}`' for name in PARAMETERS)}"
        if key in WHOLE and value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            kind = f"floating point `{value}`" if isinstance(value, float) else f'string "{value}"'
            return f"invalid type: {kind}, expected i64"
    for one in body.get("input_ids") or ():
        if not isinstance(one, int):
            return f'invalid type: string "{one}", expected a sequence'
    return ""


def said(success: bool, message: str) -> web.Response:
    return web.json_response({"success": success, "message": message}, status=200 if success else 400)
