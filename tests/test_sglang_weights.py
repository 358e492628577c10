"""Weights are checked before they are kept, nothing stays behind, and each way into the real server works."""

import asyncio
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from real_sglang import RealServer, real_sglang, sglang_python
from safetensors.torch import save_file
from tiny_models import make_model
from transformers import AutoModelForCausalLM

from pace_agent.engine.local.process import share_weights
from pace_agent.engine.sglang.client import ServerClient, Unreachable
from pace_agent.engine.sglang.weights.kept import SHARED_MEMORY, KeptWeights, WeightKeeper, remove_leftovers
from pace_agent.engine.sglang.weights.transports import Transport, make_transport
from pace_agent.errors import EngineError

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
KINDS = ("disk", "tensor", "group")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_model(0).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def keeper(model: Path, tmp_path: Path) -> Iterator[WeightKeeper]:
    made = WeightKeeper(model, folder=tmp_path / "weights")
    yield made
    made.close()
    assert not list((tmp_path / "weights").iterdir())


def kept_names() -> set[str]:
    return {path.name for path in SHARED_MEMORY.glob("*pace-kept-*")}


# Keeping


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_kept_folder_loads_as_the_new_model(model: Path, dtype: str | None, tmp_path: Path) -> None:
    keeper = WeightKeeper(model, folder=tmp_path / "weights", dtype=dtype)
    new = make_model(1).state_dict()
    kept = keeper.keep(new, 7)
    loaded = AutoModelForCausalLM.from_pretrained(kept.folder, dtype=dtype or "float32").state_dict()
    cast = getattr(torch, dtype or "float32")
    assert all(torch.equal(loaded[name], tensor.to(cast)) for name, tensor in new.items())
    assert dict(kept.tensors()).keys() == new.keys() - {HEAD}
    assert all(torch.equal(tensor, new[name].to(cast)) for name, tensor in kept.tensors())
    assert kept.size == sum(new[name].numel() for name in kept.entries) * cast.itemsize
    kept.delete()
    kept.delete()
    assert not kept.folder.exists()


def test_a_file_is_linked_and_outlives_its_name(keeper: WeightKeeper, tmp_path: Path) -> None:
    new = {name: tensor for name, tensor in make_model(1).state_dict().items() if name != HEAD}
    save_file(new, tmp_path / "published")
    kept = keeper.keep(tmp_path / "published", 1)
    assert (kept.folder / "model.safetensors").samefile(tmp_path / "published")
    (tmp_path / "published").unlink()
    assert all(torch.equal(tensor, new[name]) for name, tensor in kept.tensors())


def test_a_folder_in_parts_is_kept_in_parts(keeper: WeightKeeper, tmp_path: Path) -> None:
    make_model(1).save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    assert (tmp_path / "parts" / "model.safetensors.index.json").exists()
    kept = keeper.keep(tmp_path / "parts", 1)
    assert len(list(kept.folder.glob("*.safetensors"))) > 1
    state = make_model(1).state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in kept.tensors())
    loaded = AutoModelForCausalLM.from_pretrained(keeper.keep(dict(kept.tensors()), 2).folder)
    assert torch.equal(loaded.state_dict()[EMBEDDING], state[EMBEDDING])


def test_what_comes_through_shared_memory_is_kept_there(model: Path) -> None:
    before = kept_names()
    keeper = WeightKeeper(model)
    file = share_weights(make_model(1).state_dict())
    kept = keeper.keep(file, 1)
    file.unlink()
    assert {kept.folder.name} == kept_names() - before
    assert torch.equal(dict(kept.tensors())[EMBEDDING], make_model(1).state_dict()[EMBEDDING])
    keeper.close()
    assert kept_names() == before


@pytest.mark.parametrize("left_out", [EMBEDDING, HEAD])
@pytest.mark.parametrize("as_file", [False, True])
def test_tied_weights_may_come_under_either_name(
    keeper: WeightKeeper, tmp_path: Path, left_out: str, as_file: bool
) -> None:
    new = {name: tensor for name, tensor in make_model(1).state_dict().items() if name != left_out}
    save_file(new, tmp_path / "new.safetensors")
    kept = keeper.keep(tmp_path / "new.safetensors" if as_file else new, 1)
    assert torch.equal(dict(kept.tensors())[EMBEDDING], make_model(1).state_dict()[EMBEDDING])


def test_tied_weights_that_differ_are_refused(keeper: WeightKeeper) -> None:
    new = make_model(1).state_dict()
    with pytest.raises(
        EngineError, match=r"weights 'model.embed_tokens.weight' and 'lm_head.weight' are tied .* differ"
    ):
        keeper.keep({**new, HEAD: new[HEAD] + 1}, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model.norm.wieght": torch.zeros(32)},
            r"unknown weight 'model.norm.wieght' \(1 unknown\). Did you mean 'model.norm",
        ),
        ({"model.norm.weight": None}, r"weight 'model.norm.weight' is missing \(1 of 24 missing\)"),
        ({"model.norm.weight": torch.zeros(31)}, r"'model.norm.weight' has shape \(31,\), the model's is \(32,\)"),
        ({"model.norm.weight": torch.zeros(32, dtype=torch.int64)}, r"is int64, the model's is float32"),
        ({"model.norm.weight": [0.0] * 32}, r"weight 'model.norm.weight' is list, not a tensor"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    keeper: WeightKeeper, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    new = {name: value for name, value in {**make_model(1).state_dict(), **change}.items() if value is not None}
    with pytest.raises(EngineError, match=message):
        keeper.keep(new, 1)
    if not any(isinstance(value, list) for value in new.values()):
        save_file({name: value.clone() for name, value in new.items()}, tmp_path / "new.safetensors")
        with pytest.raises(EngineError, match=message):
            keeper.keep(tmp_path / "new.safetensors", 1)


@pytest.mark.parametrize("content", [b"", b"\x10\0\0\0\0\0\0\0not json", b"\xff" * 64])
def test_a_broken_file_is_named(keeper: WeightKeeper, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "broken.safetensors").write_bytes(content)
    with pytest.raises(EngineError, match=r"could not be read from .*broken\.safetensors"):
        keeper.keep(tmp_path / "broken.safetensors", 1)


def test_a_cut_off_file_is_named(keeper: WeightKeeper, model: Path) -> None:
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(data[:-1])
    with pytest.raises(EngineError, match="it is cut off"):
        keeper.keep(model, 1)


def test_weights_in_another_type_than_the_bulk_keep_it(tmp_path: Path) -> None:
    made = make_model(0).to(torch.bfloat16)
    made.model.norm.float()
    made.save_pretrained(tmp_path)
    kept = WeightKeeper(tmp_path, folder=tmp_path / "weights", dtype="float16").keep(make_model(1).state_dict(), 1)
    assert kept.entries["model.norm.weight"].dtype == "float32"
    assert kept.entries[EMBEDDING].dtype == "float16"


def test_buckets_hold_everything_once_and_aligned(keeper: WeightKeeper) -> None:
    kept = keeper.keep(make_model(1).state_dict(), 1)
    buckets = kept.buckets(8000)
    assert sorted(name for bucket in buckets for name in bucket) == sorted(kept.entries)
    assert len(buckets) > 3
    assert all(len(bucket) == 1 or sum(kept.entries[name].size for name in bucket) <= 8000 for bucket in buckets)
    for bucket in buckets:
        flat = torch.empty(sum(kept.entries[name].size for name in bucket), dtype=torch.uint8)
        kept.pack(bucket, flat)
        expected = [kept_tensor for name, kept_tensor in kept.tensors() if name in bucket]
        assert flat.numel() == sum(tensor.nbytes for tensor in expected)
        assert torch.equal(flat[: expected[0].nbytes].view(torch.float32), expected[0].flatten())


KILLED = """
import os, signal, sys
from pathlib import Path
from pace_agent.engine.sglang.weights.kept import WeightKeeper
kept = WeightKeeper(Path(sys.argv[1]), folder=Path(sys.argv[2])).keep(Path(sys.argv[1]), 1)
(kept.folder.parent / f".{kept.folder.name}").mkdir()
if sys.argv[3] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("end", "left"), [("kill", 2), ("exit", 1)])
def test_leftovers_of_a_killed_process_go_and_those_of_living_ones_stay(
    model: Path, tmp_path: Path, end: str, left: int
) -> None:
    place = tmp_path / "weights"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
    subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), str(model), str(place), end], env=environment)
    assert len(list(place.iterdir())) == left
    kept = WeightKeeper(model, folder=place).keep(model, 2)
    remove_leftovers(place)
    assert list(place.iterdir()) == [kept.folder]


# The real server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    sglang_python()  # skips before the model is made
    folder = tmp_path_factory.mktemp("sglang")
    make_model(0).save_pretrained(folder / "model")
    with real_sglang(folder / "model", folder, "--dtype", "float32") as made:
        yield made


@pytest.fixture
async def client(server: RealServer) -> Any:
    made = ServerClient(server.url)
    await made.post("/pause_generation", {"mode": "retract"}, timeout=30)
    yield made
    if server.answers():
        await made.post("/continue_generation", {}, timeout=30)
    await made.aclose()


async def difference(client: ServerClient, new: Any) -> float:
    """The largest difference of the server's log-probabilities to those of the model `new`."""
    await client.post("/continue_generation", {}, timeout=30)
    sampling = {"max_new_tokens": 8, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": [5, 6, 7, 8], "return_logprob": True, "sampling_params": sampling}
    answer = await client.post("/generate", body, timeout=60)
    ids = torch.tensor([[5, 6, 7, 8, *answer["output_ids"]]])
    with torch.no_grad():
        logprobs = new(input_ids=ids).logits[0, 3:-1].log_softmax(-1)
    rows = zip(logprobs, answer["meta_info"]["output_token_logprobs"], strict=True)
    return max(abs(float(row[token]) - logprob) for row, (logprob, token, _) in rows)


def transport(kind: str) -> Transport:
    """In many small buckets."""
    made = make_transport(kind, step_seconds=30)  # type: ignore[arg-type]
    if hasattr(made, "_bucket_bytes"):
        made._bucket_bytes = 10_000
    return made


def shared_blocks() -> set[str]:
    return {path.name for path in SHARED_MEMORY.glob("torch_*")}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
async def test_the_real_server_takes_new_weights(
    client: ServerClient, keeper: WeightKeeper, kind: str, seed: int
) -> None:
    before = shared_blocks()
    version = 10 * KINDS.index(kind) + seed
    kept = keeper.keep(make_model(seed).state_dict(), version)
    gone = ServerClient("http://127.0.0.1:9")
    way = transport(kind)
    outcome = await way.send([gone, client], kept, version)
    assert outcome[client.url] is None
    assert isinstance(outcome[gone.url], Unreachable)
    assert (await client.get("/model_info", timeout=30))["weight_version"] == str(version)
    assert await difference(client, make_model(seed)) < 0.005
    assert await difference(client, make_model(seed + 1)) > 0.1
    await asyncio.gather(way.aclose(), gone.aclose())
    assert shared_blocks() == before


@pytest.mark.timeout(300)
async def test_the_real_server_says_why_it_does_not_take_them(client: ServerClient, keeper: WeightKeeper) -> None:
    """Tensors of a wrong shape, which no keeper lets through, go by group: by tensor they end the server."""
    kept = keeper.keep(make_model(3).state_dict(), 40)
    wrong = KeptWeights(kept.folder, 41, {**kept.entries, "model.norm.weight": kept.entries[EMBEDDING]})
    nowhere = KeptWeights(Path("/nowhere/at-all"), 42, kept.entries)
    by_group, by_disk = transport("group"), transport("disk")
    await by_group.send([client], kept, 40)
    assert "partially updated" in str((await by_group.send([client], wrong, 41))[client.url])
    assert "/nowhere/at-all" in str((await by_disk.send([client], nowhere, 42))[client.url])
    for way in (by_group, by_disk):
        assert (await way.send([client], kept, 43))[client.url] is None
        await way.aclose()
    assert await difference(client, make_model(3)) < 0.005
    del wrong, nowhere


@pytest.mark.timeout(300)
async def test_an_update_that_a_killed_process_left_open_is_closed(client: ServerClient, keeper: WeightKeeper) -> None:
    await client.post("/begin_weight_update", {}, timeout=30)
    assert (await transport("tensor").send([client], keeper.keep(make_model(4).state_dict(), 50), 50)) == {
        client.url: None
    }
    assert await difference(client, make_model(4)) < 0.005


@pytest.mark.timeout(300)
async def test_a_group_that_the_server_forgot_is_made_anew(client: ServerClient, keeper: WeightKeeper) -> None:
    way: Any = transport("group")
    kept = keeper.keep(make_model(5).state_dict(), 60)
    assert await way.send([client], kept, 60) == {client.url: None}
    name = way._links[client.url].name
    await client.post("/destroy_weights_update_group", {"group_name": name}, timeout=30)
    assert await way.send([client], kept, 61) == {client.url: None}
    assert way._links[client.url].name != name
    await way.aclose()


async def test_tensors_are_not_sent_to_another_machine(keeper: WeightKeeper) -> None:
    far = ServerClient("http://192.0.2.1:30000")
    outcome = await transport("tensor").send([far], keeper.keep(make_model(1).state_dict(), 1), 1)
    assert "is not on this machine" in str(outcome[far.url])
    await far.aclose()
