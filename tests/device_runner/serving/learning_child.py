"""A server that learns from feedback with a small numpy model: `learning_child.py BUNDLE FOLDER EVERY`.

It prints what its event loop does to files of the folder, or to locks.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from device_runner.serving.access import Access
from device_runner.serving.app import make_app
from device_runner.serving.feedback import Feedback, FeedbackFile
from device_runner.serving.history import FEEDBACK
from device_runner.serving.learning import OnlineLearner, plan_rounds
from device_runner.serving.models import Models
from device_runner.serving.round_process import RoundProcess
from device_runner.serving.settings import LearnFlags
from device_runner.serving.uvicorn_server import Server, format_address, listening
from device_runner.serving.worker import Worker
from device_runner.session.settings import EngineFlags
from prge.data.tokenization.tokenizer import load_bundle_tokenizer
from prge.formats.adapter import Adapter
from prge.formats.bundle import open_bundle
from prge.generation.loop import Generator
from tests.device_runner.serving.child import SlowGenerationEngine
from tests.numpy_generation_engine import make_adapter


class NumpyRound(RoundProcess):
    """A process that runs a round with a numpy model."""

    words = (str(Path(__file__).with_name("round_child.py")),)


def print_line(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    folder, learn, every = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    learn.mkdir(exist_ok=True)
    bundle = open_bundle(folder)
    flags = LearnFlags(learn=learn, learn_every=every, learning_rate=0.05, learn_epochs=3)
    tokenizer, storage = load_bundle_tokenizer(bundle), ThreadPoolExecutor(1)
    learning = OnlineLearner(
        flags,
        *plan_rounds(flags, EngineFlags(), None, bundle, tokenizer),
        bundle,
        Adapter.zeros(bundle.chain.modules),
        tokenizer,
        serve=lambda adapter: None,
        log=print_line,
        begin=NumpyRound,
        storage=storage,
    )
    models = Models({"base": make_adapter()}, load_bundle_tokenizer(bundle))
    generator = Generator(SlowGenerationEngine(0.0), load_bundle_tokenizer(bundle))
    with listening("127.0.0.1", 0) as listener, Worker(generator, 8, learning.pause) as worker:
        file = FeedbackFile(learn / FEEDBACK, learning.examples, storage, 1 << 30)
        feedback = Feedback(file, print_line, learning.wake)
        app = make_app(models, worker, Access(), feedback, learning)

        def watch(event: str, arguments: tuple[object, ...]) -> None:
            is_file = event == "open" and str(arguments[0]).startswith(str(learn))
            if threading.current_thread() is threading.main_thread() and (is_file or event == "fcntl.flock"):
                print_line(f"in the event loop: {event} {arguments}")

        sys.addaudithook(watch)
        print_line(format_address(listener))
        Server(app, worker, on_stopping=feedback.close, on_each_tick=learning.tick).run([listener])
    storage.shutdown(cancel_futures=True)
    learning.close()
