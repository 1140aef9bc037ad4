"""The live page in a real browser: what it shows, to everybody."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from patience import PATIENCE_S, wait_until

from benchmarks.live import browser
from kvtier.remote.breaker import Tried
from runner import AsyncLLM, needle
from server.mortal import dies
from server.running import Running, gate, serving

MARKUP = "<img/src=x/onerror=document.title='caught'>"
SERVES = "document.getElementById('status').dataset.state === 'serving'"
TEXT = "document.getElementById({!r}).textContent"
PHONE, DESK = (390, 844), (1280, 900)

pytestmark = pytest.mark.skipif(
    browser.find() is None, reason=f"none of {', '.join(browser.NAMES)} is installed; apt install chromium"
)


@pytest.fixture(scope="module")
def chromium() -> Iterator[browser.Browser]:
    with browser.running(browser.find() or "") as found:
        yield found


@pytest.fixture(scope="module")
def pages(llm: AsyncLLM) -> Iterator[Running]:
    """A server with a name that is markup, whose page has news all the time."""
    with serving(llm, names=("<b>needle</b>", "needle")) as running:
        running.server.config.app.state.sampler.every_s = 0.1
        yield running


@pytest.fixture
def tab(chromium: browser.Browser, pages: Running) -> Iterator[browser.Tab]:
    """The page, live. The browser complains of nothing while it is open."""
    with opened(chromium, pages.url) as tab:
        tab.until(SERVES)
        yield tab
        assert [one for one in tab.problems if "/explain" not in one] == []  # there may be nothing to explain


@contextmanager
def opened(chromium: browser.Browser, url: str, before: str = "") -> Iterator[browser.Tab]:
    with chromium.tab() as tab:
        tab.size(*DESK)
        if before:
            tab.call("Page.addScriptToEvaluateOnNewDocument", source=before)
        tab.open(f"{url}/")
        yield tab


def ask(url: str, **more: Any) -> dict[str, Any]:
    headers = {"X-Request-Id": more.pop("name", "one")}
    body = {"prompt": "w1 w2", "max_tokens": 2, "ignore_eos": True, **more}
    told: dict[str, Any] = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S).json()
    return told


def send(tab: browser.Tab, prompt: str) -> None:
    """Sends a prompt from the page, and waits for the end of its answer."""
    tab.run(f"document.getElementById('prompt').value = {prompt!r}")
    tab.run("document.getElementById('ask').requestSubmit()")
    tab.until(f"/tokens in/.test({TEXT.format('ask-status')})")


RUNS = "[...document.querySelectorAll('#ask-tokens .run')].map((run) => run.classList[1])"


def test_pools_requests_and_sources_are_shown_as_they_change(tab: browser.Tab, pages: Running) -> None:
    prompt = needle.make_prompt(300, seed=41).text
    for turn in range(2):
        ask(pages.url, prompt=prompt, name=f"turn-{turn}")
    row = "[...document.querySelectorAll('#finished tr')].find((r) => r.textContent.includes('cmpl-turn-1'))"
    told = tab.until(f"{row}?.innerText")
    assert "device 288, computed 12" in told and "300 + 2" in told and "length" in told
    figures = "[...document.querySelectorAll('#pools figure')]"
    assert tab.run(f"{figures}.length") == 6
    assert tab.run("document.getElementById('remote')") is None and "remote" not in tab.run(TEXT.format("sources"))
    full = f"{figures}.find((f) => f.textContent.startsWith('full, device'))"
    stats = pages.llm.cache.stats().device["full"]
    tab.until(f"{full}.textContent.includes('cached {stats.cached:,} (')")
    tab.until(f"{full}.querySelector('path.cached').getAttribute('d').length > 20")
    label = tab.run(f"{full}.querySelector('svg').getAttribute('aria-label')")
    assert label.startswith("full, device, now: ") and f"cached {stats.cached:,}" in label
    ends = pages.llm.cache.stats().ends
    for name, of in ends.items():
        tab.until(f"{TEXT.format('ends')}.includes('{name} {of.hits:,}, {'kept' if of.pays else 'not kept'}')")
    hits = "[...document.querySelectorAll('#flow figure')].find((f) => f.textContent.startsWith('Hits by end'))"
    assert any(of.hits for of in ends.values())
    tab.until(f"{hits}.querySelector('path.end-0').getAttribute('d').length > 20")
    style = "((s) => s.strokeDasharray + s.strokeWidth)(getComputedStyle(p))"
    assert tab.run(f"new Set([...{hits}.querySelectorAll('path.line[d]')].map((p) => {style})).size") == len(ends)
    # the same in a table, for those who cannot see the picture
    tab.run(f"{full}.querySelector('details').open = true")
    assert tab.until(f"{full}.querySelectorAll('td')[12].textContent") == f"{stats.cached:,}"


def test_a_store_is_shown_if_there_is_one(
    chromium: browser.Browser, stored: tuple[AsyncLLM, Iterator[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, prompts = stored
    with serving(llm) as running, opened(chromium, running.url) as tab:
        running.server.config.app.state.sampler.every_s = 0.1
        tab.until(SERVES)
        prompt = next(prompts)
        send(tab, prompt)
        assert tab.run(RUNS) == ["remote", "computed", "generated"]
        row = "[...document.querySelectorAll('#finished tr')].find((r) => r.textContent.includes('remote 288'))"
        assert "remote 288, computed 12" in tab.until(f"{row}?.innerText")
        tab.until(f"{TEXT.format('remote')}.includes('file, in use')")
        stats = llm.cache.stats().remote
        assert stats is not None
        tab.until(f"{TEXT.format('remote')}.includes('fetched {stats.fetched_objects} · questions {stats.looks}')")
        assert "remote" in tab.run(TEXT.format("sources"))
        assert tab.run("document.querySelectorAll('#pools figure').length") == 6 + 2
        tab.run("[...document.querySelectorAll('#finished button')].at(-1).click()")
        tab.until(f"{TEXT.format('request-body')}.includes('are being fetched from the remote tier')")
        assert tab.run("document.querySelector('#request-body .bar-text').textContent") == "remote 288, computed 12"
        tab.press("Escape")
        assert tab.run(CONTRAST) == []
        remote = llm.cache.core.coordinator.door.remote
        for _ in range(3):
            remote.breaker.on_end(Tried.MOVE, False, remote.now())
        monkeypatch.setattr(remote.counts, "damaged_objects", 2)
        tab.until(f"{TEXT.format('remote')}.includes('left alone after failures')")
        tab.until(f"{TEXT.format('remote')}.includes('damaged 2')")
        assert tab.run("document.getElementById('remote').classList.contains('bad')")
        monkeypatch.setattr(remote, "is_on", False)
        tab.until(f"{TEXT.format('remote')}.includes('left alone since the cache was reset')")
        remote.breaker.on_end(Tried.MOVE, True, remote.now())
        assert len({*tab.run(ACCENTS), tab.run(ACCENT.replace("CLS", "remote"))}) == 5
        tab.size(*PHONE, is_phone=True)
        assert tab.run("[innerWidth, document.documentElement.scrollWidth]") == [390, 390]
        assert tab.problems == []


def test_a_running_request_and_one_that_waits(
    tab: browser.Tab, pages: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = needle.make_prompt(12_000, seed=42).token_ids
    names = [{"prompt": prompt, "name": f"twin-{i}"} for i in "ab"]
    asked = [threading.Thread(target=ask, args=(pages.url,), kwargs=one) for one in names]
    gate(monkeypatch, pages.llm, both_are_here := threading.Event(), seen := threading.Event())
    for one in asked:
        one.start()
    wait_until(lambda: pages.llm.load()["waiting_tokens"] >= 2 * len(prompt), "both are here")
    both_are_here.set()
    words = f"/request 'cmpl-twin-[ab]' is computing its prefix/.test({TEXT.format('open')})"
    tab.until(f"{words} && {TEXT.format('waits')}.includes('another request computes its prefix')")
    seen.set()
    for one in asked:
        one.join()
    tab.until(f"{TEXT.format('open-more')} === 'No request is open.'")


def test_names_are_text_whatever_they_are(tab: browser.Tab, pages: Running) -> None:
    told = ask(pages.url, name=MARKUP)
    assert told["id"] == f"cmpl-{MARKUP}"
    tab.until(f"{TEXT.format('finished')}.includes({MARKUP!r})")
    tab.run("[...document.querySelectorAll('#finished button')].find((b) => b.textContent.includes('img')).click()")
    tab.until(f"{TEXT.format('request-title')}.includes({MARKUP!r}) && {TEXT.format('request-body')} !== 'asking'")
    assert tab.run("document.querySelectorAll('main img, main b, dialog img, header b').length") == 0
    assert tab.run("document.title") == "<b>needle</b> · kvtier"


def test_a_prompt_is_answered_and_its_tokens_have_sources(tab: browser.Tab) -> None:
    prompt = needle.make_prompt(200, seed=43)
    for source in ("computed", "device"):
        send(tab, prompt.text)
        runs = tab.run(RUNS)
        assert (runs[0], runs[-1]) == (source, "generated")
    assert tab.run("document.querySelectorAll('#ask-tokens .run.device .token').length") == 192
    answer = tab.run("document.querySelector('#ask-tokens .generated .token').textContent")
    assert answer.split() == prompt.answer.split()[:-1]  # the last one is the model's EOS


def test_what_the_server_explains_is_shown(chromium: browser.Browser, pages: Running) -> None:
    """The explanation is made up: its sources are not those that the counts alone would tell."""
    told = """{request_id: 'x', state: 'finished', text: 'group full lacked <i>a block</i>\\nand waited', parts: [{
        prompt_tokens: 5, hit: {tokens: 3, device_tokens: 1, host_tokens: 2, computed_tokens: 2,
                                sources: [[0, 2, 'host'], [2, 3, 'device'], [3, 5, 'computed']]}}]}"""
    plant = f"""{{ const before = fetch; window.fetch = (path, ...more) => String(path).endsWith('/explain')
        ? Promise.resolve(new Response(JSON.stringify({told}))) : before(path, ...more); }}"""
    with opened(chromium, pages.url, plant) as tab:
        tab.until(SERVES)
        send(tab, "w1 w2 w3 w4")
        assert tab.run(RUNS) == ["host", "device", "computed", "generated"]
        tab.run("document.getElementById('ask-why').click()")
        tab.until(f"{TEXT.format('request-body')}.includes('group full lacked <i>a block</i>')")
        bar = tab.run("document.querySelector('#request-body .bar-text').textContent")
        assert bar == "device 1, host 2, computed 2"
        assert tab.problems == []


def test_with_keys_the_page_asks_for_one_and_keeps_it_for_this_tab(chromium: browser.Browser, llm: AsyncLLM) -> None:
    with serving(llm, api_keys=("the-key",)) as running, opened(chromium, running.url) as tab:
        tab.until("document.getElementById('status').dataset.state === 'locked'")
        for key, then in (("wrong", f"/not known/.test({TEXT.format('key-note')})"), ("the-key", SERVES)):
            tab.until("document.activeElement.id === 'key'")
            tab.type(key)
            tab.press("Enter")
            tab.until(then)
        stored = tab.run("[Object.values(sessionStorage), Object.values(localStorage), document.cookie]")
        assert stored == [["the-key"], [], ""]
        send(tab, "w1")


def test_a_page_that_has_lost_its_server_finds_it_again(tab: browser.Tab, pages: Running) -> None:
    sampler = pages.server.config.app.state.sampler
    for listener in list(sampler.listeners):
        listener.end()
    tab.until("document.getElementById('status').dataset.state === 'lost'")
    tab.until(SERVES)


def test_it_works_without_a_mouse(tab: browser.Tab, pages: Running) -> None:
    ask(pages.url, name="by-key")
    tab.until(f"{TEXT.format('finished')}.includes('cmpl-by-key')")
    tab.run("document.body.focus()")
    seen, outlined = [], []
    for _ in range(60):
        tab.press("Tab")
        name, outline = tab.run(
            "[document.activeElement.id || document.activeElement.textContent,"
            " getComputedStyle(document.activeElement).outlineStyle]"
        )
        if tab.run("document.activeElement === document.body") or name in seen:
            break
        seen.append(name)
        outlined.append(outline)
        if name == "cmpl-by-key":
            tab.press("Enter")
            tab.until("document.getElementById('request').open")
            tab.press("Escape")
            tab.until("!document.getElementById('request').open")
            assert tab.run("document.activeElement.textContent") == "cmpl-by-key"
    assert seen[0] == "Skip to the numbers"
    assert {"window", "theme", "pause", "cmpl-by-key", "prompt", "ask-kind", "ask-most", "ask-go"} <= set(seen)
    assert set(outlined) <= {"solid", "auto"}


def test_a_screen_reader_finds_its_way(tab: browser.Tab) -> None:
    nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
    found = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if not n.get("ignored")]
    roles = {role for role, _ in found}
    assert {"banner", "main", "contentinfo", "navigation", "table", "status", "heading"} <= roles
    needs_name = {"button", "link", "combobox", "textbox", "spinbutton", "image", "region", "table", "figure", "form"}
    assert [(role, name) for role, name in found if role in needs_name - {"figure", "form"} and not name] == []
    assert sum(role == "main" for role, _ in found) == 1
    live = tab.run("[...document.querySelectorAll('[role=status], [aria-live]')].map((n) => n.id)")
    assert live == ["status", "ask-status"]  # the numbers change all the time and are not read aloud


CONTRAST = """(() => {
    const canvas = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
    const rgba = (colour) => {
        canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const over = (top, under) => top.slice(0, 3).map((v, i) => v * top[3] / 255 + under[i] * (1 - top[3] / 255));
    const light = (c) => c.map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const back = (node) => !node ? [255, 255, 255]
        : over(rgba(getComputedStyle(node).backgroundColor), back(node.parentElement));
    const low = [];
    for (const node of document.querySelectorAll('body *')) {
        const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
        const unseen = '.hidden, .skip, noscript, [hidden], :disabled, svg';
        if (!own || node.closest(unseen) || !node.checkVisibility()) continue;
        const under = back(node), [a, b] = [light(over(rgba(getComputedStyle(node).color), under)), light(under)];
        const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (contrast < 4.5) low.push([node.textContent.slice(0, 30), contrast]);
    }
    return low;
})()"""
ACCENT = "getComputedStyle(document.querySelector('#sources .area.CLS')).fill"
ACCENTS = """(() => ['device', 'host', 'computed', 'generated'].map((cls) => getComputedStyle(
    document.querySelector(`#sources .area.${cls}`)).fill))()"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_themes(tab: browser.Tab, pages: Running, scheme: str) -> None:
    tab.prefer(prefers_color_scheme=scheme)
    send(tab, "w1 w2")
    assert tab.run("matchMedia('(prefers-color-scheme: dark)').matches") is (scheme == "dark")
    assert tab.run(CONTRAST) == []
    accents = tab.run(ACCENTS)
    assert len(set(accents)) == 4
    other = "light" if scheme == "dark" else "dark"
    tab.run(f"document.getElementById('theme').value = {other!r}")
    tab.run("document.getElementById('theme').dispatchEvent(new Event('change'))")
    assert tab.run(CONTRAST) == []
    assert tab.run(ACCENTS) != accents


def test_it_fits_a_phone(tab: browser.Tab, pages: Running) -> None:
    tab.size(*PHONE, is_phone=True)
    ask(pages.url, name="x" * 120)
    tab.until(f"{TEXT.format('finished')}.includes('x'.repeat(120))")
    assert tab.run("[innerWidth, document.documentElement.scrollWidth]") == [390, 390]
    small = """[...document.querySelectorAll('button, select, input, a:not(.skip), summary')]
        .filter((n) => n.checkVisibility() && n.getBoundingClientRect().height < 24).map((n) => n.outerHTML)"""
    assert tab.run(small) == []
    assert tab.run("parseFloat(getComputedStyle(document.querySelector('#pools .values')).fontSize) >= 12")
    assert tab.run("document.getAnimations().length") == 0


def test_a_dead_engine_has_a_banner_and_what_was_open_is_grey(
    chromium: browser.Browser, mortal: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(mortal, exit_on_engine_death=False) as running, opened(chromium, running.url) as tab:
        running.server.config.app.state.sampler.every_s = 0.1
        tab.until(SERVES)
        assert tab.run("document.getElementById('banner').checkVisibility()") is False
        asked = threading.Thread(target=ask, args=(running.url,), kwargs={"name": "cut", "max_tokens": 5_000})
        asked.start()
        tab.until(f"{TEXT.format('open')}.includes('cmpl-cut')", 20)
        alive = tab.run("getComputedStyle(document.querySelector('#open button')).color")
        monkeypatch.setattr(mortal.engine, "step", dies)
        asked.join()
        tab.until("document.getElementById('status').dataset.state === 'dead'")
        banner = "document.getElementById('banner')"
        told = tab.until(f"{banner}.checkVisibility() && {banner}.innerText")
        assert told.startswith("The engine has died of RuntimeError: planted death.")
        tab.until(f"{TEXT.format('open-title')} === 'Open when the engine died'")
        assert "cmpl-cut" in tab.run(TEXT.format("open"))
        assert tab.run("getComputedStyle(document.querySelector('#open button')).color") != alive
        tiles = "[...document.querySelectorAll('#now [data-name=running] dd, #now [data-name=waiting] dd')]"
        assert not any(character.isdigit() for character in tab.run(f"{tiles}.map((n) => n.textContent).join()"))
        assert tab.run(CONTRAST) == []
        tab.size(*PHONE, is_phone=True)
        assert tab.run("[innerWidth, document.documentElement.scrollWidth]") == [390, 390]
        assert tab.problems == []


def test_the_banner_stays_when_the_server_ends_with_its_engine(
    chromium: browser.Browser, mortal: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(mortal) as running, opened(chromium, running.url) as tab:
        tab.until(SERVES)
        monkeypatch.setattr(mortal.engine, "step", dies)
        assert ask(running.url)["error"]["code"] == "engine_dead"
        tab.until("document.getElementById('status').dataset.state === 'lost'", 30)
        assert "RuntimeError: planted death" in tab.run("document.getElementById('banner').innerText")


def test_a_server_that_refuses_most_is_not_called_serving(chromium: browser.Browser, llm: AsyncLLM) -> None:
    with serving(llm) as running, opened(chromium, running.url) as tab:
        running.server.config.app.state.sampler.every_s = 0.1
        tab.until(SERVES)
        ask(running.url, name="real", max_tokens=9)
        tile = "document.querySelector('#now [data-name={}]').innerText"
        times = tab.until(f"/ms/.test({tile.format('token')}) && {tile.format('token')}")
        assert re.fullmatch(r"for each later token, p50\n[\d.]+ ms\np95 [\d.]+ ms, p99 [\d.]+ ms", times)
        assert re.match(r"to the first token, p50\n[\d.]+ m?s\np95 [\d.]+ m?s, p99", tab.run(tile.format("first")))
        running.admission.most_open = 0
        assert [ask(running.url, name=f"more-{k}")["error"]["code"] for k in range(20)] == ["overloaded"] * 20
        tab.until("document.getElementById('status').dataset.state === 'overloaded'")
        assert tab.until(TEXT.format("status")) == "overloaded: most requests are refused"
        tab.until(f"{tile.format('refused')} === 'refused (429)\\n20'")
        assert "cmpl-real" in tab.run(TEXT.format("finished")) and "cmpl-more" not in tab.run(TEXT.format("finished"))
        dot = "getComputedStyle(document.getElementById('status'), '::before').backgroundColor"
        assert tab.run(dot) == tab.run("getComputedStyle(document.getElementById('status')).color")  # as the bad ones
        assert tab.problems == []
