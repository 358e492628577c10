"""The embedded model: its demonstrations, its tokenizer, the steps that make it, and where it is kept."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from pace_agent.chat.format import ChatFormat
from pace_agent.cli import embedded
from pace_agent.envs.shop.demonstrations import SLIPS, Demonstration, Slip, demonstrations, tool_schemas
from pace_agent.envs.shop.env import ShopEnv
from pace_agent.envs.tasks import split_of
from pace_agent.errors import UserError
from pace_agent.tools.parsers import get_parser
from pace_agent.trainers.small_tokenizer import MARKERS, plain_texts, train_tokenizer
from pace_agent.trainers.warm_start import encode, make_warm_start
from pace_agent.types import Message, ToolCall

SHIPPED = embedded.shipped_folder()


@pytest.fixture(scope="module")
def played() -> list[Demonstration]:
    return demonstrations(600)


@pytest.fixture(scope="module")
def shipped_chat() -> ChatFormat:
    return ChatFormat.from_pretrained(SHIPPED)


def conversations(played: Sequence[Demonstration]) -> list[tuple[Message, ...]]:
    return [each.messages for each in played]


# Demonstrations


def test_demonstrations_slip_as_often_as_stated(played: list[Demonstration]) -> None:
    decisions = [decision for each in played for decision in each.decisions]
    for slip, rate in SLIPS.items():
        chances = [decision for decision in decisions if slip in decision.possible]
        share = sum(decision.slip is slip for decision in chances) / len(chances)
        assert len(chances) > 400
        assert share == pytest.approx(rate, abs=4 * (rate * (1 - rate) / len(chances)) ** 0.5)


def test_a_demonstration_without_a_slip_is_right_and_one_with_a_slip_seldom(played: list[Demonstration]) -> None:
    harmless = (None, Slip.BROKEN_JSON)
    clean = [each for each in played if all(decision.slip in harmless for decision in each.decisions)]
    slipped = [each for each in played if each not in clean]
    assert {each.reward for each in clean} == {1.0}
    assert sum(each.reward for each in slipped) / len(slipped) < 0.05


def test_demonstrations_play_only_the_train_split(played: list[Demonstration]) -> None:
    assert {split_of(each.task.id) for each in played} == {"train"}
    evaluated = {ShopEnv.tasks.task("eval", index).id for index in range(300)}
    assert evaluated.isdisjoint(each.task.id for each in played)


def test_a_demonstration_replayed_in_the_environment_gets_the_same_answers(played: list[Demonstration]) -> None:
    env, parse = ShopEnv(), get_parser("hermes")
    for each in played[:40]:
        env.reset(options={"task": each.task})
        for message in each.messages:
            if message.role == "assistant":
                env.step(parse(message.content))
        told = [message.content for message in env.messages if message.role == "tool"]
        assert told == [message.content for message in each.messages if message.role == "tool"]
    env.close()


def test_demonstrations_repeat_for_a_seed() -> None:
    assert demonstrations(20, seed=3) == demonstrations(20, seed=3)
    assert demonstrations(20, seed=3) != demonstrations(20, seed=4)


# Tokenizer and template


def test_any_text_encodes_and_decodes_to_itself(shipped_chat: ChatFormat) -> None:
    tokenizer = shipped_chat.tokenizer
    rng = random.Random(0)
    texts = ["".join(map(chr, range(0x300))), "价格 🙂 é\u0301", "\n\n  \t a\r\n", '{"a": "}}\\n"}']
    texts += ["".join(chr(rng.choice((rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)))) for _ in range(50))]
    for text in texts:
        assert tokenizer.decode(shipped_chat.tokenizer.encode(text, add_special_tokens=False)) == text
    single = {token for token in tokenizer.get_vocab() if len(token) == 1}
    assert len(single) == 256  # one entry for each byte


def test_digits_are_single_tokens_and_markers_are_one(shipped_chat: ChatFormat) -> None:
    tokenizer = shipped_chat.tokenizer
    assert len(tokenizer.encode("1234567890", add_special_tokens=False)) == 10
    assert all(len(tokenizer.encode(marker, add_special_tokens=False)) == 1 for marker in MARKERS)


def test_batches_are_padded_on_the_left(shipped_chat: ChatFormat) -> None:
    batch = shipped_chat.tokenizer(["Ann buys 3 plums.", "2"], padding=True, return_tensors="pt")
    assert batch["attention_mask"][1].tolist() == [0] * (batch["input_ids"].shape[1] - 1) + [1]
    assert batch["input_ids"][1][0] == shipped_chat.tokenizer.pad_token_id


def test_the_template_and_the_rollout_agree_on_ids_and_mask(
    shipped_chat: ChatFormat, played: list[Demonstration]
) -> None:
    tools = tool_schemas()
    # The error about a broken call quotes a marker, which the template alone would take for a real one.
    quiet = [each for each in played if not any(decision.slip is Slip.BROKEN_JSON for decision in each.decisions)]
    for each in quiet[:60]:
        example = encode(shipped_chat, each.messages, tools)
        whole = shipped_chat.tokenizer.apply_chat_template(
            [message.to_dict() for message in each.messages],
            tools=tools,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        # The template ends with a line break after the last turn, which nobody reads any more.
        assert whole["input_ids"][:-1] == list(example.ids)
        assert whole["assistant_masks"][:-1] == list(example.mask)
        assert whole["assistant_masks"][-1] == 0


def test_calls_render_as_the_demonstrations_write_them(shipped_chat: ChatFormat) -> None:
    written = '<tool_call>\n{"name": "price", "arguments": {"item": "plum"}}\n</tool_call>'
    asked = {"role": "user", "content": "How much?"}
    call = Message("assistant", "", (ToolCall("price", {"item": "plum"}),)).to_dict()

    def render(message: dict[str, Any]) -> str:
        return str(shipped_chat.tokenizer.apply_chat_template([asked, message], tokenize=False))

    assert render(call) == render(Message("assistant", written).to_dict())


def test_tools_are_named_in_the_prompt(shipped_chat: ChatFormat) -> None:
    assert shipped_chat.shows_tools
    assert shipped_chat.shows_tool_results
    assert shipped_chat.prefix_stable


def test_prompts_and_whole_rollouts_fit(shipped_chat: ChatFormat, played: list[Demonstration]) -> None:
    env, tools = ShopEnv(), tool_schemas()
    prompts = []
    for index in range(200):
        observation, _ = env.reset(options={"task": ShopEnv.tasks.task("eval", index)})
        prompts.append(len(shipped_chat.prompt_ids(observation, tools)))
    env.close()
    assert max(prompts) <= 40
    examples = [encode(shipped_chat, each.messages, tools) for each in played]
    assert max(len(example.ids) for example in examples) <= 256
    turns = [run for example in examples for run in "".join(map(str, example.mask)).split("0")]
    assert max(map(len, turns)) <= 32


# The shipped folder


def test_the_shipped_model_is_small_and_loads(shipped_chat: ChatFormat) -> None:
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 1_500_000
    assert {tensor.dtype for tensor in load_file(SHIPPED / "model.safetensors").values()} == {torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32)
    assert model.config.vocab_size == len(shipped_chat.tokenizer)
    assert model.config.eos_token_id == shipped_chat.tokenizer.eos_token_id
    assert embedded.embedded_model() == SHIPPED


def test_the_shipped_model_solves_tasks_greedily(shipped_chat: ChatFormat) -> None:
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32).eval()
    rewards = [_greedy_reward(model, shipped_chat, index) for index in range(12)]
    assert sum(rewards) >= 9


def _greedy_reward(model: Any, chat: ChatFormat, index: int) -> float:
    env, parse = ShopEnv(), get_parser("hermes")
    observation, info = env.reset(options={"task": ShopEnv.tasks.task("eval", index)})
    ids = chat.prompt_ids(observation, info["tools"])
    for _ in range(5):
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids)),
            max_new_tokens=32,
            do_sample=False,
            temperature=None,
            top_k=None,
            top_p=None,
        )[0, len(ids) :].tolist()
        observation, reward, over, _, _ = env.step(parse(chat.decode(out)))
        if over:
            return reward
        ids += out + chat.suffix_ids(observation, last_output=out)
    return 0.0


# Making one


def test_a_warm_start_is_the_same_twice_and_learns(tmp_path: Path, played: list[Demonstration]) -> None:
    losses: list[float] = []
    for name in ("first", "second"):
        make_warm_start(
            conversations(played[:60]),
            tmp_path / name,
            tools=tool_schemas(),
            steps=5,
            batch_size=8,
            on_step=lambda done, steps, loss: losses.append(loss),
        )
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert losses[:5] == losses[5:]
    assert losses[4] < losses[0]
    ChatFormat(AutoTokenizer.from_pretrained(tmp_path / "first"))


def test_a_warm_start_changes_neither_threads_nor_random_state(tmp_path: Path, played: list[Demonstration]) -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    make_warm_start(conversations(played[:10]), tmp_path, steps=1, batch_size=2)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_a_warm_start_refuses_what_it_cannot_train_on(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one conversation"):
        make_warm_start([], tmp_path)
    with pytest.raises(ValueError, match="no turn of the assistant"):
        make_warm_start([[Message("user", "Hello")]], tmp_path)
    with pytest.raises(ValueError, match="tokens, the context holds 512"):
        make_warm_start([[Message("user", "Hello"), Message("assistant", "0123456789" * 60)]], tmp_path)


def test_few_texts_give_a_smaller_vocabulary() -> None:
    texts = plain_texts([[Message("user", "ab ab"), Message("assistant", "ab")]])
    assert 256 + len(MARKERS) < len(train_tokenizer(texts)) < 512


# The cache


@pytest.fixture
def unshipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine whose package came without the checkpoint; the cache folder is returned."""
    monkeypatch.setattr(embedded, "shipped_folder", lambda: tmp_path / "missing")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pace-agent"


def test_a_missing_checkpoint_is_made_once_and_cached(unshipped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = embedded.embedded_model(steps=2, conversations=40)
    assert folder.parent == unshipped
    assert list(unshipped.iterdir()) == [folder]  # nothing half-made is left beside it
    assert "Making the embedded model" in capsys.readouterr().err
    ChatFormat.from_pretrained(folder)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert embedded.embedded_model(steps=2, conversations=40) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_a_failed_making_leaves_nothing_behind(unshipped: Path) -> None:
    with pytest.raises(ValueError, match="at least one conversation"):
        embedded.embedded_model(steps=1, conversations=0)
    assert list(unshipped.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(unshipped: Path) -> None:
    unshipped.parent.write_text("a file where the folder should be")
    with pytest.raises(UserError, match="XDG_CACHE_HOME"):
        embedded.embedded_model(steps=1, conversations=10)
