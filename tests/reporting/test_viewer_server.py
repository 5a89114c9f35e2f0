"""The viewer's server: closed without the token, only files that a run refers to, harmless texts."""

import asyncio
import gzip
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from commands import fail
from error_cases import raises
from page_cases import NASTY, decode
from viewer_cases import make_run, write_benchmark

from saccade.errors import ConfigError, DataError, ModelError, RunError
from saccade.ledger import ImageRef
from saccade.reporting.viewer.asking import Questions
from saccade.reporting.viewer.index import EpisodeIndex
from saccade.reporting.viewer.library import Library
from saccade.reporting.viewer.parameters import CHOICES, INTEGERS, NUMBERS
from saccade.reporting.viewer.plain_json import dump_json
from saccade.reporting.viewer.server import Viewer, ViewerServer
from saccade.training.token_log import SUFFIX
from saccade.types import ToolResult

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


def build_get(library, questions=None):
    """Return a function that requests a path with the cookie, or with other cookies."""
    app = Viewer(library, questions).build_app(TOKEN, "cookie")

    def request(path, cookies=(("cookie", TOKEN),), method="GET", **headers):
        async def send():
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://viewer", cookies=dict(cookies)
            ) as client:
                return await client.request(method, path, headers=headers)

        return asyncio.run(send())

    request.app = app
    return request


@pytest.fixture
def get(library):
    return build_get(library)


@pytest.fixture
def questions():
    questions = Questions("a model", lambda *given: None)
    yield questions
    questions.close()


def test_the_event_of_a_result_counts_both_frames_of_a_pair():
    pair = ImageRef(path="clip.mp4", digest="d", time=1.0, second_time=2.0, width=32, height=32)
    shown = ToolResult(images=(pair, replace(pair, second_time=1.0)), was_executed=True)  # three frames

    def ask(question, videos, images, on_event):
        on_event("result", {"turn": 0, "index": 0, "result": shown})
        raise DataError("the model has not answered")

    questions = Questions("a model", ask)
    result, error = questions.stream("Which?", ())
    questions.close()
    assert (result["event"], result["ok"], error["event"]) == ("result", True, "error")
    assert result["text"].split()[0] == "3"


def list_routes(app):
    """Return the path and method of every route that answers requests of pages."""
    routes = [
        (route.path + own.path, own.methods)
        for route in app.routes
        for own in (getattr(route, "routes", None) or ())
        if route.path == "/api"
    ]
    routes += [(route.path, route.methods) for route in app.routes if getattr(route, "methods", None)]
    return [(path, "POST" if "POST" in methods else "GET") for path, methods in routes if path != "/"]


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
        f"/media?{query}&number=1",
        "/media?run=a&ref=../../recipe.yaml&number=0",
        "/media?run=..&ref=x&number=0",
        "/static/../server.py",
        "/static/%2e%2e/server.py",
    ):
        assert get(path).status_code == 404, path


GOOD = {
    **{"run": "a", "ref": "rl/2/0/1", "stage": "rl", "step": "2", "image": "0", "number": "0", "name": "clip.mp4"},
    **{"first_run": "a", "first_stage": "before", "second_run": "a", "second_stage": "after", "question": "What?"},
}
NO_NUMBERS = (
    "-1",
    "nan",
    "inf",
    "-inf",
    "1e999",
    "text",
    "1.5",
    "0x10",
    "1_0",
    "9" * 17,
    "9" * 5000,
    "2; DROP",
    "\u0663",
)
BAD_VALUES = {
    **dict.fromkeys(INTEGERS, NO_NUMBERS),
    **dict.fromkeys(NUMBERS, ("nan", "inf", "-inf", "1e999", "text", "1;", "0x10")),
    **dict.fromkeys(CHOICES, ("-1", "nan", "text", "Right", "reward; DROP TABLE episodes")),
    "text": ("x" * 1001,),
}


def refuse(get, path, method, name, value):
    response = get(f"{path}?{httpx.QueryParams({**GOOD, name: value})}", method=method)
    assert response.status_code == 400, (path, name, value)
    message = response.json()["error"]
    assert message.startswith(f"{name} must be "), message
    assert len(message.splitlines()) == 1
    assert len(message) < 400


@pytest.mark.slow
def test_parameters_out_of_range_are_refused_by_every_route(library, questions):
    get = build_get(library, questions)
    routes = list_routes(get.app)
    assert len(routes) >= 20
    for path, method in routes:
        for name, values in BAD_VALUES.items():
            refuse(get, path, method, name, values[0])
    for name, values in BAD_VALUES.items():
        for value in values:
            refuse(get, "/api/episodes", "GET", name, value)


# Each value takes a request per route and parameter, so half of them are among the soaks.
@pytest.mark.parametrize(
    "value",
    [
        "\u202e%'\"" + "a" * 3000,
        pytest.param("../..", marks=pytest.mark.slow),
        *(pytest.param(value, marks=pytest.mark.soak) for value in ("", "\x00")),
    ],
)
def test_no_value_of_any_parameter_breaks_a_route(library, value):
    get = build_get(library)
    for path, method in list_routes(get.app):
        for name in (*GOOD, *BAD_VALUES):
            response = get(f"{path}?{httpx.QueryParams({**GOOD, name: value})}", method=method)
            assert response.status_code in (200, 400, 404), (path, name, response.text)
            assert response.status_code == 200 or response.json()["error"], (path, name)


def test_a_stage_is_no_path(get, library):
    """A stage or an evaluation of a request is looked up: its text never becomes part of a path."""
    outside = library.get("a").folder.parent / "outside"
    (outside / "episodes").mkdir(parents=True)
    shutil.copy(library.get("a").folder / STEP, outside / "episodes" / "rl-000002.jsonl.gz")
    shutil.copy(library.get("a").folder / BEFORE, outside / "before.jsonl")
    stage = "../../outside/episodes/rl"
    assert get(f"/api/advantages?run=a&stage={stage}&step=2").status_code == 404
    sides = {"first_run": "a", "first_stage": "before", "second_run": "a", "second_stage": "../../outside/before"}
    assert get(f"/api/paired?{httpx.QueryParams(sides)}").json() == []


def test_the_bounds_of_a_page_of_episodes(get):
    assert len(list_rows(get, limit=1)) == 1
    assert list_rows(get, offset=10**15, limit=500) == []
    for wrong in ({"limit": 0}, {"limit": 501}, {"offset": 10**15 + 1}):
        (name, value) = next(iter(wrong.items()))
        response = get("/api/episodes?" + str(httpx.QueryParams({"run": "a", **wrong})))
        assert response.status_code == 400
        assert response.json()["error"].endswith(f"got '{value}'")
        assert name in response.json()["error"]


def damage_json(path, change):
    """Apply a change to every line of a JSON file, which may be compressed."""
    open_text = gzip.open if path.suffix == ".gz" else open
    with open_text(path, "rt") as file:
        values = [json.loads(line) for line in file] if "jsonl" in path.name else [json.load(file)]
    for value in values:
        change(value)
    with open_text(path, "wt") as file:
        file.writelines(json.dumps(value) + "\n" for value in values)


def set_value(*keys, value=None):
    def change(item):
        for key in keys[:-1]:
            item = item[key]
        item[keys[-1]] = value

    return change


STEP, BEFORE, CARD = (
    "episodes/rl-000002.jsonl.gz",
    "evaluations/before.jsonl",
    "evaluations/videomme.benchmark_result.json",
)
FILES = (
    *(STEP, f"episodes/rl-000002{SUFFIX}", BEFORE, CARD, "invocations.json", "metrics.jsonl"),
    "recipe.yaml",
)
BYTES = {"empty": b"", "text": b"hello\n", "null": b"null\n", "number": b"3\n", "list": b"[]\n", "object": b"{}\n"}
EPISODE = ("outcome", "episode")
CHANGES = (
    # other columns, old names and shapes, and numbers that no column holds
    *((STEP, set_value(key, value=value)) for key in ("step", "group", "index") for value in ("x", 2**70, None)),
    *((STEP, set_value("stage", value=value)) for value in (3, "\ud800")),
    *((STEP, set_value("episode", key, value=[])) for key in ("task", "ledger", "usage", "status", "children")),
    *((STEP, set_value("episode", key, value={"a": 1})) for key in ("turns", "children", "error")),
    *((STEP, set_value("score", key, value="x")) for key in ("value", "parts", "correct")),
    (STEP, lambda row: row.pop("group")),
    *((BEFORE, set_value(*EPISODE, "children", 0, "turns", value=value)) for value in (True, 3, ["x"])),
    *((BEFORE, set_value(*EPISODE, "task", key, value=None)) for key in ("question", "media", "ground_truth")),
    *((BEFORE, set_value("outcome", "score", "correct", value=value)) for value in (math.inf, math.nan, "right")),
    (BEFORE, set_value(*EPISODE, "usage", "seconds", value=math.nan)),
    (BEFORE, set_value("sample_index", value=2**70)),
    (CARD, set_value("metrics", value={"accuracy": None})),
    (CARD, lambda card: card.pop("strata")),
    *((CARD, lambda card, key=key: card[key].clear()) for key in ("metrics", "costs", "stratum_intervals")),
    *((CARD, lambda card, key=key: card[key].pop("accuracy")) for key in ("metrics", "upper_bounds", "intervals")),
    (CARD, lambda card: card["stratum_intervals"]["duration"].clear()),
    *(("metrics.jsonl", set_value(key, value=value)) for key in ("reward", "accuracy") for value in ("x", [], True)),
    ("metrics.jsonl", lambda row: row.update({"tool/x/calls": "many", "tool//": 1, "greedy/accuracy": "good"})),
    ("invocations.json", set_value(0, "seed", value=[])),
    ("invocations.json", set_value(0, value="x")),
)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("pristine") / "a")
    write_benchmark(folder, "videomme", 8)
    return folder


@pytest.fixture
def damaged(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "a")


def require_answers(folder):
    """Request every route of a damaged run; each answers, or says in one sentence why it can't."""
    library = Library([folder], load_decoder=lambda folder: decode)
    library.refresh()
    get = build_get(library)
    refs = {row["ref"] for stage in ("rl", "before") for row in list_rows(get, stage=stage)}
    for path, method in list_routes(get.app):
        for ref in (GOOD["ref"], *sorted(refs)[:2]) if path in ("/api/episode", "/api/tokens", "/frame") else ("",):
            response = get(f"{path}?{httpx.QueryParams({**GOOD, 'bands': '1', 'ref': ref})}", method=method)
            assert response.status_code in (200, 400, 404, 409), (path, response.text)
            if response.status_code != 200:
                message = response.json()["error"]
                assert message, path
                assert len(message.splitlines()) == 1, message
                assert "can't show what the run holds" not in message  # an error that nothing expected
    return get


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_never_breaks_a_route(damaged, name):
    data = (damaged / name).read_bytes()
    for content in (BYTES["empty"], BYTES["list"], data[: len(data) // 2]):
        (damaged / name).write_bytes(content)
        require_answers(damaged)
    if name != "recipe.yaml":  # what makes a folder a run
        (damaged / name).unlink()
        require_answers(damaged)
        (damaged / name).mkdir()
        require_answers(damaged)


@pytest.mark.soak  # more contents than those of the test above
@pytest.mark.parametrize("name", FILES)
def test_no_content_of_a_file_breaks_a_route(damaged, name):
    for content in (*BYTES.values(), b"\xff" * 99):
        (damaged / name).write_bytes(content)
        require_answers(damaged)


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(CHANGES)))
def test_values_of_another_version_never_break_a_route(damaged, case):
    name, change = CHANGES[case]
    damage_json(damaged / name, change)
    require_answers(damaged)


@pytest.mark.slow
def test_tables_and_advantages_of_another_version_say_why_they_are_missing(damaged):
    recipe = damaged / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("rl:", "rl:\n  group_count: 3", 1))
    (damaged / BEFORE).write_text("{}\n")
    get = require_answers(damaged)
    tables = get("/api/tables?run=a").json()
    assert [problem.count("group_count") for problem in tables["problems"]] == [1, 0]
    assert BEFORE in tables["problems"][1]
    titles = [table["title"] for section in tables["sections"] for table in section["tables"]]
    assert "Accuracy" in titles  # of the other evaluation
    response = get("/api/advantages?run=a&stage=rl&step=2")
    assert response.status_code == 409
    assert "group_count" in response.json()["error"]


def test_an_index_that_cannot_be_updated_is_a_problem_of_its_run_alone(damaged, tmp_path, monkeypatch):
    other = make_run(tmp_path / "b", num_steps=1)
    refresh = EpisodeIndex.refresh

    def fail_first(self):
        if self._run == damaged:
            raise TypeError("a bug")
        return refresh(self)

    monkeypatch.setattr(EpisodeIndex, "refresh", fail_first)
    library = Library([damaged, other])
    with raises(RunError, key=str(damaged)):
        library.refresh()
    rows = {row["name"]: row for row in library.list_runs()}
    assert "a bug" in rows["a"]["problem"]
    assert rows["b"]["problem"] == ""
    assert rows["b"]["episodes"] > 0


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


@pytest.mark.parametrize("name", ["folder.html", "device.html", "file/page.html"])
def test_an_export_that_cannot_be_written_fails_before_the_work(tmp_path, name):
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "device.html").symlink_to("/dev/full")
    (tmp_path / "file").write_text("")
    page = tmp_path / name
    fail(RunError, "view", tmp_path, "--export", page, key=str(page))
    assert (tmp_path / "folder.html").is_dir()
    assert Path("/dev/full").is_char_device()


def test_what_cannot_be_asked_is_refused_before_the_viewer_starts(tmp_path):
    fail(ModelError, "view", tmp_path, "--ask", tmp_path, key=str(tmp_path))
    fail(ConfigError, "view", tmp_path, "--ask", tmp_path, "--set", "rl.optm.lr=1", key="rl.optm.lr")
    fail(RunError, "view", tmp_path, "--set", "seed=1", key="ask")
