"""`--model URL`: eval and ask through a server that is asked in words; training refuses it."""

import json

import numpy as np
import pytest
from chat_server import completion, server
from commands import bad, good
from PIL import Image

from saccade import stages
from saccade.config import load_recipe
from saccade.errors import ConfigError
from saccade.runlog import Run

CALL = (
    '<tool_call>{"name": "zoom_image", "arguments": {"left": 0.2, "top": 0.2, "right": 0.9, "bottom": 0.9}}</tool_call>'
)
ZOOM = ["tiny/zoom_image", "agent.settings.think_prefix=false"]


def looks(number, body):
    """Zooms once, then answers; the request shows what was said before."""
    text = "I know.</think><answer>red</answer>" if len(body["messages"]) > 1 else f"I look.</think>{CALL}"
    return completion(f"<think>{text}", "stop", 12)


@pytest.fixture
def picture(tmp_path):
    Image.fromarray(np.full((96, 96, 3), (200, 30, 30), np.uint8)).save(tmp_path / "a.png")
    return tmp_path / "a.png"


def test_a_question_is_answered_without_any_model(picture):
    with server(looks) as served:
        said = good("ask", "Which?", "--image", picture, "--model", served.url, "--recipe", *ZOOM)
    assert "Answer: red" in said
    assert "24 sampled" in said  # as the server counts
    first, second = served.bodies
    assert [each["role"] for each in first["messages"]] == ["user"]
    assert [each["role"] for each in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][:1] == first["messages"]
    assert CALL in second["messages"][1]["content"]
    shown = [part["type"] for part in second["messages"][2]["content"]]
    assert (shown[0], shown[-1], shown.count("image_url")) == ("text", "text", 1)


@pytest.mark.slow
def test_an_evaluation_says_whom_it_asked_and_goes_on(tmp_path, picture):
    folder = tmp_path / "run"
    Run.create(folder, load_recipe("tiny/zoom_image", ["agent.settings.think_prefix=false"]))
    task = {"media": [{"path": "a.png", "kind": "image"}], "question": "What?", "kind": "open", "gold": "red"}
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"id": str(i), **task}) + "\n" for i in range(3)))
    words = ["eval", folder, "--tasks", tmp_path / "tasks.jsonl", "--name", "served"]
    with server(looks) as served:
        good(*words, "--model", served.url, "evaluation.limit=2")
        asked = len(served.bodies)
        good(*words, "--model", served.url)
        assert (asked, len(served.bodies)) == (4, 6)  # of three tasks two were answered before
        path = folder / "evaluations" / "served.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()]
        said = [each for each in records[0]["scored"]["episode"]["ledger"]["segments"] if each["origin"] == "sampled"]
        assert [(each["version"], each["logprobs"], len(each["tokens"])) for each in said] == [(None, [], 12)] * 2
        # The same name at another address may be another model.
        with server(looks) as other:
            assert "holds results of other weights" in bad(*words, "--model", other.url)
        both = ["engine.name=openai", f"engine.settings.url={served.url}"]
        assert "leave out --model" in bad(*words, *both, "--model", tmp_path)
        with server(looks, models=({"id": "a"}, {"id": "b"})) as several:
            assert "offers a, b; name one with" in bad(*words, "--model", several.url)
            settings = ["engine.name=openai", f"engine.settings.url={several.url}", "engine.settings.model=b"]
            good("eval", folder, "--tasks", tmp_path / "tasks.jsonl", "--name", "b", *settings)
            assert {body["model"] for body in several.bodies} == {"b"}


def test_no_server_and_no_key_are_said_in_a_sentence(picture, monkeypatch):
    words = ["ask", "Which?", "--image", picture, "--recipe", *ZOOM]
    with server(looks) as served:
        pass
    calm = ["engine.name=openai", "engine.settings.wait=0"]
    assert "can't be reached" in bad(*words, *calm, "--model", served.url)
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    said = bad(*words, *calm, "engine.settings.key_variable=NO_SUCH_KEY", "--model", "http://127.0.0.1:9/v1")
    assert "the environment variable NO_SUCH_KEY must hold the server's key" in said
    with server(looks, models=(401, '{"error": {"message": "no key"}}')) as served:
        assert "401 Unauthorized: no key" in bad(*words, *calm, "--model", served.url)


def test_a_prefix_that_can_not_be_had_is_refused_before_anything_is_asked(picture):
    with server(looks) as served:
        words = ["ask", "Which?", "--image", picture, "--model", served.url, "--recipe", ZOOM[0]]
        assert "agent.settings.think_prefix=false" in bad(*words)
    assert served.bodies == []


def test_training_refuses_it_before_anything_is_loaded(tmp_path):
    settings = ["engine.name=openai", "engine.settings.url=http://127.0.0.1:9/v1"]
    (tmp_path / "tasks.jsonl").write_text(
        json.dumps({"id": "1", "question": "What?", "kind": "open", "gold": "red", "media": []}) + "\n"
    )
    data = f"data.train={tmp_path}/tasks.jsonl"
    said = bad("train", "tiny/base", *settings, data, "--model", tmp_path / "none", "--out", tmp_path / "run")
    assert "engine.name: openai is asked in words" in said
    assert "train with engine.name=local" in said
    assert not (tmp_path / "run").exists()


def test_its_stage_can_not_be_made_for_training():
    recipe = load_recipe("tiny/base", ["engine.name=openai", "engine.settings.url=http://127.0.0.1:9/v1"])
    with pytest.raises(ConfigError, match="is asked in words"):
        stages.load(recipe, stages.Path("nowhere"))
