"""What web pages may not do: a browser sends requests for whatever page its user looks at."""

from __future__ import annotations

import logging

import httpx
import pytest

from runner import AsyncLLM
from runner.server.browsers import Hosts
from server.running import serving

FOREIGN = [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": "https://127.0.0.1:1"}]


def head(web: httpx.Client, path: str, headers: dict[str, str]) -> httpx.Response:
    """The answer to a GET, read whole only if it is a refusal: a stream has no end."""
    with web.stream("GET", path, headers=headers) as told:
        if told.status_code != 200:
            told.read()
        return told


@pytest.mark.parametrize("headers", FOREIGN)
def test_a_foreign_page_changes_and_reads_nothing(web: httpx.Client, headers: dict[str, str]) -> None:
    told = [
        web.post("/reset_prefix_cache", headers=headers),
        web.post("/v1/completions", json={"prompt": "w1", "max_tokens": 1}, headers=headers),
        web.get("/metrics", headers=headers),
        web.get("/v1/requests/x/explain", headers=headers),
        head(web, "/watch", headers),
    ]
    assert [one.status_code for one in told] == [403] * 5
    assert {one.json()["error"]["code"] for one in told} == {"origin_not_allowed"}
    assert "--allowed-origins" in told[0].json()["error"]["message"]
    assert web.get("/health", headers=headers).status_code == 200


def test_the_servers_own_page_may(web: httpx.Client) -> None:
    own = {"Origin": str(web.base_url).rstrip("/")}
    behind_a_proxy = {"Origin": "https://llm.example", "Sec-Fetch-Site": "same-origin"}
    for headers in ({}, own, behind_a_proxy):
        told = web.post("/v1/completions", json={"prompt": "w1", "max_tokens": 1}, headers=headers)
        assert told.status_code == 200, told.text
    elsewhere = {"Origin": own["Origin"], "Sec-Fetch-Site": "cross-site"}
    assert web.post("/reset_prefix_cache", headers=elsewhere).status_code == 403


def test_pages_that_were_allowed_may(llm: AsyncLLM) -> None:
    for allowed, origin, status in (
        (("http://page",), "http://page", 200),
        (("http://page",), "http://other", 403),
        (("*",), "http://any", 200),
    ):
        with serving(llm, allowed_origins=allowed) as running:
            told = httpx.post(f"{running.url}/reset_prefix_cache", headers={"Origin": origin})
            assert told.status_code == status
            assert ("access-control-allow-origin" in told.headers) == (status == 200)


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "multipart/form-data", "text/plain;charset=x"])
def test_forms_change_nothing(web: httpx.Client, kind: str) -> None:
    """Pages may send these types anywhere without asking, and old browsers without an Origin."""
    told = web.post("/reset_prefix_cache", content=b"a=b", headers={"Content-Type": kind})
    assert told.status_code == 400
    assert "application/json" in told.json()["error"]["message"]
    assert web.post("/reset_prefix_cache", json={}).json() == {"reset": True}
    assert web.post("/reset_prefix_cache").json() == {"reset": True}


def test_a_name_that_points_here_by_a_strangers_will_is_refused(
    llm: AsyncLLM, caplog: pytest.LogCaptureFixture
) -> None:
    """DNS rebinding: to the browser the page is of the same origin."""
    page = {"Host": "evil.example:8000", "Origin": "http://evil.example:8000", "Sec-Fetch-Site": "same-origin"}
    with (
        caplog.at_level(logging.WARNING, "kvtier.server"),
        serving(llm) as running,
        httpx.Client(base_url=running.url) as web,
    ):
        told = [
            web.post("/reset_prefix_cache", headers=page),
            *(head(web, path, {"Host": "evil.example:8000"}) for path in ("/metrics", "/watch", "/v1/models")),
        ]
    assert [one.status_code for one in told] == [403] * 4
    assert {one.json()["error"]["code"] for one in told} == {"host_not_allowed"}
    assert "--allowed-hosts" in told[0].json()["error"]["message"]
    assert len([line for line in caplog.messages if "evil.example" in line]) == 1  # and not one for each


def test_addresses_and_names_of_this_machine_are_its_own(web: httpx.Client) -> None:
    assert web.get("/health", headers={"Host": "evil.example"}).status_code == 200  # tells how it is, and no more
    port = web.base_url.port
    for host in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", "LOCALHOST.", "10.1.2.3"):
        assert web.get("/v1/models", headers={"Host": host}).status_code == 200, host


def test_with_a_key_any_name_will_do(llm: AsyncLLM) -> None:
    """A page that has the name has no key."""
    with serving(llm, api_keys=("key",)) as running:
        headers = {"Host": "llm.example", "Authorization": "Bearer key"}
        assert httpx.get(f"{running.url}/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("allowed", "bound", "needs_key", "taken", "refused"),
    [
        ((), "127.0.0.1", False, ["localhost", "x.localhost", "127.0.0.2", "::1"], ["kvtier", "a.local", "evil.com"]),
        ((), "me.example", False, ["me.example", "kvtier"], ["evil.com", "evil.me.example"]),
        ((), "0.0.0.0", False, ["kvtier", "10.0.0.7", "kvtier.ns.svc.cluster.local", "a.internal"], ["evil.com"]),
        ((), "::", False, ["kvtier", "fd00::1"], ["evil.com", "local.evil.com"]),
        ((), "127.0.0.1", True, ["evil.com"], []),
        (("llm.example",), "0.0.0.0", False, ["LLM.example", "10.0.0.7", "localhost"], ["kvtier", "evil.com"]),
        (("llm.example",), "0.0.0.0", True, ["llm.example"], ["evil.com"]),
        (("*",), "127.0.0.1", False, ["evil.com"], []),
    ],
)
def test_which_names_are_taken(
    allowed: tuple[str, ...], bound: str, needs_key: bool, taken: list[str], refused: list[str]
) -> None:
    hosts = Hosts(allowed, bound, needs_key)

    def written(name: str) -> list[str]:
        name = f"[{name}]" if ":" in name else name
        return [name, f"{name}:8000"]

    assert [host for name in taken for host in written(name) if not hosts.takes(host)] == []
    assert [host for name in refused for host in written(name) if hosts.takes(host)] == []
