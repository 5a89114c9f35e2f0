"""`--model URL`: eval and ask through a chat server; training refuses it."""

import json
import subprocess
import sys

import numpy as np
import pytest
from chat_server import completion, server
from commands import bad, fail, good
from error_cases import raises
from PIL import Image

import saccade
from saccade.config.load import load_recipe
from saccade.errors import ConfigError, RunError
from saccade.reporting.console import explain_missing_answer
from saccade.runs import pipeline
from saccade.runs.run_folder import Run
from saccade.types import EpisodeStatus

CALL = (
    '<tool_call>{"name": "zoom_image", "arguments": {"left": 0.2, "top": 0.2, "right": 0.9, "bottom": 0.9}}</tool_call>'
)
ZOOM = ["tiny/zoom_image", "environment.settings.force_think=false"]


def zoom_then_answer(number, body):
    """Zoom once, then answer; the request contains the earlier turns."""
    text = "I know.</think><answer>red</answer>" if len(body["messages"]) > 1 else f"I look.</think>{CALL}"
    return completion(f"<think>{text}", "stop", 12)


@pytest.fixture
def image(tmp_path):
    Image.fromarray(np.full((96, 96, 3), (200, 30, 30), np.uint8)).save(tmp_path / "a.png")
    return tmp_path / "a.png"


def test_ask_works_without_a_local_model(image):
    with server(zoom_then_answer) as served:
        output = good("ask", "Which?", "--image", image, "--model", served.url, "--recipe", *ZOOM)
    assert "Answer: red" in output
    assert "24" in output.split()  # as the server counts
    first, second = served.bodies
    assert [message["role"] for message in first["messages"]] == ["user"]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][:1] == first["messages"]
    assert CALL in second["messages"][1]["content"]
    shown = [part["type"] for part in second["messages"][2]["content"]]
    assert (shown[0], shown[-1], shown.count("image_url")) == ("text", "text", 1)


@pytest.mark.parametrize("option", ["--json", "--page"])
def test_ask_sends_nothing_if_its_file_cannot_be_written(tmp_path, image, option):
    path = tmp_path / ("a.json" if option == "--json" else "a.html")
    path.mkdir()
    with server(zoom_then_answer) as served:
        arguments = ["ask", "Which?", "--image", image, "--model", served.url, option, path, "--recipe", *ZOOM]
        fail(RunError, *arguments, key=str(path))
    assert not served.bodies


def test_ask_writes_the_episode_and_shows_a_reply_without_an_answer(tmp_path, image):
    files = ["--json", tmp_path / "episode.json", "--page", tmp_path / "episode.html"]
    with server(lambda number, body: completion("<think>hm</think>It may be", "stop", 12)) as served:
        output = good("ask", "Which?", "--image", image, "--model", served.url, *files, "--recipe", *ZOOM)
    assert "It may be" in output
    assert "<answer>" in output  # what the reply lacks
    episode = json.loads((tmp_path / "episode.json").read_text())
    assert (episode["status"], episode["task"]["question"]) == ("no_answer", "Which?")
    assert "It may be" in (tmp_path / "episode.html").read_text()
    for status in set(EpisodeStatus) - {EpisodeStatus.ANSWERED}:
        assert explain_missing_answer(status)


@pytest.mark.slow
def test_an_evaluation_records_its_server_and_resumes(tmp_path, image):
    folder = tmp_path / "run"
    Run.create(folder, load_recipe("tiny/zoom_image", ["environment.settings.force_think=false"]))
    task = {
        "media": [{"path": "a.png", "kind": "image"}],
        "question": "What?",
        "answer_type": "open",
        "ground_truth": "red",
    }
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"id": str(i), **task}) + "\n" for i in range(3)))
    arguments = ["eval", folder, "--tasks", tmp_path / "tasks.jsonl", "--name", "served"]
    with server(zoom_then_answer) as served:
        good(*arguments, "--model", served.url, "evaluation.num_tasks=2")
        num_first = len(served.bodies)
        good(*arguments, "--model", served.url)
        assert (num_first, len(served.bodies)) == (4, 6)  # two of three tasks were already answered
        path = folder / "evaluations" / "served.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()]
        sampled = [
            segment
            for segment in records[0]["outcome"]["episode"]["ledger"]["segments"]
            if segment["origin"] == "sampled"
        ]
        assert [(segment["version"], segment["tokens"], segment["num_message_tokens"]) for segment in sampled] == [
            (None, [], 12)
        ] * 2
        # The same name at another address may be another model.
        with server(zoom_then_answer) as other:
            fail(RunError, *arguments, "--model", other.url, key=path)
        overrides_both = ["engine.name=chat_completions", f"engine.settings.url={served.url}"]
        fail(ConfigError, *arguments, *overrides_both, "--model", tmp_path, key="engine.name")
        with server(zoom_then_answer, models=({"id": "a"}, {"id": "b"})) as several:
            assert "engine.settings.model" in bad(*arguments, "--model", several.url)
            settings = ["engine.name=chat_completions", f"engine.settings.url={several.url}", "engine.settings.model=b"]
            good("eval", folder, "--tasks", tmp_path / "tasks.jsonl", "--name", "b", *settings)
            assert {body["model"] for body in several.bodies} == {"b"}


def test_a_missing_server_or_key_is_one_line(image, monkeypatch):
    arguments = ["ask", "Which?", "--image", image, "--recipe", *ZOOM]
    with server(zoom_then_answer) as served:
        pass
    overrides = ["engine.name=chat_completions", "engine.settings.retry_backoff=0"]
    assert served.url in bad(*arguments, *overrides, "--model", served.url)
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    output = bad(*arguments, *overrides, "engine.settings.api_key_env=NO_SUCH_KEY", "--model", "http://127.0.0.1:9/v1")
    assert "NO_SUCH_KEY" in output
    with server(zoom_then_answer, models=(401, '{"error": {"message": "no key"}}')) as served:
        assert "401" in bad(*arguments, *overrides, "--model", served.url)


def test_an_unsupported_prefill_is_refused_before_any_request(image):
    with server(zoom_then_answer) as served:
        arguments = ["ask", "Which?", "--image", image, "--model", served.url, "--recipe", ZOOM[0]]
        assert "environment.settings.force_think=false" in bad(*arguments)
    assert served.bodies == []


def test_a_default_recipe_needs_no_prefill(image):
    with server(zoom_then_answer) as served:
        good("ask", "Which?", "--image", image, "--model", served.url)
    assert served.bodies
    assert {body["messages"][-1]["role"] for body in served.bodies} == {"user"}


def test_training_refuses_it_before_loading_a_model(tmp_path):
    settings = ["engine.name=chat_completions", "engine.settings.url=http://127.0.0.1:9/v1"]
    (tmp_path / "tasks.jsonl").write_text(
        json.dumps({"id": "1", "question": "What?", "answer_type": "open", "ground_truth": "red", "media": []}) + "\n"
    )
    data = f"data.train={tmp_path}/tasks.jsonl"
    output = bad("rl", "tiny/base", *settings, data, "--model", tmp_path / "none", "--out", tmp_path / "run")
    assert "engine.name" in output
    assert "chat_completions" in output
    assert not (tmp_path / "run").exists()


def test_it_has_no_training_components():
    recipe = load_recipe("tiny/base", ["engine.name=chat_completions", "engine.settings.url=http://127.0.0.1:9/v1"])
    with raises(ConfigError, key="engine.name", value="chat_completions"):
        pipeline.load_training_components(recipe, pipeline.Path("nowhere"))


def test_evaluate_takes_the_address_of_a_server(tmp_path, image):
    Run.create(tmp_path / "run", load_recipe("tiny/zoom_image", ["environment.settings.force_think=false"]))
    media = (saccade.Media(path=str(image), kind=saccade.MediaKind.IMAGE),)
    task = saccade.Task(id="a", question="Which?", media=media, answer_type=saccade.AnswerType.OPEN, ground_truth="red")
    with server(zoom_then_answer) as served:
        [scored] = saccade.evaluate(tmp_path / "run", model=served.url, tasks=[task])
    assert (scored.episode.answer, len(served.bodies)) == ("red", 2)


def test_settings_of_the_engine_are_those_of_the_server(image, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sk-0123456789")
    settings = ["engine.settings.api_key_env=MY_KEY", "engine.settings.extra_body={top_p: 0.5}"]
    with server(zoom_then_answer) as served:
        good("ask", "Which?", "--image", image, "--model", served.url, "--recipe", *ZOOM, *settings)
    assert {headers["Authorization"] for headers in served.headers} == {"Bearer sk-0123456789"}
    assert {body["top_p"] for body in served.bodies} == {0.5}


def test_an_engine_without_a_chat_api_is_refused(image):
    arguments = ["ask", "Which?", "--image", image, "--model", "http://127.0.0.1:9/v1", "--recipe", *ZOOM]
    assert "engine.name" in bad(*arguments, "engine.name=vllm")


def write_tasks(folder):
    task = {"id": "1", "question": "What?", "answer_type": "open", "ground_truth": "red"}
    media = [{"path": str(folder / "a.png"), "kind": "image"}]
    (folder / "tasks.jsonl").write_text(json.dumps({**task, "media": media}) + "\n")
    return folder / "tasks.jsonl"


def test_a_recipe_with_a_server_is_evaluated_and_checked_as_it_is(tmp_path, image):
    tasks = write_tasks(tmp_path)
    with server(zoom_then_answer) as served:
        (tmp_path / "mine.yaml").write_text(
            f"extends: {ZOOM[0]}\nenvironment: {{settings: {{force_think: false}}}}\n"
            f"engine: {{name: chat_completions, settings: {{url: '{served.url}', extra_body: {{top_p: 0.5}}}}}}\n"
        )
        checked = good("doctor", tmp_path / "mine.yaml", f"data.test={tasks}")
        good("eval", tmp_path / "mine.yaml", "--tasks", tasks, "--out", tmp_path / "run")
    assert {body["top_p"] for body in served.bodies} == {0.5}
    assert f"server {served.url}" in checked
    no_retries = "engine.settings.max_retries=0"
    fail(RunError, "doctor", tmp_path / "mine.yaml", no_retries, f"data.test={tasks}", key="servers", value=["servers"])


@pytest.mark.slow
def test_an_evaluation_by_a_server_imports_no_torch(tmp_path, image):
    tasks = write_tasks(tmp_path)
    code = (
        "import sys; from saccade.cli.app import app\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
        "print(sorted(sys.modules))"
    )
    with server(zoom_then_answer) as served:
        arguments = ["eval", ZOOM[0], "--model", served.url, "--tasks", tasks, "--out", tmp_path / "run", ZOOM[1]]
        command = [sys.executable, "-c", code, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    modules = done.stdout.splitlines()[-1]
    assert "'saccade.runs.evaluation'" in modules
    assert "'torch'" not in modules


def test_doctor_checks_the_server_of_an_address(tmp_path, image):
    tasks = write_tasks(tmp_path)
    with server(zoom_then_answer) as served:
        output = good("doctor", *ZOOM, f"data.test={tasks}", "--model", served.url)
        assert f"server {served.url}" in output
    fail(
        RunError,
        "doctor",
        *ZOOM,
        "engine.settings.max_retries=0",
        f"data.test={tasks}",
        "--model",
        served.url,
        key="servers",
        value=["servers"],
    )


@pytest.mark.parametrize("command", ["sft", "rl"])
def test_training_refuses_an_address(tmp_path, command):
    output = bad(command, "tiny/base", "--model", "http://127.0.0.1:9/v1", "--out", tmp_path / "run")
    assert "http://127.0.0.1:9/v1" in output
    assert not (tmp_path / "run").exists()
