"""The status page: what holds for its file alone, and how it behaves in a real browser.

The browser is Debian's Chromium, driven by playwright, against a stand-in for the server and, at the end,
against the server itself. Where either is missing those tests are skipped; a page that raises an error, or is
refused something by its content policy, fails the test that it happened in.
"""

from __future__ import annotations

import re
import shutil
import socket
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import psutil
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

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SOON = 60_000  # ms: only what never comes takes that long


@pytest.fixture
def _nothing_left_behind() -> None:
    """In place of the check after each test: the browser, which serves all tests, starts and ends processes
    as it likes. That none is left at its end is held by :func:`browser`."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("there is no chromium on this machine; Debian's package of that name has it")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with playwright.sync_playwright() as driver:
        context = driver.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("chromium"), executable_path=program, args=FLAGS
        )
        context.set_default_timeout(SOON)
        yield context
        context.close()
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    _, alive = psutil.wait_procs(left, timeout=60)
    assert not alive


class Page:
    """A tab on a server's page. ``errors`` are the console's, but for requests that were meant to fail."""

    def __init__(self, browser: Any, url: str) -> None:
        self.errors: list[str] = []
        self.tab = browser.new_page()
        self.tab.on("pageerror", lambda error: self.errors.append(str(error)))
        self.tab.on("console", self._heard)
        self.tab.clock.install()
        self.tab.clock.pause_at(time.time() + 60)
        self.tab.goto(url)

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            self.errors.append(message.text)

    def says(self, selector: str, text: str) -> None:
        """Wait until an element holds a text."""
        self.tab.locator(selector, has_text=text).first.wait_for()

    def later(self) -> None:
        """Let two seconds pass for the page, whose clock stands still otherwise: it looks again."""
        self.tab.clock.fast_forward(2_000)

    def card(self, name: str) -> Any:
        return self.tab.get_by_role("region", name=f"Session {name}", exact=True)

    def destroy(self, name: str) -> Any:
        self.card(name).get_by_role("button").click()
        return self.tab.get_by_role("dialog", name=f"Destroy session {name}?")


@pytest.fixture
def visit(browser: Any) -> Iterator[Any]:
    """Opens pages; at the end none of them may have raised an error."""
    pages: list[Page] = []

    def visit(fake: FakeServer | str) -> Page:
        pages.append(Page(browser, fake if isinstance(fake, str) else fake.url))
        return pages[-1]

    yield visit
    for page in pages:
        page.tab.close()
    assert [error for page in pages for error in page.errors] == []


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def test_it_shows_what_the_server_says_and_what_changes(visit: Any, fake: FakeServer) -> None:
    page = visit(fake)
    page.says("#state", "live")
    first, fill = fake.tick, "table .bar .amount"
    card = page.card("imagenet")
    image = moving(first)[0]
    assert page.tab.locator("h2:visible").all_text_contents() == ["imagenet", "sweep", "eval"]
    assert card.locator(fill).first.text_content() == f"{image['caches'][0]['cached']:,} of 1,281,167"
    memory = card.get_by_role("meter", name="Memory")
    used, limit = image["memory"]["used"], image["memory"]["limit"]
    assert memory.get_attribute("aria-valuetext") == f"{format_bytes(used)} of {format_bytes(limit)}"
    assert float(memory.get_attribute("aria-valuenow")) == pytest.approx(100 * used / limit, abs=0.06)
    box, track = memory.locator("div").bounding_box(), memory.bounding_box()
    assert box["width"] / track["width"] == pytest.approx(used / limit, abs=0.02)
    assert "stale" in page.card("sweep").locator("tr", has_text="Decathlon").text_content()

    card.get_by_role("button").focus()
    later = moving(first + 1)[0]["caches"][0]["cached"]
    page.later()
    page.says(fill, f"{later:,} of 1,281,167")
    assert (
        page.tab.evaluate("document.activeElement.getAttribute('aria-label')") == "Destroy session imagenet…"
    )


def test_machines_that_share_a_session_have_a_table(visit: Any, fake: FakeServer) -> None:
    page = visit(fake)
    page.says("#state", "live")
    image = moving(fake.tick)[0]
    table = page.card("imagenet").get_by_role("table", name="Machines")
    titles = table.get_by_role("columnheader").all_text_contents()
    rows = table.locator("tbody tr")
    cells = [dict(zip(titles, row.locator("td").all_text_contents(), strict=True)) for row in rows.all()]
    named = table.locator("td:first-child > *").all_text_contents()
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
    rate = page.card("imagenet").locator("dd[data-is=hits]").text_content()
    assert rate == f"{hits / (hits + misses):.1%}", "what others sent was no miss"
    assert page.tab.get_by_role("table", name="Machines").count() == 1, "others are on one machine alone"

    fake.still = [image | {"machines": [image["machines"][0], third | {"latency": 1.23, "failures": 4}]}]
    page.later()
    page.says(".machines td", "1.23 s")
    assert rows.locator("td:first-child > span").all_text_contents() == ["gpu1-5e0c71aa", "gpu3-0d6ea2c4"]

    page.tab.set_viewport_size({"width": 820, "height": 900})
    head = page.card("imagenet").get_by_role("heading", name="Machines")
    assert head.is_visible(), "where the columns' heads are not"
    fake.still = [image | {"machines": []}]
    page.later()
    table.wait_for(state="hidden")
    assert head.is_hidden()


def test_charts_have_axes_gaps_and_a_value_under_the_pointer(visit: Any, fake: FakeServer) -> None:
    page = visit(fake)
    page.says("#state", "live")
    charts = page.card("sweep").locator("figure")
    speed = charts.first.locator("svg")
    labels = speed.locator("text").all_text_contents()
    assert labels[:3] == ["0", "10k", "20k"]
    assert labels[3:] == ["now", *(f"\N{MINUS SIGN}{minutes} min" for minutes in (2, 4, 6, 8, 10))]
    assert speed.locator(".curve").get_attribute("d").count("L") > 250
    assert re.fullmatch(
        r"Samples per second over the last 10 minutes: 1\d,\d{3} now, 1\d,\d{3} at most",
        speed.get_attribute("aria-label"),
    )
    speed.scroll_into_view_if_needed()
    area = speed.bounding_box()
    page.tab.mouse.move(area["x"] + area["width"] / 2, area["y"] + 50)
    page.says("figcaption", "ago: 1")
    assert speed.locator(".cursor").count() == 1

    # What the server does not know is left open, not drawn as nothing.
    page.tab.route("**/api/history", lambda route: route.fulfill(json=_holes()))
    page.tab.mouse.move(0, 0)
    page.later()
    page.says("figcaption", "70 now, 80 at most")
    assert speed.locator(".curve").get_attribute("d").count("M") == 2


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
        cells = page.tab.locator("td[data-label=Memory]").all_text_contents()
    assert cells == [format_bytes(amount) for amount in amounts]


def test_text_from_the_server_stays_text(visit: Any) -> None:
    evil = "<img src=x onerror=\"document.title='taken'\">"
    caches = [cache(1, f"{evil}1", 10, 10, state=f"{evil}2")]
    made = session(5, evil, GIB, caches, disk={"folder": f"/{evil}", "used": 0})
    with FakeServer(sessions=[made]) as fake:
        page = visit(fake)
        page.says("#state", "live")
        dialog = page.destroy(evil)
        assert dialog.get_by_role("heading").text_content() == f"Destroy session {evil}?"
        body = page.tab.locator("body").text_content()
        assert all(text in body for text in (f"{evil}1", f"{evil}2", f"spills to /{evil}"))
        assert page.tab.locator("img").count() == 0
        assert page.tab.title() == "hotset"


def test_with_no_sessions_it_says_how_to_make_one(visit: Any) -> None:
    with FakeServer(sessions=[]) as fake:
        fake.spill = False
        page = visit(fake)
        page.says("#empty", "hotset session create imagenet --memory 120GiB")
        assert page.tab.locator("[data-bar=spill]").is_hidden()
        fake.still = [session(3, "first", GIB, [])]
        page.later()
        page.says("h2", "first")
        assert page.tab.locator("#empty").is_hidden()


def test_a_server_that_goes_is_said_and_waited_for(visit: Any, fake: FakeServer) -> None:
    page = visit(fake)
    page.says("#state", "live")
    fake.stop()
    try:
        page.later()
        page.says("#notice", "The server has not answered since")
        page.says("#state", "no answer")
        assert page.card("imagenet").is_visible(), "what was known goes on being shown"
    finally:
        fake.start()
    page.later()
    page.says("#state", "live")
    assert page.tab.locator("#notice").text_content() == ""


def test_destroying_asks_says_what_is_lost_and_needs_the_token(visit: Any, fake: FakeServer) -> None:
    page = visit(fake)
    page.says("#state", "live")
    dialog = page.destroy("sweep")
    assert (
        "2 caches with 50,212 samples are lost: 17.9 GiB in memory and 0 B on disk" in dialog.text_content()
    )
    assert "It is in use now" in dialog.text_content()
    dialog.get_by_role("button", name="Cancel").click()
    assert dialog.is_hidden()
    assert not any(request.method == "DELETE" for request in fake.requests)

    page.destroy("sweep")
    for wrong in ("wrong", "wröng"):
        dialog.get_by_label("Token").fill(wrong)
        dialog.get_by_role("button", name="Destroy").click()
        page.says("[role=alert]", "The token was refused")
        assert page.tab.evaluate("sessionStorage.length") == 0
    assert fake.destroyed == set()
    dialog.get_by_label("Token").fill(f" {fake.token}\n")
    page.tab.keyboard.press("Enter")
    page.says("#notice", "Session sweep is destroyed; 17.9 GiB are free again.")
    assert fake.destroyed == {88_120}
    page.card("sweep").wait_for(state="detached")

    dialog = page.destroy("eval")
    assert dialog.get_by_label("Token").is_hidden(), "it has the token already"
    dialog.get_by_role("button", name="Destroy").click()
    page.says("#notice", "Session eval is destroyed")

    assert page.tab.evaluate("[localStorage.length, document.cookie]") == [0, ""]
    deletes = [request for request in fake.requests if request.method == "DELETE"]
    assert [request.authorization for request in deletes] == ["Bearer wrong"] + [f"Bearer {fake.token}"] * 2
    assert not any(fake.token in request.path or request.cookie for request in fake.requests)
    assert fake.token not in page.tab.url


def test_a_token_of_a_server_that_has_gone_is_forgotten(visit: Any, fake: FakeServer) -> None:
    page = visit(fake)
    page.says("#state", "live")
    page.tab.evaluate("sessionStorage.setItem('hotset-token', 'old')")
    dialog = page.destroy("eval")
    assert dialog.get_by_label("Token").is_hidden()
    dialog.get_by_role("button", name="Destroy").click()
    page.says("[role=alert]", "The token was refused")
    assert page.tab.evaluate("sessionStorage.length") == 0
    dialog.get_by_label("Token").fill(fake.token)
    page.tab.keyboard.press("Enter")
    page.says("#notice", "Session eval is destroyed")

    fake.token, fake.guarded = "new", True
    page.later()
    page.says("#unlock [role=alert]", "The token was refused")
    assert page.tab.evaluate("sessionStorage.length") == 0


def test_the_dialog_serves_the_keyboard(visit: Any, fake: FakeServer) -> None:
    page = visit(fake)
    page.says("#state", "live")
    page.tab.keyboard.press("Tab")
    focused = "document.activeElement.getAttribute('aria-label') ?? document.activeElement.id"
    assert page.tab.evaluate(focused) == "Destroy session imagenet…"
    page.tab.keyboard.press("Enter")
    assert page.tab.evaluate(focused) == "destroy-token"
    page.tab.keyboard.press("Escape")
    assert page.tab.get_by_role("dialog").count() == 0
    assert page.tab.evaluate(focused) == "Destroy session imagenet…"


def test_a_server_that_asks_for_its_token_gets_it(visit: Any) -> None:
    with FakeServer(guarded=True) as fake:
        page = visit(fake)
        page.says("#state", "locked")
        assert page.tab.locator("section:visible").count() == 0
        page.tab.locator("#unlock-token").fill("wrong")
        page.tab.keyboard.press("Enter")
        page.says("#unlock [role=alert]", "The token was refused")
        page.tab.locator("#unlock-token").fill(fake.token)
        page.tab.keyboard.press("Enter")
        page.says("#state", "live")
        assert page.card("imagenet").is_visible()
        assert page.tab.locator("#unlock").is_hidden()
        assert not any(fake.token in request.path for request in fake.requests)


@pytest.mark.parametrize("width", [400, 820, 1600])
def test_it_fits_the_window_in_light_and_dark(visit: Any, fake: FakeServer, width: int) -> None:
    page = visit(fake)
    page.tab.set_viewport_size({"width": width, "height": 900})
    page.says("#state", "live")
    assert page.tab.evaluate("document.documentElement.scrollWidth") == width
    grounds = set()
    for scheme in ("light", "dark"):
        page.tab.emulate_media(color_scheme=scheme)
        grounds.add(page.tab.evaluate("getComputedStyle(document.body).backgroundColor"))
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
        assert page.card("real").get_by_text("0 B of 16 MiB").is_visible()
        dialog = page.destroy("real")
        dialog.get_by_label("Token").fill("wrong")
        page.tab.keyboard.press("Enter")
        page.says("[role=alert]", "The token was refused")
        dialog.get_by_label("Token").fill(server.token(port))
        page.tab.keyboard.press("Enter")
        page.says("#notice", "Session real is destroyed")
        page.says("#empty", "There are no sessions yet")
    finally:
        server.stop(port)
        if place.log:
            Path(place.log).unlink()
