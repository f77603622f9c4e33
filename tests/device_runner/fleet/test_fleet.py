"""Tests of a fleet from the first round to the last: training, equal bits, kills and malicious devices."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from device_runner.fleet.coordinator import RoundReport
from device_runner.fleet.device import FLEETS, STATE, answer
from device_runner.fleet.messages import RoundResult, RoundTask, TaskRefusal, parse_reply
from device_runner.fleet.server import open_fleet
from device_runner.replay import main as replay
from prge.errors import ConfigError, RunError
from prge.formats.journal import Journal
from prge.formats.peft import read_peft
from tests.device_runner.fleet.fleets import NODES, Fleet, play, record_types, same
from tests.device_runner.numpy_device import Killed
from tests.refusals import raises

NODE = NODES[0]
METHODS: dict[str, dict[str, Any]] = {
    "tangents": {},
    "one direction for all examples": {"share_directions": True, "queries": 8},
    "P-RGE": {"estimator": "antithetic", "queries": 8},
    "median": {"combine": "median"},
    "FedAvg, trimmed": {"estimator": "exact", "combine": "trimmed"},
}
ENCODERS = {f"encoder, {name}": METHODS[name] for name in ("tangents", "FedAvg, trimmed")}
NOISE: dict[str, Any] = {"share_directions": True, "max_grad_norm": 1.0, "noise": 1.0, "queries": 8}
BUDGET_EXCEEDED = TaskRefusal(
    "privacy_epsilon would be 9 after this round, but at most 1 is allowed"
).to_bytes()


def methods(*names: str) -> pytest.MarkDecorator:
    """Parametrize over some methods, by default all; a name with `encoder` trains an encoder."""
    chosen = {name: (METHODS | ENCODERS)[name] for name in names or (METHODS | ENCODERS)}
    cases = [("encoder" if name in ENCODERS else "decoder", method) for name, method in chosen.items()]
    return pytest.mark.parametrize(("fleet", "method"), cases, indirect=["fleet"], ids=list(chosen))


@methods()
def test_a_fleet_learns_its_rows(fleet: Fleet, method: dict[str, Any]) -> None:
    _, reports = fleet.run(fleet.settings(**method, rounds=15))
    losses = [report.loss or 0.0 for report in reports]
    assert sum(losses[-3:]) < 0.95 * sum(losses[:3])
    assert all(len(report.answered) == 3 and not report.refused for report in reports)


@methods("P-RGE", "median", "FedAvg, trimmed", "encoder, tangents", "encoder, FedAvg, trimmed")
def test_a_killed_server_resumes_with_the_same_bits(
    fleet: Fleet, method: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = fleet.settings(**method)
    fleet.run(settings, rounds=2)
    # A third round that devices answer, and that the journal holds only in part.
    with open_fleet(settings) as server:
        reply = {node: fleet.direct(node, task) for node, task in server.tasks(list(NODES)).items()}
        append, written = server.journal.append, []

        def killed(record: Any) -> Any:
            if written:
                raise Killed
            return written.append(append(record))

        server.journal.append = killed  # type: ignore[method-assign]
        with pytest.raises(Killed):
            server.receive(reply)
    values, reports = fleet.run(settings)
    assert [report.number for report in reports] == [2, 3]
    whole, _ = fleet.run(replace(settings, out=tmp_path / "whole"), fleet.again)
    assert same(values, whole)
    if "estimator" not in method or method["estimator"] != "exact":
        assert replay([str(settings.out), "--out", str(tmp_path / "replayed")]) == 0
        assert "the same bits" in capsys.readouterr().out


def test_a_server_that_is_killed_before_it_has_scored_a_round_scores_it_later(
    fleet: Fleet, tmp_path: Path
) -> None:
    settings = fleet.settings(rounds=3)
    whole, _ = fleet.run(replace(settings, out=tmp_path / "whole"))
    for rounds in (0, 1, 1, 1):
        with open_fleet(settings) as server:
            if rounds == 0:
                server.tasks(list(NODES))
                continue
            reply = {node: fleet.again(node, task) for node, task in server.tasks(list(NODES)).items()}
            append = server.journal.append

            def killed(record: Any, append: Any = append) -> Any:
                if record["type"] == "evaluation":
                    raise Killed
                return append(record)

            server.journal.append = killed  # type: ignore[method-assign]
            with pytest.raises(Killed):
                server.receive(reply)
    with open_fleet(settings) as server:
        assert server.finished
        server.write_final()
        assert same(server.state.adapter.values, whole)
        modules = server.state.adapter.modules
    folders = (settings.out, tmp_path / "whole")
    evaluations = [_evaluations(folder) for folder in folders]
    assert evaluations[0] == evaluations[1] and len(evaluations[0]) == 4
    assert same(*(read_peft(folder / "final", modules).values for folder in folders))


def _evaluations(folder: Path) -> list[tuple[int, float]]:
    records = Journal(folder / "journal.jsonl", writable=False).records
    return [(record["step"], record["loss"]) for record in records if record["type"] == "evaluation"]


@pytest.mark.parametrize("fleet", ["decoder", "encoder"], indirect=True)
def test_a_fleet_that_was_killed_at_its_start_can_start_again(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = fleet.settings()
    append, written = Journal.append, []

    def killed(journal: Journal, record: Any) -> Any:
        if record["type"] == "start":
            raise Killed
        written.append(record)
        return append(journal, record)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Journal, "append", killed)
        open_fleet(settings)
    assert len(written) == fleet.numpy.encoder
    _, reports = fleet.run(settings)
    assert len(reports) == 4


@methods("tangents", "FedAvg, trimmed", "encoder, tangents")
def test_every_device_has_the_servers_bits_where_its_round_begins(
    fleet: Fleet, method: dict[str, Any]
) -> None:
    """One device misses two rounds, another one joins late."""
    settings = fleet.settings(**method, rounds=6)
    present = [NODES[:2], NODES[:2], NODES[:1], NODES[1:2], NODES, NODES]
    with open_fleet(settings) as server:
        for nodes in present:
            common = server.state.adapter.values.copy()
            report = play(server, fleet.direct, nodes)
            assert report.answered == sorted(nodes) and not report.refused
            for node in nodes:
                assert same(fleet.state(node, server.agreement).adapter.values, common)


@methods("tangents", "P-RGE", "encoder, FedAvg, trimmed")
def test_a_killed_device_sends_the_same_result(fleet: Fleet, method: dict[str, Any], tmp_path: Path) -> None:
    with open_fleet(fleet.settings(**method)) as server:
        task = server.tasks([NODE])[NODE]
    folder = fleet.folder / str(NODE)
    twin = shutil.copytree(folder, tmp_path / "twin" / "device")
    reply, fleet.numpy.calls_left = b"", 0
    while not reply:
        with suppress(Killed):
            reply = answer(folder, task)
        fleet.numpy.calls_left = 1
    fleet.numpy.calls_left = None
    assert reply == answer(twin, task)
    assert record_types(folder) == ["begun", "answered"]


def test_rows_of_a_round_continue_after_those_of_the_last_one(fleet: Fleet) -> None:
    """Each row of a device takes part once in every pass, whichever rounds the device missed."""
    settings = fleet.settings(rounds=5, local_steps=2, examples=2)
    rows = []

    def watched(device: int, task: bytes) -> bytes:
        reply = fleet.direct(device, task)
        if device == NODE:
            (journal,) = (fleet.folder / str(NODE)).glob("fleets/*/round-*/journal.jsonl")
            records = Journal(journal, writable=False).records
            rows.extend(row for record in records for row in record["rows"])
        return reply

    with open_fleet(settings) as server:
        for nodes in (NODES, NODES[1:], NODES, NODES, NODES):
            play(server, watched, nodes)
    assert len(rows) == 16 and len(set(rows[:13])) == 13


def test_a_task_brings_only_what_is_missing(fleet: Fleet) -> None:
    with open_fleet(fleet.settings(rounds=6)) as server:
        sizes = []
        for nodes in (NODES, NODES, NODES[1:], NODES[1:]):
            tasks = server.tasks(list(nodes))
            sizes.append({node: len(task) for node, task in tasks.items()})
            server.receive({node: fleet.direct(node, task) for node, task in tasks.items()})
        away, there, *_ = (RoundTask.parse(task) for task in server.tasks(list(NODES)).values())
    assert sizes[1][NODE] < sizes[0][NODE]
    assert len(list(away.missed_steps())) == 3 or away.state
    assert len(list(there.missed_steps())) == 1 and not there.agreement


def test_development_rows_may_be_evaluated_only_before_and_after(fleet: Fleet) -> None:
    settings = fleet.settings(rounds=3, eval_steps=0)
    fleet.run(settings)
    assert [step for step, _ in _evaluations(settings.out)] == [0, 9]


def test_garbage_is_refused_by_name_and_changes_nothing(fleet: Fleet, tmp_path: Path) -> None:
    liar = NODES[1]

    def first(value: float) -> Callable[[RoundResult], bytes]:
        return lambda own: replace(own, values=np.append(np.float32(value), own.values[1:])).to_bytes()

    lies: list[tuple[Callable[[RoundResult], bytes], str]] = [
        (first(1e30), "1e+30"),
        (first(np.nan), "not finite"),
        (lambda own: replace(own, values=own.values[:-1]).to_bytes(), "values"),
        (lambda own: replace(own, sha256=bytes(16)).to_bytes(), "agreement"),
        (lambda own: replace(own, number=own.number + 1).to_bytes(), "late"),
        (lambda own: own.to_bytes()[:-1], "ends early"),
    ]

    def network(node: int, task: bytes) -> bytes:
        reply = parse_reply(honest := fleet.direct(node, task))
        assert isinstance(reply, RoundResult)
        return lies[reply.number][0](reply) if node == liar else honest

    settings = fleet.settings(rounds=len(lies))
    values, reports = fleet.run(settings, network)
    for report, (_, word) in zip(reports, lies, strict=True):
        assert report.answered == [NODE, NODES[2]]
        assert word in report.refused[liar] and word in str(report)
    honest, _ = fleet.run(
        replace(settings, out=tmp_path / "honest"),
        lambda node, task: None if node == liar else fleet.again(node, task),
    )
    assert same(values, honest)


def test_devices_that_disappear_and_late_results(fleet: Fleet) -> None:
    late: dict[int, bytes] = {}

    def network(node: int, task: bytes) -> bytes | None:
        reply = fleet.direct(node, task)
        if node == NODES[2]:
            before, late[node] = late.get(node), reply
            return before
        return reply

    _, reports = fleet.run(fleet.settings(rounds=3), network)
    assert [report.silent for report in reports] == [[NODES[2]], [], []]
    assert "late: a result of round 1" in reports[1].refused[NODES[2]]


def test_a_server_without_answers_stops_and_can_be_resumed(fleet: Fleet) -> None:
    settings = fleet.settings(rounds=2, least_answers=2)
    with raises(RunError, "devices-silent", containing="--resume"):
        fleet.run(settings, lambda node, task: None)
    with open_fleet(settings) as server:
        report = play(server, lambda node, task: fleet.direct(node, task) if node == NODE else None)
        assert report.answered == [] and server.round == 0
        assert play(server, fleet.direct).answered == list(NODES)


def test_a_device_that_lost_its_folder_or_has_an_older_state_catches_up(fleet: Fleet) -> None:
    with open_fleet(fleet.settings(rounds=6)) as server:
        play(server, fleet.direct)
        (state,) = (fleet.folder / str(NODE)).glob(f"{FLEETS}/*/{STATE}")
        old = state.read_bytes()
        play(server, fleet.direct)
        state.write_bytes(old)
        assert "is at step 0" in play(server, fleet.direct).refused[NODE]
        assert NODE in play(server, fleet.direct).answered
        shutil.rmtree(fleet.folder / str(NODE) / FLEETS)
        assert "does not know" in play(server, fleet.direct).refused[NODE]
        assert NODE in play(server, fleet.direct).answered


def test_a_round_selects_some_devices_and_several_rounds_select_all(fleet: Fleet) -> None:
    requested = set()
    with open_fleet(fleet.settings(rounds=20, per_round=2, dev=None)) as server:
        for _ in range(10):
            chosen = server.tasks(list(NODES))
            assert len(chosen) == 2 and chosen.keys() == server.tasks(list(reversed(NODES))).keys()
            requested |= chosen.keys()
            server.receive({node: fleet.direct(node, task) for node, task in chosen.items()})
    assert requested == set(NODES)


def test_steps_that_diverge_on_every_device_leave_the_state_finite(fleet: Fleet) -> None:
    settings = fleet.settings(rounds=8, learning_rate=1e30, optimizer="sgd")
    with suppress(RunError):  # no device answers if steps diverge within a round
        _, reports = fleet.run(settings)
        assert all(report.discarded for report in reports)
    with open_fleet(settings) as server:
        assert not server.state.overflow() and server.state.step == 0


def test_a_diverging_round_is_discarded_and_reported(fleet: Fleet) -> None:
    """The state stays finite even if all devices send the same malicious result."""
    settings = fleet.settings(rounds=4, estimator="exact")

    def network(node: int, task: bytes) -> bytes:
        reply = parse_reply(fleet.direct(node, task))
        assert isinstance(reply, RoundResult)
        absurd = np.full_like(reply.values, 9e5)
        return replace(reply, values=absurd if reply.number == 1 else reply.values).to_bytes()

    values, reports = fleet.run(settings, network)
    assert [report.discarded for report in reports] == [False, True, False, False]
    assert "discarded: the development loss would be" in str(reports[1])
    assert np.abs(values).max() < 1
    with open_fleet(settings) as server:
        assert same(server.state.adapter.values, values) and server.state.step == 3


Check = Callable[[RoundReport], bool]


def changed(**changes: Any) -> Callable[[RoundResult], bytes]:
    """Return the honest result with some fields changed."""
    return lambda result: replace(result, **changes).to_bytes()


def refused(text: str) -> Check:
    """Check that the malicious device is refused with this text."""
    return lambda report: text in report.refused[NODE]


def is_usual(report: RoundReport) -> bool:
    """Check that the round's loss is that of honest devices."""
    return 0.1 < (report.loss or 0.0) < 3 and not report.problem


MALICIOUS: dict[str, tuple[Callable[[RoundResult], bytes], dict[str, Any], Check]] = {
    "a high loss": (changed(losses=np.full(3, 9999, np.float32)), {}, is_usual),
    "a low loss": (changed(losses=np.full(3, -9999, np.float32)), {}, is_usual),
    "no loss": (changed(losses=np.zeros(3, np.float32)), {}, is_usual),
    "no examples": (changed(examples=0), {"estimator": "exact"}, refused("took 0 examples")),
    "too many examples": (
        changed(examples=2**32 - 1),
        {"estimator": "exact"},
        refused(f"took {2**32 - 1} examples"),
    ),
    "an epsilon below zero": (changed(privacy_epsilon=-1.0), {}, refused("spent a privacy_epsilon")),
    "an epsilon that is NaN": (changed(privacy_epsilon=np.nan), {}, refused("spent a privacy_epsilon")),
    "an infinite epsilon": (
        changed(privacy_epsilon=np.inf),
        {},
        lambda report: report.privacy_epsilon == 0.0,
    ),
    "a spent privacy budget": (
        lambda result: BUDGET_EXCEEDED,
        {"least_answers": 2},
        lambda report: (
            report.answered == list(NODES[1:]) and (NODE in report.refused) == (report.number == 0)
        ),
    ),
    "values multiplied by a thousand": (
        lambda result: replace(result, values=result.values * 1000).to_bytes(),
        {},
        lambda report: report.shortened == [NODE],
    ),
}


@pytest.mark.parametrize("name", MALICIOUS)
def test_one_malicious_device_of_three_has_no_influence(fleet: Fleet, name: str) -> None:
    output, changes, check = MALICIOUS[name]

    def network(node: int, task: bytes) -> bytes:
        reply = parse_reply(fleet.direct(node, task))
        assert isinstance(reply, RoundResult)
        return output(reply) if node == NODE else reply.to_bytes()

    _, reports = fleet.run(fleet.settings(**changes), network)
    assert [report.number for report in reports] == [0, 1, 2, 3]
    assert all(map(check, reports))


def test_a_fleet_continues_after_a_spent_budget_while_other_devices_are_absent(fleet: Fleet) -> None:
    with open_fleet(fleet.settings(rounds=1)) as server:
        play(server, lambda node, task: BUDGET_EXCEEDED if node == NODE else None)
        assert not server.finished
        assert play(server, fleet.direct, NODES[1:]).answered == list(NODES[1:])


class TestDeviceRefusals:
    def _reason(self, fleet: Fleet, **changes: Any) -> str:
        with open_fleet(fleet.settings()) as server:
            task = RoundTask.parse(server.tasks([NODE])[NODE])
        reply = parse_reply(fleet.direct(NODE, replace(task, **changes).to_bytes()))
        assert isinstance(reply, TaskRefusal)
        return reply.reason

    @pytest.mark.parametrize(
        ("policy", "reason"),
        [
            ("estimators: [antithetic]", "estimators ['antithetic'], the plan asks for tangent"),
            ("most_privacy_epsilon: 2", "most_privacy_epsilon 2.0, the plan asks for no noise"),
            ("most_seconds: 0", "out of time"),
            ("only_charging: true", "an error on the device"),
        ],
    )
    def test_a_plan_that_the_owner_does_not_allow_is_refused(
        self, fleet: Fleet, policy: str, reason: str
    ) -> None:
        fleet.join(NODE, policy)
        assert reason in self._reason(fleet)

    def test_refusals_reveal_no_rows_or_paths(self, fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
        rows = fleet.folder / f"{NODE}.jsonl"
        rows.write_text('{"text": "my secret", "label": "neither"}\n')
        assert self._reason(fleet) == "an error on the device, which printed it"
        assert str(rows) in capsys.readouterr().err

    def test_another_bundle_or_task_is_refused(self, fleet: Fleet, tmp_path: Path) -> None:
        text = Path(fleet.task).read_text()
        fleet.join(NODE, bundle=fleet.numpy.write_bundle(tmp_path / "other", scheme="8da8w"))
        assert "the fleet's bundle is" in self._reason(fleet)
        (tmp_path / "own.yaml").write_text(text.replace("Yes", "Never"))
        fleet.join(NODE, task=str(tmp_path / "own.yaml"))
        assert "the fleet's task is not the device's" in self._reason(fleet)

    def test_a_wrong_agreement_or_state_is_refused(self, fleet: Fleet) -> None:
        with open_fleet(fleet.settings()) as server:
            other = replace(server.agreement, plan=replace(server.agreement.plan, local_steps=100))
        assert "does not have the hash" in self._reason(fleet, agreement=other.content)
        for state in (b"nothing", b"\x00" * 64):
            assert "state" in self._reason(fleet, state=state)

    def test_malformed_tasks_are_refused(self, fleet: Fleet) -> None:
        assert isinstance(parse_reply(answer(fleet.folder / str(NODE), b"")), TaskRefusal)


class TestWithNoise:
    def test_losses_stay_hidden_and_the_fleet_ends_with_its_budget(self, fleet: Fleet) -> None:
        settings = fleet.settings(rounds=50, most_privacy_epsilon=6.0, **NOISE)
        reports = []
        with open_fleet(settings) as server:
            while not server.finished:
                reports.append(play(server, fleet.direct))
            assert server.privacy_is_spent and 0 < server.round < 10
            server.write_final()
        assert all(report.loss is None for report in reports)
        epsilons = [report.privacy_epsilon for report in reports if report.answered]
        assert 4 < epsilons[0] <= epsilons[-1] <= 6 and epsilons == sorted(epsilons)

    def test_an_owners_budget_counts_rounds_without_noise_too(self, fleet: Fleet, tmp_path: Path) -> None:
        fleet.run(fleet.settings(rounds=1, out=tmp_path / "open"))
        fleet.join(NODE, "most_privacy_epsilon: 5\n")
        _, (report,) = fleet.run(fleet.settings(rounds=1, out=tmp_path / "noisy", name="noisy", **NOISE))
        assert "epsilon would be inf after this round, because earlier rounds had" in report.refused[NODE]
        assert report.answered == list(NODES[1:]) and report.privacy_epsilon < 20


def test_states_of_old_fleets_are_sent_again(fleet: Fleet, tmp_path: Path) -> None:
    for name in "abcdef":
        fleet.run(fleet.settings(rounds=1, out=tmp_path / name, name=name))
    assert record_types(fleet.folder / str(NODE)) == ["begun", "answered"] * 6
    with open_fleet(fleet.settings(rounds=3, out=tmp_path / "long", name="a")) as server:
        play(server, fleet.direct)
        assert play(server, fleet.direct).answered == list(NODES)


def test_another_plan_or_an_earlier_versions_agreement_in_the_same_folder_is_refused(fleet: Fleet) -> None:
    fleet.run(fleet.settings(), rounds=1)
    with raises(ConfigError, "plan-differs", containing="queries"):
        open_fleet(fleet.settings(queries=8))
    path = fleet.folder / "fleet" / "agreement.json"
    path.write_text(path.read_text().replace('"plan":{', '"plan":{"directions":"common",'))
    with raises(RunError, "agreement-of-other-version", containing=str(path)):
        open_fleet(fleet.settings())


@pytest.mark.parametrize("fleet", ["encoder"], indirect=True)
def test_an_encoders_fleet_needs_a_head(fleet: Fleet) -> None:
    with raises(ConfigError, "head-missing", containing="--head-rows"):
        open_fleet(fleet.settings(head_rows=None))


@pytest.mark.parametrize("fleet", ["decoder", "encoder"], indirect=True)
def test_a_fleet_begins_where_a_run_ended(fleet: Fleet, tmp_path: Path) -> None:
    first = fleet.settings()
    fleet.run(first)
    settings = fleet.settings(out=tmp_path / "second", adapter=first.out, head_rows=None, seed=7)
    with open_fleet(settings) as server:
        best = read_peft(first.out / "final", server.state.adapter.modules)
        assert same(server.state.adapter.values, best.values)
        assert play(server, fleet.direct).answered == list(NODES)
