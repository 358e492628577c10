"""A byte-level BPE tokenizer of a few hundred entries with ChatML and tool-call markers, trained in about a second.

What always holds:

* Every byte has an entry, so any text encodes and decodes to itself.
* A digit is a token of its own, so a number's tokens say its value place by place.
* Encoding a whole conversation gives the ids of its pieces encoded one after the other: no merge reaches over the
  line that names a role, nor over the lines around a tool's answer. What a model sees in a rollout, where every turn is
  encoded alone, is what it saw in training.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pace_agent.types import Message

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL_MARKERS = (PAD, START, END)
TOOL_MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
MARKERS = CONTROL_MARKERS + TOOL_MARKERS

# What stands alone: a role's line; a line break, except around the JSON of a call; and the last argument of a call.
# The rest of a call may merge into one token on each side of that argument, which halves the tokens of a call.
UNMERGED = r"""(?:system|user|assistant)\n|(?<!\})\n(?!\{)|[^"{}\n]+(?="\})"""

CHAT_TEMPLATE = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if system or tools %}
    {{- '<|im_start|>system' + '\\n' + system }}
    {%- if tools %}
        {{- ('\\n' if system else '') + 'Tools: ' }}
        {%- for tool in tools %}
            {%- set function = tool.function if tool.function is defined else tool %}
            {{- function.name + '(' + (function.parameters.properties | default({}) | list | join(', ')) + ')' }}
            {{- ', ' if not loop.last }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>' + '\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant' + '\\n' }}
        {%- generation %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function if call.function is defined else call %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>' + '\\n' + '{"name": ' + (function.name | tojson) + ', "arguments": ' }}
            {{- function.arguments if function.arguments is string else (function.arguments | tojson) }}
            {{- '}' + '\\n' + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
        {{- '\\n' + '<tool_response>' + '\\n' + message.content + '\\n' + '</tool_response>' }}
        {{- '<|im_end|>' + '\\n' if loop.last or loop.nextitem.role != 'tool' }}
    {%- elif message.role == 'user' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant' + '\\n' }}
{%- endif %}
"""
"""Qwen's layout, with the tools in one line of names and parameters to keep the prompt of a small task short."""


def plain_texts(conversations: Sequence[Sequence[Message]], tools: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    """Conversations as the template writes them, before there is a tokenizer. The contents hold the calls, too."""
    blank = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=CHAT_TEMPLATE)
    dicts = [[{"role": said.role, "content": said.content} for said in conversation] for conversation in conversations]
    return list(blank.apply_chat_template(dicts, tools=list(tools) or None, tokenize=False))


def train_tokenizer(texts: Iterable[str], *, size: int = 512, max_length: int = 512) -> PreTrainedTokenizerFast:
    """A tokenizer of at most `size` entries: the markers, 256 bytes, and merges learned from `texts`.

    Few or uniform texts give fewer merges; the tokenizer's length is then what a model has to be made for.
    """
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = _pre_tokenizer()
    # Between the markers only: a merge that spells one would let plain text turn into it.
    pieces = (piece for text in texts for piece in re.split("|".join(map(re.escape, MARKERS)), text) if piece)
    learner.train_from_iterator(
        pieces,
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[AddedToken(marker, normalized=False) for marker in MARKERS],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    # A new tokenizer around what was learned: the trainer marks everything as special, but the tool markers must stay
    # readable in text that is decoded without special tokens, as in Qwen's own tokenizer.
    learned = json.loads(learner.to_str())["model"]
    bpe = Tokenizer(models.BPE(vocab=learned["vocab"], merges=[tuple(pair) for pair in learned["merges"]]))
    bpe.pre_tokenizer = _pre_tokenizer()
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(marker, normalized=False) for marker in CONTROL_MARKERS])
    bpe.add_tokens([AddedToken(marker, normalized=False) for marker in TOOL_MARKERS])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=[START],
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(UNMERGED), behavior="isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
