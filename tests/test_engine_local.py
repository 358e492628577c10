"""The decoder over a row cache: what it samples, what it says about it, and what a weight update does."""

import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import CONTEXT, VOCAB, make_model, worst_error

from pace_agent.engine.base import Generation, GenerationRequest, SamplingParams
from pace_agent.engine.local.sampler import mixed_seed, sample, uniforms
from pace_agent.engine.local.slots import SlotDecoder
from pace_agent.errors import EngineError
from pace_agent.types import check_spans

TOLERANCE = 1e-4


def ask(rid: str, ids: Iterable[int], tokens: int = 8, *, session: str = "", **sampling: Any) -> GenerationRequest:
    options = {"seed": 7, **sampling}
    return GenerationRequest(rid, list(ids), SamplingParams(tokens, **options), session)


def prompts(count: int, *, shared: int, seed: int = 0) -> list[list[int]]:
    """Mixed lengths, the first `shared` tokens in common."""
    rng = random.Random(seed)
    common = [rng.randrange(VOCAB) for _ in range(shared)]
    return [common + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))] for _ in range(count)]


def finish(decoder: SlotDecoder) -> dict[str, Generation]:
    done: dict[str, Generation] = {}
    while decoder.busy:
        for rid, outcome in decoder.step():
            assert isinstance(outcome, Generation)
            done[rid] = outcome
    return done


def generate(decoder: SlotDecoder, *requests: GenerationRequest) -> list[Generation]:
    for request in requests:
        decoder.submit(request)
    done = finish(decoder)
    return [done[request.rid] for request in requests]


def assert_exact(models: dict[int, Any], requests: Sequence[GenerationRequest], done: Sequence[Generation]) -> None:
    for request, generation in zip(requests, done, strict=True):
        check_spans(generation.spans, len(generation.output_ids))
        assert worst_error(models, request, generation) < TOLERANCE


@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("qwen3", False), ("llama", True), ("llama", False)])
def test_logprobs_of_mixed_lengths_are_the_models(family: str, tied: bool) -> None:
    decoder = SlotDecoder(make_model(family=family, tied=tied), max_slots=7)
    requests = [
        ask(f"{i}", ids, 3 + i, seed=i, temperature=(1.0, 0.6)[i % 2]) for i, ids in enumerate(prompts(16, shared=20))
    ]
    done = generate(decoder, *requests)
    assert [len(generation.output_ids) for generation in done] == [3 + i for i in range(16)]
    assert {generation.finish for generation in done} == {"length"}
    assert_exact({0: make_model(family=family, tied=tied)}, requests, done)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_swap_in_the_middle_of_32_generations_is_exact_on_both_sides(family: str) -> None:
    models = {version: make_model(version, family=family) for version in (0, 3, 4)}
    decoder = SlotDecoder(make_model(0, family=family), max_slots=32)
    requests = [ask(f"{i}", ids, 6 + i % 9, seed=i) for i, ids in enumerate(prompts(32, shared=24))]
    for request in requests:
        decoder.submit(request)
    for _ in range(4):
        decoder.step()
    decoder.swap(models[3].state_dict(), 3)
    for _ in range(2):
        decoder.step()
    decoder.swap(models[4].state_dict(), 4)
    done_by_rid = finish(decoder)
    done = [done_by_rid[request.rid] for request in requests if request.rid in done_by_rid]
    late = [request for request in requests if request.rid in done_by_rid]
    assert any([span.version for span in generation.spans] == [0, 3, 4] for generation in done)
    assert all(generation.segments == 3 for generation in done)
    assert_exact(models, late, done)
    assert decoder.stats().interrupted == 32


def test_sessions_extend_over_turns_swaps_and_evictions() -> None:
    rng = random.Random(1)
    models = {version: make_model(version) for version in range(3)}
    decoder = SlotDecoder(make_model(0), max_slots=5)
    texts = dict(enumerate(prompts(9, shared=12)))
    turns = dict.fromkeys(texts, 0)
    asked: dict[str, GenerationRequest] = {}
    done: dict[str, Generation] = {}

    def submit(i: int) -> None:
        request = ask(f"{i}.{turns[i]}", texts[i], rng.randint(2, 9), session=f"s{i}", seed=i)
        asked[request.rid] = request
        decoder.submit(request)

    for i in texts:
        submit(i)
    steps = 0
    while decoder.busy:
        steps += 1
        if steps in (9, 20):
            version = decoder.version + 1
            decoder.swap(models[version].state_dict(), version)
        for rid, outcome in decoder.step():
            assert isinstance(outcome, Generation)
            done[rid] = outcome
            i = int(rid.split(".")[0])
            texts[i] = [*asked[rid].input_ids, *outcome.output_ids, *(rng.randrange(VOCAB) for _ in range(4))]
            turns[i] += 1
            if turns[i] < 4:
                submit(i)
    assert len(done) == 36
    assert decoder.version == 2
    assert_exact(models, list(asked.values()), [done[rid] for rid in asked])


def test_the_next_turn_computes_only_what_is_new() -> None:
    decoder = SlotDecoder(make_model(), max_slots=4)
    first = ask("a", range(30), 5, session="s")
    (turn,) = generate(decoder, first)
    before = decoder.stats().prefill_tokens
    second = ask("b", [*range(30), *turn.output_ids, 1, 2, 3], 5, session="s")
    (again,) = generate(decoder, second)
    assert decoder.stats().prefill_tokens - before == 4  # the last sampled token and the three new ones
    assert_exact({0: make_model()}, [second], [again])


def test_a_turn_that_departs_from_what_is_held_is_computed_from_there() -> None:
    decoder = SlotDecoder(make_model(), max_slots=2)
    generate(decoder, ask("a", range(30), 5, session="s"))
    other = ask("b", [*range(20), *range(40, 60)], 5, session="s")
    shorter = ask("c", range(12), 5, session="s")
    for request in (other, shorter):
        assert_exact({0: make_model()}, [request], generate(decoder, request))


def test_common_prompts_are_computed_once() -> None:
    decoder = SlotDecoder(make_model(), max_slots=8)
    requests = [ask(f"{i}", [*range(50), 60 + i, 70], 4, seed=i) for i in range(8)]
    done = generate(decoder, *requests)
    assert decoder.stats().prefill_tokens == 52 + 7 * 2
    assert_exact({0: make_model()}, requests, done)


def test_prompts_beyond_one_pass_are_computed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pace_agent.engine.local.planner.MAX_NEW_TOKENS", 16)
    decoder = SlotDecoder(make_model(), max_slots=8)
    requests = [ask(f"{i}", ids, 6, seed=i) for i, ids in enumerate(prompts(8, shared=9))]
    assert_exact({0: make_model()}, requests, generate(decoder, *requests))


def test_rows_that_decode_far_apart_are_exact() -> None:
    decoder = SlotDecoder(make_model(), max_slots=16)
    requests = [ask(f"{i}", ids, 20 if i in (1, 9, 15) else 2, seed=i) for i, ids in enumerate(prompts(16, shared=3))]
    assert_exact({0: make_model()}, requests, generate(decoder, *requests))


def test_a_seed_gives_the_same_tokens_alone_and_in_company() -> None:
    decoder = SlotDecoder(make_model(), max_slots=6)
    ids = prompts(6, shared=5)
    (alone,) = generate(decoder, ask("a", ids[0], 20, seed=11))
    crowd = generate(decoder, *[ask(f"{i}", text, 20, seed=11 + i) for i, text in enumerate(ids)])
    assert crowd[0].output_ids == alone.output_ids
    twins = generate(decoder, ask("x", ids[0], 20, seed=11), ask("y", ids[0], 20, seed=12))
    assert twins[0].output_ids == alone.output_ids != twins[1].output_ids


def test_without_seeds_samples_differ() -> None:
    decoder = SlotDecoder(make_model(), max_slots=4)
    done = generate(decoder, *[ask(f"{i}", range(9), 20, seed=None) for i in range(4)])
    assert len({generation.output_ids for generation in done}) == 4


def test_temperature_0_takes_the_most_probable_token() -> None:
    model = make_model()
    decoder = SlotDecoder(make_model(), max_slots=2)
    request = ask("a", range(9), 12, temperature=0.0)
    (done,) = generate(decoder, request)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*request.input_ids, *done.output_ids]])).logits[0, 8:-1]
    assert logits.argmax(-1).tolist() == list(done.output_ids)
    assert_exact({0: model}, [request], [done])


def test_a_stop_token_ends_the_turn_and_belongs_to_it() -> None:
    decoder = SlotDecoder(make_model(), max_slots=3)
    (free,) = generate(decoder, ask("a", range(9), 30))
    stop = free.output_ids[10]
    end = free.output_ids.index(stop) + 1
    done, other = generate(decoder, ask("b", range(9), 30, stop_token_ids=(VOCAB + 5, stop)), ask("c", range(9), 30))
    assert done.output_ids == free.output_ids[:end]
    assert done.finish == "stop"
    assert other.output_ids == free.output_ids


def test_the_context_cuts_a_turn() -> None:
    decoder = SlotDecoder(make_model(), max_slots=2, context_length=40)
    (done,) = generate(decoder, ask("a", range(35), 30))
    assert len(done.output_ids) == 5
    assert done.finish == "length"
    with pytest.raises(EngineError, match="40 input ids; a context of 40"):
        decoder.submit(ask("b", range(40), 1))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (ask("a", [1, VOCAB, 2]), f"id {VOCAB} is outside the vocabulary of {VOCAB}"),
        (ask("a", [1, -3]), "id -3 is outside"),
        (ask("a", []), "no input ids"),
        (ask("a", [1], 0), "max_new_tokens must be at least 1, got 0"),
        (ask("a", [1], temperature=-1.0), "temperature"),
        (ask("a", [1], top_p=0.0), "top_p"),
        (ask("a", [1], top_k=-1), "top_k"),
    ],
)
def test_a_bad_request_is_named_and_changes_nothing(request_: GenerationRequest, words: str) -> None:
    decoder = SlotDecoder(make_model(), max_slots=2)
    with pytest.raises(EngineError, match=words):
        decoder.submit(request_)
    assert not decoder.busy


def test_one_session_and_one_name_run_once() -> None:
    decoder = SlotDecoder(make_model(), max_slots=4)
    decoder.submit(ask("a", range(5), session="s"))
    with pytest.raises(EngineError, match="'a' is already running"):
        decoder.submit(ask("a", range(5)))
    with pytest.raises(EngineError, match="'s' already runs a turn"):
        decoder.submit(ask("b", range(5), session="s"))


def test_abort_keeps_the_tokens_and_the_session_goes_on() -> None:
    decoder = SlotDecoder(make_model(), max_slots=1)
    first = ask("a", range(9), 20, session="s")
    decoder.submit(first)
    decoder.submit(ask("waiting", range(9), 20))
    for _ in range(3):
        decoder.step()
    assert decoder.abort("unknown") == []
    (queued,) = decoder.abort("waiting")
    assert queued == ("waiting", Generation((), (), (), "abort"))
    ((rid, cut),) = decoder.abort()
    assert isinstance(cut, Generation)
    assert (rid, cut.finish, len(cut.output_ids)) == ("a", "abort", 3)
    later = ask("b", [*range(9), *cut.output_ids], 5, session="s")
    assert_exact({0: make_model()}, [first, later], [cut, *generate(decoder, later)])


def test_release_frees_the_slot_at_once_or_after_the_turn() -> None:
    decoder = SlotDecoder(make_model(), max_slots=1)
    generate(decoder, ask("a", range(30), 3, session="s"))
    decoder.release("s")
    decoder.release("never seen")
    before = decoder.stats().prefill_tokens
    decoder.submit(ask("b", range(40, 70), 3, session="t"))
    decoder.step()
    decoder.release("t")
    finish(decoder)
    generate(decoder, ask("c", range(40, 73), 3, session="t"))
    assert decoder.stats().prefill_tokens - before == 30 + 33


def test_an_update_that_can_not_be_taken_leaves_weights_and_version() -> None:
    decoder = SlotDecoder(make_model(0), max_slots=2, version=5)
    good = make_model(1).state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    tied = {**good, "lm_head.weight": good["lm_head.weight"] + 1}
    for bad, words in (
        ({key: value for key, value in good.items() if key != name}, f"'{name}' is missing"),
        ({**good, name: good[name][:3]}, "has shape"),
        ({**good, name: good[name].long()}, "int64"),
        ({**good, name + "s": good[name]}, f"Did you mean '{name}'"),
        (tied, "tied"),
    ):
        with pytest.raises(EngineError, match=words):
            decoder.swap(bad, 6)
    with pytest.raises(EngineError, match="below the engine's version 5"):
        decoder.swap(good, 4)
    request = ask("a", range(9))
    (done,) = generate(decoder, request)
    assert decoder.version == 5
    assert_exact({5: make_model(0)}, [request], [done])


def test_tied_weights_may_come_under_one_name_and_in_another_type() -> None:
    decoder = SlotDecoder(make_model(0), max_slots=2)
    expected = make_model(1)
    weights = {name: tensor.bfloat16() for name, tensor in expected.state_dict().items()}
    expected.load_state_dict(weights)
    del weights["lm_head.weight"]
    decoder.swap(weights, 1)
    request = ask("a", range(9))
    assert_exact({1: expected}, [request], generate(decoder, request))


def test_a_swap_before_the_first_token_is_no_interruption() -> None:
    decoder = SlotDecoder(make_model(0), max_slots=1)
    decoder.submit(ask("a", range(9), 4))
    decoder.submit(ask("queued", range(9), 4))
    decoder.step()
    decoder.swap(make_model(1).state_dict(), 1)
    done = finish(decoder)
    assert done["a"].segments == 2
    assert done["queued"].segments == 1
    assert [span.version for span in done["queued"].spans] == [1]
    assert decoder.stats().interrupted == 1


def test_a_kept_cache_is_said_to_be_stale() -> None:
    models = {0: make_model(0), 1: make_model(1)}
    for stale_cache in ("keep", "recompute"):
        decoder = SlotDecoder(make_model(0), max_slots=4, stale_cache=stale_cache)
        requests = [ask(f"{i}", range(20), 8, seed=i) for i in range(4)]
        for request in requests:
            decoder.submit(request)
        for _ in range(3):
            decoder.step()
        decoder.swap(models[1].state_dict(), 1)
        done = finish(decoder)
        worst = max(worst_error(models, request, done[request.rid]) for request in requests)
        assert decoder.stats().stale_tokens == (4 * 5 if stale_cache == "keep" else 0)
        assert (worst > 0.01) == (stale_cache == "keep")
        fresh = ask("fresh", range(50, 60))
        assert_exact(models, [fresh], generate(decoder, fresh))


def test_weights_that_are_not_finite_fail_the_turn_and_good_ones_heal() -> None:
    decoder = SlotDecoder(make_model(0), max_slots=4)
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in make_model(1).state_dict().items()}
    decoder.swap(broken, 1)
    decoder.submit(ask("a", range(9), session="s"))
    ((rid, outcome),) = decoder.step()
    assert rid == "a"
    assert isinstance(outcome, EngineError)
    assert "version 1 are not finite" in str(outcome)
    assert not decoder.busy
    decoder.swap(make_model(2).state_dict(), 2)
    request = ask("b", range(9))
    assert_exact({2: make_model(2)}, [request], generate(decoder, request))


def test_a_sliding_window_shorter_than_the_context_is_refused() -> None:
    from transformers import AutoModelForCausalLM, MistralConfig

    config = MistralConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, intermediate_size=32,
        vocab_size=VOCAB, max_position_embeddings=CONTEXT, sliding_window=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(EngineError, match="at most 64"):
        SlotDecoder(model)
    assert SlotDecoder(model, context_length=64).context_length == 64


def test_a_context_beyond_the_models_is_refused() -> None:
    with pytest.raises(EngineError, match=f"the model's {CONTEXT}, got {CONTEXT + 1}"):
        SlotDecoder(make_model(), context_length=CONTEXT + 1)


def test_uniform_numbers_are_even_and_unrelated_between_neighbouring_seeds() -> None:
    states = np.array([mixed_seed(seed) for seed in range(200)], dtype=np.uint64)
    draws = np.stack([uniforms(states, np.full(200, i)) for i in range(100)])
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    counts, _ = np.histogram(draws, bins=20, range=(0, 1))
    assert abs(counts - 1000).max() < 160  # five standard deviations
    correlation = np.corrcoef(draws.T)
    assert abs(correlation[~np.eye(200, dtype=bool)]).max() < 0.55


def test_samples_follow_the_distribution_and_its_limits() -> None:
    logits = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.1])).repeat(4000, 1)
    ones = np.ones(4000, dtype=np.float32)
    draws = (np.arange(4000) + 0.5) / 4000

    def shares(top_k: int = 0, top_p: float = 1.0, temperature: float = 1.0) -> tuple[list[float], float]:
        tokens, logprobs = sample(logits, ones * temperature, draws, np.full(4000, top_k), np.full(4000, top_p))
        found = [float((tokens == token).mean()) for token in range(4)]
        return found, float(logprobs[0])

    assert shares()[0] == pytest.approx([0.5, 0.25, 0.15, 0.1], abs=1e-3)
    assert shares(top_k=2)[0] == pytest.approx([2 / 3, 1 / 3, 0, 0], abs=1e-3)
    assert shares(top_p=0.8)[0] == pytest.approx([0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0], abs=1e-3)
    assert shares(top_p=0.01) == (pytest.approx([1, 0, 0, 0]), pytest.approx(np.log(0.5)))
    assert shares(temperature=0.0)[0] == [1, 0, 0, 0]
    assert shares(temperature=0.5)[1] == pytest.approx(np.log(0.25 / 0.345), abs=1e-4)
