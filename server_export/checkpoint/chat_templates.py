"""The chat template that an export is given, for a tokenizer that has none or for rows that ask for another.

`plain` needs nothing of a vocabulary but letters and a colon:

    User: Is it warm?
    Assistant: Yes.</s>
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prge.errors import ConfigError, DataError, PrgeError
from prge.rows.tokenization.tokenizer import read_chat_template
from server_export.checkpoint.tokenization import adds_bos
from server_export.settings import PrependBos

PLAIN = "plain"

# <line> parts turns: a line break, or a space where the tokenizer knows no line break.
_ENDS_WITH_TOKEN = """\
{%- for message in messages %}
    {%- if not loop.first %}{{ '<line>' }}{% endif %}
    {{- message['role'] | capitalize + ': ' + message['content'] | trim }}
    {%- if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<line>Assistant:' }}{% endif %}"""
# What ends an answer is who speaks next, learnt as its last words.
_ENDS_WITH_USER = """\
{%- for message in messages %}
    {%- if loop.first or loop.previtem['role'] != 'assistant' %}
        {%- if not loop.first %}{{ '<line>' }}{% endif %}
        {{- message['role'] | capitalize + ':' }}
    {%- endif %}
    {{- ' ' + message['content'] | trim }}
    {%- if message['role'] == 'assistant' %}{{ '<line>User:' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<line>Assistant:' }}{% endif %}"""
_QUESTION, _ANSWER = "Is it warm?", "Yes it is."


def give_template(tokenizer: Any, wanted: str | None, prepend_bos: PrependBos) -> None:
    """Set the chat template of a tokenizer of transformers.

    Args:
        tokenizer: is changed.
        wanted: `plain`, a file with a Jinja template, or None: the tokenizer keeps its own.
        prepend_bos: as the export was asked; a plain template begins as all texts of the model do.

    Raises:
        ConfigError: the file can't be read, or renders no conversation.
    """
    if wanted is None:
        return
    own = wanted == PLAIN
    source = plain_template(tokenizer, prepend_bos) if own else read_chat_template(Path(wanted))
    if problem := _problem(source, tokenizer):
        raise ConfigError(
            f"{wanted} can't be used as a chat template:",
            [problem],
            remedy="give a Jinja template of the kind of transformers' chat_template.jinja, or plain",
            code="chat-template-unusable",
        )
    tokenizer.chat_template = source


def plain_template(tokenizer: Any, prepend_bos: PrependBos) -> str:
    """A template of plain words, for the tokens that a tokenizer has."""
    knows_lines = "\n" in tokenizer.decode(tokenizer.encode("a\nb", add_special_tokens=False))
    begins = prepend_bos == "always" or adds_bos(tokenizer)
    end = tokenizer.eos_token_id
    # An end that only the model's configuration names may have no text that is read as it.
    is_read = end is not None and tokenizer.encode(tokenizer.eos_token, add_special_tokens=False) == [end]
    body = _ENDS_WITH_TOKEN if is_read else _ENDS_WITH_USER
    return "{{- bos_token }}\n" * begins + body.replace("<line>", "\\n" if knows_lines else " ")


def _problem(source: str, tokenizer: Any) -> str | None:
    """Why a template can't be used; None if it renders a conversation."""
    from prge.rows.tokenization.chat import ChatTemplate

    tokens = {name: getattr(tokenizer, name, None) for name in ("bos_token", "eos_token", "pad_token")}
    turns = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    try:
        template = ChatTemplate(source, {name: token for name, token in tokens.items() if token is not None})
        asked = template.render(turns[:1], add_generation_prompt=True)
        found = template.renderings(turns)
    except PrgeError as error:
        problems = error.problems if isinstance(error, DataError) else []
        return "; ".join([error.what.splitlines()[0], *problems]).removeprefix("the bundle's ")
    written = [each.text[start:end] for each in found for start, end in each.spans]
    if _QUESTION not in asked or not written or any(_ANSWER not in text for text in written):
        return "what the user or the assistant says is not in its text"
    return None
