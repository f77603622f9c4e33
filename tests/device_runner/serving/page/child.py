"""A server with scripted answers, which follow from the prompt: `child.py SETTINGS`, a JSON object.

    {"port": 0, "key": null, "feedback": null, "runs": null, "learns": false, "chats": true}

The server prints its address. It answers with a word every few milliseconds: `slow` takes long, the words of
`burst` come at once, `line` is a megabyte without a space, and the page must show the markup of `hostile` as
text.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any

from device_runner.serving.access import Access
from device_runner.serving.app import make_app
from device_runner.serving.feedback import Feedback, FeedbackFile
from device_runner.serving.models import Models
from device_runner.serving.page.runs import Runs
from device_runner.serving.protocol import RequestError
from device_runner.serving.uvicorn_server import Server, format_address, listening
from device_runner.serving.worker import EventHandler
from prge.data.tokenization.tokenizer import Tokenizer
from prge.generation.loop import Completion, Request, Ticket
from tests.device_runner.serving.child import LIMIT, TEMPLATE, adapters, make_examples
from tests.prge.data.tiny_tokenizers import byte_level_backend

HOSTILE = (
    "<script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\">\n"
    "![a picture](http://evil.example/x.png) [a link](javascript:alert(1)) \u202egnirts\u202c</div></main>"
)
LINE = "x" * (1 << 20)
ABOUT = {
    "bundle": {
        "bundle": "smollm2", "base_model": "HuggingFaceTB/SmolLM2-135M", "architecture": "LlamaForCausalLM",
        "parameters": 134_515_008, "weights": "8da4w", "hash": "0123456789abcdef",
    },
    "models": {
        "base": {},
        "tuned": {
            "adapter": "first", "rank": 8, "alpha": 16, "estimator": "exact", "learning_rate": 0.003,
            "train": "rows.jsonl", "training_rows": 300, "steps_taken": 600, "seconds": 754.0,
            "best": "perplexity 22.4",
        },
    },
}  # fmt: skip


class ScriptedWorker:
    """Stands in for a worker: answers follow from the prompt."""

    alive = True
    context = 1 << 20

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def submit(self, requests: Sequence[tuple[Request, EventHandler]]) -> list[Ticket]:
        tickets = [Ticket(request, [], handler, handler) for request, handler in requests]
        for ticket in tickets:
            Thread(target=self._write, args=(ticket,), daemon=True).start()
        return tickets

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            ticket.cancelled = True

    def _write(self, ticket: Ticket) -> None:
        prompt = self._tokenizer.decode(ticket.request.prompt.tokens).removeprefix("<s>")
        users = re.findall(r"user\n(.*?)<\|im_end\|>", prompt, re.DOTALL)
        text = (users or [prompt])[-1].strip()
        adapter = "tuned" if ticket.request.adapter.values.any() else "base"
        chunks, turns, choice = [], max(1, len(users)), ticket.request.settings.sampling
        for chunk in _chunks(text, f"{adapter}, turn {turns}, temperature {choice.temperature}"):
            if ticket.cancelled:
                break
            chunks.append(chunk)
            ticket.send_text(chunk)
        reason = "cancelled" if ticket.cancelled else "stop"
        ticket.answer = Completion(
            "".join(chunks), tuple(range(len(chunks))), reason, 1, 1, 0, 0.1, len(chunks), 0.1
        )
        ticket.end()


def _chunks(prompt: str, model: str) -> Iterator[str]:
    if prompt == "hostile":
        yield HOSTILE
    elif prompt == "line":
        yield from (LINE[start : start + (1 << 14)] for start in range(0, len(LINE), 1 << 14))
    elif prompt == "burst":
        yield from ["word "] * 50
    else:
        text = f"This is {model}. You said: {prompt}" if prompt != "slow" else "word " * 500
        for word in re.findall(r"\S+\s*", text):
            time.sleep(0.05)
            yield word


class ScriptedLearning:
    """Stands in for a learner with two learned adapters, of which the newest is served."""

    current = 2
    storage = ThreadPoolExecutor(1)

    def pause(self, is_answering: bool) -> None:
        """Do nothing."""

    def history(self) -> list[dict[str, Any]]:
        held_out_losses = [{}, {"before": 3.214, "after": 2.087}, {"before": 2.087, "after": 1.912}]
        return [
            {
                "object": "adapter", "version": version, "feedback": 8 * bool(version),
                "current": version == self.current,
                "status": "start" if not version else "served" if version <= self.current else "taken back",
                **({"held_back": held_out_losses[version]} if version else {}),
            }
            for version in range(3)
        ]  # fmt: skip

    def revert(self, version: int) -> int:
        if not self.current:
            raise RequestError(409, "the initial adapter is served: there is no adapter to take back")
        self.current -= 1
        return self.current


if __name__ == "__main__":
    settings = {"port": 0, "key": None, "feedback": None, "runs": None, "learns": False, "chats": True}
    settings |= json.loads(sys.argv[1])
    template = TEMPLATE if settings["chats"] else None
    tokenizer = Tokenizer(byte_level_backend(), bos_id=1, eos_id=2, prepend_bos=True, chat_template=template)
    runs = Runs(Path(settings["runs"])) if settings["runs"] else None
    learning: Any = ScriptedLearning() if settings["learns"] else None
    worker: Any = ScriptedWorker(tokenizer)
    file = None
    if settings["feedback"]:
        file = FeedbackFile(Path(settings["feedback"]), make_examples(), ThreadPoolExecutor(1), LIMIT)
    feedback = Feedback(file)
    models = Models(adapters(), tokenizer)
    with listening("127.0.0.1", settings["port"]) as listener:
        access = Access((settings["key"],) if settings["key"] else ())
        app = make_app(models, worker, access, feedback, learning, runs, ABOUT)
        print(format_address(listener), flush=True)
        Server(app, worker, on_stopping=runs.close if runs else lambda: None).run([listener])
