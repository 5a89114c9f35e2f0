"""Mutated inputs of every surface that reads files or servers: each is used or refused in one sentence, never a crash.

`python tests/test_mutations.py COUNT` prints the numbers for docs/reliability.md.
"""

import asyncio
import json
import random
import sys
import tempfile
from pathlib import Path

import pytest

from saccade.chat.parser import parse_reply
from saccade.checks.run_checks import check_recipe
from saccade.config.load import RECIPES_DIR, load_recipe, parse_yaml
from saccade.data.dataset import iterate_items
from saccade.engines.remote import sglang_api, vllm_api
from saccade.engines.remote.server import Server, ServerError, ServerRequest
from saccade.errors import SaccadeError
from saccade.ledger import Ledger, Origin, Segment
from saccade.metrics.metric_log import read_metric_rows
from saccade.types import SamplingParams, Task
from saccade.utils.http_client import RequestFailed
from saccade.utils.openai_client import OpenAIClient

COUNT = 60  # mutations of each surface
NASTY = [
    *("null", "true", "-1", "0", "1e400", "NaN", "Infinity", "1" + "0" * 400, "9" * 30, '""', "[]", "{}", '"\\ud800"'),
    *("[" * 200, "]" * 9, "{" * 99, ": ", "*a", "&a ", "<<: *a", "!!python/object:os.system", "\\", "\x00", "\x1b[2J"),
    *("\n", "  ", "\t", ",", "'", '"', "..", "é", "\u202e", "x" * 3000),
]


def mutate(text: str, rng: random.Random) -> str:
    """Replace, delete, repeat or swap parts of a text."""
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.choice([0, 1, 2, 5, 20]))
        part = rng.choice([rng.choice(NASTY), "", text[start:end] * 3, chr(rng.randrange(0x3000))])
        text = text[:start] + part + text[end:]
    return text


def mutate_value(value, rng: random.Random):
    """Replace, remove or repeat one part of plain JSON."""
    if isinstance(value, dict | list) and value and rng.random() < 0.9:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = rng.choice(list(keys))
        copy = value.copy()
        if rng.random() < 0.15:
            del copy[key]
        else:
            copy[key] = mutate_value(value[key], rng)
        return copy
    others = [None, True, -1, 2**70, 10**400, 1e400, float("nan"), "", "x", [], {}, [[]], {"a": 1}, value, [value] * 9]
    return rng.choice(others)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return path


RECIPE = (RECIPES_DIR / "tiny" / "base.yaml").read_text(encoding="utf-8")
TASK = {
    "id": "1",
    "question": "Which?",
    "media": [{"path": "a.png", "kind": "image"}],
    "answer_type": "choice",
    "ground_truth": "A",
    "options": ["red", "blue"],
    "extras": {"scene": 3},
}
METRICS = {"stage": "rl", "step": 1, "reward": 0.5, "seconds": 2.0}
REPLY = (
    '<think>Look.</think><tool_call>{"name": "crop_video", "arguments": {"start_time": 3}}</tool_call>'
    "<tool_code>print(crop_video(3, end_time=9))</tool_code><code>```python\nx = 1\n```</code><answer>red</answer>"
)
PROMPT = Ledger(segments=(Segment(tokens=(5, 6, 7), origin=Origin.PROMPT),))
SAMPLING = SamplingParams(max_tokens=2)
VLLM_REPLY = {
    "prompt_token_ids": [5, 6, 7],
    "choices": [
        {
            "token_ids": [8, 9],
            "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2.0}]},
            "finish_reason": "length",
            "weight_versions": [{"version": "v", "start": 0, "end": 2}],
        }
    ],
}
SGLANG_REPLY = {
    "output_ids": [8, 9],
    "prompt_token_ids": [5, 6, 7],
    "meta_info": {
        "output_token_logprobs": [[-1.0, 8, None], [-2.0, 9, None]],
        "finish_reason": {"type": "length", "length": 2},
        "weight_versions": [{"version": "v", "start": 0, "end": 2}],
    },
}
CHAT_REPLY = {
    "choices": [{"message": {"role": "assistant", "content": "red"}, "finish_reason": "stop"}],
    "usage": {"completion_tokens": 3},
}


def read_recipe(rng, folder):
    check_recipe(load_recipe(str(write(folder, "mutated.yaml", mutate(RECIPE, rng)))))


def read_override(rng, folder):
    load_recipe("tiny/base", [mutate("rl.optim.lr=1e-6", rng)])


def read_yaml_text(rng, folder):
    parse_yaml(mutate("a: &a [1, {b: *a}]\nc: {<<: {d: 1}}\n", rng), "text")


def read_tasks(rng, folder):
    line = json.dumps(mutate_value(TASK, rng)) if rng.random() < 0.5 else mutate(json.dumps(TASK), rng)
    list(iterate_items(write(folder, "tasks.jsonl", line + "\n"), Task))


def read_metrics(rng, folder):
    line = json.dumps(mutate_value(METRICS, rng)) if rng.random() < 0.5 else mutate(json.dumps(METRICS), rng)
    read_metric_rows(write(folder, "metrics.jsonl", line + "\n"))


def read_reply(rng, folder):
    text = mutate(REPLY, rng)
    assert parse_reply(text).text == text


def generate(api, reply, rng):
    async def post(path, body=None, **query):
        return mutate_value(reply, rng)

    server = Server("http://127.0.0.1:9", 1.0, api)
    server.version_by_label, server.vocab_size, server.post = {"v": 0}, 100, post
    completion, _ = asyncio.run(server.generate(ServerRequest(PROMPT, SAMPLING)))
    assert len(completion.tokens) == len(completion.logprobs)
    assert all(0 <= token < 100 for token in completion.tokens)


def read_vllm_reply(rng, folder):
    generate(vllm_api, VLLM_REPLY, rng)


def read_sglang_reply(rng, folder):
    generate(sglang_api, SGLANG_REPLY, rng)


def read_chat_reply(rng, folder):
    text = json.dumps(mutate_value(CHAT_REPLY, rng)) if rng.random() < 0.5 else mutate(json.dumps(CHAT_REPLY), rng)
    client = OpenAIClient(base_url="http://127.0.0.1:9", timeout=1.0)

    async def send(*arguments):
        return text.encode("utf-8", "surrogatepass")

    client._send = send
    completion = asyncio.run(client.create_chat_completion({}))
    assert isinstance(completion.text, str)
    assert completion.num_tokens >= 0


SURFACES = {
    "recipe files": read_recipe,
    "overrides": read_override,
    "YAML with anchors": read_yaml_text,
    "files of tasks": read_tasks,
    "metrics.jsonl": read_metrics,
    "replies of models": read_reply,
    "completions of vLLM": read_vllm_reply,
    "completions of SGLang": read_sglang_reply,
    "chat completions": read_chat_reply,
}


def count_refusals(surface, folder: Path, count: int, seed: int = 0) -> int:
    """Read so many mutations; return how many were refused. Any other error is raised, with the mutation's number."""
    messages = []
    for number in range(count):
        try:
            surface(random.Random(f"{seed}/{number}"), folder)
        except (SaccadeError, ServerError, RequestFailed) as error:
            messages.append(str(error))
        except Exception as error:
            error.add_note(f"mutation {number} of seed {seed}")
            raise
    assert all(message and "\n" not in message for message in messages)
    return len(messages)


@pytest.mark.parametrize("name", SURFACES)
def test_mutations_are_used_or_refused(name, tmp_path):
    # A client of a server takes 50 ms to make.
    count_refusals(SURFACES[name], tmp_path, COUNT // 4 if name == "chat completions" else COUNT)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for name, surface in SURFACES.items():
            total = int(sys.argv[1])
            print(f"| {name} | {total:,} | {count_refusals(surface, Path(folder), total, seed=1):,} | 0 |", flush=True)
