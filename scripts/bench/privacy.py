"""Audit how much a hostile server learns about a row, and compare with the device's reported epsilon.

    python scripts/bench/privacy.py --json privacy.json [--rounds 120] [--bundle BUNDLE]

The device's own code replies to a server that knows all of its rows but one, the canary, and asks thousands
of times, with the canary and without. Each trial starts with a device without history, and the server says
whether the device has the canary. The proven bound (auditing.py) is printed next to the reported epsilon.
Each trick is played against the real device, and against one whose defence is removed by this script:

    plain       asks once, and projects the result on the canary's effect
    averaging   asks for a round again after another one began; without the ledger's records of this
    windows     the canary is a text of many windows; without treating its windows as one row
    divergence  sends a state at which the canary's derivatives overflow; without continuing on divergence
    floats      looks for results that floating-point noise can't produce; without discrete noise

The engine, its programs and the tokenizer belong to a bundle of a tiny model. Only "without the canary" isn't
a file: the engine returns zero derivatives for its row, which is the definition of a neighbour
(docs/explanation/privacy.md).
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from auditing import audit
from numpy.typing import NDArray
from reports import make_parser, report
from timing import export

from device_runner.engines.opening import OpenEngine, open_engine
from device_runner.fleet import device
from device_runner.fleet import local_round as local
from device_runner.fleet.agreement import Agreement, Plan
from device_runner.fleet.device import DeviceSettings, answer, make_device
from device_runner.fleet.local_round import LocalTrainer, open_local
from device_runner.fleet.messages import RoundResult, RoundTask, TaskRefusal, parse_reply
from device_runner.fleet.privacy import reported
from device_runner.fleet.privacy.ledger import Ledger
from device_runner.fleet.privacy.reported import ReportingEstimator
from device_runner.fleet.state import initial_state, pack_state
from prge.engine import Call, Directions, Engine, Float64Array, FloatArray, GradFn
from prge.errors import DivergenceError
from prge.formats.adapter import Adapter
from prge.formats.bundle import open_bundle
from prge.training.estimators.protocol import Measurement, Step
from tests.tiny_models import save_model

SHAPE = ("--target-modules", "q_proj", "--adapt-layers", "top:1", "--rank", "1", "--sequence-length", "16")
OTHERS = ("bb dd aa", "cc aa", "dd dd bb")
CANARY, LONG_CANARY = "aa bb cc", " ".join(["aa bb cc dd"] * 30)
REPEATS, DELTA = 100, 1e-5
# With such a small clip bound, every example's part is clipped to it.
PLAN: Mapping[str, Any] = {
    **{"rounds": 10_000, "examples": 4, "local_steps": 1, "queries": 4, "share_directions": True},
    **{"max_grad_norm": 1e-4, "noise": 2.0, "delta": DELTA, "optimizer": "sgd", "learning_rate": 1.0},
}
RESULT_TYPES: Mapping[str, Mapping[str, Any]] = {"scalars": {}, "changes": {"estimator": "exact"}}


class HidingEngine:
    """Implements Engine by another one; derivatives of some token sequences are zeros."""

    def __init__(self, inner: Engine, hidden: set[tuple[int, ...]]) -> None:
        self._inner = inner
        self.model, self.forward = inner.model, inner.forward
        self._hidden = hidden

    @property
    def seconds(self) -> float:
        """See prge.engine.Engine."""
        return self._inner.seconds

    def jvp(self, call: Call, directions: Directions) -> tuple[FloatArray, FloatArray]:
        """See prge.engine.Engine."""
        outputs, derivatives = self._inner.jvp(call, directions)
        counts = [len(sequence.targets) for sequence in call.sequences]
        derivatives[:, np.repeat(self._is_hidden(call), counts)] = 0
        return outputs, derivatives

    def vjp(self, call: Call, grad_fn: GradFn) -> tuple[FloatArray, FloatArray]:
        """See prge.engine.Engine; a call has one sequence if examples are clipped."""
        outputs, gradient = self._inner.vjp(call, grad_fn)
        return outputs, np.zeros_like(gradient) if self._is_hidden(call).any() else gradient

    def _is_hidden(self, call: Call) -> NDArray[np.bool_]:
        return np.array([sequence.tokens in self._hidden for sequence in call.sequences])


class Server:
    """A server that asks one device without history at every trial, and knows everything but the noise."""

    def __init__(self, folder: Path, bundle: Path, canary: str, plan: Plan) -> None:
        self.folder = folder / "device"
        shutil.rmtree(self.folder, ignore_errors=True)
        rows, policy = folder / "rows.jsonl", folder / "policy.yaml"
        rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in (canary, *OTHERS)))
        policy.write_text("estimators: [tangent, exact]\nmost_examples: 1000\n")
        make_device(self.folder, DeviceSettings(bundle, rows, policy=policy))
        opened = open_bundle(bundle)
        self.agreement, self.modules = Agreement("audit", plan, opened.sha256), opened.chain.modules
        self.state = self._zeros(0)
        self.has_canary, self.is_noiseless = True, False
        self._cache: dict[str, Any] = {}

    def ask(self, number: int = 0, seconds: float = 600.0) -> RoundResult | TaskRefusal:
        """Return the device's reply to a round."""
        plan, agreement = self.agreement.plan, self.agreement
        first = number * (plan.local_steps if plan.sends_projected_gradients else 1)
        state = self._zeros(first) if first else self.state
        task = RoundTask(agreement.sha256, number, first, seconds, agreement.content, state=state)
        with ExitStack() as patches:
            patches.enter_context(patch.object(device, "open_local", self._opened))
            for owner, name in _CACHED_FUNCTIONS:
                patches.enter_context(patch.object(owner, name, self._once(getattr(owner, name))))
            reply = parse_reply(answer(self.folder, task.to_bytes()))
        assert isinstance(reply, RoundResult | TaskRefusal), reply
        return reply

    def reset(self) -> None:
        """Delete the device's history."""
        (self.folder / device.LEDGER).unlink(missing_ok=True)
        shutil.rmtree(self.folder / device.FLEETS, ignore_errors=True)

    def noiseless_values(self, has_canary: bool) -> Float64Array:
        """Return the device's reply to round 0 without noise, which the server can compute itself."""
        self.has_canary, self.is_noiseless = has_canary, True
        self.reset()
        reply = self.ask()
        self.is_noiseless = False
        assert isinstance(reply, RoundResult), reply
        return reply.values.astype(np.float64)

    def _zeros(self, step: int) -> bytes:
        state = initial_state(self.agreement.plan, Adapter.zeros(self.modules))
        state.progress.step = step
        return pack_state(state)

    def _opened(self, *arguments: Any) -> tuple[LocalTrainer, OpenEngine]:
        with patch.object(local, "open_engine", self._once(open_engine)):
            trainer, opened = open_local(*arguments)
        canary = {
            sequence.tokens for each in trainer.examples if each.row == 1 for sequence in each.sequences
        }
        engine: Engine = trainer.engine if self.has_canary else HidingEngine(trainer.engine, canary)
        if self.is_noiseless:
            trainer = replace(trainer, draw=_no_noise)
        return replace(trainer, engine=engine), opened

    def _once(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def cached(*arguments: Any, **keywords: Any) -> Any:
            key = f"{call.__qualname__} {arguments[0] if isinstance(arguments[0], type) else ''}"
            if key not in self._cache:
                self._cache[key] = call(*arguments, **keywords)
            return self._cache[key]

        return cached


def _no_noise(count: int) -> Any:
    return np.zeros(count, np.int64)


# Functions with the same result in every trial of a server: files, and the engine with its programs.
_CACHED_FUNCTIONS = (
    (device, "open_bundle"),
    (device, "read_settings"),
    (local, "read_inputs"),
    (Agreement, "parse"),
)


# Scores of a device: above 0.5 the server says that the canary is there.


def project(server: Server) -> Callable[[], tuple[float, float]]:
    """Project one result on the canary's effect; return a function of the score and the reported epsilon."""
    return _make_projection(server, lambda: [server.ask()])


def average(server: Server) -> Callable[[], tuple[float, float]]:
    """Average all results of round 0; another round begins between two of them."""

    def ask() -> list[RoundResult | TaskRefusal]:
        replies = []
        for _ in range(REPEATS):
            replies.append(server.ask())
            if isinstance(replies[-1], TaskRefusal):
                break
            server.ask(1, seconds=1e-9)
        return replies

    return _make_projection(server, ask)


def _make_projection(
    server: Server, ask: Callable[[], list[RoundResult | TaskRefusal]]
) -> Callable[[], tuple[float, float]]:
    without = server.noiseless_values(has_canary=False)
    change = server.noiseless_values(has_canary=True) - without

    def score() -> tuple[float, float]:
        answers = {reply.values.tobytes(): reply for reply in ask() if isinstance(reply, RoundResult)}
        mean = np.mean([reply.values for reply in answers.values()], 0) - without
        reported_epsilon = max(reply.privacy_epsilon for reply in answers.values())
        return float(mean @ change / (change @ change)), reported_epsilon

    return score


def check_refusal(server: Server) -> Callable[[], tuple[float, float]]:
    """Check whether the device refuses a state at which only the canary's derivatives overflow."""
    random = np.random.default_rng(0)
    state = initial_state(server.agreement.plan, Adapter.zeros(server.modules))
    with patch.object(reported, "whole_sum", raise_divergence):
        # Near the largest float32, where rows differ in what overflows.
        for exponent in random.uniform(118, 127, 500):
            signs = random.choice([-1, 1], state.adapter.size)
            state.adapter.values[:] = signs * 2**exponent
            server.state = pack_state(state)
            refusals = []
            for server.has_canary in (True, False):
                server.reset()
                refusals.append(isinstance(server.ask(), TaskRefusal))
            if refusals == [True, False]:
                break
        else:
            raise SystemExit("no state was found at which the canary alone overflows")

    def score() -> tuple[float, float]:
        reply = server.ask()
        return (1.0, 0.0) if isinstance(reply, TaskRefusal) else (0.0, reply.privacy_epsilon)

    return score


def count_impossible(server: Server) -> Callable[[], tuple[float, float]]:
    """Count values of a result that floating-point noise can't produce without the canary."""
    plan = server.agreement.plan
    deviation = np.float32(plan.noise * reported.sensitivity(plan))
    without = server.noiseless_values(has_canary=False).astype(np.float32)

    def score() -> tuple[float, float]:
        reply = server.ask()
        assert isinstance(reply, RoundResult)
        noise_values = ((reply.values.astype(np.float64) - without) / deviation).astype(np.float32)
        is_possible = np.zeros(len(noise_values), bool)
        for side in (-np.inf, np.inf):
            noise = noise_values.copy()
            for _ in range(4):
                is_possible |= without + deviation * noise == reply.values
                noise = np.nextafter(noise, np.float32(side))
        return float((~is_possible).sum()), reply.privacy_epsilon

    return score


# Replacements that remove a defence of the device.


def raise_divergence(parts: Float64Array, norm: float, unit: float) -> Any:
    """End the round if a part isn't finite."""
    if not np.isfinite(parts).all():
        raise DivergenceError("a part isn't finite")
    return _whole_sum(parts, norm, unit)


_whole_sum = reported.whole_sum


def add_float_noise(self: ReportingEstimator, engine: Engine, step: Step) -> Measurement:
    """Add float32 normals to float32 values."""
    plan = self._plan
    measured = self._inner.measure(engine, step)
    values: FloatArray = (
        measured.projected_gradients.mean(1, keepdims=True)
        if measured.gradient is None
        else measured.gradient
    ).astype(np.float32)
    deviation = np.float32(plan.noise * reported.sensitivity(plan))
    if self._draw is not _no_noise:
        noise = np.random.default_rng().standard_normal(values.shape, np.float32)
        values = values + deviation * noise
    if measured.gradient is not None:
        return replace(measured, loss=0.0, gradient=values)
    return replace(measured, loss=0.0, projected_gradients=values.astype(np.float64))


@dataclass(frozen=True)
class Trick:
    """A trick: its score, the replacement of a defence, changes of PLAN by type, and its share of trials."""

    score: Callable[[Server], Callable[[], tuple[float, float]]]
    without: Sequence[tuple[object, str, Callable[..., Any]]] = ()
    plan: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: RESULT_TYPES)
    canary: str = CANARY
    share: float = 1.0


_WITHOUT_LEDGER = [(Ledger, name, lambda *_: None) for name in ("line", "begin")]
_BY_WINDOW = [(owner, "by_row", lambda examples: [[each] for each in examples]) for owner in (local, device)]
TRICKS = {
    "plain": Trick(project),
    "averaging": Trick(
        average,
        _WITHOUT_LEDGER,
        {result_type: {**plan, "noise": 3.0} for result_type, plan in RESULT_TYPES.items()},
        share=1 / 3,
    ),
    # All windows are in one step.
    "windows": Trick(
        project,
        _BY_WINDOW,
        {result_type: {**plan, "examples": 64} for result_type, plan in RESULT_TYPES.items()},
        LONG_CANARY,
    ),
    "divergence": Trick(check_refusal, [(reported, "whole_sum", raise_divergence)]),
    "floats": Trick(
        count_impossible,
        [(ReportingEstimator, "_with_noise", add_float_noise)],
        {
            # The steps change nothing, so the server knows the state of each.
            "scalars": {"queries": 1, "local_steps": 16, "noise": 16.0, "learning_rate": 1e-30},
            "changes": {"estimator": "exact", "noise": 8.0},
        },
    ),
}


def run_trick(
    trick: Trick, result_type: str, without: bool, folder: Path, bundle: Path, rounds: int
) -> dict[str, Any]:
    """Run the trials of one trick with the canary and as many without; return what they prove."""
    with ExitStack() as defences:
        for owner, name, replacement in trick.without if without else ():
            defences.enter_context(patch.object(owner, name, replacement))
        server = Server(folder, bundle, trick.canary, Plan(**{**PLAN, **trick.plan[result_type]}))
        score = trick.score(server)
        hits, reported_epsilon = {True: 0, False: 0}, 0.0
        for number in range(2 * rounds):
            server.has_canary = number % 2 == 0
            server.reset()
            score_value, epsilon = score()
            hits[server.has_canary] += score_value > 0.5
            reported_epsilon = max(reported_epsilon, epsilon)
    proven = audit(hits[True], hits[False], rounds, DELTA)
    return {
        "told_epsilon": reported_epsilon,
        "audited_epsilon": proven.epsilon,
        "audited_as_gaussian": proven.gaussian,
        "seen": {"with_canary": hits[True], "without": hits[False], "of": rounds},
    }


def main() -> int:
    """Parse the flags, run every trick and print JSON; return 1 if a figure is wrong."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=120, help="trials with the canary, and as many without")
    parser.add_argument("--bundle", type=Path, help="of a tiny decoder, with the roles jvp and backward")
    parser.add_argument("--tricks", nargs="+", choices=TRICKS, default=list(TRICKS))
    arguments = parser.parse_args()
    audits: dict[str, Any] = {}
    problems = []
    with tempfile.TemporaryDirectory() as name:
        folder, bundle = Path(name), arguments.bundle
        if bundle is None:
            bundle = folder / "bundle"
            save_model(folder / "model", "llama")
            export(folder / "model", bundle, *SHAPE, "--roles", "jvp", "backward")
        for trick in arguments.tricks:
            for result_type in RESULT_TYPES:
                variants = (False, True) if TRICKS[trick].without else (False,)
                for without in variants:
                    variant = "without_its_defence" if without else "as_it_is"
                    rounds = max(8, round(TRICKS[trick].share * arguments.rounds))
                    figures = run_trick(TRICKS[trick], result_type, without, folder, bundle, rounds)
                    audits.setdefault(trick, {}).setdefault(result_type, {})[variant] = figures
                    print(f"{trick}, {result_type}, {variant}: {figures}", file=sys.stderr, flush=True)
                    if without == (figures["audited_epsilon"] <= figures["told_epsilon"]):
                        problems.append(f"{trick}, {result_type}, {variant}")
    report({"audits": audits, "problems": problems}, arguments)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
