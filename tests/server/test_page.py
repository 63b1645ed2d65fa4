"""The page at `/`: one file without outside resources, in a real browser where there is one."""

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from browser import PROGRAM, Browser
from http_servers import MODEL, SAID, Served, tiny_file, tools_template

pytestmark = pytest.mark.one_build


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with Served(tiny_file(tmp_path_factory.mktemp("tools"), tools_template("")), limits={"aliases": ["two"]}) as made:
        yield made


def root(served):
    return served.url.removesuffix("v1")


class Reader(HTMLParser):
    """The tags that are open, and all ids and places of a page."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.places = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "link", "input"):
            self.open.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            assert not name.startswith("on"), "no script stands in an attribute, which its policy forbids"
            if name in ("src", "href", "action"):
                self.places.append(value)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_file(served):
    with urlopen(root(served), timeout=60) as page:
        text, headers = page.read().decode(), page.headers
    assert headers["content-type"] == "text/html; charset=utf-8"
    found = Reader(text)
    assert found.open == []
    assert found.places == ["data:,"]
    assert not re.search(r"https?:|@import|url\(|innerHTML|eval", text), "texts of a network become text alone"
    assert sorted(set(re.findall(r'at\("(\w+)"\)', text))) == sorted(set(found.ids) - {"chat"})
    policy = dict(each.strip().split(" ", 1) for each in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"].startswith("'sha256-")
    with urlopen(Request(root(served), method="HEAD"), timeout=60) as page:
        assert page.read() == b""


@pytest.mark.skipif(PROGRAM is None, reason="without a browser")
def test_a_chat_in_a_browser(served):
    """It shows what runs; an answer streams in with its thoughts; the next turn has the first one before it."""
    folder = os.environ.get("KVCACHE_TEST_PICTURES")
    with Browser() as browser:
        browser.open(root(served))
        browser.until("document.querySelectorAll('#state tr').length >= 8")
        assert browser.run("[...document.getElementById('model').options].map(each => each.value)") == [MODEL, "two"]

        def say(text):
            browser.run(f"document.getElementById('said').value = {text!r}")
            browser.run("document.getElementById('form').requestSubmit()")
            browser.until("document.getElementById('stop').disabled")
            parts = "document.querySelector('.assistant:last-child').children"
            return browser.run(f"[...{parts}].map(each => each.innerText)")

        served.say("<think>hm</think>It <b>rains</b> & snows.")
        name, thought, answer, note = say("What weather is it?")
        assert (name, thought.strip(), answer) == (MODEL, "hm", "It <b>rains</b> & snows.")
        assert re.search(r"tokens of prompt, 0 of them cached · \d+ new ones · first after", note)
        served.say("Yes.")
        _, answer, note = say("Still?")
        assert answer == "Yes."
        assert int(re.search(r"(\d+) of them cached", note)[1]) > 0
        assert browser.run("messages.map(each => each.role).join()") == "user,assistant,user,assistant"
        if folder is not None:
            browser.until("document.getElementById('state').innerText.match(/Requests ended\\s+[1-9]/)")
            browser.picture(Path(folder) / "page.png")
        served.network.error = RuntimeError("broken")
        assert "the request failed: RuntimeError" in say("And now?")[-1]
        served.network.error = None
        served.say("It rains.\n" * 60)
        browser.call("Emulation.setDeviceMetricsOverride", width=420, height=700, deviceScaleFactor=1, mobile=True)
        say("On a phone?")
        below = "innerHeight - document.getElementById('form').getBoundingClientRect().bottom"
        assert browser.run(below) >= 0, "a long answer leaves the form where it is"
        talk = "document.getElementById('talk')"
        assert browser.run(f"{talk}.scrollHeight - {talk}.scrollTop - {talk}.clientHeight") < 40, "its end is in view"
        browser.run(f"{talk}.scrollTop = 0; follow(() => made('p', 'more', {talk}))")
        assert browser.run(f"{talk}.scrollTop") == 0, "but not where a person reads above"
        browser.run("document.getElementById('clear').click()")
        assert browser.run("messages.length + document.getElementById('talk').children.length") == 0
        assert browser.errors == []


@pytest.mark.skipif(PROGRAM is None, reason="without a browser")
def test_keys_and_stops_in_a_browser(tmp_path):
    with Served(tiny_file(tmp_path, tools_template("")), keys={"sesame": "a"}) as served, Browser() as browser:
        browser.open(root(served))
        browser.until("document.getElementById('state').innerText.includes('wants a key')")
        browser.run("document.getElementById('key').value = 'sesame'; watch()")
        browser.until("document.getElementById('model').options.length === 1")
        served.say(SAID * 3)
        served.network.closed = True
        for _ in range(20):
            served.network.permits.release()
        browser.run("document.getElementById('said').value = 'x'; document.getElementById('form').requestSubmit()")
        browser.until("document.querySelector('.assistant .thought') !== null")
        browser.run("document.getElementById('stop').click()")
        browser.until("document.getElementById('talk').innerText.includes('stopped')")
        served.network.open()


# -- pages of other origins -------------------------------------------------------------------------------------


def test_origins(tmp_path):
    origin = "https://example.com"
    with Served(tiny_file(tmp_path), limits={"origins": [origin]}) as served:
        def asked(origin, method="OPTIONS", **headers):
            found = {"Origin": origin, **{name.replace("_", "-"): value for name, value in headers.items()}}
            try:
                with urlopen(Request(f"{served.url}/models", None, found, method=method), timeout=60) as page:
                    return page.status, page.headers
            except OSError as error:
                return error.code, error.headers

        wanted = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "authorization"}
        status, headers = asked(origin, **wanted)
        assert (status, headers["access-control-allow-origin"]) == (200, origin)
        assert "authorization" in headers["access-control-allow-headers"]
        status, headers = asked(origin, "GET")
        assert (status, headers["access-control-allow-origin"]) == (200, origin)
        assert "x-request-id" in headers["access-control-expose-headers"]
        status, headers = asked("https://other.example", **wanted)
        assert (status, headers["access-control-allow-origin"]) == (400, None)
    for odd in ("*", "example.com", "https://a.b/path", "null"):
        with pytest.raises(ValueError, match="cors_origin: expected"):
            Served(tmp_path / "tiny.gguf", limits={"origins": [odd]})
    Served(tmp_path / "tiny.gguf", keys={"k": None}, limits={"origins": ["*"]})


def test_without_the_option_no_page_may_ask(served):
    request = Request(f"{served.url}/models", None, {"Origin": "https://example.com"})
    with urlopen(request, timeout=60) as page:
        assert page.headers["access-control-allow-origin"] is None
        assert json.loads(page.read())["data"]
