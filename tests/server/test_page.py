"""The status page: what holds for its file alone, and how it behaves in a real browser.

The browser is Debian's Chromium, which tests/chromium.py drives, against a stand-in for the server and, at
the end, against the server itself. Where it is missing those tests are skipped; a page that raises an error,
or is refused something by its content policy, fails the test that it happened in.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import chromium
import pytest
from fake_server import GIB, PAGE, FakeServer, cache, moving, session

from hotset.server.request_auth import content_policy
from hotset.units import format_bytes

TEXT = PAGE.read_text(encoding="utf-8")

# The file


class Elements(HTMLParser):
    """Every start tag of the page with its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(TEXT)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def values(self, attribute: str) -> list[str]:
        return [str(attributes[attribute]) for _, attributes in self.found if attribute in attributes]


def test_the_page_fetches_nothing_from_elsewhere() -> None:
    names = {"http://www.w3.org/2000/svg"}  # a name space, never fetched
    assert set(re.findall(r"(?:https?:)?//[\w.-]+\.[^\s\"')]*", TEXT)) <= names | {"//www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|import\(|\bsrc\s*=", TEXT)
    links = [attributes["href"] or "" for tag, attributes in Elements().found if tag == "link"]
    assert links
    assert all(link.startswith("data:") for link in links)
    assert set(re.findall(r"ask\([\"'`](/[\w/]*)", TEXT)) == {"/api/status", "/api/history", "/api/sessions/"}


def test_the_page_runs_under_the_policy_of_the_server() -> None:
    elements = Elements()
    tags = [tag for tag, _ in elements.found]
    assert tags.count("script") == tags.count("style") == 1
    assert content_policy(TEXT).count("'sha256-") == 2
    for tag, attributes in elements.found:
        bad = [name for name in attributes if name.startswith("on") or name in ("style", "action")]
        assert not bad, f"<{tag}> has {bad}, which the policy stops"
    assert "javascript:" not in TEXT


def test_the_script_neither_makes_html_of_text_nor_code() -> None:
    sinks = r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|srcdoc|\beval\b|\bFunction\("
    assert not re.search(sinks, TEXT)


def test_the_token_has_one_place_and_one_way_out() -> None:
    assert not re.search(r"localStorage|document\.cookie|indexedDB|pushState|location\s*=|console\.", TEXT)
    assert set(re.findall(r"sessionStorage\.\w+", TEXT)) == {
        f"sessionStorage.{n}Item" for n in ("get", "set", "remove")
    }
    assert TEXT.count("Bearer") == 1


def test_what_refers_to_something_finds_it() -> None:
    elements = Elements()
    ids = elements.values("id")
    assert len(ids) == len(set(ids))
    named = {
        name for value in ("for", "aria-labelledby", "aria-describedby") for name in elements.values(value)
    }
    used = set(re.findall(r"byId\(\"([\w-]+)\"\)", TEXT))
    assert named | used <= set(ids)
    inputs = [attributes["id"] for tag, attributes in elements.found if tag == "input"]
    assert set(inputs) <= set(elements.values("for")), "an input has no label"
    assert set(re.findall(r"put\(card, \"(\w+)\"", TEXT)) == set(elements.values("data-is"))


def _luminance(colour: str) -> float:
    digits = colour if len(colour) == 6 else "".join(2 * c for c in colour)
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: str, other: str) -> float:
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_have_the_contrast_that_reading_needs(scheme: int) -> None:
    rules = re.findall(r":root \{(.*?)\}", TEXT, re.DOTALL)
    assert len(rules) == 2
    colours = dict(re.findall(r"--([\w-]+): #([0-9a-f]+)", rules[scheme]))
    for ground in ("ground", "panel"):
        for text in ("text", "quiet", "bad"):  # 4.5 and 3 are those of WCAG's level AA
            assert _contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
        for graphics in ("memory", "disk", "good", "wait"):
            assert _contrast(colours[graphics], colours[ground]) >= 3, (graphics, ground)
    assert _contrast(colours["text"], colours["notice"]) >= 4.5
    assert _contrast(colours["on-bad"], colours["bad"]) >= 4.5


# The browser

# Two seconds pass for the page when a test says so, and not otherwise.
CLOCK = """(() => {
  const real = window.setTimeout;
  window.due = [];
  window.setTimeout = (call, ms, ...rest) => (ms === 2000 ? window.due.push(call) : real(call, ms, ...rest));
})()"""


@pytest.fixture
def _nothing_left_behind() -> None:
    """In place of the check after each test: the browser, which serves all tests, starts and ends processes
    as it likes."""


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Browser]:
    if chromium.program() is None:
        pytest.skip(chromium.MISSING)
    with chromium.Browser() as opened:
        opened.call("Page.addScriptToEvaluateOnNewDocument", source=CLOCK)
        yield opened


class Page:
    """The browser on a server's page. Selectors are CSS; ``$`` and ``$$`` are what they select."""

    def __init__(self, browser: chromium.Browser, url: str) -> None:
        self.browser = browser
        browser.look(1280, "light", height=720)
        browser.open(url)
        self.ask(
            "window.$ = (selector) => document.querySelector(selector), "
            "window.$$ = (selector) => [...document.querySelectorAll(selector)], 0"
        )

    def ask(self, script: str) -> Any:
        return self.browser.ask(script)

    def until(self, script: str) -> None:
        self.browser.wait_for(script)

    def says(self, selector: str, text: str) -> None:
        """Wait until an element that is visible holds a text."""
        self.until(f"$$({selector!r}).some(e => e.checkVisibility() && e.textContent.includes({js(text)}))")

    def later(self) -> None:
        """Let two seconds pass for the page, whose clock stands still otherwise: it looks again."""
        self.until("due.length > 0")
        self.ask("due.splice(0).forEach((call) => call())")

    def text(self, selector: str) -> str:
        return str(self.ask(f"$({selector!r}).textContent"))

    def texts(self, selector: str) -> list[str]:
        found: list[str] = self.ask(f"$$({selector!r}).map(e => e.textContent)")
        return found

    def attribute(self, selector: str, name: str) -> str:
        return str(self.ask(f"$({selector!r}).getAttribute({name!r})"))

    def is_visible(self, selector: str) -> bool:
        return bool(self.ask(f"$({selector!r})?.checkVisibility() ?? false"))

    def width(self, selector: str) -> float:
        return float(self.ask(f"$({selector!r}).getBoundingClientRect().width"))

    def destroy(self, name: str) -> None:
        """Open the dialog that asks whether a session is to be destroyed."""
        found = f"$$('section').find(e => e.ariaLabel === {js('Session ' + name)})"
        self.ask(f"{found}.querySelector('button').click()")
        assert self.text("#destroy-title") == f"Destroy session {name}?"
        assert self.ask("$('#destroy').open")

    def press(self, button: str) -> None:
        """Press a button of the dialog."""
        self.ask(f"$$('#destroy button').find(e => e.textContent === {button!r}).click()")

    def fill(self, selector: str, text: str) -> None:
        self.ask(f"$({selector!r}).focus(), $({selector!r}).select()")
        self.browser.press(text)

    def key(self, name: str) -> None:
        codes = {"Tab": 9, "Enter": 13, "Escape": 27}
        key = {"key": name, "code": name, "windowsVirtualKeyCode": codes[name]}
        typed = {"text": "\r"} if name == "Enter" else {}
        self.browser.call("Input.dispatchKeyEvent", type="keyDown", **key, **typed)
        self.browser.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def mouse(self, x: float, y: float) -> None:
        self.browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)


def js(text: str) -> str:
    return json.dumps(text)


def card(name: str) -> str:
    """The selector of a session's part of the page."""
    return f'section[aria-label="Session {name}"]'


@pytest.fixture
def visit(browser: chromium.Browser) -> Iterator[Any]:
    """Opens pages; at the end none of them may have raised an error, but for requests that were to fail."""

    def visit(fake: FakeServer | str) -> Page:
        return Page(browser, fake if isinstance(fake, str) else fake.url)

    yield visit
    meant = ("Failed to load resource", "a request failed")
    assert [problem for problem in browser.problems if not problem.startswith(meant)] == []
    browser.open("about:blank")


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def test_it_shows_what_the_server_says_and_what_changes(visit: Any, fake: FakeServer) -> None:
    page = visit(fake)
    page.says("#state", "live")
    first, imagenet = fake.tick, card("imagenet")
    fill = f"{imagenet} table .bar .amount"
    image = moving(first)[0]
    assert page.ask("$$('h2').filter(e => e.checkVisibility()).map(e => e.textContent)") == [
        *("imagenet", "sweep", "eval")
    ]
    assert page.text(fill) == f"{image['caches'][0]['cached']:,} of 1,281,167"
    memory = f"{imagenet} [role=meter][aria-label=Memory]"
    used, limit = image["memory"]["used"], image["memory"]["limit"]
    assert page.attribute(memory, "aria-valuetext") == f"{format_bytes(used)} of {format_bytes(limit)}"
    assert float(page.attribute(memory, "aria-valuenow")) == pytest.approx(100 * used / limit, abs=0.06)
    assert page.width(f"{memory} div") / page.width(memory) == pytest.approx(used / limit, abs=0.02)
    (stale,) = [row for row in page.texts(f"{card('sweep')} tbody tr") if "Decathlon" in row]
    assert "stale" in stale

    page.ask(f"$('{imagenet} button').focus()")
    later = moving(first + 1)[0]["caches"][0]["cached"]
    page.later()
    page.says(fill, f"{later:,} of 1,281,167")
    assert page.ask("document.activeElement.ariaLabel") == "Destroy session imagenet…"


def test_jobs_without_a_session_have_a_table_with_their_speed(visit: Any, fake: FakeServer) -> None:
    job = cache(5, "VOCDetection", 1_000, 4_096, processes=3, hits=100, hit_rate=0.25, misses=300)
    job["process"] = 7_341
    fake.jobs = [job | {"waited_seconds": 10.0}]
    page = visit(fake)
    page.says("#jobs", "VOCDetection")
    titles = page.texts("#jobs th")

    def row() -> dict[str, str]:
        return dict(zip(titles, page.texts("#jobs tbody td"), strict=True))

    assert (row()["Cache"], row()["Hit rate"], row()["Waited"]) == (
        "VOCDetectionprocess 7341",
        "25.0%",
        "10 s",
    )
    assert row()["Samples/s"] == row()["Consumer wait"] == "\N{EN DASH}", "one look gives no speed"

    page.ask("performance.now = ((real) => () => real.call(performance) + 2000)(performance.now)")
    fake.jobs = [job | {"hits": 1_000_100, "waited_seconds": 10.5}]
    page.later()
    page.until(f"$$('#jobs tbody td')[{titles.index('Samples/s')}].textContent !== '\N{EN DASH}'")
    assert 1_000 < float(row()["Samples/s"].replace(",", "")) <= 500_000, "a million in two seconds or more"
    assert 0.0 < float(row()["Consumer wait"].removesuffix(" s/s")) <= 0.25

    fake.jobs = [job | {"hits": 1_000_100}, job | {"id": 6, "hits": 50}]  # of validation: all else is alike
    page.later()
    page.until("$$('#jobs tbody tr').length === 2")
    page.later()
    for cell in (titles.index("Samples/s"), len(titles) + titles.index("Samples/s")):
        page.until(f"$$('#jobs tbody td')[{cell}].textContent === '0'")  # each is compared with itself

    fake.jobs = []
    page.later()
    page.until("!$('#jobs').checkVisibility()")


def test_machines_that_share_a_session_have_a_table(visit: Any, fake: FakeServer) -> None:
    page = visit(fake)
    page.says("#state", "live")
    image = moving(fake.tick)[0]
    table = f"{card('imagenet')} table[aria-label=Machines]"
    titles = page.texts(f"{table} th")
    cells = [
        dict(zip(titles, row, strict=True))
        for row in page.ask(
            f"$$('{table} tbody tr').map(row => [...row.querySelectorAll('td')].map(e => e.textContent))"
        )
    ]
    named = page.texts(f"{table} td:first-child > *")
    assert named[:4] == ["gpu1-5e0c71aa", "10.0.0.11, this machine", "gpu2-93b41f08", "10.0.0.12"]
    _, second, third = image["machines"]
    assert list(cells[0].values())[1:] == ["160 GiB", *5 * ["\N{EN DASH}"]]
    assert cells[1] == {
        "Machine": "gpu2-93b41f0810.0.0.12",
        "Can hold": "160 GiB",
        "Samples from it": f"{second['received']:,}",
        "Bytes": format_bytes(second["bytes"]),
        "An answer takes": "4.14 ms",
        "Brought to it": f"{second['stored']:,}",
        "Failures": "0",
    }
    assert (cells[2]["Failures"], cells[2]["Samples from it"]) == ("3", f"{third['received']:,}")
    hits, misses = (sum(c[name] for c in image["caches"]) for name in ("hits", "misses"))
    hits += sum(c["peer_hits"] for c in image["caches"])
    rate = page.text(f"{card('imagenet')} dd[data-is=hits]")
    assert rate == f"{hits / (hits + misses):.1%}", "what others sent was no miss"
    shown = "$$('table[aria-label=Machines]').filter(e => e.checkVisibility()).length"
    assert page.ask(shown) == 1, "others are on one machine alone"

    fake.still = [image | {"machines": [image["machines"][0], third | {"latency": 1.23, "failures": 4}]}]
    page.later()
    page.says(".machines td", "1.23 s")
    assert page.texts(f"{table} tbody td:first-child > span") == ["gpu1-5e0c71aa", "gpu3-0d6ea2c4"]

    page.browser.look(820, "light")
    head = f"{card('imagenet')} h3"
    assert page.is_visible(head), "where the columns' heads are not"
    fake.still = [image | {"machines": []}]
    page.later()
    page.until(f"!$('{table}').checkVisibility()")
    assert not page.is_visible(head)


def test_charts_have_axes_gaps_and_a_value_under_the_pointer(visit: Any, fake: FakeServer) -> None:
    page = visit(fake)
    page.says("#state", "live")
    speed = f"{card('sweep')} figure:first-of-type svg"
    labels = page.texts(f"{speed} text")
    assert labels[:3] == ["0", "10k", "20k"]
    assert labels[3:] == ["now", *(f"\N{MINUS SIGN}{minutes} min" for minutes in (2, 4, 6, 8, 10))]
    assert page.attribute(f"{speed} .curve", "d").count("L") > 250
    assert re.fullmatch(
        r"Samples per second over the last 10 minutes: 1\d,\d{3} now, 1\d,\d{3} at most",
        page.attribute(speed, "aria-label"),
    )
    page.ask(f"$('{speed}').scrollIntoView()")
    area = page.ask(f"$('{speed}').getBoundingClientRect().toJSON()")
    page.mouse(area["x"] + area["width"] / 2, area["y"] + 50)
    page.says("figcaption", "ago: 1")
    assert page.ask(f"$$('{speed} .cursor').length") == 1

    # What the server does not know is left open, not drawn as nothing.
    answer = f"new Response({js(json.dumps(_holes()))}, {{headers: {{'Content-Type': 'application/json'}}}})"
    page.ask(
        "window.real = window.fetch, window.fetch = async (url, ...rest) => "
        f"String(url).includes('/api/history') ? {answer} : window.real(url, ...rest), 0"
    )
    page.mouse(0, 0)
    page.later()
    page.says("figcaption", "70 now, 80 at most")
    assert page.attribute(f"{speed} .curve", "d").count("M") == 2


def _holes() -> dict[str, Any]:
    series = {"samples_per_second": [None, 50, 80, None, None, 70], "waited": [None] * 6}
    return {"interval": 2.0, "times": [2.0 * t for t in range(6)], "sessions": {"88120": series}}


def test_bytes_read_as_everywhere_else_in_the_library(visit: Any) -> None:
    amounts = [0, 1, 511, 999, 1000, 1023, 1024, 10_000, 102_348, 102_400, 1_022_976, 301_056_000]
    amounts += [GIB - 1, GIB, 3 * GIB // 2, 123_456_789_012, 5 << 40, 5_000 << 40]
    caches = [cache(number, "D", 1, 1, memory=amount) for number, amount in enumerate(amounts)]
    with FakeServer(sessions=[session(1, "s", GIB, caches)]) as fake:
        page = visit(fake)
        page.says("#state", "live")
        assert page.texts("td[data-label=Memory]") == [format_bytes(amount) for amount in amounts]


def test_text_from_the_server_stays_text(visit: Any) -> None:
    evil = "<img src=x onerror=\"document.title='taken'\">"
    caches = [cache(1, f"{evil}1", 10, 10, state=f"{evil}2")]
    made = session(5, evil, GIB, caches, disk={"folder": f"/{evil}", "used": 0})
    with FakeServer(sessions=[made]) as fake:
        page = visit(fake)
        page.says("#state", "live")
        page.destroy(evil)
        body = page.text("body")
        assert all(text in body for text in (f"{evil}1", f"{evil}2", f"spills to /{evil}"))
        assert page.ask("document.images.length") == 0
        assert page.ask("document.title") == "hotset"


def test_with_no_sessions_it_says_how_to_make_one(visit: Any) -> None:
    with FakeServer(sessions=[]) as fake:
        fake.spill = False
        page = visit(fake)
        page.says("#empty", "hotset session create imagenet --memory 120GiB")
        assert not page.is_visible("[data-bar=spill]")
        fake.still = [session(3, "first", GIB, [])]
        page.later()
        page.says("h2", "first")
        assert not page.is_visible("#empty")


def test_a_server_that_goes_is_said_and_waited_for(visit: Any, fake: FakeServer) -> None:
    page = visit(fake)
    page.says("#state", "live")
    fake.stop()
    try:
        page.later()
        page.says("#notice", "The server has not answered since")
        page.says("#state", "no answer")
        assert page.is_visible(card("imagenet")), "what was known goes on being shown"
    finally:
        fake.start()
    page.later()
    page.says("#state", "live")
    assert page.text("#notice") == ""


def test_destroying_asks_says_what_is_lost_and_needs_the_token(visit: Any, fake: FakeServer) -> None:
    page = visit(fake)
    page.says("#state", "live")
    page.destroy("sweep")
    said = page.text("#destroy")
    assert "2 caches with 50,212 samples are lost: 17.9 GiB in memory and 0 B on disk" in said
    assert "It is in use now" in said
    page.press("Cancel")
    assert not page.ask("$('#destroy').open")
    assert not any(request.method == "DELETE" for request in fake.requests)

    page.destroy("sweep")
    for wrong in ("wrong", "wröng"):
        page.fill("#destroy-token", wrong)
        page.press("Destroy")
        page.says("[role=alert]", "The token was refused")
        assert page.ask("sessionStorage.length") == 0
    assert fake.destroyed == set()
    page.fill("#destroy-token", f" {fake.token}\n")
    page.key("Enter")
    page.says("#notice", "Session sweep is destroyed; 17.9 GiB are free again.")
    assert fake.destroyed == {88_120}
    page.until(f"!$('{card('sweep')}')")

    page.destroy("eval")
    assert not page.is_visible("#destroy-token"), "it has the token already"
    page.press("Destroy")
    page.says("#notice", "Session eval is destroyed")

    assert page.ask("[localStorage.length, document.cookie]") == [0, ""]
    deletes = [request for request in fake.requests if request.method == "DELETE"]
    assert [request.authorization for request in deletes] == ["Bearer wrong"] + [f"Bearer {fake.token}"] * 2
    assert not any(fake.token in request.path or request.cookie for request in fake.requests)
    assert fake.token not in page.ask("location.href")


def test_a_token_of_a_server_that_has_gone_is_forgotten(visit: Any, fake: FakeServer) -> None:
    page = visit(fake)
    page.says("#state", "live")
    page.ask("sessionStorage.setItem('hotset-token', 'old')")
    page.destroy("eval")
    assert not page.is_visible("#destroy-token")
    page.press("Destroy")
    page.says("[role=alert]", "The token was refused")
    assert page.ask("sessionStorage.length") == 0
    page.fill("#destroy-token", fake.token)
    page.key("Enter")
    page.says("#notice", "Session eval is destroyed")

    fake.token, fake.guarded = "new", True
    page.later()
    page.says("#unlock [role=alert]", "The token was refused")
    assert page.ask("sessionStorage.length") == 0


def test_the_dialog_serves_the_keyboard(visit: Any, fake: FakeServer) -> None:
    page = visit(fake)
    page.says("#state", "live")
    page.key("Tab")
    focused = "document.activeElement.ariaLabel ?? document.activeElement.id"
    assert page.ask(focused) == "Destroy session imagenet…"
    page.key("Enter")
    assert page.ask(focused) == "destroy-token"
    page.key("Escape")
    page.until("!$('#destroy').open")
    assert page.ask(focused) == "Destroy session imagenet…"


def test_a_server_that_asks_for_its_token_gets_it(visit: Any) -> None:
    with FakeServer(guarded=True) as fake:
        page = visit(fake)
        page.says("#state", "locked")
        assert page.ask("$$('section').filter(e => e.checkVisibility()).length") == 0
        page.fill("#unlock-token", "wrong")
        page.key("Enter")
        page.says("#unlock [role=alert]", "The token was refused")
        page.fill("#unlock-token", fake.token)
        page.key("Enter")
        page.says("#state", "live")
        assert page.is_visible(card("imagenet"))
        assert not page.is_visible("#unlock")
        assert not any(fake.token in request.path for request in fake.requests)


@pytest.mark.parametrize("width", [400, 820, 1600])
def test_it_fits_the_window_in_light_and_dark(visit: Any, fake: FakeServer, width: int) -> None:
    page = visit(fake)
    page.says("#state", "live")
    grounds = set()
    for scheme in ("light", "dark"):
        page.browser.look(width, scheme)
        assert page.ask("document.documentElement.scrollWidth") == width
        grounds.add(page.ask("getComputedStyle(document.body).backgroundColor"))
    assert len(grounds) == 2


def test_it_works_with_the_server_itself(visit: Any) -> None:
    from hotset.cli import server
    from hotset.cli.client import client
    from hotset.server.options import Options

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = server.start(Options.parse(port=port))
    try:
        page = visit(f"{place.url}/")
        page.says("#empty", "There are no sessions yet")
        client(port).call("POST", "/api/sessions", {"name": "real", "memory": "16MiB"})
        page.later()
        page.says("h2", "real")
        page.says(f"{card('real')} .amount", "0 B of 16 MiB")
        page.destroy("real")
        page.fill("#destroy-token", "wrong")
        page.key("Enter")
        page.says("[role=alert]", "The token was refused")
        page.fill("#destroy-token", server.token(port))
        page.key("Enter")
        page.says("#notice", "Session real is destroyed")
        page.says("#empty", "There are no sessions yet")
    finally:
        server.stop(port)
        if place.log:
            Path(place.log).unlink()
