"""A bundle whose generation engine is a numpy model, for the verbs that generate text."""

from __future__ import annotations

from pathlib import Path

import pytest

from prge.data.tokenization.tokenizer import Tokenizer, load_bundle_tokenizer
from prge.formats.adapter import Adapter
from prge.formats.bundle import Bundle, open_bundle
from prge.formats.peft import write_peft
from prge.generation.loop import Completion, GenerationSettings, Generator, Request
from prge.generation.prompts import Prompts
from tests.device_runner.numpy_device import Device
from tests.numpy_generation_engine import NumpyGenerationEngine
from tests.templates import random_adapter

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class NumpyModel:
    """A bundle in a folder, and the generation engines that verbs have opened for it."""

    def __init__(self, folder: Path, chat_template: str = "", context: int = 400) -> None:
        self.folder = Device().write_bundle(folder, chat_template=chat_template)
        self.bundle = open_bundle(self.folder)
        self.tokenizer = load_bundle_tokenizer(self.bundle)
        self.context = context
        self.engines: list[NumpyGenerationEngine] = []

    def replaces(self, monkeypatch: pytest.MonkeyPatch, *modules: object) -> None:
        """Make these modules open numpy generation engines."""
        for module in modules:
            monkeypatch.setattr(module, "open_generator", self.open_generator)

    def open_generator(self, bundle: Bundle, tokenizer: Tokenizer, flags: object, slots: int) -> Generator:
        """Replace device_runner.session.generation.open_generator."""
        self.engines.append(NumpyGenerationEngine(bundle.chain.vocabulary_size, self.context, slots))
        return Generator(self.engines[-1], tokenizer)

    def write_adapter(self, folder: Path, seed: int = 1) -> Path:
        """Write a PEFT folder for the bundle with random values."""
        write_peft(folder, random_adapter(self.bundle.chain.modules, seed), self.bundle.adapter)
        return folder

    def answers(
        self, text: str | list[dict[str, str]], adapter: Adapter | None = None, max_tokens: int = 16
    ) -> Completion:
        """Return the model's greedy answer to a text or messages, computed alone."""
        prompts = Prompts(self.tokenizer)
        prompt = prompts.encode_text(text) if isinstance(text, str) else prompts.encode_messages(text)
        engine = NumpyGenerationEngine(self.bundle.chain.vocabulary_size, self.context)
        adapter = adapter or Adapter.zeros(self.bundle.chain.modules)
        request = Request(prompt, adapter, GenerationSettings(max_tokens))
        return Generator(engine, self.tokenizer).generate([request])[0]
