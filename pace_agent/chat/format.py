"""Messages to ids by the model's own chat template: token in, token out.

What always holds:

* Sampled ids are never touched. A conversation grows as prompt ids, sampled ids, suffix ids, sampled ids, ... and no
  earlier id changes. Where a template drops or rewrites earlier turns (most drop earlier `<think>` parts) the tokens
  stay as they were sampled: the model goes on from what it really wrote.
* For a turn that ends as the template ends it, prompt + sampled + suffix are the ids of the whole conversation as the
  template renders it, but for such rewriting.
* No text of a message, a tool result or a tool schema becomes a control token (see `encoding`). That includes the
  content of assistant messages in a prompt: put calls in `tool_calls`, where the template writes the tags.

Not promised: a template that moves the tools or the system text to the last user message (`prefix_stable` is then
False, and it is logged once), or that counts the turns: a suffix is rendered after one short exchange without tools.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pace_agent.chat.encoding import TextEncoder
from pace_agent.chat.skeleton import Skeleton, find_skeleton
from pace_agent.chat.template import Dicts, Template, generation_stops, said
from pace_agent.errors import UserError
from pace_agent.types import Message

log = logging.getLogger(__name__)

_SAMPLE = 'Price: 3 plums,\n  x = 1.50; déjà vu 价格 🙂\t{"a": [1, -2]} end'
_MOST_SHAPES = 64
_SEEN_BEFORE_SKELETON = 8

Shape = tuple[Any, ...]


class ChatFormat:
    """The chat format of one tokenizer.

    `tokenizer` is a transformers fast tokenizer with a chat template. UserError where there is none, where turns can't
    be appended exactly, or where text could forge control tokens. Safe to use from several threads; pickles with its
    tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise UserError(
                f"Tokenizer {getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__} is not a fast one. "
                "Use one with a tokenizer.json (PreTrainedTokenizerFast)."
            )
        self.tokenizer = tokenizer
        self._template = Template(tokenizer)
        self._encoder = TextEncoder(tokenizer)
        self._check_encoding()
        self.stop_token_ids = self._find_stops()
        """The token that closes the assistant's turn in the template, then those of tokenizer and generation config."""
        self.vocab_size: int = len(tokenizer)
        """Tokens that the tokenizer knows; a model's embedding may have more rows."""
        pad = tokenizer.pad_token_id
        self.pad_token_id: int = self.stop_token_ids[0] if pad is None else int(pad)
        """The tokenizer's; the first stop token where it has none."""
        self.shows_tools = self._template.shows_tools()
        """Whether the template writes the tools' schemas into the prompt."""
        self.shows_tool_results = self._template.shows_tool_results()
        """Whether the template has a place for tool results. Without one, `suffix_ids` refuses them."""
        self.prefix_stable = self._template.keeps_prefix()
        """Whether the template leaves the first messages where they were when others follow."""
        if not self.prefix_stable:
            log.warning("The chat template of %s moves earlier text when messages follow.", self._template.name)
        self._stops = frozenset(self.stop_token_ids)
        self._skeletons: dict[Shape, Skeleton | None] = {}
        self._seen: dict[Shape, int] = {}
        self._warned = False

    @classmethod
    def from_pretrained(cls, path: str | Path) -> Self:
        """Load from a local folder. UserError if it is missing or holds no tokenizer with a chat template."""
        if not Path(path).is_dir():
            raise UserError(f"Model folder {str(path)!r} does not exist. Give a folder that save_pretrained wrote.")
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        except Exception as error:  # the Rust side raises bare Exception
            raise UserError(f"Model folder {str(path)!r} holds no tokenizer that can be loaded: {error}") from error
        return cls(tokenizer)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.tokenizer,)

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Ids of the first prompt: the messages, the tools, and the opening of the assistant's turn."""
        if tools and not self.shows_tools and not self._warned:
            log.warning("The chat template of %s does not show tools to the model.", self._template.name)
            self._warned = True
        hidden = self._encoder.hide_all(tools)
        return self._ids(messages, hidden, ("prompt", json.dumps(hidden)), after_turn=False)

    def suffix_ids(self, messages: Sequence[Message], *, last_output: Sequence[int]) -> list[int]:
        """Ids that follow the sampled turn `last_output`: the end of that turn, the messages, the next opening.

        Where `last_output` ends with a stop token (padding after it does not count), this token is not repeated and
        the first ids are those that the template puts after it, such as the line break in ChatML. Consecutive tool
        results are rendered together, as the template does it. UserError for messages of the assistant, and for tool
        results where the template has no place for them.
        """
        for message in messages:
            if message.role == "assistant":
                raise UserError("suffix_ids takes tool results and user messages; a turn's ids are its sampled ones.")
            if message.role == "tool" and not self.shows_tool_results:
                raise UserError(
                    f"The chat template of {self._template.name} has no place for tool results (role 'tool'). "
                    "Use a model with a tool template, or an environment that answers with user messages."
                )
        ids = self._ids(messages, [], ("suffix",), after_turn=True)
        if not self._ended(last_output):
            return ids
        end = next((i for i, token in enumerate(ids) if token in self._encoder.control_ids), None)
        return ids if end is None or ids[end] not in self._stops else ids[end + 1 :]

    def decode(self, output_ids: Sequence[int]) -> str:
        """Text of a turn without the stop tokens and padding at its end. Special tokens stay: tool tags may be some."""
        end = len(output_ids)
        while end and (output_ids[end - 1] in self._stops or output_ids[end - 1] == self.pad_token_id):
            end -= 1
        return str(self.tokenizer.backend_tokenizer.decode(list(output_ids[:end]), skip_special_tokens=False))

    def _ended(self, output_ids: Sequence[int]) -> bool:
        """Whether the last id but for padding is a stop token."""
        last = next(
            (token for token in reversed(output_ids) if token in self._stops or token != self.pad_token_id), None
        )
        return last in self._stops

    def _ids(self, messages: Sequence[Message], tools: Dicts, kind: Shape, *, after_turn: bool) -> list[int]:
        """Rendered and encoded, through the shape's skeleton where there is one."""
        shape = (*kind, *((message.role, bool(message.name), bool(message.tool_call_id)) for message in messages))
        values = [value for message in messages for value in _texts(message).values()]
        usual = all(values) and not any(message.tool_calls for message in messages)
        skeleton = self._skeletons.get(shape) if usual else None
        if skeleton is not None:
            return skeleton.fill(values, self._encoder, first=not after_turn)

        def render(dicts: Dicts) -> str:
            return self._template.after_turn(dicts) if after_turn else self._template.render(dicts, tools)

        if usual and shape not in self._skeletons:
            self._look_for_skeleton(shape, messages, render, first=not after_turn)
        rendered = render(self._encoder.hide_all([message.to_dict() for message in messages]))
        return self._encoder.ids(rendered, first=not after_turn)

    def _look_for_skeleton(
        self, shape: Shape, messages: Sequence[Message], render: Callable[[Dicts], str], *, first: bool
    ) -> None:
        """Once a shape has come often enough to be worth the search, which takes as long as some hundred renderings."""
        if len(self._skeletons) >= _MOST_SHAPES:
            return
        if (
            shape not in self._seen and len(self._seen) >= _MOST_SHAPES
        ):  # shapes that come once must not keep later ones out
            self._seen.clear()
        self._seen[shape] = self._seen.get(shape, 0) + 1
        if self._seen[shape] <= _SEEN_BEFORE_SKELETON:
            return

        def render_texts(values: Sequence[str]) -> str:
            texts = iter(values)
            return render(
                [{"role": message.role} | {key: next(texts) for key in _texts(message)} for message in messages]
            )

        n_values = sum(len(_texts(message)) for message in messages)
        try:
            found = find_skeleton(render_texts, n_values, self._encoder, self._template.source, first=first)
        except UserError:  # the template refuses some texts, so it does more than copy
            found = None
        self._skeletons[shape] = found
        self._seen.pop(shape, None)

    def _check_encoding(self) -> None:
        """Check that pieces are encoded as the whole is, on rendered conversations."""
        asked = said("user", _SAMPLE)
        self._encoder.check(self._template.render([asked]))
        self._encoder.check(self._template.render([asked, said("assistant", _SAMPLE), asked]))

    def _find_stops(self) -> tuple[int, ...]:
        after = self._template.after_turn([said("user", "question")]).partition("question")[0]
        closing = next((piece for piece in self._encoder.split(after) if isinstance(piece, int)), None)
        if closing is None:
            raise UserError(
                f"The chat template of {self._template.name} closes the assistant's turn with no token of its own, so "
                "the end of a turn can't be told. Use a template that ends turns with a special token, such as "
                "<|im_end|> in ChatML, and a tokenizer that knows this token."
            )
        eos = self.tokenizer.eos_token_id
        known = [closing, *([] if eos is None else [int(eos)]), *generation_stops(str(self.tokenizer.name_or_path))]
        return tuple(dict.fromkeys(known))


def _texts(message: Message) -> dict[str, str]:
    """The texts that a template may write, as `Message.to_dict` has them."""
    texts = {"content": message.content}
    if message.name:
        texts["name"] = message.name
    if message.tool_call_id:
        texts["tool_call_id"] = message.tool_call_id
    return texts
