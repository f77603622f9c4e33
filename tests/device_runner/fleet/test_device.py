"""Tests of a device with a hostile server: one result per line of the ledger, and each line counts."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from device_runner.fleet.device import FLEETS, LEDGER, answer
from device_runner.fleet.messages import RoundResult, RoundSteps, RoundTask, TaskRefusal, parse_reply
from device_runner.fleet.server import open_fleet
from device_runner.fleet.state import pack_state
from device_runner.session.pauses import Pauses
from prge.engine import FloatArray
from prge.formats.journal import Journal
from prge.training.privacy_accounting import epsilon_of
from tests.device_runner.fleet.fleets import NODES, Fleet, ledger, record_types
from tests.device_runner.numpy_device import Killed

NODE = NODES[0]
NOISE: dict[str, Any] = {
    "share_directions": True,
    "max_grad_norm": 1.0,
    "noise": 8.0,
    "queries": 4,
    "examples": 5,
}
ROWS = 14


class Server:
    """A server that sends arbitrary tasks to one device."""

    def __init__(self, fleet: Fleet, **changes: Any) -> None:
        settings = fleet.settings(**{"rounds": 50, "local_steps": 2, "learning_rate": 1e-3, **changes})
        with open_fleet(settings) as server:
            self.first = RoundTask.parse(server.tasks([NODE])[NODE])
            self.agreement, self.state = server.agreement, server.state
        self.fleet, self.plan = fleet, self.agreement.plan
        self.folder = fleet.folder / str(NODE)

    def steps(self, number: int, value: float = 0.0) -> RoundSteps:
        """Return the steps of a round."""
        count = self.plan.local_steps
        projected_gradients = np.full((count, int(np.prod(self.plan.shape))), value, np.float32)
        few = np.zeros(count, np.float32)
        return RoundSteps(count * number, few, few, projected_gradients)

    def task(self, number: int, **changes: Any) -> bytes:
        """Return the task of a round that follows rounds of zeros, with changed fields."""
        missed = b"".join(self.steps(each).to_bytes() for each in range(number))
        fields = {"number": number, "step": self.plan.local_steps * number, "missed": missed}
        return replace(self.first, **{**fields, "seconds": 60.0, **changes}).to_bytes()

    def ask(self, number: int, **changes: Any) -> Any:
        """Return the device's decoded message."""
        return parse_reply(answer(self.folder, self.task(number, **changes)))

    def refusal(self, number: int, **changes: Any) -> str:
        """Return the reason of the device's refusal."""
        reply = self.ask(number, **changes)
        assert isinstance(reply, TaskRefusal), reply
        return reply.reason

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Return the ledger's lines of begun rounds."""
        there = (self.folder / LEDGER).is_file()
        return [line for line in ledger(self.folder) if line["type"] == "begun"] if there else []


@pytest.fixture
def server(fleet: Fleet) -> Server:
    return Server(fleet, **NOISE)


def _cost(times: int, noise: float = 8.0) -> float:
    return epsilon_of([(noise, times)], 1e-5)


class TestOneResultPerLine:
    def test_a_round_before_the_newest_is_never_answered_again(self, server: Server) -> None:
        assert isinstance(server.ask(0), RoundResult)
        assert "out of time" in server.refusal(1, seconds=1e-9)
        assert server.refusal(0) == "round 1 is over: round 2 was begun"
        assert [line["round"] for line in server.lines] == [0, 1]

    @pytest.mark.parametrize("lost", ["answer", "fleets"])
    def test_a_deleted_result_is_not_computed_again(self, server: Server, lost: str) -> None:
        server.ask(0)
        if lost == "answer":
            (reply,) = server.folder.glob("fleets/*/round-*/answer.bin")
            reply.unlink()
        else:
            shutil.rmtree(server.folder / FLEETS)
        assert server.refusal(0) == "round 1 was answered, but its result is gone"
        assert isinstance(server.ask(1), RoundResult)
        assert record_types(server.folder) == ["begun", "answered"] * 2

    def test_removed_fleets_stay_in_the_ledger(self, fleet: Fleet) -> None:
        servers = [Server(fleet, name=name, out=fleet.folder / name, **NOISE) for name in "abcdef"]
        for each in servers:
            assert isinstance(each.ask(0), RoundResult)
        assert len(list((servers[0].folder / FLEETS).iterdir())) == 4
        assert "is gone" in servers[0].refusal(0)

    @pytest.mark.parametrize(
        "method", [{}, {"estimator": "exact", "optimizer": "sgd"}], ids=["projected_gradients", "changes"]
    )
    def test_a_device_killed_at_any_instant_sends_one_result(
        self, fleet: Fleet, method: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Kill one device after another at each write to storage."""
        server = Server(fleet, **NOISE, **method)
        task, fsync, rename, append = server.task(0), os.fsync, os.replace, Journal.append
        instant, was_killed = 0, True
        while was_killed:
            twin = shutil.copytree(server.folder, fleet.folder / f"twin-{instant}")
            left = iter(range(instant))

            def until_killed(call: Any, left: Any = left) -> Any:
                def counted(*arguments: Any) -> Any:
                    if next(left, None) is None:
                        raise Killed
                    return call(*arguments)

                return counted

            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", until_killed(fsync))
                patch.setattr(os, "replace", until_killed(rename))
                patch.setattr(Journal, "append", until_killed(append))
                try:
                    reply, was_killed = {answer(twin, task)}, False
                except Killed:
                    reply, was_killed = set(), True
            reply |= {answer(twin, task), answer(twin, task)}
            assert len(reply) == 1 and isinstance(parse_reply(reply.pop()), RoundResult)
            assert record_types(twin) == ["begun", "answered"]
            instant += 1
        assert instant > 12

    def test_a_round_begun_with_other_rows_is_refused(self, server: Server) -> None:
        server.refusal(0, seconds=1e-9)
        rows = server.fleet.folder / f"{NODE}.jsonl"
        rows.write_text(rows.read_text().replace("good", "bad"))
        assert server.refusal(0) == "the round was begun with other rows"
        assert isinstance(server.ask(1), RoundResult)


class TestCounting:
    def test_rounds_without_an_answer_count(self, server: Server) -> None:
        """With two steps of 5 of 14 rows, a row is in at most 2 steps after six steps."""
        server.fleet.join(NODE, "most_rounds_a_day: 3\n")
        assert "out of time" in server.refusal(0, seconds=1e-9)
        assert isinstance(server.ask(0), RoundResult)
        assert "out of time" in server.refusal(1, seconds=1e-9)
        reply = server.ask(2)
        assert reply.privacy_epsilon == pytest.approx(_cost(-(-6 * 5 // ROWS)), rel=1e-4)
        assert "most_rounds_a_day 3, the plan asks for 4" in server.refusal(3)

    def test_fewer_rows_than_examples_are_one_mechanism_a_step(self, fleet: Fleet) -> None:
        server = Server(fleet, **{**NOISE, "examples": 64})
        assert server.ask(0).privacy_epsilon == pytest.approx(_cost(2), rel=1e-4)
        assert server.lines[0]["examples"] == server.lines[0]["rows"] == ROWS

    def test_other_rows_begin_another_count(self, server: Server) -> None:
        server.ask(0)
        rows = server.fleet.folder / f"{NODE}.jsonl"
        rows.write_text(rows.read_text().replace("good", "bad"))
        assert server.ask(1).privacy_epsilon == pytest.approx(_cost(1 + 1), rel=1e-4)

    def test_the_owner_as_the_unit_counts_every_step(self, fleet: Fleet) -> None:
        server = Server(fleet, **NOISE)
        assert server.ask(0).privacy_epsilon == pytest.approx(_cost(1), rel=1e-4)
        fleet.join(NODE, "unit: owner\nmost_privacy_epsilon: 20\n")
        assert "has unit owner, the plan asks for row" in server.refusal(1)
        owner = Server(fleet, unit="owner", name="owner", out=fleet.folder / "owner", **NOISE)
        # Noise that protects a row protects the owner 5 times less.
        whole = epsilon_of([(8.0 / 5, 2), (8.0, 2)], 1e-5)
        assert owner.ask(0).privacy_epsilon == pytest.approx(whole, rel=1e-4)

    def test_a_round_of_the_first_version_counts_as_one_without_noise(self, server: Server) -> None:
        with Journal(server.folder / LEDGER) as old:
            old.append({"type": "round", "step": 0, "agreement": "ab", "round": 3, "time": 0.0, "steps": 2,
                        "examples": 4, "rows": 9, "noise": 1.0, "bytes": 9})  # fmt: skip
        server.fleet.join(NODE, "most_privacy_epsilon: 50\n")
        assert "privacy_epsilon would be inf" in server.refusal(0)
        server.fleet.join(NODE)
        assert server.ask(0).privacy_epsilon == pytest.approx(_cost(1), rel=1e-4)


class TestRowsAreNotRevealed:
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
    @pytest.mark.parametrize("estimator", ["tangent", "exact"])
    def test_derivatives_that_are_not_finite_count_as_zero(
        self, fleet: Fleet, value: float, estimator: str
    ) -> None:
        server = Server(fleet, **NOISE, estimator=estimator, optimizer="sgd")
        fleet.numpy.broken = value
        reply = server.ask(0)
        assert isinstance(reply, RoundResult) and np.isfinite(reply.values).all() and not reply.losses.any()

    def test_steps_that_are_too_large_are_refused_again_without_computing(self, fleet: Fleet) -> None:
        """New noise for the same rows would reveal more."""
        server = Server(fleet, **NOISE, optimizer="sgd", learning_rate=3e38, local_steps=6, estimator="exact")
        assert "diverge" in server.refusal(0)
        fleet.numpy.calls_left = 0
        assert "diverge" in server.refusal(0)
        assert record_types(server.folder) == ["begun", "answered"]


class TestTasksOutsideThePlan:
    def test_a_round_outside_the_plan_is_refused(self, server: Server) -> None:
        for number, changes, reason in (
            (0, {"step": 2}, "the plan has no round 1 from step 2 on"),
            (3, {"step": 5}, "the plan has no round 4 from step 5 on"),
            (50, {}, "the plan has no round 51"),
        ):
            assert reason in server.refusal(number, **changes)
        assert not server.lines

    def test_missed_steps(self, server: Server) -> None:
        good = server.steps(0)
        few, wide = np.zeros(1, np.float32), np.zeros((2, 5), np.float32)
        for missed, reason in (
            (
                replace(good, rates=few, losses=few, projected_gradients=good.projected_gradients[:1]),
                "a round of 1 steps of 4 projected gradients",
            ),
            (replace(good, projected_gradients=wide), "a round of 2 steps of 5 projected gradients"),
            (server.steps(0, np.nan), "steps from 0 on after which the adapter has"),
        ):
            assert reason in server.refusal(1, missed=missed.to_bytes())
        assert "steps to 2, the round begins at 4" in server.refusal(2, missed=good.to_bytes())
        assert "is at step 0, needs that of step 6" in server.refusal(3, missed=server.steps(1).to_bytes())

    def test_missed_steps_of_changes_and_wrong_sizes_are_refused(self, fleet: Fleet) -> None:
        server = Server(fleet, estimator="exact")
        assert "steps from 0 on" in server.refusal(1, step=1, missed=server.steps(0).to_bytes())
        content = bytearray(server.task(1))
        content[34:38] = (2**32 - 1).to_bytes(4, "little")
        reply = parse_reply(answer(server.folder, bytes(content)))
        assert isinstance(reply, TaskRefusal) and "ends early" in reply.reason

    def test_states(self, server: Server) -> None:
        def state(change: Any) -> bytes:
            arrays = safetensors.numpy.load(zlib.decompress(pack_state(server.state)))
            progress = {"step": 0, "first_loss": None, "smoothed_loss": None}
            change(arrays, progress)
            return zlib.compress(safetensors.numpy.save(arrays, {"progress": json.dumps(progress)}))

        def values(name: str, array: FloatArray) -> Any:
            return lambda arrays, progress: arrays.__setitem__(name, array)

        size = server.state.adapter.size
        bombs = values("adapter", np.zeros(10_000_000, np.float32))
        for change, reason in (
            (values("adapter", np.zeros(size + 1, np.float32)), "do not fit"),
            (values("adapter", np.full(size, np.nan, np.float32)), "is not finite"),
            (values("more", np.zeros(1, np.float32)), "do not fit"),
            (bombs, "or has more than"),
            (lambda arrays, progress: progress.update(step=-1), "its step is -1"),
            (lambda arrays, progress: progress.update(step=True), "its step is True"),
            (lambda arrays, progress: progress.update(first_loss="0"), "its losses ('0', None)"),
            (lambda arrays, progress: arrays.pop("adapter"), "do not fit"),
        ):
            assert reason in server.refusal(0, state=state(change))
        assert not server.lines

    def test_noise_out_of_bounds_is_refused(self, server: Server) -> None:
        for setting, value in (
            ("noise", 1e-200),
            ("noise", 1e9),
            ("max_grad_norm", 1e-300),
            ("max_grad_norm", 1e30),
        ):
            reply = json.loads(server.agreement.content)
            reply["plan"][setting] = value
            problem = f"--{setting.replace('_', '-')} is {value:g}, with noise it must be from "
            assert problem in server.refusal(0, agreement=json.dumps(reply).encode())


def test_a_refused_plan_creates_no_folder(fleet: Fleet) -> None:
    fleet.join(NODE, "most_steps: 2\n")
    for name in "abcdefg":
        assert "most_steps" in Server(fleet, name=name, out=fleet.folder / name, local_steps=3).refusal(0)
    folder = fleet.folder / str(NODE) / FLEETS
    assert not folder.exists() or not list(folder.iterdir())


def test_time_may_run_out_during_the_replay_which_is_stored(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([False] * 3 + [True] * 100)
    with monkeypatch.context() as patch:
        patch.setattr(Pauses, "wait", lambda *_: next(answers))
        assert "out of time" in server.refusal(6)
    assert len(server.lines) == 1
    assert "is at step 6, needs that of step 12" in server.refusal(6, missed=b"", state=b"")
    rest = b"".join(server.steps(number).to_bytes() for number in (3, 4, 5))
    assert isinstance(server.ask(6, missed=rest, state=b""), RoundResult)


def test_changed_settings_are_refused(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    config = server.folder / "device.yaml"
    config.write_text(f"# changed\n{config.read_text()}")
    assert "an error on the device" in server.refusal(0)
    output = capsys.readouterr().err
    assert "outside of its folder" in output and " --train " in output
    assert not server.lines
