"""`--when`: which words it accepts, and what each of them waits for."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_runner.fleet.policy import Policy
from device_runner.session import sensors as module
from device_runner.session.constraints import Battery, Charging, Cool, Hours, Idle, parse_when
from device_runner.session.pauses import Pauses
from device_runner.session.sensors import Sensors
from device_runner.session.settings import RunSettings
from prge.errors import ConfigError
from tests.refusals import raises

DAY = 24 * 60
MINUTES = st.integers(0, DAY - 1)


def written(begin: int, end: int) -> str:
    return f"{begin // 60:02d}:{begin % 60:02d}-{end // 60:02d}:{end % 60:02d}"


@given(MINUTES, MINUTES, MINUTES)
def test_hours_include_their_begin_and_exclude_their_end(begin: int, end: int, now: int) -> None:
    hours = Hours.parse(written(begin, end), "x")
    assert hours is not None
    minute, inside = begin, set()
    while True:  # from the begin on, over midnight, until the end stops it
        inside.add(minute)
        minute = (minute + 1) % DAY
        if minute in (end, begin):
            break
    assert hours.has(now) == (now in inside)


@given(MINUTES, MINUTES, MINUTES)
def test_a_window_and_its_complement_cover_the_day(begin: int, end: int, now: int) -> None:
    one, other = Hours("x", begin, end), Hours("x", end, begin)
    assert begin == end or one.has(now) != other.has(now)


@given(MINUTES)
def test_the_day_may_end_at_24(now: int) -> None:
    hours = Hours.parse("18:30-24:00", "x")
    assert hours is not None and hours.has(now) == (now >= 18 * 60 + 30)
    whole = Hours.parse("0-24", "x")
    assert whole is not None and whole.has(now)


@given(st.text(alphabet="0123456789:-,ab ", max_size=12))
def test_a_text_is_parsed_as_conditions_or_refused(text: str) -> None:
    try:
        result = parse_when(text)
    except ValueError as error:
        assert str(error).startswith("--when has ")
    else:
        assert len(result) == (text.count(",") + 1 if text else 0)
        for each in result:
            assert isinstance(each, Hours) and 0 <= each.begin < DAY and 0 <= each.end < DAY


def test_all_conditions_are_parsed() -> None:
    result = parse_when("charging, cool:40,battery:30,idle,22:00-07:00")
    assert [type(each) for each in result] == [Charging, Cool, Battery, Idle, Hours]
    assert result[1:3] == [Cool("--when cool:40", 40.0), Battery("--when battery:30", 30.0)]
    assert parse_when("cool") == [Cool("--when cool", 42.0)] and not parse_when("")


@pytest.mark.parametrize(
    "word",
    ["charged", "cool:", "cool:hot", "cool:nan", "cool:5000", "battery", "battery:-1", "battery:101",
     "idle:1", "charging:1", "22:00", "25:00-07:00", "22:60-07:00", "22:00-24:01", "charging,", "Charging"],
)  # fmt: skip
def test_unknown_conditions_are_refused_with_the_allowed_ones(word: str) -> None:
    with raises(ConfigError, "settings-unusable", containing="--when"):
        RunSettings(bundle=Path("b"), train=Path("t"), out=Path("o"), when=word)


def test_two_conditions_of_one_type_are_refused() -> None:
    with raises(ConfigError, "settings-unusable", containing="12:00-13:00"):
        RunSettings(bundle=Path("b"), train=Path("t"), out=Path("o"), when="22:00-07:00,12:00-13:00")


def test_flags_and_when_make_the_same_conditions() -> None:
    flags = RunSettings(
        Path("b"), Path("t"), Path("o"), only_charging=True, pause_above_celsius=41, pause_below_battery=30
    )
    from_flags, from_when = flags.constraints(), parse_when("charging,cool:41,battery:30")
    assert [{**vars(each), "flag": ""} for each in from_flags] == [
        {**vars(each), "flag": ""} for each in from_when
    ]
    policy = Policy(only_charging=True, pause_above_celsius=41, pause_below_battery=30)
    assert policy.constraints() == from_flags


def reason_and_messages(pauses: Pauses) -> tuple[str, list[str]]:
    """Return why work must wait, and the messages."""
    messages: list[str] = []
    return pauses.reason_to_wait(messages.append), messages


def test_hours_follow_a_clock_that_jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [12 * 60]
    monkeypatch.setattr(
        time, "localtime", lambda: time.struct_time((2026, 1, 1, now[0] // 60, now[0] % 60, 0, 0, 1, 0))
    )
    pauses = Pauses(parse_when("22:00-07:00"), seconds=0)
    why = "not the time: it is 12:00, it waits for 22:00-07:00"
    assert reason_and_messages(pauses) == (why, [f"paused, {why}"])
    now[0] = 6 * 60 + 59
    assert reason_and_messages(pauses) == ("", ["resuming after a pause of 0 s"])
    now[0] = 7 * 60
    assert reason_and_messages(pauses)[0].startswith("not the time: it is 07:00")


def dumpsys(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Install a `dumpsys` like Android's with only the service `power`."""
    script = folder / "dumpsys"
    script.write_text(f"#!/bin/sh\n[ $1 = power ] && echo '{text}'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("state", "why"),
    [("Asleep", ""), ("Dozing", ""), ("Awake", "in use: the screen is on"),
     ("Dreaming", "in use: the screen is on")],
)  # fmt: skip
def test_a_phone_is_idle_while_its_screen_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, why: str
) -> None:
    dumpsys(tmp_path, monkeypatch, f"POWER MANAGER\n  mWakefulness={state}\n  mIsPowered=true")
    assert reason_and_messages(Pauses(parse_when("idle"), seconds=0))[0] == why


def test_a_phone_whose_screen_is_not_readable_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumpsys(tmp_path, monkeypatch, "Permission Denial")
    with raises(ConfigError, "condition-not-measurable", containing="--when idle"):
        Pauses(parse_when("idle"))


def test_another_machine_is_idle_while_others_take_few_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = {"now": 100.0, "own": 0.0, "others": 0.0}
    ticks = os.sysconf("SC_CLK_TCK")

    def passed(seconds: float, own: float = 0.0, others: float = 0.0) -> None:
        clock["now"] += seconds
        clock["own"] += own * seconds
        clock["others"] += others * seconds
        worked = int((clock["own"] + clock["others"]) * ticks)
        (tmp_path / "stat").write_text(f"cpu  {worked} 0 0 999999 5 0 0 0 0 0\ncpu0 1 2 3\n")

    fake: Any = type("Time", (), {})
    fake.monotonic, fake.process_time = lambda: clock["now"], lambda: clock["own"]
    fake.sleep = passed
    monkeypatch.setattr(module, "time", fake)
    passed(1)
    pauses = Pauses(parse_when("idle"), Sensors(tmp_path, tmp_path), seconds=0)
    passed(5, own=2.0, others=0.4)  # what the run itself takes is no use of the device
    assert reason_and_messages(pauses)[0] == ""
    passed(5, own=2.0, others=1.5)
    assert reason_and_messages(pauses)[0] == "in use: other programs use 1.5 cores, the limit is 0.5"
    passed(5, others=0.4)
    assert reason_and_messages(pauses)[0] == "in use: other programs use 0.4 cores, the limit is 0.25"
    passed(5, others=0.2)
    assert reason_and_messages(pauses) == ("", ["resuming after a pause of 0 s"])


def test_a_machine_whose_load_is_not_readable_is_refused(tmp_path: Path) -> None:
    with raises(ConfigError, "condition-not-measurable", containing=f"{tmp_path}/stat"):
        Pauses(parse_when("idle"), Sensors(tmp_path, tmp_path))
