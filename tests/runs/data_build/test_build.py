"""`saccade data build` on mp4 files with a teacher behind a real HTTP server, from the command line to SFT's data."""

import asyncio
import collections
import itertools
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
import wave
from pathlib import Path

import av
import pytest
from chat_server import completion, server
from color_teacher import identify, make_clip, teach
from commands import bad, fail, good, lock_elsewhere, run
from error_cases import raises

from saccade.config.load import load_data_build_recipe, load_recipe
from saccade.data.dataset import load_demonstrations, load_tasks
from saccade.errors import BrokenEngineError, ConfigError, DataError, MediaError, RunError
from saccade.runs.run_lock import DATA_BUILD

REAL = Path(__file__).parents[4] / "shared" / "media"
# Two frames of twelve seconds, at 3 and 9, show the answers of some questions and not of others.
SETTINGS = [
    "data_build.filters.few_frames=2",
    "data_build.filters.no_video_votes=2",
    "data_build.questions.pairs_per_video=1",
    "environment.settings.num_frames=6",
    "engine.settings.max_retries=0",
    "engine.settings.retry_backoff=0",
    "sampling.max_tokens=512",
]
FILES = ("tasks.jsonl", "demonstrations.jsonl", "report.json", "rejected.jsonl", "provenance.json")


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    make_clip(folder / "a.mp4", ["red", "blue", "green"])
    make_clip(folder / "b.mp4", ["yellow", "red", "blue"])
    return folder


def build(served, clips, folder, *arguments):
    return ["data", "build", clips, "--out", folder, "--yes", "--teacher", served.url, *SETTINGS, *arguments]


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_files(folder):
    """Return the files of a build without the address of its teacher."""
    contents = {name: (folder / name).read_text() for name in FILES}
    contents["provenance.json"] = {**json.loads(contents["provenance.json"]), "engine": None}
    return contents


@pytest.fixture(scope="module")
def built(clips, tmp_path_factory):
    """A finished build, and the requests it sent."""
    folder = tmp_path_factory.mktemp("built") / "out"
    with server(teach) as served:
        good(*build(served, clips, folder))
        return folder, list(served.bodies)


@pytest.mark.slow
def test_a_build_yields_tasks_that_the_video_answers(built, clips):
    folder, bodies = built
    tasks = load_tasks(folder / "tasks.jsonl")
    assert {task.answer_type for task in tasks} >= {"choice", "open", "grounding"}
    assert {Path(task.media[0].path).name for task in tasks} == {"a.mp4", "b.mp4"}
    assert all(Path(task.media[0].path).is_file() for task in tasks)
    report = json.loads((folder / "report.json").read_text())
    assert report["counts"]["scenes"] == report["counts"]["captions"] == 6
    assert report["counts"]["tasks"] == len(tasks)
    assert (
        report["rejected"]["no_video"]["answerable without the video"] > 0
    )  # one color: the teacher's constant answer
    assert report["rejected"]["few_frames"]["answerable from a few frames"] > 0
    # What is dropped at each stage and what goes on add up.
    names = ["questions", "no_video", "few_frames", "agreement"]
    for before, stage in itertools.pairwise(names):
        dropped = sum(report["rejected"].get(stage, {}).values())
        assert report["counts"][before] == report["counts"][stage] + dropped
    assert report["usage"]["captions"]["requests"] == 6
    assert sum(stage["requests"] for stage in report["usage"].values()) == len(bodies)
    counts = collections.Counter(map(identify, bodies))
    assert counts["no_video"] == 2 * report["counts"]["questions"]


@pytest.mark.slow
def test_the_files_pass_the_check_and_name_their_origin(built, clips):
    folder, _ = built
    assert "no problem" in good("data", "check", folder / "tasks.jsonl")
    assert "no problem" in good("data", "check", folder / "demonstrations.jsonl")
    provenance = json.loads((folder / "provenance.json").read_text())
    assert provenance["teacher"] == "m"
    assert {Path(video["path"]).name for video in provenance["videos"]} == {"a.mp4", "b.mp4"}
    digests = {video["digest"] for video in provenance["videos"]}
    for task in load_tasks(folder / "tasks.jsonl"):
        origin = task.extras["provenance"]
        assert origin["digest"] in digests
        assert (origin["stage"], origin["teacher"]) == ("questions", "m")
        assert {"scenes", "prompts", "settings"} <= origin.keys()
    stages = read_lines(folder / "rejected.jsonl")
    assert {row["stage"] for row in stages} <= {"questions", "no_video", "few_frames", "agreement", "demonstrations"}


@pytest.mark.slow
def test_demonstrations_have_parallel_calls_and_are_learned_whole(built, tiny_folder):
    """Two crops in two turns of the teacher are one turn, and the environment replays it without an error."""
    from saccade.rollouts.components import TrainingComponents
    from saccade.training.demonstrations import replay_demonstration

    folder, _ = built
    demonstrations = load_demonstrations(folder / "demonstrations.jsonl")
    assert demonstrations
    assert {len(item.replies) for item in demonstrations} == {2}
    assert {len(texts) for item in demonstrations for texts in item.children} == {2}
    assert all(reply.startswith("<think>\n") for item in demonstrations for reply in item.replies)
    recipe = load_recipe("tiny/sft", [f"model.path={tiny_folder}", "environment.settings.frame_pixels=[784,1024]"])
    components = TrainingComponents.from_recipe(recipe)
    for item in demonstrations[:2]:
        work = replay_demonstration(item, components.environments(item.task), components.build_context(seed=0))
        main, *children = asyncio.run(work)
        assert len(children) == 2
        text = components.renderer.decode(main.ledger.input_ids())
        assert "Error" not in text
        assert all(body in text for body in ("I look at part 0.", "I have looked."))


@pytest.mark.slow
def test_a_repeated_build_sends_nothing_and_writes_the_same(built, clips):
    folder, _ = built
    before = read_files(folder)
    with server(teach) as served:
        good(*build(served, clips, folder))
        assert served.bodies == []
    assert read_files(folder) == before


@pytest.mark.slow
def test_a_build_that_failed_anywhere_pays_for_nothing_twice(built, clips, tmp_path):
    """A teacher that dies after n requests, for growing n: the union of the requests is that of one build."""
    folder, bodies = built
    received = []
    for limit in (3, 9, 40, 50, None):

        def reply(number, body, limit=limit):
            if limit is not None and number >= limit:
                return 401, '{"error": {"message": "out of credit"}}'
            received.append(json.dumps(body, sort_keys=True))
            return teach(number, body)

        with server(reply) as served:
            done = run(*build(served, clips, tmp_path / "out"))
        # Few refusals among the last replies don't stop a build: it names how many items lack a reply.
        is_complete = done.exit_code == 0 and "lack a reply" not in done.stderr
        assert is_complete == (limit is None), done.output
        assert done.exit_code == 0 or done.stderr.count("\n") == 1
    assert len(received) == len(set(received)) == len(bodies)
    assert read_files(tmp_path / "out") == read_files(folder)


@pytest.mark.slow
def test_a_truncated_line_of_a_journal_is_requested_again(built, clips, tmp_path):
    import shutil

    folder = Path(shutil.copytree(built[0], tmp_path / "out"))
    for stage in ("captions", "questions", "scenes"):
        path = folder / "stages" / f"{stage}.jsonl"
        path.write_bytes(path.read_bytes()[:-20])
    with server(teach) as served:
        good(*build(served, clips, folder))
        assert sorted(map(identify, served.bodies)) == ["captions", "questions"]
    assert read_files(folder)["tasks.jsonl"] == read_files(built[0])["tasks.jsonl"]


def stop_build(served, arguments, stop_signal, *, after):
    """Run a build in a process that a signal stops after so many requests; return how many were sent before it."""
    command = [sys.executable, "-c", "from saccade.cli.app import main; main()", *map(str, arguments)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        while len(served.bodies) < after:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        process.send_signal(stop_signal)
        num_sent = len(served.bodies)
        assert process.wait(120) == (130 if stop_signal is signal.SIGINT else -stop_signal)
        assert "Traceback" not in process.stderr.read()
    return num_sent


def check_stopped_builds(built, clips, folder, stops):
    """Stop a build at each of `stops`, pairs of a signal and a number of requests, and let it end."""
    reference, bodies = built
    concurrency, num_killed = 2, 0
    with server(teach, seconds=0.02) as served:
        arguments = build(served, clips, folder, f"engine.settings.max_concurrency={concurrency}")
        for stop_signal, after in stops:
            num_sent = stop_build(served, arguments, stop_signal, after=len(served.bodies) + after)
            assert len(served.bodies) <= num_sent + concurrency, "queued requests were sent after the signal"
            num_killed += stop_signal is signal.SIGKILL
        good(*arguments)
    received = collections.Counter(json.dumps(body, sort_keys=True) for body in served.bodies)
    assert received.keys() == {json.dumps(body, sort_keys=True) for body in bodies}
    # Only replies on their way to a killed process are paid for again.
    assert received.total() - len(received) <= concurrency * num_killed
    recorded = [row["key"] for path in (folder / "stages").glob("*.jsonl") for row in read_lines(path)]
    assert len(recorded) == len({*recorded})
    for name in ("tasks.jsonl", "demonstrations.jsonl", "rejected.jsonl", "report.json"):
        assert (folder / name).read_text() == (reference / name).read_text()


@pytest.mark.slow
def test_ctrl_c_sends_nothing_more_and_keeps_what_was_paid_for(built, clips, tmp_path):
    check_stopped_builds(built, clips, tmp_path / "out", [(signal.SIGINT, 20)])


@pytest.mark.soak
def test_a_second_ctrl_c_does_not_wait(clips, tmp_path):
    """The teacher hangs: the first signal waits for its replies, the second ends the command in one line."""
    with server(teach, seconds=600) as served:
        command = [sys.executable, "-c", "from saccade.cli.app import main; main()"]
        command += map(str, build(served, clips, tmp_path / "out"))
        with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
            while len(served.bodies) < 6:
                assert process.poll() is None, process.stderr.read()
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            assert "6 requests in progress" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
            assert process.wait(50) == 130
            assert "Traceback" not in process.stderr.read()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_builds_that_are_stopped_anywhere_end_with_the_same_files(built, clips, tmp_path, seed):
    rng = random.Random(seed)
    stops = [(rng.choice((signal.SIGINT, signal.SIGKILL)), rng.randint(1, 25)) for _ in range(4)]
    check_stopped_builds(built, clips, tmp_path / "out", stops)


# ---- teachers that fail ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_nonsense_is_refused_and_counted(clips, tmp_path):
    """Every second caption and every second reply with questions is nonsense; the others are used."""
    numbers = collections.Counter()

    def reply(number, body):
        stage = identify(body)
        numbers[stage] += 1
        if stage in ("captions", "questions") and numbers[stage] % 2:
            return "Lorem ipsum [dolor] {sit: amet}"
        return teach(number, body)

    with server(reply) as served:
        output = good(*build(served, clips, tmp_path / "out", "data_build.max_concurrency=1"))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["rejected"]["captions"] == {"the reply holds no JSON": 3}
    assert report["counts"]["captions"] == 3
    assert report["rejected"]["questions"]["the reply holds no JSON"] >= 1
    assert "the reply holds no JSON" in output
    assert load_tasks(tmp_path / "out" / "tasks.jsonl")


@pytest.mark.slow
def test_a_teacher_with_wrong_answers_yields_no_task(clips, tmp_path):
    """Its questions have wrong answers, which its own votes on the frames don't confirm."""

    def reply(number, body):
        text = teach(number, body)
        if identify(body) != "questions":
            return text
        return text.replace('"answer": "red"', '"answer": "green"').replace('"answer": "blue"', '"answer": "red"')

    types = "data_build.questions.answer_types=[choice]"
    folder = tmp_path / "out"
    make_clip(tmp_path / "only.mp4", ["red", "blue"])
    with server(reply) as served:
        fail(RunError, *build(served, tmp_path / "only.mp4", folder, types), key=folder)
    report = json.loads((folder / "report.json").read_text())
    assert report["rejected"]["agreement"]["the votes don't confirm the answer"] == report["counts"]["few_frames"] > 0
    assert not (folder / "tasks.jsonl").exists()


@pytest.mark.slow
def test_requests_that_fail_are_counted_and_sent_again(built, clips, tmp_path):
    folder = tmp_path / "out"

    def reply(number, body):
        return (500, "broken") if identify(body) == "captions" and number % 3 == 0 else teach(number, body)

    received = collections.Counter()
    with server(reply) as served:
        done = run(*build(served, clips, folder))
        assert done.exit_code == 0, done.output
        received.update(json.dumps(body) for body in served.bodies)
        num_failed = json.loads((folder / "report.json").read_text())["rejected"]["captions"]["a request failed"]
        assert f"{num_failed} items" in done.stderr
    with server(teach) as served:
        good(*build(served, clips, folder))
        assert sum(identify(body) == "captions" for body in served.bodies) == num_failed > 0
        received.update(json.dumps(body) for body in served.bodies)
    # The other requests are those of a build in which none failed, and each was sent once.
    assert received.total() - num_failed == len(received) == len(built[1])
    assert read_files(folder) == read_files(built[0])


@pytest.mark.slow
@pytest.mark.parametrize("status", [500, 200])
def test_a_teacher_that_always_fails_stops_the_build(clips, tmp_path, status):
    with server(lambda number, body: (status, "<html>")) as served:
        arguments = build(served, clips, tmp_path / "out", "data_build.max_failures=3", "data_build.max_concurrency=1")
        fail(BrokenEngineError, *arguments, key="data_build.max_failures", value=3)
        assert len(served.bodies) == 3


@pytest.mark.slow
def test_a_teacher_that_hangs_is_a_failed_request(clips, tmp_path):
    with server(teach, seconds=2) as served:
        settings = ["engine.settings.request_timeout=0.2", "data_build.max_failures=2"]
        line = bad(*build(served, clips, tmp_path / "out", *settings))
    assert "0.2 seconds" in line


@pytest.mark.slow
def test_a_truncated_reply_is_refused(clips, tmp_path):
    def reply(number, body):
        return completion(teach(number, body)[:-1], "length") if identify(body) == "captions" else teach(number, body)

    with server(reply) as served:
        fail(RunError, *build(served, clips, tmp_path / "out"), key=tmp_path / "out")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["rejected"] == {"captions": {"the reply was truncated": 6}}


# ---- videos and arguments --------------------------------------------------------------------------------------------


def write_sound(path):
    with wave.open(str(path.with_suffix(".wav")), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes(8000))
    with av.open(str(path.with_suffix(".wav"))) as source, av.open(str(path), "w") as target:
        stream = target.add_stream("aac", rate=8000)
        for frame in source.decode(audio=0):
            target.mux(stream.encode(frame))
        target.mux(stream.encode())


BAD_VIDEOS = {
    "missing.mp4": lambda path: None,
    "empty.mp4": lambda path: path.touch(),
    "text.mp4": lambda path: path.write_text("this is no video"),
    "sound.mp4": write_sound,
}


@pytest.mark.parametrize("name", BAD_VIDEOS)
def test_a_bad_video_is_named_before_any_request(name, clips, tmp_path):
    path = tmp_path / name
    BAD_VIDEOS[name](path)
    with server(teach) as served:
        arguments = build(served, clips / "a.mp4", tmp_path / "out", path)
        fail(MediaError, *arguments, key=path)
        assert served.bodies == []
    with raises(RunError, key=str(path)):
        from saccade.runs.data_build.build import prepare

        prepare(
            [path],
            tmp_path / "x",
            load_data_build_recipe("paravt/sft"),
            skip_bad=True,
            start_stage=lambda *_: lambda *_: None,
        )


@pytest.mark.parametrize("name", ["corrupted.mp4"])
def test_a_real_corrupt_clip_is_named(name, tmp_path):
    if not (REAL / name).exists():
        pytest.skip("the real clips are not part of the repository")
    arguments = ["data", "build", REAL / name, "--out", tmp_path / "out", "--dry-run"]
    fail(MediaError, *arguments, key=REAL / name)


def test_bad_videos_can_be_skipped_and_copies_are(clips, tmp_path):
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "copy.mp4").write_bytes((clips / "a.mp4").read_bytes())
    videos = [tmp_path / "empty.mp4", clips / "a.mp4", tmp_path / "copy.mp4"]
    output = good("data", "build", *videos, "--out", tmp_path / "out", "--dry-run", "--on-bad", "skip")
    assert "empty.mp4" in output
    assert "a copy of another file" in output


def test_the_cost_is_shown_before_and_is_an_upper_bound(built, clips, tmp_path):
    prices = ["data_build.price.prompt=2", "data_build.price.completion=8", *SETTINGS]
    output = good("data", "build", clips, "--out", tmp_path / "out", "--dry-run", *prices)
    assert "cost" in output
    folder, _ = built
    used = json.loads((folder / "report.json").read_text())["usage"]
    rows = [line.split() for line in output.splitlines() if line.split()[:1] and line.split()[0] in used]
    assert {row[0] for row in rows} == used.keys()
    for stage, *numbers in rows:
        requests, prompt, sampled = (int(number.replace(",", "")) for number in numbers[:3])
        usage = used[stage]
        assert requests >= usage["requests"]
        assert prompt >= usage["prompt_tokens"]
        assert sampled >= usage["completion_tokens"]
        assert float(numbers[3].replace(",", "")) == pytest.approx((2 * prompt + 8 * sampled) / 1e6, abs=0.006)


def test_nothing_starts_without_confirmation_or_a_teacher(clips, tmp_path):
    with server(teach) as served:
        arguments = [word for word in build(served, clips, tmp_path / "out") if word != "--yes"]
        fail(ConfigError, *arguments, key="--yes")
        assert served.bodies == []
    fail(ConfigError, "data", "build", clips, "--out", tmp_path / "out", "--yes", key="engine.name", value="local")
    fail(ConfigError, "data", "build", "--out", tmp_path / "out", "seed=1", key="VIDEO")
    fail(DataError, "data", "build", tmp_path / "out", "--out", tmp_path / "out", "--dry-run", key=tmp_path / "out")
    assert "data_build.scenes.threshhold" in bad(
        "data", "build", clips, "--out", tmp_path / "out", "--dry-run", "data_build.scenes.threshhold=1"
    )


def test_two_builds_in_one_folder_are_refused(clips, tmp_path):
    with lock_elsewhere(tmp_path / "out", DATA_BUILD) as holder:
        command = ["data", "build", clips, "--out", tmp_path / "out", "--dry-run"]
        fail(RunError, *command, key=tmp_path / "out", value=holder.pid)
    good(*command)


@pytest.mark.slow
def test_a_named_pipe_in_the_folder_of_a_build_holds_nothing(built, clips, tmp_path):
    folder, _ = built
    names = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    assert {*map(str, names)} >= {*FILES, "stages/captions.jsonl", ".locks/data-build.lock"}
    with server(teach) as served:
        for number, name in enumerate([*names, Path("tasks.jsonl.part")]):
            copy = tmp_path / str(number)
            shutil.copytree(folder, copy)
            (copy / name).unlink(missing_ok=True)
            os.mkfifo(copy / name)
            assert "named pipe" in bad(*build(served, clips, copy)), name
            assert stat.S_ISFIFO((copy / name).stat().st_mode)


def test_only_a_data_build_reads_its_section(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("extends: paravt/sft\ndata_build: {scenes: {fps: 2}}\n")
    assert load_data_build_recipe(str(path), ["data_build.captions.fps=3"]).data_build.scenes.fps == 2
    assert "data_build" not in load_recipe("paravt/sft").model_dump()
    with raises(ConfigError, key="data_build.scenes.fps", value=2):
        load_recipe(str(path))
    with raises(ConfigError, key="data_build.price.prompt", value=1):
        load_recipe("paravt/sft", ["data_build.price.prompt=1"])
