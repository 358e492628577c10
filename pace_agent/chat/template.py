"""The chat template of a tokenizer: rendering, what follows the assistant's turn, and where a turn ends."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pace_agent.chat.encoding import MARK
from pace_agent.errors import UserError

Dicts = Sequence[Mapping[str, Any]]

TURN = MARK + "\U000ffffc"
"""Stands for the assistant's text where only what surrounds it is wanted; no content can hold it."""

PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "pace_probe",
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "string", "description": "A text."}},
            "required": ["a"],
        },
    },
}


def said(role: str, content: str) -> dict[str, Any]:
    """A message as templates take it."""
    return {"role": role, "content": content}


class Template:
    """Renders messages with the tokenizer's chat template (of several named ones `tool_use`, else `default`)."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.name = str(tokenizer.name_or_path or type(tokenizer).__name__)
        source = tokenizer.chat_template
        if isinstance(source, Mapping):
            source = source.get("tool_use") or source.get("default")
        if not source:
            raise UserError(
                f"Tokenizer {self.name} has no chat template. Set tokenizer.chat_template (ChatML, for one) and save "
                "it again, or choose an instruction-tuned model."
            )
        self.source = str(source)

    def render(self, messages: Dicts, tools: Dicts = (), *, open_turn: bool = True) -> str:
        """Rendered text. `open_turn`: with the opening of the assistant's turn. UserError if the template refuses."""
        from jinja2 import TemplateError

        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=list(tools) or None,
                    chat_template=self.source,
                    tokenize=False,
                    add_generation_prompt=open_turn,
                )
            )
        except (TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise UserError(f"The chat template of {self.name} can't render the roles {roles}: {error}") from error

    def after_turn(self, messages: Dicts) -> str:
        """What follows the assistant's text when `messages` come next, up to the opening of its next turn."""
        rendered = self.render([said("user", "a"), said("assistant", TURN), *messages])
        _, found, after = rendered.partition(TURN)
        if not found or TURN in after:
            raise UserError(f"The chat template of {self.name} does not write the assistant's text exactly once.")
        return after

    def keeps_prefix(self) -> bool:
        """Whether the first messages and the tools stay where they were when others follow."""
        asked = said("user", "question")
        head, found, _ = self.render([asked], [PROBE_TOOL]).partition("question")
        later = self.render([asked, said("assistant", TURN), said("user", "next")], [PROBE_TOOL])
        return later.startswith(head + found)

    def shows_tools(self) -> bool:
        """Whether the tools' schemas get into the prompt."""
        return "pace_probe" in self.render([said("user", "a")], [PROBE_TOOL])

    def shows_tool_results(self) -> bool:
        """Whether messages of role `tool` are written."""
        try:
            return "pace_probe" in self.after_turn([said("tool", "pace_probe")])
        except UserError:
            return False


def generation_stops(folder: str) -> list[int]:
    """End-of-sequence ids in the generation config of a model folder; none where there is no such file."""
    file = Path(folder) / "generation_config.json"
    if not file.is_file():
        return []
    try:
        eos = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{file} is not a JSON object: {error}") from error
    if eos is None:
        return []
    return [int(token) for token in eos] if isinstance(eos, list) else [int(eos)]
