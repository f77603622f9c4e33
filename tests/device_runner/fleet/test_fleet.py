"""A fleet from the first round to the last: it learns, all have the same bits, kills and liars included."""

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
from device_runner.fleet.device import FLEETS, STATE, DeviceSettings, answer, make_device
from device_runner.fleet.messages import Answer, Refusal, Task, parse_answer
from device_runner.fleet.opening import open_fleet
from device_runner.replay import main as replay
from prge.errors import ConfigError, RunError
from prge.files.journal import Journal
from prge.files.peft import read_peft
from tests.device_runner.fleet.fleets import NODES, Fleet, kinds, play, same
from tests.device_runner.numpy_device import Killed

WAYS: dict[str, dict[str, Any]] = {
    "tangents": {},
    "tangents, one direction for all examples": {"share_directions": True, "queries": 8},
    "P-RGE": {"estimator": "antithetic", "queries": 8},
    "trimmed": {"combine": "trimmed"},
    "median": {"combine": "median"},
    "FedAvg": {"estimator": "exact"},
    "FedAvg, trimmed": {"estimator": "exact", "combine": "trimmed"},
    "FedAdam": {"estimator": "exact", "average": "fedadam"},
    "FedProx": {"estimator": "exact", "average": "fedprox"},
}
_CASES = [("decoder", name) for name in WAYS] + [("encoder", "tangents"), ("encoder", "FedAvg")]
ways = pytest.mark.parametrize(
    ("fleet", "way"),
    [(model, WAYS[name]) for model, name in _CASES],
    indirect=["fleet"],
    ids=[f"{model}, {name}" for model, name in _CASES],
)


@ways
def test_it_learns_its_rows(fleet: Fleet, way: dict[str, Any]) -> None:
    _, reports = fleet.run(fleet.settings(**way, rounds=15))
    losses = [report.loss or 0.0 for report in reports]
    assert sum(losses[-3:]) < 0.95 * sum(losses[:3])
    assert all(len(report.answered) == 3 and not report.refused for report in reports)


@ways
def test_a_server_that_is_killed_goes_on_to_the_same_bits(
    fleet: Fleet, way: dict[str, Any], tmp_path: Path
) -> None:
    settings = fleet.settings(**way)
    fleet.run(settings, rounds=2)
    # A third round that devices answer, of which the journal has a part.
    with open_fleet(settings) as server:
        said = {node: fleet.direct(node, task) for node, task in server.tasks(list(NODES)).items()}
        append, written = server.journal.append, []

        def killed(record: Any) -> Any:
            if written:
                raise Killed
            return written.append(append(record))

        server.journal.append = killed  # type: ignore[method-assign]
        with pytest.raises(Killed):
            server.receive(said)
    values, reports = fleet.run(settings)
    assert [report.number for report in reports] == [2, 3]
    whole, _ = fleet.run(replace(settings, out=tmp_path / "whole"), fleet.again)
    assert same(values, whole)


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
            said = {node: fleet.again(node, task) for node, task in server.tasks(list(NODES)).items()}
            append = server.journal.append

            def killed(record: Any, append: Any = append) -> Any:
                if record["kind"] == "evaluation":
                    raise Killed
                return append(record)

            server.journal.append = killed  # type: ignore[method-assign]
            with pytest.raises(Killed):
                server.receive(said)
    with open_fleet(settings) as server:
        assert server.finished
        server.write_final()
        assert same(server.state.adapter.values, whole)
    evaluations = [_evaluations(folder) for folder in (settings.out, tmp_path / "whole")]
    assert evaluations[0] == evaluations[1] and len(evaluations[0]) == 4
    left, right = (
        read_peft(folder / "final", server.state.adapter.modules).values
        for folder in (settings.out, tmp_path / "whole")
    )
    assert same(left, right)


def _evaluations(folder: Path) -> list[tuple[int, float]]:
    records = Journal(folder / "journal.jsonl", writable=False).records
    return [(record["step"], record["loss"]) for record in records if record["kind"] == "evaluation"]


def test_a_fleet_that_was_killed_while_it_began_begins_anew(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = fleet.settings()
    append = Journal.append
    written: list[Any] = []

    def killed(journal: Journal, record: Any) -> Any:
        if record["kind"] == "start":
            raise Killed
        written.append(record)
        return append(journal, record)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Journal, "append", killed)
        open_fleet(settings)
    assert len(written) == fleet.numpy.encoder
    _, reports = fleet.run(settings)
    assert len(reports) == 4


@ways
def test_every_device_has_the_servers_bits_where_its_round_begins(fleet: Fleet, way: dict[str, Any]) -> None:
    """One of them misses two rounds, one comes late."""
    settings = fleet.settings(**way, rounds=6)
    present = [NODES[:2], NODES[:2], NODES[:1], NODES[1:2], NODES, NODES]
    with open_fleet(settings) as server:
        for nodes in present:
            common = server.state.adapter.values.copy()
            report = play(server, fleet.direct, nodes)
            assert report.answered == sorted(nodes) and not report.refused
            for node in nodes:
                assert same(fleet.state(node, server.agreement).adapter.values, common)


@pytest.mark.parametrize("way", [WAYS["tangents"], WAYS["P-RGE"]], ids=["tangents", "P-RGE"])
def test_prge_replay_makes_the_adapter_from_the_servers_journal(
    fleet: Fleet, way: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = fleet.settings(**way)
    fleet.run(settings)
    assert replay([str(settings.out), "--out", str(tmp_path / "replayed")]) == 0
    assert "the same bits" in capsys.readouterr().out


@ways
def test_a_device_that_is_killed_answers_what_it_would_have_answered(
    fleet: Fleet, way: dict[str, Any], tmp_path: Path
) -> None:
    settings = fleet.settings(**way)
    twin = tmp_path / "twin"
    (twin).mkdir()
    with open_fleet(settings) as server:
        task = server.tasks([NODES[0]])[NODES[0]]
    folder = fleet.folder / str(NODES[0])
    shutil.copytree(folder, twin / "device")
    calls = 0
    while True:
        fleet.numpy.calls_left = calls
        try:
            said = answer(folder, task)
            break
        except Killed:
            calls = 1
    fleet.numpy.calls_left = None
    assert said == answer(twin / "device", task)
    assert kinds(folder) == ["begun", "answered"]


def test_one_that_is_asked_twice_answers_once(fleet: Fleet) -> None:
    with open_fleet(fleet.settings()) as server:
        task = server.tasks([NODES[0]])[NODES[0]]
    first = fleet.direct(NODES[0], task)
    fleet.numpy.calls_left = 0
    assert fleet.direct(NODES[0], task) == first
    assert kinds(fleet.folder / str(NODES[0])) == ["begun", "answered"]


def test_rows_of_a_round_go_on_where_the_last_one_ended(fleet: Fleet) -> None:
    """So in n passes over its rows a device shows each of them n times, whichever rounds it missed."""
    settings = fleet.settings(rounds=5, local_steps=2, examples=2)
    node, seen = NODES[0], []

    def watched(device: int, task: bytes) -> bytes:
        said = fleet.direct(device, task)
        if device == node:
            (journal,) = (fleet.folder / str(node)).glob("fleets/*/round-*/journal.jsonl")
            records = Journal(journal, writable=False).records
            seen.extend(row for record in records for row in record["rows"])
        return said

    with open_fleet(settings) as server:
        for nodes in (NODES, NODES[1:], NODES, NODES, NODES):
            play(server, watched, nodes)
    assert len(seen) == 16
    assert len(set(seen[:13])) == 13


def test_a_task_brings_only_what_is_missing(fleet: Fleet) -> None:
    settings = fleet.settings(rounds=6)
    with open_fleet(settings) as server:
        sizes = []
        for nodes in (NODES, NODES, NODES[1:], NODES[1:]):
            sizes.append({node: len(task) for node, task in server.tasks(list(nodes)).items()})
            server.receive(
                {node: fleet.direct(node, task) for node, task in server.tasks(list(nodes)).items()}
            )
        tasks = {node: Task.parse(task) for node, task in server.tasks(list(NODES)).items()}
    assert sizes[1][NODES[0]] < sizes[0][NODES[0]]
    assert len(list(tasks[NODES[0]].missed_steps())) == 3 or tasks[NODES[0]].state
    assert len(list(tasks[NODES[1]].missed_steps())) == 1
    assert not tasks[NODES[1]].agreement


def test_garbage_is_refused_by_name_and_changes_nothing(fleet: Fleet, tmp_path: Path) -> None:
    settings = fleet.settings()
    liar = NODES[1]

    def lies(said: bytes, number: int) -> bytes:
        honest = parse_answer(said)
        assert isinstance(honest, Answer)
        values = honest.values.copy()
        values[0] = [1e30, np.nan][number % 2]
        return [
            replace(honest, values=values).to_bytes(),
            replace(honest, values=values).to_bytes(),
            replace(honest, values=honest.values[:-1]).to_bytes(),
            replace(honest, sha256=bytes(16)).to_bytes(),
            replace(honest, number=honest.number + 1).to_bytes(),
            b"",
            b"\x02\x01 nothing",
            said[:-1],
            said + b"!",
        ][number]

    settings = replace(settings, rounds=9)

    def network(node: int, task: bytes) -> bytes:
        said = fleet.direct(node, task)
        return lies(said, Task.parse(task).number) if node == liar else said

    values, reports = fleet.run(settings, network)
    words = ["1e+30", "not finite", "values", "agreement", "late", "ends early", "", "ends early", "too many"]
    for report, word in zip(reports, words, strict=True):
        assert report.answered == [NODES[0], NODES[2]]
        assert word in report.refused[liar]
        assert word in str(report)
    honest, _ = fleet.run(
        replace(settings, out=tmp_path / "honest"),
        lambda node, task: None if node == liar else fleet.again(node, task),
    )
    assert same(values, honest)


def test_a_device_that_exaggerates_is_shortened(fleet: Fleet) -> None:
    def network(node: int, task: bytes) -> bytes:
        said = parse_answer(fleet.direct(node, task))
        assert isinstance(said, Answer)
        return replace(said, values=said.values * (1000 if node == NODES[2] else 1)).to_bytes()

    _, reports = fleet.run(fleet.settings(rounds=2), network)
    assert all(report.shortened == [NODES[2]] for report in reports)


def test_devices_that_vanish_and_late_answers(fleet: Fleet) -> None:
    settings = fleet.settings(rounds=3)
    late: dict[int, bytes] = {}

    def network(node: int, task: bytes) -> bytes | None:
        said = fleet.direct(node, task)
        if node == NODES[2]:
            before, late[node] = late.get(node), said
            return before
        return said

    _, reports = fleet.run(settings, network)
    assert [report.silent for report in reports] == [[NODES[2]], [], []]
    assert "late: an answer of round 1" in reports[1].refused[NODES[2]]


def test_a_server_that_nobody_answers_stops_and_can_go_on(fleet: Fleet) -> None:
    settings = fleet.settings(rounds=2)
    with pytest.raises(RunError, match=r"no round could be ended, 3 times in a row: no answer\n.*--resume"):
        fleet.run(settings, lambda node, task: None)
    _, reports = fleet.run(settings)
    assert [len(report.answered) for report in reports] == [3, 3]


def test_too_few_answers_end_no_round(fleet: Fleet) -> None:
    settings = fleet.settings(rounds=1, least_answers=2)
    with open_fleet(settings) as server:
        report = play(server, lambda node, task: fleet.direct(node, task) if node == NODES[0] else None)
        assert report.answered == [] and server.round == 0
        assert play(server, fleet.direct).answered == list(NODES)


def test_a_device_that_lost_its_folder_gets_everything_again(fleet: Fleet) -> None:
    settings = fleet.settings(rounds=4)
    with open_fleet(settings) as server:
        play(server, fleet.direct)
        shutil.rmtree(fleet.folder / str(NODES[0]) / FLEETS)
        assert "doesn't know" in play(server, fleet.direct).refused[NODES[0]]
        assert NODES[0] in play(server, fleet.direct).answered


def test_a_device_with_an_older_state_says_so_and_catches_up(fleet: Fleet) -> None:
    settings = fleet.settings(rounds=4)
    with open_fleet(settings) as server:
        play(server, fleet.direct)
        (state,) = (fleet.folder / str(NODES[0])).glob(f"{FLEETS}/*/{STATE}")
        old = state.read_bytes()
        play(server, fleet.direct)
        state.write_bytes(old)
        assert "is at step 0" in play(server, fleet.direct).refused[NODES[0]]
        assert NODES[0] in play(server, fleet.direct).answered


def test_a_round_asks_some_devices_and_over_rounds_all(fleet: Fleet) -> None:
    settings = fleet.settings(rounds=20, per_round=2, dev=None, head_rows=fleet.settings().head_rows)
    asked = set()
    with open_fleet(settings) as server:
        for _ in range(10):
            chosen = server.tasks(list(NODES))
            assert len(chosen) == 2 and chosen.keys() == server.tasks(list(reversed(NODES))).keys()
            asked |= chosen.keys()
            server.receive({node: fleet.direct(node, task) for node, task in chosen.items()})
    assert asked == set(NODES)


def test_steps_that_diverge_on_every_device_leave_the_state_finite(fleet: Fleet) -> None:
    settings = fleet.settings(rounds=8, learning_rate=1e30, optimizer="sgd")
    with suppress(RunError):  # nobody answers, where steps diverge within a round
        _, reports = fleet.run(settings)
        assert all(report.discarded for report in reports)
    with open_fleet(settings) as server:
        assert not server.state.overflow() and server.state.step == 0


def test_a_round_with_an_absurd_result_is_discarded_and_said(fleet: Fleet) -> None:
    """Even if all of its devices lie in the same way."""
    settings = fleet.settings(rounds=4, estimator="exact")

    def network(node: int, task: bytes) -> bytes:
        said = parse_answer(fleet.direct(node, task))
        assert isinstance(said, Answer)
        absurd = np.full_like(said.values, 9e5)
        return replace(said, values=absurd if said.number == 1 else said.values).to_bytes()

    values, reports = fleet.run(settings, network)
    assert [report.discarded for report in reports] == [False, True, False, False]
    assert "discarded: the development loss would be" in str(reports[1])
    assert np.abs(values).max() < 1
    with open_fleet(settings) as server:
        assert same(server.state.adapter.values, values)
        assert server.state.step == 3


class TestOneLiarOfThree:
    """Its word is its own: the fleet goes on to its end."""

    def _lies(self, fleet: Fleet, lie: Callable[[Answer], bytes], **changes: Any) -> list[RoundReport]:
        def network(node: int, task: bytes) -> bytes:
            said = parse_answer(fleet.direct(node, task))
            assert isinstance(said, Answer)
            return lie(said) if node == NODES[0] else said.to_bytes()

        _, reports = fleet.run(fleet.settings(**changes), network)
        assert [report.number for report in reports] == [0, 1, 2, 3]
        return reports

    @pytest.mark.parametrize("loss", [9999.0, -9999.0, 0.0])
    def test_a_false_loss(self, fleet: Fleet, loss: float) -> None:
        reports = self._lies(
            fleet, lambda said: replace(said, losses=np.full(3, loss, np.float32)).to_bytes()
        )
        assert all(0.1 < (report.loss or 0.0) < 3 for report in reports)
        assert not any(report.problem for report in reports)

    def test_no_privacy_left(self, fleet: Fleet) -> None:
        spent = Refusal("privacy_epsilon would be 9 after this round, at most 1 is allowed").to_bytes()
        reports = self._lies(fleet, lambda said: spent, least_answers=2)
        assert [report.answered for report in reports] == [list(NODES[1:])] * 4
        assert NODES[0] in reports[0].refused and NODES[0] not in reports[1].refused

    def test_no_privacy_left_while_the_others_are_away(self, fleet: Fleet) -> None:
        spent = Refusal("privacy_epsilon would be 9 after this round, at most 1 is allowed").to_bytes()
        with open_fleet(fleet.settings(rounds=1)) as server:
            play(server, lambda node, task: spent if node == NODES[0] else None)
            assert not server.finished
            assert play(server, fleet.direct, NODES[1:]).answered == list(NODES[1:])

    @pytest.mark.parametrize("examples", [0, 1, 2**32 - 1])
    def test_a_claim_of_more_examples(self, fleet: Fleet, examples: int) -> None:
        reports = self._lies(
            fleet, lambda said: replace(said, examples=examples).to_bytes(), estimator="exact"
        )
        assert all(f"took {examples} examples" in report.refused[NODES[0]] for report in reports)

    @pytest.mark.parametrize("epsilon", [-1.0, np.nan])
    def test_no_epsilon(self, fleet: Fleet, epsilon: float) -> None:
        reports = self._lies(fleet, lambda said: replace(said, privacy_epsilon=epsilon).to_bytes())
        assert all("spent a privacy_epsilon" in report.refused[NODES[0]] for report in reports)

    def test_an_epsilon_without_end(self, fleet: Fleet) -> None:
        reports = self._lies(fleet, lambda said: replace(said, privacy_epsilon=np.inf).to_bytes())
        assert [report.privacy_epsilon for report in reports] == [0.0] * 4


class TestADeviceRefuses:
    def _reason(self, fleet: Fleet, **changes: Any) -> str:
        with open_fleet(fleet.settings(**changes)) as server:
            said = parse_answer(fleet.direct(NODES[0], server.tasks([NODES[0]])[NODES[0]]))
        assert isinstance(said, Refusal)
        return said.reason

    @pytest.mark.parametrize(
        ("policy", "plan", "reason"),
        [
            ("estimators: [antithetic]", {}, "estimators ['antithetic'], the plan asks for tangent"),
            ("most_steps: 2", {}, "most_steps 2, the plan asks for 3"),
            ("most_examples: 3", {}, "most_examples 3, the plan asks for 4"),
            ("most_queries: 3", {}, "most_queries 3, the plan asks for 4"),
            ("least_noise: 0.5", {}, "least_noise 0.5, the plan asks for 0.0"),
            ("most_privacy_epsilon: 2", {}, "most_privacy_epsilon 2.0, the plan asks for no noise"),
            ("most_seconds: 0", {}, "out of time"),
            ("only_charging: true", {}, "an error on the device"),
        ],
    )
    def test_what_its_owner_did_not_allow(
        self, fleet: Fleet, policy: str, plan: dict[str, Any], reason: str
    ) -> None:
        fleet.join(NODES[0], policy)
        assert reason in self._reason(fleet, **plan)

    def test_exact_gradients_unless_its_owner_allows_them(self, fleet: Fleet) -> None:
        fleet.join(NODES[0])
        assert "estimators" in self._reason(fleet, estimator="exact")

    def test_and_tells_no_row_nor_path(self, fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
        rows = fleet.folder / f"{NODES[0]}.jsonl"
        rows.write_text('{"text": "my secret", "label": "neither"}\n')
        assert self._reason(fleet) == "an error on the device, which tells it there"
        assert str(rows) in capsys.readouterr().err

    def test_more_rounds_a_day_than_allowed(self, fleet: Fleet) -> None:
        fleet.join(NODES[0], "most_rounds_a_day: 1\n")
        _, (first, second) = fleet.run(fleet.settings(rounds=2))
        assert NODES[0] in first.answered
        assert "most_rounds_a_day 1, the plan asks for 2" in second.refused[NODES[0]]

    def test_another_bundle_and_another_task(self, fleet: Fleet, tmp_path: Path) -> None:
        other = fleet.numpy.write_bundle(tmp_path / "other", scheme="8da8w")
        make_device(
            fleet.folder / str(NODES[0]),
            DeviceSettings(bundle=other, train=fleet.folder / f"{NODES[0]}.jsonl", task=fleet.task),
        )
        assert "the fleet's bundle is" in self._reason(fleet)
        text = Path(fleet.task).read_text()
        (tmp_path / "own.yaml").write_text(text.replace("Yes", "Never"))
        make_device(
            fleet.folder / str(NODES[0]),
            DeviceSettings(
                bundle=fleet.bundle, train=fleet.folder / f"{NODES[0]}.jsonl", task=str(tmp_path / "own.yaml")
            ),
        )
        assert "the fleet's task is another one" in self._reason(fleet)

    def test_an_agreement_that_is_not_what_its_hash_says(self, fleet: Fleet) -> None:
        with open_fleet(fleet.settings()) as server:
            task = Task.parse(server.tasks([NODES[0]])[NODES[0]])
            other = replace(server.agreement, plan=replace(server.agreement.plan, local_steps=100))
        said = parse_answer(fleet.direct(NODES[0], replace(task, agreement=other.content).to_bytes()))
        assert isinstance(said, Refusal) and "doesn't have the hash" in said.reason

    @pytest.mark.parametrize("content", [b"", b"\x00", b"\x02\x00", bytes(100)])
    def test_what_is_no_task(self, fleet: Fleet, content: bytes) -> None:
        assert isinstance(parse_answer(answer(fleet.folder / str(NODES[0]), content)), Refusal)

    def test_a_state_that_does_not_fit(self, fleet: Fleet) -> None:
        with open_fleet(fleet.settings()) as server:
            task = Task.parse(server.tasks([NODES[0]])[NODES[0]])
        for state in (b"nothing", b"\x00" * 64):
            said = parse_answer(fleet.direct(NODES[0], replace(task, state=state).to_bytes()))
            assert isinstance(said, Refusal) and "state" in said.reason


NOISE: dict[str, Any] = {"share_directions": True, "clip": 1.0, "noise": 1.0, "queries": 8}


class TestWithNoise:
    def test_nobody_is_told_a_loss_and_epsilon_grows(self, fleet: Fleet) -> None:
        _, reports = fleet.run(fleet.settings(rounds=6, **NOISE))
        assert all(report.loss is None for report in reports)
        epsilons = [report.privacy_epsilon for report in reports]
        assert 4 < epsilons[0] < epsilons[-1]
        assert epsilons == sorted(epsilons)

    def test_the_fleet_ends_where_its_budget_does(self, fleet: Fleet) -> None:
        settings = fleet.settings(rounds=50, most_privacy_epsilon=5.0, **NOISE)
        with open_fleet(settings) as server:
            while not server.finished:
                play(server, fleet.direct)
            assert server.privacy_is_spent and 0 < server.round < 10
            server.write_final()

    def test_an_owners_budget_counts_all_fleets(self, fleet: Fleet, tmp_path: Path) -> None:
        fleet.join(NODES[0], "most_privacy_epsilon: 5\n")
        for name in ("first", "second", "third", "fourth"):
            _, reports = fleet.run(fleet.settings(rounds=2, out=tmp_path / name, name=name, **NOISE))
        assert "privacy_epsilon would be" in {**reports[0].refused, **reports[1].refused}[NODES[0]]
        assert NODES[1] in reports[-1].answered

    def test_an_owners_budget_counts_rounds_without_noise_too(self, fleet: Fleet, tmp_path: Path) -> None:
        fleet.run(fleet.settings(rounds=1, out=tmp_path / "open"))
        fleet.join(NODES[0], "most_privacy_epsilon: 5\n")
        _, (report,) = fleet.run(fleet.settings(rounds=1, out=tmp_path / "noisy", name="noisy", **NOISE))
        assert (
            "privacy_epsilon would be inf after this round, for earlier rounds had"
            in report.refused[NODES[0]]
        )
        assert report.answered == list(NODES[1:]) and report.privacy_epsilon < 20


def test_states_of_old_fleets_make_room_and_come_back(fleet: Fleet, tmp_path: Path) -> None:
    for name in "abcdef":
        fleet.run(fleet.settings(rounds=1, out=tmp_path / name, name=name))
    assert len(list((fleet.folder / str(NODES[0]) / FLEETS).iterdir())) == 4
    assert kinds(fleet.folder / str(NODES[0])) == ["begun", "answered"] * 6
    with open_fleet(fleet.settings(rounds=3, out=tmp_path / "long", name="a")) as server:
        play(server, fleet.direct)
        assert play(server, fleet.direct).answered == list(NODES)


def test_another_plan_in_the_same_folder_is_refused(fleet: Fleet) -> None:
    fleet.run(fleet.settings(), rounds=1)
    with pytest.raises(ConfigError, match="queries was 4, is 8"):
        open_fleet(fleet.settings(queries=8))


@pytest.mark.parametrize("fleet", ["encoder"], indirect=True)
def test_an_encoders_fleet_needs_a_head(fleet: Fleet) -> None:
    with pytest.raises(ConfigError, match="needs a classification head"):
        open_fleet(fleet.settings(head_rows=None))


def test_a_fleet_begins_where_a_run_ended(fleet: Fleet, tmp_path: Path) -> None:
    first = fleet.settings()
    fleet.run(first)
    settings = fleet.settings(out=tmp_path / "second", adapter=first.out, head_rows=None, seed=7)
    with open_fleet(settings) as server:
        best = read_peft(first.out / "final", server.state.adapter.modules)
        assert same(server.state.adapter.values, best.values)
        assert play(server, fleet.direct).answered == list(NODES)
