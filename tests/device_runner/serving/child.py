"""A server with a small numpy model in a process: `child.py SECONDS_A_STEP QUEUE KEY FILE SYSTEM SCRIPT`."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from device_runner.serving.access import Access
from device_runner.serving.app import make_app
from device_runner.serving.feedback import Feedback, FeedbackFile
from device_runner.serving.models import Models
from device_runner.serving.uvicorn_server import Server, format_address, listening
from device_runner.serving.worker import Worker
from device_runner.session.constraints import Cool
from device_runner.session.pauses import Pauses
from device_runner.session.sensors import Sensors
from prge.data.feedback_examples import FeedbackExamples
from prge.data.tokenization import chat
from prge.data.tokenization.tokenizer import Tokenizer
from prge.engine import FloatArray
from prge.formats.adapter import Adapter
from prge.generation.loop import Generator
from tests.bundles import make_spec
from tests.numpy_generation_engine import NumpyGenerationEngine, make_adapter
from tests.prge.data.tiny_tokenizers import byte_level_backend

CONTEXT = 2048
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if messages[0].content == 'loop' %}{% for a in range(90000) %}{% for b in range(90000) %}"
    "{% endfor %}{% endfor %}{% endif %}"
)
# The engine fails at this token of a prompt; it is never sampled.
FAILING = 419
# Largest size of the feedback file.
LIMIT = 1 << 20


class SlowGenerationEngine(NumpyGenerationEngine):
    """A generation engine whose steps take some seconds, and which fails at the token FAILING."""

    def __init__(self, seconds: float) -> None:
        super().__init__(context=CONTEXT, slots=4)
        self.failing.add(FAILING)
        self._seconds = seconds

    def _fed(self, sequence: int, tokens: Sequence[int]) -> FloatArray:
        logits = super()._fed(sequence, tokens).copy()
        logits[FAILING] = -np.inf
        return logits

    def step(self, tokens: Mapping[int, int]) -> dict[int, FloatArray]:
        time.sleep(self._seconds)
        return super().step(tokens)


class ScriptedGenerationEngine(SlowGenerationEngine):
    """A generation engine whose completions are a given text; its next tokens are the most likely ones."""

    def __init__(self, text: str) -> None:
        super().__init__(0)
        self._tokens = [*make_tokenizer().encode(text, control=True), 2]
        self._prompt_length: dict[int, int] = {}

    def feed(self, sequence: int, tokens: Sequence[int]) -> FloatArray:
        self._prompt_length[sequence] = self.length(sequence) + len(tokens)
        return super().feed(sequence, tokens)

    def _fed(self, sequence: int, tokens: Sequence[int]) -> FloatArray:
        logits = super()._fed(sequence, tokens)
        number = self.length(sequence) - self._prompt_length[sequence]
        logits[self._tokens[min(number, len(self._tokens) - 1)]] = 100
        return logits


def make_tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_backend(), bos_id=1, eos_id=2, prepend_bos=True, chat_template=TEMPLATE)


def make_examples() -> FeedbackExamples:
    return FeedbackExamples(make_tokenizer(), make_spec(vocabulary_size=512, sequence_length=64))


def adapters() -> dict[str, Adapter]:
    return {"base": make_adapter(), "tuned": make_adapter(1)}


if __name__ == "__main__":
    chat.SECONDS = 0.5  # timeout of a template
    seconds, queue, key = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    models = Models(adapters(), make_tokenizer())
    script = sys.argv[6]
    engine = ScriptedGenerationEngine(script) if script else SlowGenerationEngine(seconds)
    generator = Generator(engine, make_tokenizer())
    examples = make_examples()
    with listening("127.0.0.1", 0) as listener, Worker(generator, queue) as worker:
        storage = ThreadPoolExecutor(1)
        file = FeedbackFile(Path(sys.argv[4]), examples, storage, LIMIT) if sys.argv[4] else None
        feedback = Feedback(file, lambda text: print(text, flush=True))
        print(format_address(listener), flush=True)
        hot = [Cool("--pause-above-celsius", 45)] if sys.argv[5] else []
        pauses = Pauses(hot, Sensors(Path(sys.argv[5])), seconds=0)
        app = make_app(models, worker, Access(tuple(filter(None, key.split(",")))), feedback, pauses=pauses)
        Server(app, worker, on_stopping=feedback.close).run([listener])
