"""Tests of the page's chat, in a real browser."""

from __future__ import annotations

import json
import re
import select
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.device_runner.serving.page.browsing import (
    Served,
    check_axe,
    send_message,
    served,
    take_screenshots,
)
from tests.device_runner.serving.page.child import HOSTILE, LINE

Visit = Callable[..., Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("server")
    with served(feedback=folder / "feedback.jsonl", learns=True) as child:
        yield child


def feedback_rows(server: Served) -> list[dict[str, Any]]:
    settings = json.loads(server.process.args[2])  # type: ignore[index]
    return [json.loads(line) for line in Path(settings["feedback"]).read_text().splitlines()]


def test_an_answer_streams_and_can_be_stopped(server: Served, visit: Visit) -> None:
    page = visit(server.url)
    answer = send_message(page, "Hello!")
    expect(answer).to_contain_text("This is base, turn 1, temperature 1.0. You said: Hello!")
    expect(answer.locator("footer")).to_contain_text(re.compile(r"10 tokens · [\d.\u202f]+ tokens/s"))
    # Text that arrives in a burst says nothing about the generation speed.
    expect(send_message(page, "burst").locator("footer .muted")).to_have_text("50 tokens")
    slow = send_message(page, "slow")
    expect(slow).to_contain_text("word word")
    page.get_by_role("button", name="Stop").click()
    expect(slow).to_contain_text("stopped")
    written = slow.locator(".text").inner_text()
    assert 2 <= written.count("word") < 500
    # The message can be sent again; the next turn includes the stopped answer.
    expect(send_message(page, "Go on")).to_contain_text("turn 4")


@pytest.mark.whole
def test_escape_stops_and_a_message_can_be_changed(server: Served, visit: Visit) -> None:
    page = visit(server.url)
    for text in ("one", "two", "three"):
        expect(send_message(page, text)).to_contain_text(f"You said: {text}")
    page.get_by_role("button", name="Edit").nth(1).click()
    edited = page.get_by_role("textbox", name="Edit your message")
    expect(edited).to_be_focused()
    expect(edited).to_have_value("two")
    edited.fill("2")
    page.get_by_role("button", name="Ask again").click()
    expect(page.locator(".turns > li")).to_have_count(2)
    expect(page.locator(".answer").last).to_contain_text("turn 2, temperature 1.0. You said: 2")
    page.get_by_role("button", name="Edit").first.click()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Edit").first).to_be_focused()
    slow = send_message(page, "slow")
    expect(slow).to_contain_text("word")
    page.keyboard.press("Escape")
    expect(slow).to_contain_text("stopped")
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".turns > li")).to_have_count(0)
    expect(send_message(page, "new")).to_contain_text("turn 1")


@pytest.mark.whole
def test_a_conversation_survives_a_reload_but_not_its_tab(server: Served, visit: Visit) -> None:
    page = visit(server.url)
    page.get_by_role("checkbox", name="tuned").check()
    page.get_by_role("checkbox", name="base").uncheck()
    page.get_by_role("spinbutton", name="Max tokens").fill("400")
    expect(send_message(page, "one")).to_contain_text("You said: one")
    expect(send_message(page, "slow")).to_contain_text("word word")
    page.reload()
    expect(page.locator(".turns > li")).to_have_count(2)
    answers = page.locator(".answer")
    expect(answers.first).to_contain_text("This is tuned, turn 1, temperature 1.0. You said: one")
    expect(answers.last).to_contain_text(re.compile("word word.*stopped", re.DOTALL))
    expect(page.get_by_role("checkbox", name="base")).not_to_be_checked()
    expect(page.get_by_role("spinbutton", name="Max tokens")).to_have_value("400")
    expect(send_message(page, "three")).to_contain_text("This is tuned, turn 3")
    answers.first.get_by_role("button", name="Good answer").click()
    expect(answers.first).to_contain_text("Saved. Thank you.")
    page.get_by_role("button", name="New conversation").click()
    page.reload()
    expect(page.locator("main")).to_contain_text("Write a message below.")
    expect(page.locator(".turns > li")).to_have_count(0)
    other = visit(server.url)
    expect(other.get_by_role("checkbox", name="base")).to_be_checked()


@pytest.mark.whole
def test_a_conversation_too_large_to_store_is_lost_with_the_page(server: Served, visit: Visit) -> None:
    page = visit(server.url)
    send_message(page, "x" * 400_000)
    page.evaluate("sessionStorage.setItem('other', 'x'.repeat(4_900_000))")
    page.reload()
    expect(send_message(page, "Hello!")).to_contain_text("turn 1")
    for stored in ("{", "null", "[]", '{"turns": 1}'):
        # Invalid stored content; written while the page unloads, so that the next page finds it from the
        # start.
        page.add_init_script(f"sessionStorage.setItem('prge-talk', {json.dumps(stored)})")
        page.reload()
        expect(send_message(page, "Hello!")).to_contain_text("turn 1")


@pytest.mark.whole
def test_a_chat_stored_with_earlier_field_names_is_restored(server: Served, visit: Visit) -> None:
    answer = {"model": "tuned", "text": "Hello to you", "state": "cut", "answer": "chatcmpl-1", "took": 2,
              "tokens": 5, "judged": "good", "is_short": True}  # fmt: skip
    chat = {"turns": [{"id": 1, "text": "Hello!", "answers": [answer]}], "chosen": ["tuned"], "settings": {}}
    page = visit(server.url)
    page.add_init_script(f"sessionStorage.setItem('prge-talk', {json.dumps(json.dumps(chat))})")
    page.reload()
    expect(page.locator(".answer .text")).to_have_text("Hello to you")
    status = "5 tokens · 2 tokens/s · reached max tokens · older messages were omitted"
    expect(page.locator(".answer footer .muted")).to_have_text(status)
    expect(page.locator(".answer footer")).to_contain_text("Saved")
    expect(page.get_by_role("checkbox", name="tuned")).to_be_checked()


@pytest.mark.whole
def test_models_answer_side_by_side_and_see_their_own_answers(server: Served, visit: Visit) -> None:
    page = visit(server.url)
    page.get_by_role("checkbox", name="tuned").check()
    answers = send_message(page, "Who are you?")
    expect(answers).to_have_count(2)
    for name in ("base", "tuned"):
        expect(page.get_by_role("article", name=name)).to_contain_text(f"This is {name}, turn 1")
    boxes = [answers.nth(index).bounding_box() for index in range(2)]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] < boxes[1]["x"]
    page.get_by_role("checkbox", name="base").uncheck()
    expect(send_message(page, "And now?")).to_contain_text("This is tuned, turn 2")
    assert "exact" in page.locator("aside").inner_text() and "smollm2" in page.locator("aside").inner_text()


@pytest.mark.whole
def test_ratings_and_corrections_are_kept(server: Served, visit: Visit) -> None:
    page = visit(server.url)
    for name in ("Good answer", "Bad answer"):
        answer = send_message(page, name)
        answer.get_by_role("button", name=name).click()
        expect(answer).to_contain_text("Saved. Thank you.")
        expect(answer.get_by_role("button")).to_have_count(0)
    answer = send_message(page, "Correct me")
    answer.get_by_role("button", name="Correct").click()
    page.get_by_role("textbox", name="Corrected answer").fill("Right <b>so</b>")
    page.get_by_role("button", name="Save correction").click()
    expect(answer).to_contain_text("Saved. Thank you.")
    good, bad, corrected = feedback_rows(server)[-3:]
    assert (good["rating"], bad["rating"], corrected["correction"]) == ("good", "bad", "Right <b>so</b>")
    assert corrected["messages"][-1] == {"role": "user", "content": "Correct me"}


@pytest.mark.whole
def test_a_server_without_feedback_reports_that(visit: Visit) -> None:
    with served(chats=False) as server:
        page = visit(server.url)
        page.get_by_role("textbox", name="Text to continue").fill("Once upon")
        page.keyboard.press("Enter")
        expect(page.locator(".answer")).to_contain_text("You said: Once upon")
        expect(page.get_by_role("button", name="Good answer")).to_have_count(0)
        expect(page.locator("aside")).to_contain_text("are not stored")
        expect(page.locator("main")).to_contain_text("no chat template")


@pytest.mark.whole
def test_sampling_settings_are_sent_with_the_message(server: Served, visit: Visit) -> None:
    page = visit(server.url, expected=("400",))
    sent: list[Any] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.post_data else None)
    values = {"Temperature": "0.5", "Top p": "0.9", "Top k": "40", "Min p": "0.2",
              "Repetition penalty": "1.1", "Max tokens": "99", "Seed": "7"}  # fmt: skip
    for name, value in values.items():
        page.get_by_label(name).fill(value)
    expect(send_message(page, "Hello")).to_contain_text("temperature 0.5")
    named = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed")
    assert [sent[-1][name] for name in named] == [0.5, 0.9, 40, 0.2, 1.1, 99, 7]
    page.get_by_label("Seed").fill("")
    page.get_by_label("Temperature").fill("1e9")
    expect(send_message(page, "Hello")).to_contain_text("No answer: temperature is 1000000000")
    assert "seed" not in sent[-1]
    page.get_by_label("Temperature").fill("0")
    page.get_by_role("button", name="Ask again").click()
    expect(page.locator(".answer").last).to_contain_text("temperature 0")


@pytest.mark.whole
def test_learned_adapters_are_listed_and_can_be_reverted(visit: Visit) -> None:
    with served(learns=True) as server:
        page = visit(server.url)
        history = page.locator(".history li")
        expect(history).to_have_count(3)
        expect(history.first).to_contain_text("Adapter 2: accepted in use")
        expect(history.first).to_contain_text("from 8 ratings and corrections · loss 2.087 → 1.912")
        page.get_by_role("button", name="Revert to the previous adapter").click()
        expect(history.nth(1)).to_contain_text("in use")
        page.get_by_role("button", name="Revert to the previous adapter").click()
        expect(page.get_by_role("button", name="Revert to the previous adapter")).to_have_count(0)
        expect(history.last).to_contain_text("Adapter 0: initial adapter in use")


@pytest.mark.whole
def test_a_conversation_continues_while_training_runs_are_shown(server: Served, visit: Visit) -> None:
    page = visit(server.url)
    expect(send_message(page, "Hello!")).to_contain_text("You said: Hello!")
    slow = send_message(page, "slow")
    page.get_by_role("link", name="Training").click()
    expect(page).to_have_title("Training – prge")
    expect(page.get_by_role("textbox", name="Message")).to_have_count(0)
    page.go_back()
    expect(page).to_have_title("Chat – prge")
    expect(page.locator(".turns > li")).to_have_count(2)
    expect(slow).to_contain_text("word word")


@pytest.mark.whole
def test_a_models_output_is_shown_as_text(server: Served, visit: Visit) -> None:
    page = visit(server.url)
    urls: list[str] = []
    page.on("request", lambda request: urls.append(request.url))
    answer = send_message(page, "hostile")
    expect(answer.locator(".text")).to_have_text(HOSTILE)
    assert answer.locator(".text").evaluate("at => at.children.length") == 0
    assert page.title() == "Chat – prge" and "evil.example" not in "".join(urls)
    page.get_by_role("textbox", name="Message").fill(HOSTILE)
    page.keyboard.press("Enter")
    expect(page.locator(".user-message .text").last).to_have_text(HOSTILE)


@pytest.mark.whole
def test_a_megabyte_without_a_space_is_shown(server: Served, visit: Visit) -> None:
    page = visit(server.url, expected=("400",))
    answer = send_message(page, "line")
    expect(answer.locator("footer")).to_contain_text("64 tokens", timeout=30_000)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    begun = time.monotonic()
    # The message is not sent with the next one, because it is longer than the context.
    expect(send_message(page, "Hello")).to_contain_text("older messages were omitted", timeout=30_000)
    assert time.monotonic() - begun < 10
    answer = page.locator(".answer").first
    answer.get_by_role("button", name="Show all 1\u202f048\u202f576 characters").click()
    assert answer.locator(".text").evaluate("at => at.textContent.length") == len(LINE)


@pytest.mark.whole
def test_the_page_stays_fast_with_a_thousand_messages(visit: Visit) -> None:
    with served(chats=False) as server:
        page = visit(server.url)
        page.get_by_role("checkbox", name="tuned").check()
        field = page.get_by_role("textbox", name="Text to continue")
        for number in range(334):
            field.fill(f"message {number}")
            field.press("Enter")
            expect(page.locator(".answer[aria-busy=false]")).to_have_count(2 * number + 2)
            page.get_by_role("button", name="Send").wait_for()
        expect(page.locator(".text")).to_have_count(1002)
        begun = time.monotonic()
        field.press_sequentially("twenty characters ..")
        assert time.monotonic() - begun < 2
        # Time per frame while an answer streams.
        field.fill("slow")
        field.press("Enter")
        page.wait_for_timeout(300)
        frames = page.evaluate(
            "new Promise(done => { const times = []; const next = now => times.push(now) < 30 ?"
            " requestAnimationFrame(next) : done(times); requestAnimationFrame(next); })"
        )
        assert max(later - earlier for earlier, later in pairwise(frames)) < 500


@pytest.mark.whole
def test_the_chat_survives_a_restart_of_the_server(visit: Visit) -> None:
    with served() as first:
        page = visit(first.url)
        expect(send_message(page, "Hello!")).to_contain_text("You said")
        slow = send_message(page, "slow")
        expect(slow).to_contain_text("word")
        port = first.port
    expect(slow).to_contain_text("No answer: The server is not reachable.")
    expect(page.locator(".banner")).to_contain_text("retries until")
    expect(send_message(page, "Are you there?")).to_contain_text("No answer")
    with served(port=port):
        expect(page.locator(".banner")).to_contain_text("The server is back.")
        page.get_by_role("button", name="Ask again").last.click()
        expect(page.locator(".answer").last).to_contain_text("You said: Are you there?")
        expect(page.locator(".turns > li")).to_have_count(3)


@contextmanager
def forwarded(port: int) -> Iterator[int]:
    """Forward another port of this machine to the server's, as adb and ssh do."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection(("127.0.0.1", port)) as other:
                pair = {self.request: other, other: self.request}
                while content := [(each, each.recv(1 << 16)) for each in select.select([*pair], [], [])[0]]:
                    for each, received in content:
                        if not received:
                            return
                        pair[each].sendall(received)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.mark.whole
def test_the_page_works_through_a_forwarded_port(server: Served, visit: Visit) -> None:
    with forwarded(server.port) as port:
        page = visit(f"http://localhost:{port}/")
        expect(send_message(page, "Hello")).to_contain_text("You said: Hello")
        page.context.close()


@pytest.mark.whole
def test_a_key_is_requested_once_per_tab(visit: Visit) -> None:
    with served(key="secret") as server:
        page = visit(server.url, expected=("401",))
        urls: list[str] = []
        page.on("request", lambda request: urls.append(request.url))
        field = page.get_by_label("API key")
        for key, message in (("wrong", "This key is wrong."), ("secret", "")):
            field.fill(key)
            page.get_by_role("button", name="Open").click()
            if message:
                expect(page.get_by_role("alert").filter(has_text=message)).to_be_visible()
        expect(send_message(page, "Hello")).to_contain_text("You said: Hello")
        page.reload()
        expect(send_message(page, "Again")).to_contain_text("You said: Again")
        assert "secret" not in "".join(urls) + page.url
        assert page.evaluate("document.cookie + JSON.stringify(localStorage)").count("secret") == 0
        other = page.context.new_page()
        other.goto(server.url)
        expect(other.get_by_label("API key")).to_be_visible()
        # A key in the URL has no effect.
        other.goto(f"{server.url}/?key=secret&api_key=secret")
        expect(other.get_by_label("API key")).to_be_visible()


@pytest.mark.whole
def test_the_page_can_be_used_by_keyboard(server: Served, visit: Visit) -> None:
    page = visit(server.url)
    expect(page.get_by_role("textbox", name="Message")).to_be_visible()
    reached = []
    for _ in range(25):
        page.keyboard.press("Tab")
        name = page.evaluate("(at => at.labels?.[0]?.textContent || at.textContent)(document.activeElement)")
        reached.append((name or "").strip())
        assert page.evaluate(
            "document.activeElement == document.body || getComputedStyle(document.activeElement).outlineStyle"
        )
        if reached[-1] == "Message":
            break
    assert reached[0] == "Skip to content"
    expected = {"Chat", "Training", "Deutsch", "Temperature", "Seed", "base", "tuned", "Message"}
    assert expected <= set(reached)
    page.keyboard.type("By keys")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("alone")
    page.keyboard.press("Enter")
    expect(page.locator(".answer")).to_contain_text("You said: By keys\nalone", use_inner_text=True)
    for _ in range(4):
        page.keyboard.press("Shift+Tab")
        if page.evaluate("document.activeElement.textContent") == "Correct":
            break
    page.keyboard.press("Enter")
    page.keyboard.type("!")
    page.keyboard.press("Enter")
    expect(page.locator(".answer")).to_contain_text("Saved")


@pytest.mark.whole
@pytest.mark.parametrize("locale", ["de-AT", "fr-FR"])
def test_the_language_is_the_browsers_and_can_be_switched(server: Served, visit: Visit, locale: str) -> None:
    page = visit(server.url, locale)
    is_german = locale == "de-AT"
    expect(page.get_by_role("button", name="Senden" if is_german else "Send", exact=True)).to_be_visible()
    assert page.evaluate("document.documentElement.lang") == ("de" if is_german else "en")
    page.get_by_role("button", name="English" if is_german else "Deutsch").click()
    expect(page.get_by_role("button", name="Send" if is_german else "Senden", exact=True)).to_be_visible()
    page.reload()
    expect(page).to_have_title("Chat – prge")
    expect(page.get_by_role("button", name="Send" if is_german else "Senden", exact=True)).to_be_visible()
    check_axe(page)


@pytest.mark.whole
def test_screenshots_of_the_chat(server: Served, visit: Visit, pictures: Path) -> None:
    def fill_chat(page: Any) -> None:
        page.get_by_role("checkbox", name="tuned").check()
        for text in ("Hello! Tell me about the hotel in Northwick, please.", "And how was the breakfast?"):
            expect(send_message(page, text).last).to_contain_text("tokens/s")
        page.get_by_role("article", name="tuned").last.get_by_role("button", name="Correct").click()

    def wait_for_composer(page: Any) -> None:
        expect(page.get_by_role("textbox", name="Message")).to_be_visible()

    take_screenshots(visit, server.url, pictures, "empty", wait_for_composer)
    take_screenshots(visit, server.url, pictures, "chat", fill_chat)
