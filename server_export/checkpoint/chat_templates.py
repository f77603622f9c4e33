"""The chat template of an export, for a tokenizer that has none or for rows that need another one.

The template `plain` needs nothing of a vocabulary but letters and a colon:

    User: Is it warm?
    Assistant: Yes.</s>
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prge.data.tokenization.tokenizer import read_chat_template
from prge.errors import ConfigError, DataError, PrgeError, as_clause
from server_export.checkpoint.tokenization import adds_bos
from server_export.settings import PrependBos

PLAIN = "plain"

# <line> separates messages: a line break, or a space if the tokenizer has no line break.
_ENDS_WITH_TOKEN = """\
{%- for message in messages %}
    {%- if not loop.first %}{{ '<line>' }}{% endif %}
    {{- message['role'] | capitalize + ': ' + message['content'] | trim }}
    {%- if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<line>Assistant:' }}{% endif %}"""
# Without an end token, an answer ends with the next speaker's label, which is trained as part of the answer.
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


def set_chat_template(tokenizer: Any, wanted: str | None, prepend_bos: PrependBos) -> None:
    """Set the chat template of a transformers tokenizer in place.

    Args:
        tokenizer: the tokenizer of transformers that is changed.
        wanted: `plain`, a file with a Jinja template, or None to keep the tokenizer's own template.
        prepend_bos: the export's setting; the plain template begins with the begin-of-sequence token if every
            sequence of the model does.

    Raises:
        ConfigError: the file can't be read, or does not render a conversation.
    """
    if wanted is None:
        return
    is_plain = wanted == PLAIN
    source = plain_template(tokenizer, prepend_bos) if is_plain else read_chat_template(Path(wanted))
    if problem := _template_problem(source, tokenizer):
        raise ConfigError(
            f"Cannot use {wanted} as a chat template:",
            [problem],
            remedy="Use a Jinja template like transformers' chat_template.jinja, or `plain`.",
            code="chat-template-unusable",
        )
    tokenizer.chat_template = source


def plain_template(tokenizer: Any, prepend_bos: PrependBos) -> str:
    """Return a template of plain words that uses only tokens that the tokenizer has."""
    has_line_breaks = "\n" in tokenizer.decode(tokenizer.encode("a\nb", add_special_tokens=False))
    has_bos = prepend_bos == "always" or adds_bos(tokenizer)
    eos = tokenizer.eos_token_id
    # An end-of-sequence token that only the model's configuration names may have no text that encodes to it.
    is_encodable = eos is not None and tokenizer.encode(tokenizer.eos_token, add_special_tokens=False) == [
        eos
    ]
    body = _ENDS_WITH_TOKEN if is_encodable else _ENDS_WITH_USER
    return "{{- bos_token }}\n" * has_bos + body.replace("<line>", "\\n" if has_line_breaks else " ")


def _template_problem(source: str, tokenizer: Any) -> str | None:
    """Return why a template can't be used, or None if it renders a conversation."""
    from prge.data.tokenization.chat import ChatTemplate

    tokens = {name: getattr(tokenizer, name, None) for name in ("bos_token", "eos_token", "pad_token")}
    messages = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    try:
        template = ChatTemplate(source, {name: token for name, token in tokens.items() if token is not None})
        prompt = template.render(messages[:1], add_generation_prompt=True)
        renderings = template.renderings(messages)
    except PrgeError as error:
        problems = error.problems if isinstance(error, DataError) else []
        return "; ".join([as_clause(error.what), *problems]).removeprefix("the bundle's ")
    trained = [each.text[start:end] for each in renderings for start, end in each.spans]
    if _QUESTION not in prompt or not trained or any(_ANSWER not in text for text in trained):
        return "the rendered text lacks the message of the user or of the assistant"
    return None
