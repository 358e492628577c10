"""The episodes of `rollout_overhead.py` in other packages. That program starts this one with the peers' own Python.

It reads lines `NAME ROLLOUTS TURNS` and answers each with one line of JSON: the CPU seconds of all rollouts together,
the peer's version, and a sample of what was kept. What is set up once (servers, clients, tokenizer) is not counted.
Nothing of pace-agent is imported here. `TOKENIZER` in the environment names a folder with tokenizer and chat template.
"""

# The peers are not installed where types are checked.
# mypy: ignore-errors

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from importlib.metadata import version
from typing import Any

QUESTION = "Here is question number one: what do you make of it?"
SAID = "I have thought about it for a while and this is my turn now."
ANSWER = "The turn was noted."

Outcome = tuple[float, Any]
"""CPU seconds, and what one rollout kept."""


async def timed(rollout: Callable[[], Awaitable[Any]], rollouts: int) -> Outcome:
    """All rollouts at once, as an asynchronous trainer runs them."""
    started = time.process_time()
    kept = await asyncio.gather(*(rollout() for _ in range(rollouts)))
    return time.process_time() - started, kept[0]


# verifiers ---------------------------------------------------------------------------------------------------------


async def verifiers_rollout(rollouts: int, turns: int) -> Outcome:
    """The installed version's own rollout: `MultiTurnEnv.rollout` where it has one, else `Agent.run`."""
    import verifiers

    play = verifiers_environment if hasattr(verifiers, "MultiTurnEnv") else verifiers_agent
    return await play(rollouts, turns)


async def verifiers_environment(rollouts: int, turns: int) -> Outcome:
    """verifiers 0.1: the environment's rollout loop over a client that has its response ready."""
    import verifiers as vf
    from datasets import Dataset
    from verifiers.types import Response, ResponseMessage

    response = Response(
        id="stub",
        created=0,
        model="stub",
        message=ResponseMessage(content=SAID, finish_reason="stop", is_truncated=False),
    )

    class Stub(vf.Client):
        def _unused(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

        setup_client = to_native_tool = to_native_prompt = get_native_response = _unused
        raise_from_native_response = from_native_response = close = _unused

        async def get_response(self, *args: Any, **kwargs: Any) -> Response:
            return response

    class NoOp(vf.MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            return [vf.UserMessage(content=ANSWER)]

    row = {"prompt": [{"role": "user", "content": QUESTION}], "answer": "", "example_id": 0}
    env = NoOp(
        max_turns=turns,
        dataset=Dataset.from_list([{"question": QUESTION, "answer": ""}]),
        rubric=vf.Rubric(funcs=[lambda **_: 1.0]),
    )
    client = Stub(object())

    async def rollout() -> list[str]:
        state = await env.rollout(row, client, "stub", {})
        return [step["completion"][0].content for step in state["trajectory"]]

    return await timed(rollout, rollouts)


async def verifiers_agent(rollouts: int, turns: int) -> Outcome:
    """verifiers 0.4: an agent's run. Its harness is a loop in this process, its client has the response ready.

    Every model call goes through the package's interception server, as every harness must send it; all rollouts share
    one server, one connection pool and one box, which is the cheapest way to run them.
    """
    import aiohttp
    import verifiers.v1 as vf
    from verifiers.v1.interception import InterceptionServer

    choice = {"index": 0, "message": {"role": "assistant", "content": SAID}, "finish_reason": "stop"}
    raw = {"id": "stub", "object": "chat.completion", "created": 0, "model": "stub", "choices": [choice]}
    usage = vf.Usage(prompt_tokens=50, completion_tokens=15)

    class Stub(vf.Client):
        async def get_response(self, *args: Any, **kwargs: Any) -> vf.Response:
            message = vf.AssistantMessage(content=SAID)
            return vf.Response(
                id="stub", created=0, model="stub", message=message, finish_reason="stop", usage=usage, raw=raw
            )

    class Loop(vf.Harness[vf.HarnessConfig]):
        APPENDS_SYSTEM_PROMPT = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
        ) -> Any:
            messages = [{"role": "user", "content": data.prompt}]
            for turn in range(turns):
                body = {"model": ctx.model, "messages": messages}
                headers = {"Authorization": f"Bearer {secret}"}
                async with http.post(f"{endpoint}/chat/completions", json=body, headers=headers) as reply:
                    messages.append((await reply.json())["choices"][0]["message"])
                if turn + 1 < turns:
                    messages.append({"role": "user", "content": ANSWER})
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    class Noted(vf.Task):
        @vf.reward
        async def done(self, trace: vf.Trace) -> float:
            return 1.0

    endpoint = vf.EvalClientConfig(base_url="http://localhost:9/v1")
    harness = {"id": "null"}
    config = vf.AgentConfig(harness=harness, runtime={"type": "subprocess"}, model="stub", client=endpoint)
    async with InterceptionServer() as server, aiohttp.ClientSession() as http:
        server.clients[endpoint.model_dump_json()] = Stub()
        agent = vf.make_agent(config, interception=server)
        agent.harness = Loop(agent.config.harness)
        task = Noted(vf.TaskData(idx=0, prompt=QUESTION))
        async with agent.provision(task) as box:

            async def rollout() -> list[str]:
                trace = await agent.run(task, runtime=box)
                if not trace.ok:
                    raise RuntimeError(str(trace.errors))
                return [message.content for message in trace.branches[-1].messages if message.role == "assistant"]

            return await timed(rollout, rollouts)


# skyrl-gym ---------------------------------------------------------------------------------------------------------


def skyrl_environment(turns: int) -> Callable[[], Any]:
    """What makes the no-op environment, by the package's registry as its users do."""
    import skyrl_gym
    from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
    from skyrl_gym.envs.registration import registry

    class NoOp(BaseTextEnv):
        def __init__(self, env_config: Any = None, extras: Any = None) -> None:
            super().__init__()
            self.max_turns = extras["max_turns"]

        def step(self, action: str) -> Any:
            self.turns += 1
            done = self.turns >= self.max_turns
            said = [] if done else [{"role": "user", "content": ANSWER}]
            return BaseTextEnvStepOutput(observations=said, reward=float(done), done=done, metadata={})

    registry.pop("noop", None)
    skyrl_gym.register(id="noop", entry_point=NoOp)
    return lambda: skyrl_gym.make("noop", env_config={}, extras={"max_turns": turns})


async def skyrl_text(rollouts: int, turns: int) -> Outcome:
    """Text alone: no ids, no log-probabilities, nothing that a trainer could learn from."""
    make = skyrl_environment(turns)

    async def rollout() -> list[str]:
        env, reward = make(), 0.0
        conversation, _ = env.init([{"role": "user", "content": QUESTION}])
        done = False
        while not done:
            conversation.append({"role": "assistant", "content": SAID})
            out = env.step(SAID)
            conversation += out["observations"]
            reward += out["reward"]
            done = out["done"]
        env.close()
        return [message["content"] for message in conversation if message["role"] == "assistant"]

    return await timed(rollout, rollouts)


async def skyrl_bytes(rollouts: int, turns: int) -> Outcome:
    """Token in, token out, with one id per byte and nothing around a message but its role."""

    def encode(messages: list[dict[str, str]]) -> list[int]:
        return list("".join(f"{each['role']}:{each['content']}\n" for each in messages).encode())

    def decode(ids: list[int]) -> str:
        return bytes(ids[:-1]).decode()

    return await skyrl_tokens(rollouts, turns, encode, encode, decode, [*SAID.encode(), 0])


async def skyrl_template(rollouts: int, turns: int) -> Outcome:
    """Token in, token out, by a chat template: new messages are rendered after a fixed conversation, then cut off."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(os.environ["TOKENIZER"])
    base = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]

    def render(messages: list[dict[str, str]], **options: Any) -> list[int]:
        ids: list[int] = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
        return ids

    cut = len(render(base)) - 1  # without the line break after the end of the turn: the suffix begins with it

    def suffix(messages: list[dict[str, str]]) -> list[int]:
        return render([*base, *messages], add_generation_prompt=True)[cut:]

    def prompt(messages: list[dict[str, str]]) -> list[int]:
        return render(messages, add_generation_prompt=True)

    sampled = [*tokenizer.encode(SAID, add_special_tokens=False), tokenizer.convert_tokens_to_ids("<|im_end|>")]
    return await skyrl_tokens(rollouts, turns, prompt, suffix, lambda ids: tokenizer.decode(ids[:-1]), sampled)


async def skyrl_tokens(
    rollouts: int,
    turns: int,
    prompt: Callable[[list[dict[str, str]]], list[int]],
    suffix: Callable[[list[dict[str, str]]], list[int]],
    decode: Callable[[list[int]], str],
    sampled: list[int],
) -> Outcome:
    """The bare loop that keeps what a trainer needs: ids, loss mask, log-probabilities, the messages, the reward."""
    make = skyrl_environment(turns)
    logprobs = [-1.0] * len(sampled)

    async def rollout() -> list[int]:
        env, reward = make(), 0.0
        conversation, _ = env.init([{"role": "user", "content": QUESTION}])
        ids = prompt(conversation)
        mask, kept = [0] * len(ids), [0.0] * len(ids)
        done = False
        while not done:
            text = decode(sampled)
            ids += sampled
            mask += [1] * len(sampled)
            kept += logprobs
            conversation.append({"role": "assistant", "content": text})
            out = env.step(text)
            conversation += out["observations"]
            reward += out["reward"]
            done = out["done"]
            if not done:
                said = suffix(out["observations"])
                ids += said
                mask += [0] * len(said)
                kept += [0.0] * len(said)
        env.close()
        return ids

    return await timed(rollout, rollouts)


PEERS: dict[str, tuple[str, Callable[[int, int], Coroutine[Any, Any, Outcome]]]] = {
    "verifiers": ("verifiers", verifiers_rollout),
    "skyrl-gym text": ("skyrl-gym", skyrl_text),
    "skyrl-gym bytes": ("skyrl-gym", skyrl_bytes),
    "skyrl-gym template": ("skyrl-gym", skyrl_template),
}


def main() -> None:
    for line in sys.stdin:
        name, rollouts, turns = line.rsplit(maxsplit=2)
        package, play = PEERS[name]
        cpu, kept = asyncio.run(play(int(rollouts), int(turns)))
        print(json.dumps({"cpu": cpu, "kept": kept, "version": version(package)}), flush=True)


if __name__ == "__main__":
    main()
