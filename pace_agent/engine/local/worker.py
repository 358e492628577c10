"""What runs in the engine's process: take commands, step, send what finished.

The process ends when its parent says so, closes the socket, or dies. Ctrl-C in the terminal is the parent's to answer.
One step is never interrupted: commands are read between steps, so a weight update sees no step half done.
"""

import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pace_agent.engine.base import Generation, GenerationRequest
from pace_agent.engine.local import wire
from pace_agent.errors import EngineError

IDLE_SECONDS = 1.0
"""How often an idle process looks whether its parent is still there."""


class ParentGone(Exception):
    """The other end of the socket is closed."""


class Worker:
    """Serves one decoder over one socket."""

    def __init__(self, sock: socket.socket, decoder: Any, parent: int) -> None:
        self._socket = sock
        self._decoder = decoder
        self._messages = wire.Decoder()
        self._parent = parent
        self._paused = False
        self._open = True
        self._handlers: dict[str, Callable[..., None]] = {
            "submit": self._submit,
            "abort": self._abort,
            "release": decoder.release,
            "pause": self._pause,
            "resume": self._resume,
            "update": self._update,
            "close": self._close,
        }

    def send(self, kind: str, *content: Any) -> None:
        try:
            self._socket.sendall(wire.encode((kind, *content)))
        except OSError as error:
            raise ParentGone from error

    def run(self) -> None:
        self.send("ready", self._decoder.info)
        while self._open:
            runs = self._decoder.busy and not self._paused
            for name, *arguments in self._commands(0.0 if runs else IDLE_SECONDS):
                self._handlers[name](*arguments)
            if self._decoder.busy and not self._paused:
                self._step()

    def _commands(self, timeout: float) -> list[tuple[Any, ...]]:
        if os.getppid() != self._parent:
            raise ParentGone
        readable, _, _ = select.select([self._socket], [], [], timeout)
        if not readable:
            return []
        data = self._socket.recv(1 << 20)
        if not data:
            raise ParentGone
        return [command for batch in self._messages.feed(data) for command in batch]

    def _step(self) -> None:
        try:
            outcomes = self._decoder.step()
        except Exception as error:  # whatever a model raises ends the turns, not the engine
            outcomes = self._decoder.fail_all(EngineError(f"the model raised {type(error).__name__}: {error}"))
        if outcomes:
            self._finished(outcomes)

    def _finished(self, outcomes: list[tuple[str, Generation | EngineError]]) -> None:
        self.send("finished", outcomes, self._decoder.stats())

    def _submit(self, request: GenerationRequest) -> None:
        try:
            self._decoder.submit(request)
        except EngineError as error:
            self._finished([(request.rid, error)])

    def _abort(self, rid: str | None) -> None:
        outcomes = self._decoder.abort(rid)
        if outcomes:
            self._finished(outcomes)

    def _pause(self, ticket: int) -> None:
        self._paused = True
        self.send("done", ticket, None, self._decoder.stats())

    def _resume(self) -> None:
        self._paused = False

    def _update(self, ticket: int, path: str, version: int) -> None:
        from pace_agent.engine.local.weights import read_weights

        failure: str | None = None
        try:
            self._decoder.swap(read_weights(Path(path)), version)
        except EngineError as error:
            failure = str(error)
        except Exception as error:  # a bug or a full memory: the parent must hear of it, and may go on
            failure = f"{type(error).__name__}: {error}"
        self.send("done", ticket, failure, self._decoder.stats())

    def _close(self) -> None:
        self._open = False


def main() -> None:
    """Arguments: the socket's descriptor and the engine's options as JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    options = json.loads(sys.argv[2])
    parent = options.pop("parent")
    try:
        try:
            import torch

            from pace_agent.engine.local.slots import SlotDecoder
            from pace_agent.engine.local.weights import load_model

            torch.set_num_threads(options.pop("threads"))
            decoder = SlotDecoder(load_model(options.pop("path"), options.pop("dtype")), **options)
        except EngineError as error:
            sock.sendall(wire.encode(("failed", str(error))))
            return
        Worker(sock, decoder, parent).run()
    except (ParentGone, BrokenPipeError, ConnectionResetError):
        return
