"""What a hostile server can find out of a row, and what the device says that it costs.

    python scripts/bench/privacy.py --json privacy.json [--rounds 120] [--bundle BUNDLE]

The device's own code answers a server that knows all of its rows but one, the canary, and asks thousands of
times, with the canary and without: each trial is a device that has answered nothing before, and the server
says whether it has the canary. What that proves (auditing.py) stands beside what the device told. Each trick
is played against the device as it is, and with the one defence against it taken out, by this script:

    plain       asks once, and projects the answer on what the canary changes
    averaging   asks for a round again after another one was begun; without: the ledger has no such lines
    windows     the canary is a text of many windows; without: a window is a row
    divergence  sends a state at which the canary's derivatives overflow; without: steps may diverge
    floats      looks for answers that floating-point noise can't make; without: such noise

The engine, its programs and the tokenizer are those of a bundle of a tiny model. Only "without the canary" is
not a file: the engine's derivatives of its row are zeros, for that is what a neighbour is
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
from reports import parser_of, report
from timing import export

from device_runner.engines.opening import OpenEngine, open_engine
from device_runner.fleet import device, local
from device_runner.fleet.agreement import Agreement, Plan
from device_runner.fleet.common import first_state, pack_state
from device_runner.fleet.device import DeviceSettings, answer, make_device
from device_runner.fleet.local import Local, open_local
from device_runner.fleet.messages import Answer, Refusal, Task, parse_answer
from device_runner.fleet.privacy import reported
from device_runner.fleet.privacy.ledger import Ledger
from device_runner.fleet.privacy.reported import Reported
from prge.engine import Call, Directions, Engine, Float64Array, FloatArray, GradFn
from prge.errors import DivergenceError
from prge.files.adapter import Adapter
from prge.files.bundle import open_bundle
from prge.learning.estimators.protocol import Measurement, Step
from tests.tiny_models import save_model

SHAPE = ("--target-modules", "q_proj", "--adapt-layers", "top:1", "--rank", "1", "--sequence-length", "16")
OTHERS = ("bb dd aa", "cc aa", "dd dd bb")
CANARY, LONG_CANARY = "aa bb cc", " ".join(["aa bb cc dd"] * 30)
ASKED_AGAIN, DELTA = 100, 1e-5
# With so little clipping every example's part is as long as it may be.
PLAN: Mapping[str, Any] = {
    **{"rounds": 10_000, "examples": 4, "local_steps": 1, "queries": 4, "share_directions": True},
    **{"clip": 1e-4, "noise": 2.0, "delta": DELTA, "optimizer": "sgd", "learning_rate": 1.0},
}
KINDS: Mapping[str, Mapping[str, Any]] = {"scalars": {}, "changes": {"estimator": "exact"}}


class Hiding:
    """Implements Engine by another one: derivatives of some token sequences are zeros."""

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
        """See prge.engine.Engine; a call has one sequence where examples are clipped."""
        outputs, gradient = self._inner.vjp(call, grad_fn)
        return outputs, np.zeros_like(gradient) if self._is_hidden(call).any() else gradient

    def _is_hidden(self, call: Call) -> NDArray[np.bool_]:
        return np.array([sequence.tokens in self._hidden for sequence in call.sequences])


class Server:
    """Asks one device, which has forgotten all at every trial, and knows everything but the noise."""

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
        self.has_canary, self.is_silent = True, False
        self._found: dict[str, Any] = {}

    def ask(self, number: int = 0, seconds: float = 600.0) -> Answer | Refusal:
        """What the device says to a round."""
        plan, agreement = self.agreement.plan, self.agreement
        first = number * (plan.local_steps if plan.by_scalars else 1)
        state = self._zeros(first) if first else self.state
        task = Task(agreement.sha256, number, first, seconds, agreement.content, state=state)
        with ExitStack() as patches:
            patches.enter_context(patch.object(device, "open_local", self._opened))
            for place, name in _READ_ONCE:
                patches.enter_context(patch.object(place, name, self._once(getattr(place, name))))
            said = parse_answer(answer(self.folder, task.to_bytes()))
        assert isinstance(said, Answer | Refusal), said
        return said

    def forget(self) -> None:
        """Make the device one that has answered nothing before."""
        (self.folder / device.LEDGER).unlink(missing_ok=True)
        shutil.rmtree(self.folder / device.FLEETS, ignore_errors=True)

    def known(self, has_canary: bool) -> Float64Array:
        """What the device would say to round 0 without noise: the server can compute this itself."""
        self.has_canary, self.is_silent = has_canary, True
        self.forget()
        said = self.ask()
        self.is_silent = False
        assert isinstance(said, Answer), said
        return said.values.astype(np.float64)

    def _zeros(self, step: int) -> bytes:
        state = first_state(self.agreement.plan, Adapter.zeros(self.modules))
        state.progress.step = step
        return pack_state(state)

    def _opened(self, *arguments: Any) -> tuple[Local, OpenEngine]:
        with patch.object(local, "open_engine", self._once(open_engine)):
            made, opened = open_local(*arguments)
        canary = {sequence.tokens for each in made.examples if each.row == 1 for sequence in each.sequences}
        engine: Engine = made.engine if self.has_canary else Hiding(made.engine, canary)
        if self.is_silent:
            made = replace(made, draw=_silence)
        return replace(made, engine=engine), opened

    def _once(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def kept(*arguments: Any, **named: Any) -> Any:
            key = f"{call.__qualname__} {arguments[0] if isinstance(arguments[0], type) else ''}"
            if key not in self._found:
                self._found[key] = call(*arguments, **named)
            return self._found[key]

        return kept


def _silence(count: int) -> Any:
    return np.zeros(count, np.int64)


# What says the same at every trial of a server: files, and the engine with its programs.
_READ_ONCE = (
    (device, "open_bundle"),
    (device, "read_settings"),
    (local, "read_inputs"),
    (Agreement, "parse"),
)


# What the server makes of a device that it may ask: more than 0.5 where it says that the canary is there.


def projected(server: Server) -> Callable[[], tuple[float, float]]:
    """One answer along what the canary changes; the score and what the device told."""
    return _projecting(server, lambda: [server.ask()])


def averaged(server: Server) -> Callable[[], tuple[float, float]]:
    """The mean of all that round 0 is answered with, where a round is begun between two times."""

    def ask() -> list[Answer | Refusal]:
        said = []
        for _ in range(ASKED_AGAIN):
            said.append(server.ask())
            if isinstance(said[-1], Refusal):
                break
            server.ask(1, seconds=1e-9)
        return said

    return _projecting(server, ask)


def _projecting(
    server: Server, ask: Callable[[], list[Answer | Refusal]]
) -> Callable[[], tuple[float, float]]:
    without = server.known(has_canary=False)
    change = server.known(has_canary=True) - without

    def score() -> tuple[float, float]:
        answers = {said.values.tobytes(): said for said in ask() if isinstance(said, Answer)}
        mean = np.mean([said.values for said in answers.values()], 0) - without
        told = max(said.privacy_epsilon for said in answers.values())
        return float(mean @ change / (change @ change)), told

    return score


def refused(server: Server) -> Callable[[], tuple[float, float]]:
    """Whether the device refuses at a state where the canary alone has derivatives that aren't finite."""
    random = np.random.default_rng(0)
    state = first_state(server.agreement.plan, Adapter.zeros(server.modules))
    with patch.object(reported, "whole_sum", diverging):
        # Near the largest number of float32, where rows differ in what overflows.
        for exponent in random.uniform(118, 127, 500):
            signs = random.choice([-1, 1], state.adapter.size)
            state.adapter.values[:] = signs * 2**exponent
            server.state = pack_state(state)
            said = []
            for server.has_canary in (True, False):
                server.forget()
                said.append(isinstance(server.ask(), Refusal))
            if said == [True, False]:
                break
        else:
            raise SystemExit("no state was found at which the canary alone overflows")

    def score() -> tuple[float, float]:
        said = server.ask()
        return (1.0, 0.0) if isinstance(said, Refusal) else (0.0, said.privacy_epsilon)

    return score


def impossible(server: Server) -> Callable[[], tuple[float, float]]:
    """How many numbers of an answer floating-point noise can't make of what there is without the canary."""
    plan = server.agreement.plan
    deviation = np.float32(plan.noise * reported.reach(plan))
    without = server.known(has_canary=False).astype(np.float32)

    def score() -> tuple[float, float]:
        said = server.ask()
        assert isinstance(said, Answer)
        near = ((said.values.astype(np.float64) - without) / deviation).astype(np.float32)
        made = np.zeros(len(near), bool)
        for side in (-np.inf, np.inf):
            drawn = near.copy()
            for _ in range(4):
                made |= without + deviation * drawn == said.values
                drawn = np.nextafter(drawn, np.float32(side))
        return float((~made).sum()), said.privacy_epsilon

    return score


# The device without one of its defences.


def diverging(parts: Float64Array, norm: float, unit: float) -> Any:
    """What isn't finite ends the round."""
    if not np.isfinite(parts).all():
        raise DivergenceError("a part isn't finite")
    return _whole_sum(parts, norm, unit)


_whole_sum = reported.whole_sum


def floating(self: Reported, engine: Engine, step: Step) -> Measurement:
    """Normals in float32, added to values in float32."""
    plan = self._plan
    measured = self._inner.measure(engine, step)
    values: FloatArray = (
        measured.scalars.mean(1, keepdims=True) if measured.gradient is None else measured.gradient
    ).astype(np.float32)
    deviation = np.float32(plan.noise * reported.reach(plan))
    if self._draw is not _silence:
        drawn = np.random.default_rng().standard_normal(values.shape, np.float32)
        values = values + deviation * drawn
    if measured.gradient is not None:
        return replace(measured, loss=0.0, gradient=values)
    return replace(measured, loss=0.0, scalars=values.astype(np.float64))


@dataclass(frozen=True)
class Trick:
    """How a server plays: its score, what stands for a defence, its plan beside PLAN by kind, its trials."""

    score: Callable[[Server], Callable[[], tuple[float, float]]]
    without: Sequence[tuple[object, str, Callable[..., Any]]] = ()
    plan: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: KINDS)
    canary: str = CANARY
    share: float = 1.0


_FORGETFUL = [(Ledger, name, lambda *_: None) for name in ("line", "begin")]
_BY_WINDOW = [(place, "by_row", lambda examples: [[each] for each in examples]) for place in (local, device)]
TRICKS = {
    "plain": Trick(projected),
    "averaging": Trick(
        averaged, _FORGETFUL, {kind: {**plan, "noise": 3.0} for kind, plan in KINDS.items()}, share=1 / 3
    ),
    # All windows in one step.
    "windows": Trick(
        projected, _BY_WINDOW, {kind: {**plan, "examples": 64} for kind, plan in KINDS.items()}, LONG_CANARY
    ),
    "divergence": Trick(refused, [(reported, "whole_sum", diverging)]),
    "floats": Trick(
        impossible,
        [(Reported, "_with_noise", floating)],
        {
            # Steps that change nothing: the server knows what each begins with.
            "scalars": {"queries": 1, "local_steps": 16, "noise": 16.0, "learning_rate": 1e-30},
            "changes": {"estimator": "exact", "noise": 8.0},
        },
    ),
}


def played(trick: Trick, kind: str, without: bool, folder: Path, bundle: Path, rounds: int) -> dict[str, Any]:
    """The trials of one trick with the canary and as many without, and what they prove."""
    with ExitStack() as defences:
        for place, name, instead in trick.without if without else ():
            defences.enter_context(patch.object(place, name, instead))
        server = Server(folder, bundle, trick.canary, Plan(**{**PLAN, **trick.plan[kind]}))
        score = trick.score(server)
        seen, told = {True: 0, False: 0}, 0.0
        for number in range(2 * rounds):
            server.has_canary = number % 2 == 0
            server.forget()
            found, epsilon = score()
            seen[server.has_canary] += found > 0.5
            told = max(told, epsilon)
    proven = audit(seen[True], seen[False], rounds, DELTA)
    return {
        "told_epsilon": told,
        "audited_epsilon": proven.epsilon,
        "audited_as_gaussian": proven.gaussian,
        "seen": {"with_canary": seen[True], "without": seen[False], "of": rounds},
    }


def main() -> int:
    """Read the flags, play every trick, print JSON; 1 if a figure is not as it must be."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=120, help="trials with the canary, and as many without")
    parser.add_argument("--bundle", type=Path, help="of a tiny decoder, with the roles tangent and back")
    parser.add_argument("--tricks", nargs="+", choices=TRICKS, default=list(TRICKS))
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    problems = []
    with tempfile.TemporaryDirectory() as name:
        folder, bundle = Path(name), arguments.bundle
        if bundle is None:
            bundle = folder / "bundle"
            save_model(folder / "model", "llama")
            export(folder / "model", bundle, *SHAPE, "--roles", "tangent", "back")
        for trick in arguments.tricks:
            for kind in KINDS:
                arms = (False, True) if TRICKS[trick].without else (False,)
                for without in arms:
                    arm = "without_its_defence" if without else "as_it_is"
                    rounds = max(8, round(TRICKS[trick].share * arguments.rounds))
                    line = played(TRICKS[trick], kind, without, folder, bundle, rounds)
                    found.setdefault(trick, {}).setdefault(kind, {})[arm] = line
                    print(f"{trick}, {kind}, {arm}: {line}", file=sys.stderr, flush=True)
                    if without == (line["audited_epsilon"] <= line["told_epsilon"]):
                        problems.append(f"{trick}, {kind}, {arm}")
    report({"audits": found, "problems": problems}, arguments)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
