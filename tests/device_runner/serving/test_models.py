"""What a server says of conversations that its chat template refuses, before it keeps feedback on them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from device_runner.serving.models import Models
from device_runner.serving.protocol import RequestError
from prge.rows.feedback import Answered
from prge.rows.tokenizer import Tokenizer
from tests.prge.rows.tiny_tokenizers import byte_level_backend

TEMPLATE = """{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('it says no') }}{% endif %}
{{- m.role ~ ':' ~ m.content ~ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""


@pytest.mark.parametrize(
    ("answer", "correction", "refused"),
    [("yes", None, False), ("no", None, True), ("no", "yes", False), ("yes", "no", True)],
)
def test_feedback_that_could_not_be_learnt_is_refused(
    answer: str, correction: str | None, refused: bool
) -> None:
    tokenizer = Tokenizer(byte_level_backend(), bos_id=1, eos_id=2, chat_template=TEMPLATE)
    models = Models({}, tokenizer)
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Is it?"}]}
    answered = Answered("a", "m", "", asked, answer, {})
    if refused:
        with pytest.raises(RequestError, match="the chat template refuses the messages\n  - it says no"):
            asyncio.run(models.check_learnable(answered, correction))
    else:
        asyncio.run(models.check_learnable(answered, correction))


def test_feedback_on_texts_has_no_template() -> None:
    models = Models({}, Tokenizer(byte_level_backend(), bos_id=1, eos_id=2))
    answered = Answered("a", "m", "", {"prompt": "Is it?"}, "no", {})
    asyncio.run(models.check_learnable(answered, "yes"))
