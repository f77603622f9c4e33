"""A hostile server against a device: garbage, repeated and reordered rounds, false states and plans.

One process is a device that handles many tasks by the code of `prge fleet join`. Its reply must be a message;
for each record of its ledger there is at most one reply, and none to a task that no honest server sends. The
process must not end by an error or a signal, and must stay within bounds of time and memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import safetensors.numpy
from child import Child, Limits
from outcome import Case, Findings, Verdict, judge
from workshop import Bench, Workshop

from device_runner.fleet.agreement import Agreement, Plan, task_sha256
from device_runner.fleet.device import LEDGER, DeviceSettings, answer, make_device
from device_runner.fleet.messages import RoundResult, RoundSteps, RoundTask, parse_reply
from device_runner.fleet.privacy.ledger import BEGUN
from device_runner.fleet.state import initial_state, pack_state
from prge.data.forms.task import load_task
from prge.formats.adapter import Adapter
from prge.formats.bundle import open_bundle
from prge.formats.journal import Journal

TASKS, EVICTIONS = 40, "evictions"
MAX_SECONDS = 20.0
LIMITS = Limits(seconds=300, processor_seconds=600, memory=None)
# Memory of the process beyond its parent's: engine, rows and messages.
MAX_MEMORY = 250 << 20
PLANS: Sequence[dict[str, Any]] = (
    {},
    {"share_directions": True, "max_grad_norm": 1.0, "noise": 2.0},
    {"share_directions": True, "max_grad_norm": 1.0, "noise": 2.0, "unit": "owner"},
    {"estimator": "antithetic", "examples": 1, "max_grad_norm": 0.1, "noise": 1.0},
    {"estimator": "exact", "optimizer": "sgd"},
    {"estimator": "exact", "max_grad_norm": 1e-3, "noise": 8.0},
)


# Changed values by name.
Changes = dict[str, Any] | None


@dataclass
class Server:
    """State of a hostile server: its plan, the fleet's progress, and the device's replies."""

    random: Random
    folder: Path
    bundle: Any
    task: str
    agreement: Agreement = field(init=False)
    number: int = 0
    replies: dict[tuple[bytes, int], set[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.new_fleet()

    def new_fleet(self) -> None:
        """Start another fleet."""
        plan = Plan(rounds=1000, local_steps=2, **self.random.choice(PLANS))
        self.agreement = Agreement(str(self.random.random()), plan, self.bundle.sha256, self.task)
        self.number = 0

    def make_task(self, number: int | None = None, **changes: Any) -> RoundTask:
        """Return a round's task with some fields changed."""
        number, plan = self.number if number is None else number, self.agreement.plan
        first = number * (plan.local_steps if plan.sends_projected_gradients else 1)
        task = RoundTask(self.agreement.sha256, number, first, 60.0, self.agreement.content)
        return replace(task, **{"state": self.state(first), **changes})

    def state(self, step: int, arrays: Changes = None, progress: Changes = None) -> bytes:
        """Return a common state with changed arrays (none if they are {}) and progress."""
        state = initial_state(self.agreement.plan, Adapter.zeros(self.bundle.chain.modules))
        state.progress.step = step
        packed = pack_state(state)
        if arrays is None and progress is None:
            return packed
        stored = safetensors.numpy.load(zlib.decompress(packed)) if arrays != {} else {}
        progress_json = json.dumps({**asdict(state.progress), **(progress or {})})
        return zlib.compress(
            safetensors.numpy.save({**stored, **(arrays or {})}, {"progress": progress_json}), 1
        )

    def steps(self, first: int, **changes: Any) -> RoundSteps:
        """Return the steps of a round that the device missed."""
        plan = self.agreement.plan
        zeros = np.zeros(plan.local_steps, np.float32)
        projected_gradients = np.zeros((plan.local_steps, int(np.prod(plan.shape))), np.float32)
        return replace(RoundSteps(first, zeros, zeros, projected_gradients), **changes)


@dataclass(frozen=True)
class Lie:
    """A message of a server, whether a device may reply to it, and its weight in the random choice."""

    make: Callable[[Server], RoundTask | bytes]
    may_reply: Callable[[Server], bool] = lambda _: False
    often: int = 1


def _torn(server: Server) -> bytes:
    content = server.make_task().to_bytes()
    whole = server.random.random() < 0.2
    return content + b"!" if whole else content[: server.random.randrange(len(content))]


def _flipped(server: Server) -> bytes:
    content = bytearray(server.make_task(seconds=1.0).to_bytes())
    for _ in range(server.random.randint(1, 4)):
        content[server.random.randrange(min(len(content), 600))] ^= 1 << server.random.randrange(8)
    return bytes(content)


def _four_bytes(server: Server, form: str, offsets: Sequence[int], values: Sequence[float]) -> bytes:
    """Return a task whose head has a wrong or impossible number."""
    content, at = server.make_task().to_bytes(), server.random.choice(offsets)
    return content[:at] + struct.pack(form, server.random.choice(values)) + content[at + 4 :]


def _earlier(server: Server, least: int, most: int) -> RoundTask:
    return server.make_task(max(0, server.number - server.random.randint(least, most)))


def _later(server: Server, least: int, most: int, **changes: Any) -> RoundTask:
    server.number += server.random.randint(least, most)
    return server.make_task(**changes)


def _no_round(server: Server) -> RoundTask:
    step = server.make_task().step + server.random.choice((1, 7, 2**31))
    lies: Sequence[dict[str, Any]] = ({"step": step}, {"number": 1000}, {"number": 2**32 - 1})
    return replace(server.make_task(), **server.random.choice(lies))


def _state(server: Server) -> RoundTask:
    """Return a task with a state that the device must refuse."""
    size, step = Adapter.zeros(server.bundle.chain.modules).size, server.make_task().step
    arrays: list[dict[str, Any]] = [
        *({"adapter": np.full(size, number, np.float32)} for number in (np.nan, -np.inf)),
        {"adapter": np.zeros(size + 1, np.float32)},
        {"adapter": np.zeros(size, np.float64)},
        {"adapter": np.zeros((size, 1), np.float32)},
        {"adapter": np.zeros(50_000_000, np.int8)},
        *({"head": np.zeros(shape, np.float32)} for shape in ((10_000, 65), (2, 1))),
        {"x" * 70_000: np.zeros(1, np.float32)},
        {},
    ]
    progress: list[dict[str, Any]] = [
        *({"step": number} for number in (-1, step + 10**6, 1.5, "0", True)),
        *({"smoothed_loss": [1]}, {"first_loss": "much"}),
    ]
    number = server.random.randrange(len(arrays) + len(progress))
    if number < len(progress):
        content = server.state(step, progress=progress[number])
    else:
        content = server.state(step, arrays=arrays[number - len(progress)])
    if server.random.random() < 0.2:
        content = content[:-9]
    return server.make_task(state=content)


def _far(server: Server) -> RoundTask:
    """Return a task with a valid state that makes everything overflow."""
    server.number += 1
    size = Adapter.zeros(server.bundle.chain.modules).size
    values = np.full(size, server.random.choice((1e9, 1e20, 3e38)), np.float32)
    state = server.state(server.make_task().step, {"adapter": values})
    return server.make_task(state=state)


def _missed(server: Server) -> RoundTask:
    server.number = max(server.number, 1)
    good = server.steps(0)
    wide = np.zeros((len(good.projected_gradients), good.projected_gradients.shape[1] + 1), np.float32)
    none = np.zeros(0, np.float32)
    wrong = server.random.choice(
        [
            replace(good, projected_gradients=wide),
            replace(good, projected_gradients=np.full_like(good.projected_gradients, np.nan)),
            replace(
                good,
                rates=np.full_like(good.rates, np.inf),
                projected_gradients=np.ones_like(good.projected_gradients),
            ),
            replace(good, rates=none, losses=none, projected_gradients=good.projected_gradients[:0]),
            replace(good, first=1),
        ]
    )
    missed = wrong.to_bytes()
    missed = server.random.choice([missed, missed, missed[:-1], missed + b"\0"])
    return replace(server.make_task(), state=server.state(0), missed=missed)


def _plan(server: Server) -> RoundTask:
    """Return a task with an invalid or excessive agreement."""
    content_fields = json.loads(server.agreement.content)
    lies: list[dict[str, Any]] = [
        *({"noise": noise, "max_grad_norm": 1.0} for noise in (1e-200, 1e300, "2", None)),
        *({"noise": 1.0, "max_grad_norm": max_grad_norm} for max_grad_norm in (0.0, 1e-300, 1e30, -1.0)),
        *({"local_steps": count} for count in (0, 10**7, 2**70, "9")),
        *({"noise": 1.0, "max_grad_norm": 1.0, "delta": delta} for delta in (0.0, 1.0, 2)),
        *({"estimator": "all"}, {"unit": "none"}, {"seed": -1}, {"more": 1}, {"learning_rate": 1e400}),
    ]
    content_fields["plan"].update(server.random.choice(lies))
    others = [{**content_fields, "bundle": "0" * 64}, {**content_fields, "name": 1}, {"plan": content_fields}]
    content = json.dumps(
        server.random.choice([content_fields, content_fields, content_fields, *others])
    ).encode()
    damaged = [b"[" * 9000, b"\xff{}", content + b" " * (1 << 16)]
    content = server.random.choice([content, content, content, *damaged])
    return replace(server.make_task(), agreement=content)


def _hashed_plan(server: Server) -> RoundTask:
    """Return a task with an agreement beyond the owner's policy and with a valid hash."""
    asks: dict[str, Any] = server.random.choice([{"local_steps": 201}, {"examples": 65}, {"queries": 65}])
    other = replace(server.agreement, plan=Plan(**{"rounds": 1000, "local_steps": 2, **asks}))
    return RoundTask(other.sha256, 0, 0, 60.0, other.content)


def _evictions(server: Server) -> bytes:
    """Return the old round again, after fleets that evict it."""
    old = server.make_task().to_bytes()
    was = server.agreement, server.number
    for _ in range(5):
        server.new_fleet()
        answer(server.folder, server.make_task(seconds=1e-9).to_bytes())
    server.agreement, server.number = was
    return old


def _always(_: Server) -> bool:
    return True


LIES: dict[str, Lie] = {
    "garbage": Lie(lambda server: server.random.randbytes(server.random.choice((0, 1, 2, 50, 5000)))),
    "torn": Lie(_torn),
    "flipped": Lie(_flipped, _always),
    "counts": Lie(lambda server: _four_bytes(server, "<I", (30, 34, 38), (1, 2**16, 2**31, 2**32 - 1))),
    "no time": Lie(lambda server: _four_bytes(server, "<f", (26,), (-1.0, float("nan"), float("inf"), 1e9))),
    "again": Lie(lambda server: _earlier(server, 0, 1), _always, often=2),
    "older": Lie(lambda server: _earlier(server, 2, 5), lambda server: server.number < 2),
    "later": Lie(lambda server: _later(server, 1, 3), _always, often=2),
    "no round": Lie(_no_round),
    "hurried": Lie(
        lambda server: _later(server, 1, 1, seconds=server.random.choice((1e-9, 1e-40, 1e-3))), _always
    ),
    "state": Lie(_state, often=2),
    "far": Lie(_far, _always),
    "missed": Lie(_missed),
    "plan": Lie(_plan),
    "hashed plan": Lie(_hashed_plan),
    EVICTIONS: Lie(_evictions, _always),
}


def attack_a_device(bench: Bench, random: Random, folder: Path) -> Findings:
    """Let one device handle TASKS tasks of a hostile server."""
    cases_file = folder / "found.jsonl"
    device = Child(("device",), LIMITS, call=partial(_serve, bench.workshop, random, folder, cases_file))
    result = device.wait()
    lines = cases_file.read_text().splitlines() if cases_file.is_file() else []
    cases = [Case(**{**case, "verdict": Verdict(case["verdict"])}) for case in map(json.loads, lines)]
    if verdict := judge(result):
        cases.append(Case.of("device", verdict, result))
    if result.memory > MAX_MEMORY:
        tail = f"{result.memory >> 20} MB more than its parent"
        cases.append(Case("memory of the device", Verdict.GREEDY, tail=tail))
    return cases, Counter(network_devices=1)


def _serve(workshop: Workshop, random: Random, folder: Path, cases_file: Path) -> int:
    """Run the device's process, which writes a line for each task."""
    bundle_type = random.choice(
        [bundle_type for bundle_type in workshop.bundle_types if bundle_type in ("quantized", "decoder")]
    )
    task = workshop.folder / "task.yaml"
    policy = folder / "policy.yaml"
    bound = random.choice(["", "most_privacy_epsilon: 50\n"])
    policy.write_text(f"estimators: [tangent, antithetic, exact]\n{bound}")
    device = folder / "device"
    make_device(
        device,
        DeviceSettings(
            workshop.bundle(bundle_type), workshop.folder / "train.jsonl", task=str(task), policy=policy
        ),
    )
    server = Server(
        random, device, open_bundle(workshop.bundle(bundle_type)), task_sha256(load_task(str(task)))
    )
    with (
        cases_file.open("a") as stream,
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stderr(nowhere),
    ):
        for _ in range(TASKS):
            (name,) = random.choices([*LIES], [lie.often for lie in LIES.values()])
            if random.random() < 0.1:
                server.new_fleet()
            case = _judge_lie(server, name)
            stream.write(json.dumps(asdict(case)) + "\n")
            stream.flush()
    return 0


def _judge_lie(server: Server, name: str) -> Case:
    begin = time.monotonic()
    try:
        message = LIES[name].make(server)
        may_reply = LIES[name].may_reply(server)
        content = answer(server.folder, message if isinstance(message, bytes) else message.to_bytes())
        reply = parse_reply(content)
    except Exception:
        return Case(name, Verdict.TRACEBACK, tail=traceback.format_exc()[-3000:])
    if time.monotonic() - begin > MAX_SECONDS * (6 if name == EVICTIONS else 1):
        return Case(name, Verdict.GREEDY, tail=f"{time.monotonic() - begin:.1f} s")
    if not isinstance(reply, RoundResult):
        return Case(name, Verdict.REFUSED)
    seen = server.replies.setdefault((reply.sha256, reply.number), set())
    if not may_reply and content not in seen:
        return Case(name, Verdict.SILENT, tail=repr(reply)[:500])
    seen.add(content)
    with Journal(server.folder / LEDGER, writable=False) as journal:
        begun = [
            (each["agreement"], each["round"]) for each in journal.records if each["type"] == BEGUN
        ].count((reply.sha256.hex(), reply.number))
    if len(seen) > 1 or begun != 1:
        return Case(name, Verdict.DIFFERENT, tail=f"{len(seen)} answers, {begun} lines")
    if not (np.isfinite(reply.values).all() and np.isfinite(reply.losses).all()):
        return Case(name, Verdict.SILENT, tail="an answer that is not finite")
    return Case(name, Verdict.ACCEPTED)
