"""Tests of the page's training runs, in a real browser."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.device_runner.reporting.run_folders import write_run
from tests.device_runner.serving.page.browsing import active_run, served, take_screenshots, take_step

Visit = Callable[..., Any]
EVIL = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


def test_a_run_is_followed_and_stopped(tmp_path: Path, visit: Visit) -> None:
    with active_run(tmp_path / "runs" / "first") as process, served(runs=tmp_path / "runs") as server:
        page = visit(f"{server.url}/training")
        expect(page.get_by_role("heading", name="first")).to_be_visible()
        view = page.locator("article")
        expect(view).to_contain_text("Step 25 of 40")
        expect(view).to_contain_text("running")
        first_chart = view.locator("svg").first.inner_html()
        for number in range(26, 31):
            take_step(process, number)
        expect(view).to_contain_text("Step 30 of 40")
        expect(view).to_contain_text("Time left5 s")
        assert view.locator("svg").first.inner_html() != first_chart
        with (tmp_path / "runs" / "first" / "samples.jsonl").open("a") as samples:
            samples.write(json.dumps({"step": 30, "prompt": "Once", "text": EVIL}) + "\n")
        expect(view.get_by_text(EVIL)).to_be_visible()
        page.get_by_role("button", name="Stop after this step").click()
        expect(page.get_by_text("The run stops after this step.")).to_be_visible()
        expect(view.locator(".mark")).to_have_text("stopped early")
        expect(page.get_by_role("button", name="Stop after this step")).to_have_count(0)
        assert process.wait(10) == 0 and page.title() == "Training – prge"


@pytest.mark.whole
def test_a_pause_and_its_reason_are_shown(tmp_path: Path, visit: Visit) -> None:
    with active_run(tmp_path / "runs" / "first"), served(runs=tmp_path / "runs") as server:
        page = visit(f"{server.url}/training")
        mark = page.locator("article .mark")
        expect(mark).to_have_text("running")
        summary = json.loads((tmp_path / "runs/first/run.json").read_text())
        summary["run"]["waits_for"] = "not charging: it waits for a charger"
        (tmp_path / "runs/first/run.json").write_text(json.dumps(summary))
        expect(mark).to_have_text("paused, not charging: it waits for a charger")
        summary["run"]["waits_for"] = None
        (tmp_path / "runs/first/run.json").write_text(json.dumps(summary))
        expect(mark).to_have_text("running")


@pytest.mark.whole
def test_a_second_request_to_stop_is_refused(tmp_path: Path, visit: Visit) -> None:
    with active_run(tmp_path / "first") as process, served(runs=tmp_path) as server:
        os.kill(process.pid, signal.SIGSTOP)
        page = visit(f"{server.url}/training", expected=("409",))
        button = page.get_by_role("button", name="Stop after this step")
        button.click()
        expect(page.get_by_text("The run stops after this step.")).to_be_visible()
        button.click()
        expect(page.get_by_text("was already asked to stop")).to_be_visible()
        os.kill(process.pid, signal.SIGCONT)
        assert process.wait(10) == 0


@pytest.mark.whole
def test_runs_of_a_tuning_are_opened_by_keyboard(tmp_path: Path, visit: Visit) -> None:
    tuned = tmp_path / "tuned"
    for name in ("search/0.01-4", "search/0.03-4", "run"):
        write_run(tuned / name, steps=20 if "search" in name else 40)
    (tuned / "tune.json").write_text("{}")
    with served(runs=tuned) as server:
        page = visit(f"{server.url}/training")
        list_runs = page.get_by_role("navigation", name="Training runs").get_by_role("link")
        expect(list_runs).to_have_count(3)
        names = sorted(list_runs.all_inner_texts())
        assert [name.split("\n")[0] for name in names] == ["run", "search/0.01-4", "search/0.03-4"]
        page.get_by_role("link", name="search/0.03-4").focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="search/0.03-4")).to_be_visible()
        expect(page.locator("article")).to_contain_text("Step 20 of 40")
        expect(page.locator("article .mark")).to_have_text("completed")
        expect(page.locator("table tbody tr")).to_have_count(2)
        # A link to a run opens the run; other folders are not runs.
        page.goto(f"{server.url}/training#run=search%2F0.01-4")
        page.reload()
        expect(page.get_by_role("heading", name="search/0.01-4")).to_be_visible()


@pytest.mark.whole
def test_the_charts_are_translated(tmp_path: Path, visit: Visit) -> None:
    write_run(tmp_path / "first")
    with served(runs=tmp_path) as server:
        page = visit(f"{server.url}/training", "de-DE")
        expect(page.locator("svg").first).to_contain_text("Trainingszeilen, geglättet")
        expect(page.locator("figcaption").last).to_have_text(
            "Perplexität auf Entwicklungszeilen. Niedriger ist besser."
        )
        # German words are long.
        wide = "each => each.scrollWidth > each.parentElement.clientWidth"
        for width in (390, 768, 1280):
            page.set_viewport_size({"width": width, "height": 800})
            assert not page.locator(".tiles dt").evaluate_all(f"all => all.some({wide})")
        page.get_by_role("button", name="English").click()
        expect(page.locator("svg").first).to_contain_text("training rows, smoothed")


@pytest.mark.whole
def test_the_page_reconnects_to_a_restarted_server(tmp_path: Path, visit: Visit) -> None:
    write_run(tmp_path / "first", steps=25)
    with served(runs=tmp_path) as server:
        page = visit(f"{server.url}/training")
        expect(page.locator("article")).to_contain_text("Step 25 of 40")
        port = server.port
    expect(page.locator(".banner")).to_contain_text("retries until")
    with (tmp_path / "first" / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"event": "step", "step": 39, "loss": 3.0, "seconds": 19}) + "\n")
    with served(runs=tmp_path, port=port):
        expect(page.locator(".banner")).to_contain_text("The server is back.")
        expect(page.locator("article")).to_contain_text("Step 39 of 40")


@pytest.mark.whole
def test_hostile_content_of_a_run_is_shown_as_text(tmp_path: Path, visit: Visit) -> None:
    folder = write_run(tmp_path / EVIL.replace("/", "_"), status=EVIL)
    summary = json.loads((folder / "run.json").read_text())
    summary["run"] |= {"model": {"name_or_path": EVIL}, "quantization": {"scheme": EVIL}}
    (folder / "run.json").write_text(json.dumps(summary))
    (folder / "config.yaml").write_text(json.dumps({"estimator": EVIL, "steps": 10**90, "train": EVIL}))
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"event": EVIL, "step": 41, "loss": 1.0}) + f"\n{EVIL}\n")
        metrics.write(json.dumps({"event": "step", "step": 42, "loss": 1e299, EVIL: EVIL}) + "\n")
    with (folder / "samples.jsonl").open("a") as samples:
        samples.write(json.dumps({"step": 1, "prompt": EVIL, "text": EVIL, "right": EVIL}) + "\n")
    with served(runs=tmp_path) as server:
        page = visit(f"{server.url}/training")
        expect(page.locator(".sample")).to_have_count(2)
        expect(page.locator("article")).to_contain_text("metrics.jsonl: 1")
        assert page.locator("main img, main script").count() == 0 and page.title() == "Training – prge"


@pytest.mark.whole
def test_a_page_without_runs_names_the_command_that_shows_runs(tmp_path: Path, visit: Visit) -> None:
    with served() as server:
        page = visit(f"{server.url}/training")
        expect(page.locator("main")).to_contain_text("prge watch FOLDER")
    with served(runs=tmp_path) as server:
        page = visit(f"{server.url}/training")
        expect(page.locator("main")).to_contain_text("This folder has no runs yet.")
        write_run(tmp_path / "new")
        expect(page.get_by_role("heading", name="new")).to_be_visible(timeout=15_000)


@pytest.mark.whole
def test_screenshots_of_the_training_view(tmp_path: Path, visit: Visit, pictures: Path) -> None:
    def wait_for_charts(page: Any) -> None:
        expect(page.locator("svg")).to_have_count(2)

    write_run(tmp_path / "tuned" / "search" / "0.01-4", steps=20)
    write_run(tmp_path / "second", status="failed", steps=10)
    with active_run(tmp_path / "tuned" / "run") as process, served(runs=tmp_path) as server:
        for number in range(26, 31):
            take_step(process, number)
        take_screenshots(
            visit, f"{server.url}/training#run=tuned%2Frun", pictures, "training", wait_for_charts
        )
