"""What a model may call: `@tool` makes a typed function with a docstring into a `Tool`; a `ToolSet` answers calls.

    @tool
    def lookup(word: str, limit: int = 3) -> list[str]:
        '''Find entries that begin with a word.

        Args:
            word: The beginning.
            limit: At most so many entries.
        '''

What always holds:

* Every call gets exactly one answer. What the model did wrong (an unknown tool, bad arguments, a call that could not be
  read) is told to the model and the episode goes on; the tool is not run.
* A `ToolError` is a tool's own message to the model. Any other exception is the environment's fault and rises as
  `EnvironmentFault`; errors that name their layer already (a dead sandbox) rise unchanged.
* Only what is declared is a tool. A method without `@tool` can never be called by a model.
"""

import asyncio
import inspect
import json
import sys
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from types import MethodType
from typing import Any, overload

from pydantic_core import to_jsonable_python

from pace_agent.errors import (
    EngineError,
    EnvironmentFault,
    GraderError,
    PaceError,
    SandboxError,
    UserError,
    did_you_mean,
)
from pace_agent.sandbox.base import FileError, Session
from pace_agent.tools.schema import Signature, check_arguments, json_schema, read_signature
from pace_agent.types import Message, ToolCall

OpenSession = Callable[[], Awaitable[Session]]
"""Gives the rollout's sandbox session, opening it on the first call."""


class ToolError(PaceError):
    """Raised by a tool on purpose: the message is the model's observation."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The answer to one call. `error`: the call failed in a way that the model can mend.

    `executed` is False where the tool was never run; `seconds` is the time it ran.
    """

    call: ToolCall
    content: str
    error: bool = False
    executed: bool = True
    seconds: float = 0.0

    def message(self) -> Message:
        return Message("tool", self.content, name=self.call.name, tool_call_id=self.call.id)


class Tool:
    """A function that a model may call. Calling the object calls the function.

    As a class attribute whose function takes `self`, it binds like a method. A parameter annotated with
    `pace_agent.sandbox.base.Session` is hidden from the model and filled with the rollout's sandbox.
    """

    def __init__(self, function: Callable[..., Any], *, name: str | None = None, thread: bool = False) -> None:
        self.function = function
        self.thread = thread
        self.signature: Signature = read_signature(function, name)
        self.__doc__ = function.__doc__
        self.__module__ = function.__module__

    @property
    def name(self) -> str:
        return self.signature.name

    @property
    def description(self) -> str:
        return self.signature.description

    @property
    def needs_session(self) -> bool:
        return self.signature.session is not None

    def schema(self) -> dict[str, Any]:
        """A new OpenAI-style description of the tool."""
        return json_schema(self.signature)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __get__(self, instance: object | None, owner: type | None = None) -> "Tool":
        if instance is None or not self.signature.method:
            return self
        bound = object.__new__(type(self))  # copy.copy would ask __reduce__, once for every rollout
        bound.__dict__.update(self.__dict__, function=MethodType(self.function, instance))
        return bound

    def __repr__(self) -> str:
        return f"Tool({self.name!r})"

    def __reduce__(self) -> str | tuple[Any, ...]:
        """By reference, like a function: the decorated name stands for the tool, not for what it decorates."""
        if isinstance(self.function, MethodType):
            return getattr, (self.function.__self__, self.function.__name__)
        where = sys.modules.get(str(self.function.__module__))
        if getattr(where, self.function.__qualname__, None) is self:
            return self.function.__qualname__
        return super().__reduce__()

    async def run(self, arguments: dict[str, Any], session: OpenSession | None = None) -> str:
        """Run with checked arguments and return the result as text.

        Raises ToolError for the model, EnvironmentFault for a fault of the tool, and errors of other layers unchanged.
        """
        if self.signature.session is not None:
            if session is None:
                raise EnvironmentFault(f"tool {self.name!r} needs a sandbox, but none was given to its environment")
            arguments = {**arguments, self.signature.session: await session()}
        try:
            if self.thread:
                value = await asyncio.to_thread(self.function, **arguments)
            else:
                value = self.function(**arguments)
            if inspect.isawaitable(value):
                value = await value
            return as_text(value)
        except FileError as error:
            raise ToolError(f"{error.filename}: {error.strerror}") from error
        except (ToolError, SandboxError, EngineError, GraderError, EnvironmentFault):
            raise
        except Exception as error:
            raise EnvironmentFault(f"tool {self.name!r} raised {type(error).__name__}: {error}") from error


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...


@overload
def tool(*, name: str | None = None, thread: bool = False) -> Callable[[Callable[..., Any]], Tool]: ...


def tool(
    function: Callable[..., Any] | None = None, /, *, name: str | None = None, thread: bool = False
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Declare a tool: a function or a method, synchronous or not.

    Synchronous functions run in the event loop's thread, which is right for cheap ones; `thread=True` moves one that
    blocks to a worker thread.
    """
    if function is not None:
        return Tool(function)
    return lambda declared: Tool(declared, name=name, thread=thread)


def as_text(value: Any) -> str:
    """Text as it is, anything else as JSON with every script left readable."""
    text = value if isinstance(value, str) else json.dumps(to_jsonable_python(value), ensure_ascii=False)
    return encodable(text)


def encodable(text: str) -> str:
    """The text without lone surrogates, which no tokenizer can take."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def declared_tools(owner: object) -> list[Tool]:
    """The tools declared as methods of an object, bound to it, in the order of their definition."""
    names: dict[str, None] = {}
    for kind in reversed(type(owner).__mro__):
        names.update(dict.fromkeys(name for name, value in vars(kind).items() if isinstance(value, Tool)))
    found = [getattr(owner, name) for name in names]
    return [each for each in found if isinstance(each, Tool)]


@lru_cache(maxsize=256)
def _tool_of(function: Callable[..., Any]) -> Tool:
    """Kept, because every rollout asks for it and to read a signature takes half a millisecond."""
    return Tool(function)


class ToolSet:
    """The tools of one rollout."""

    def __init__(self, tools: Iterable[Tool | Callable[..., Any]], *, session: OpenSession | None = None) -> None:
        self._tools: dict[str, Tool] = {}
        self._session = session
        for each in tools:
            made = each if isinstance(each, Tool) else _tool_of(each) if inspect.isfunction(each) else Tool(each)
            if made.name in self._tools:
                raise UserError(f"two tools are named {made.name!r}")
            self._tools[made.name] = made

    def names(self) -> list[str]:
        return list(self._tools)

    def schemas(self) -> list[dict[str, Any]]:
        """New OpenAI-style descriptions, as chat templates expect them."""
        return [each.schema() for each in self._tools.values()]

    @property
    def needs_session(self) -> bool:
        return any(each.needs_session for each in self._tools.values())

    async def call(self, call: ToolCall) -> ToolResult:
        """Answer one call. Raises only what is not the model's fault."""
        if call.error is not None:
            return _refused(call, call.error)
        wanted = self._tools.get(call.name)
        if wanted is None:
            return _refused(call, f"there is no tool {call.name!r}.{did_you_mean(call.name, self._tools)}")
        checked = check_arguments(wanted.signature, call.arguments)
        if isinstance(checked, str):
            return _refused(call, f"{call.name}: {checked}")
        time = asyncio.get_running_loop().time
        start = time()
        try:
            content, error = await wanted.run(checked, self._session), False
        except ToolError as raised:
            content, error = encodable(f"Error: {raised}"), True
        return ToolResult(call, content, error=error, seconds=time() - start)


def _refused(call: ToolCall, reason: str) -> ToolResult:
    return ToolResult(call, encodable(f"Error: {reason}"), error=True, executed=False)
