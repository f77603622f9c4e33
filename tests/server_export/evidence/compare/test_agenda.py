"""Which run of how many, and how long the rest takes."""

from __future__ import annotations

import pytest

from server_export.evidence.compare.agenda import Agenda


def test_runs_are_counted_and_their_time_foretold() -> None:
    agenda = Agenda({"quick": [0.5, 1.0], "slow": [0.5, 1.0]})
    assert agenda.begin("quick", 0.5) == "1 of 4"
    agenda.end("quick", 0.5, 60)
    # A share of the other method is taken to last as long: 1 + 0.5 + 1 shares of two minutes.
    assert agenda.begin("slow", 0.5) == "2 of 4, about 5 min 0 s left"
    agenda.end("slow", 0.5, 300)
    assert agenda.begin("quick", 1.0) == "3 of 4, about 12 min 0 s left"
    agenda.end("quick", 1.0, 120)
    assert agenda.seconds_left() == pytest.approx(600)


def test_a_run_that_was_not_planned_is_one_more() -> None:
    agenda = Agenda({"one": [0.5]})
    agenda.begin("one", 0.5)
    agenda.end("one", 0.5, 30)
    assert agenda.begin("one", 0.5) == "2 of 2, about 30 s left"


def test_runs_of_a_method_that_failed_are_no_longer_waited_for() -> None:
    agenda = Agenda({"broken": [0.5, 1.0, 1.0], "one": [1.0]})
    agenda.begin("broken", 0.5)
    agenda.drop("broken")
    assert agenda.begin("one", 1.0) == "2 of 2"
