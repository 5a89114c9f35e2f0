"""The viewer's server: closed without the token, only files that a run refers to, harmless texts."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from commands import fail
from error_cases import raises
from page_cases import NASTY, decode
from viewer_cases import make_run

from saccade.errors import ConfigError, ModelError, RunError
from saccade.reporting.viewer.library import Library
from saccade.reporting.viewer.plain_json import dump_json
from saccade.reporting.viewer.server import Viewer, ViewerServer

TOKEN = "a-token"
PATHS = (
    "/",
    "/api/runs",
    "/api/episodes?run=a",
    "/frame?run=a&ref=x&image=0",
    "/media?run=a&ref=x&number=0",
    "/static/main.js",
    "/ask/question?question=x",
)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("runs") / "a", hostile=NASTY)
    library = Library([folder], load_decoder=lambda folder: decode)
    library.refresh()
    return library


@pytest.fixture
def get(library):
    """Return a function that requests a path with the cookie, or with other cookies."""
    app = Viewer(library).build_app(TOKEN, "cookie")

    def request(path, cookies=(("cookie", TOKEN),), **headers):
        async def send():
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://viewer", cookies=dict(cookies)
            ) as client:
                return await client.get(path, headers=headers)

        return asyncio.run(send())

    return request


def list_rows(get, **filters):
    return get("/api/episodes?" + str(httpx.QueryParams({"run": "a", "limit": 500, **filters}))).json()["rows"]


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_served_without_the_token(get, path):
    for cookies in ((), (("cookie", "another"),), (("other", TOKEN),)):
        response = get(path, cookies)
        assert response.status_code == 403
        assert TOKEN not in response.text
    assert get(path + ("&" if "?" in path else "?") + "token=wrong", ()).status_code == 403


def test_the_token_of_the_address_becomes_a_cookie(get):
    response = get(f"/?token={TOKEN}", ())
    assert response.status_code == 303
    assert response.headers["location"] == "/"
    assert "httponly" in response.headers["set-cookie"].lower()
    assert "samesite=strict" in response.headers["set-cookie"].lower()
    page = get("/")
    policy = page.headers["content-security-policy"]
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert "https:" not in page.text


def test_frames_and_videos_are_numbers_of_an_episode(get):
    (ref,) = {row["ref"] for row in list_rows(get, stage="before", task="w-0")}
    query = f"run=a&ref={ref}"
    frame = get(f"/frame?{query}&image=0&size=full")
    assert frame.headers["content-type"] == "image/png"
    assert get(f"/frame?{query}&image=0").content.startswith(b"\xff\xd8")
    whole = get(f"/media?{query}&number=0")
    part = get(f"/media?{query}&number=0", range="bytes=100-199")
    assert part.status_code == 206
    assert part.content == whole.content[100:200]
    assert whole.headers["content-type"] == "video/mp4"
    for path in (
        f"/frame?{query}&image=99",
        f"/frame?{query}&image=-1",
        f"/frame?{query}&image=../recipe.yaml",
        f"/media?{query}&number=1",
        "/media?run=a&ref=../../recipe.yaml&number=0",
        "/media?run=..&ref=x&number=0",
        "/static/../server.py",
        "/static/%2e%2e/server.py",
    ):
        assert get(path).status_code == 404, path


def test_a_changed_clip_gives_no_frame(get, tmp_path):
    run = make_run(tmp_path / "b", num_steps=1)
    library = Library([run])
    library.refresh()
    ref = library.get("b").index.list_episodes({})[1][0]["ref"]
    next((run / "media").iterdir()).write_bytes(b"another file")
    viewer = Viewer(library).build_app(TOKEN, "cookie")

    async def send():
        cookies = {"cookie": TOKEN}
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(viewer), base_url="http://v", cookies=cookies
        ) as client:
            return await client.get(f"/frame?run=b&ref={ref}&image=0")

    assert asyncio.run(send()).status_code == 409


def test_texts_hold_no_control_characters(get):
    (row,) = list_rows(get, task="hostile")
    text = get(f"/api/episode?run=a&ref={row['ref']}").text
    assert "<script>alert" in json.loads(text)["task"]["question"]  # it is text, and stays whole
    assert not set("\x00\u202e\ud800") & set(json.dumps(json.loads(text), ensure_ascii=False))


def test_tokens_have_the_values_that_the_trainer_computed(get):
    data = get("/api/tokens?run=a&ref=rl/2/0/1").json()
    assert data["note"] == ""
    sampled = [part for part in data["conversations"][0]["segments"] if part["origin"] == "sampled"]
    start = sum(part["tokens"] for part in data["conversations"][0]["segments"][:2])  # prompt and prefill
    piece = sampled[0]["pieces"][2]
    assert piece["entropy"] == pytest.approx((start + 2) / 2, rel=1e-3)
    assert piece["logprob_diff"] == pytest.approx((start + 2) / 1000, rel=1e-3)
    assert piece["advantage"] != 0
    assert piece["logprob"] == pytest.approx(-0.2)
    dropped = get("/api/tokens?run=a&ref=rl/2/1/1").json()
    assert "no step trained on this one" in dropped["note"]
    assert {piece["logprob_diff"] for part in dropped["conversations"][0]["segments"] for piece in part["pieces"]} == {
        None
    }


def test_an_episode_has_the_reasons_of_its_rewards(get):
    score = get("/api/episode?run=a&ref=rl/2/0/1").json()["score"]
    assert score["reasons"] == {"accuracy": "answer 'red' is episode 1"}


def test_json_has_no_numbers_that_browsers_reject():
    assert (
        dump_json({"a": [float("nan"), float("inf"), 1.5], "b\x1b": "\u202e"}) == '{"a":[null,null,1.5],"b␛":"\ufffd"}'
    )


def test_an_occupied_port_is_an_error_of_one_sentence(library):
    first = ViewerServer(library)
    port = int(first.address.rpartition(":")[2].partition("/")[0])
    with raises(RunError, key="port", value=port):
        ViewerServer(library, port=port)
    first.close()


@pytest.mark.parametrize("name", ["folder", "/dev/full", "file/page.html"])
def test_an_export_that_cannot_be_written_fails_before_the_work(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    page = tmp_path / name
    fail(RunError, "view", tmp_path, "--export", page, key=str(page))
    assert (tmp_path / "folder").is_dir()
    assert Path("/dev/full").is_char_device()


def test_what_cannot_be_asked_is_refused_before_the_viewer_starts(tmp_path):
    fail(ModelError, "view", tmp_path, "--ask", tmp_path, key=str(tmp_path))
    fail(ConfigError, "view", tmp_path, "--ask", tmp_path, "--set", "rl.optm.lr=1", key="rl.optm.lr")
    fail(RunError, "view", tmp_path, "--set", "seed=1", key="ask")
