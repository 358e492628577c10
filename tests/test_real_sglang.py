"""The real server does what the engine builds on, and what the recorded answers in data/sglang say."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_sglang import RealServer, real_sglang, sglang_python
from tiny_models import make_model

RECORDED = Path(__file__).parent / "data" / "sglang"
GENERATE = {
    "rid": "turn-2",
    "input_ids": [10, 20, 30],
    "stream": True,
    "return_logprob": True,
    "logprob_start_len": -1,
    "sampling_params": {"max_new_tokens": 6, "temperature": 1.0, "ignore_eos": True},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    sglang_python()  # skips before the model is made
    folder = tmp_path_factory.mktemp("sglang")
    make_model(0).save_pretrained(folder / "model")
    with real_sglang(folder / "model", folder) as made:
        yield made


def chunks(stream: bytes) -> list[dict[str, Any]]:
    """The JSON of a stream that ended as it should."""
    *events, done = [event.removeprefix("data: ") for event in stream.decode().split("\n\n") if event]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def test_model_info_tells_the_version_of_the_weights(server: RealServer) -> None:
    info = server.get("/model_info")
    assert info["weight_version"] == "0"
    assert set(info) >= set(json.loads((RECORDED / "model_info.json").read_text()))
    assert server.get("/server_info")["version"] == json.loads((RECORDED / "server_info.json").read_text())["version"]


def test_the_last_chunk_of_a_stream_stamps_every_token(server: RealServer) -> None:
    got = chunks(server.post("/generate", GENERATE))
    recorded = chunks((RECORDED / "generate_stream.txt").read_bytes())
    assert [len(chunk["output_ids"]) for chunk in got] == [1, 2, 3, 4, 5, 6]  # cumulative
    assert ["weight_versions" in chunk["meta_info"] for chunk in got] == [False] * 5 + [True]
    last = got[-1]["meta_info"]
    assert last["weight_versions"] == [{"version": "0", "start": 0, "end": 6}]
    assert set(last) == set(recorded[-1]["meta_info"])
    assert [token for _, token, _ in last["output_token_logprobs"]] == got[-1]["output_ids"]


def test_a_killed_server_leaves_no_process(server: RealServer) -> None:
    """The last test of this module: nothing answers afterwards."""
    group = server.pid
    server.kill()
    assert not server.answers()
    # The group's other processes are reaped by init, not by us, so they may still be listed for a moment.
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            os.killpg(group, signal.SIGCONT)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail(f"processes of group {group} are left")


def test_a_server_that_exits_is_told_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACE_AGENT_SGLANG_PYTHON", sys.executable)  # which has no SGLang, so the exit comes at once
    with (
        pytest.raises(RuntimeError, match=r"exited with code 1:\n.*No module named '?sglang"),
        real_sglang(tmp_path, tmp_path),
    ):
        pass


def test_an_interpreter_that_is_not_there_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACE_AGENT_SGLANG_PYTHON", str(tmp_path / "python"))
    with pytest.raises(pytest.fail.Exception, match=r"PACE_AGENT_SGLANG_PYTHON names .* doesn't exist"):
        sglang_python()


def test_without_the_server_a_test_is_skipped_and_fails_in_ci(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PACE_AGENT_SGLANG_PYTHON", raising=False)
    monkeypatch.setenv("PACE_AGENT_CACHE", str(tmp_path))
    monkeypatch.setenv("CI", "")
    with pytest.raises(pytest.skip.Exception, match=r"run `python scripts/sglang_cpu.py .*/sglang-cpu`"):
        sglang_python()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no SGLang for a CPU"):
        sglang_python()
