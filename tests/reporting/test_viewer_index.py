"""The index of a run's episodes: complete, filtered and paged, incremental, rebuilt when it is damaged."""

import contextlib
import resource
import stat
import tempfile
from dataclasses import replace

import pytest
from commands import good
from page_cases import decode, example
from viewer_cases import build_record, build_rollouts, make_run, write_rollouts

from saccade.data.dataset import load_tasks
from saccade.errors import RunError
from saccade.evaluation.judge_results import JudgeVerdict
from saccade.reporting.episode_view import build_timeline
from saccade.reporting.viewer.episodes import (
    Describer,
    StoredEpisode,
    describe_tokens,
    list_images,
    read_episode,
)
from saccade.reporting.viewer.index import INDEX_FOLDER, EpisodeIndex
from saccade.reporting.viewer.library import Library, RecentResults, UnknownItemError
from saccade.utils.jsonl import append_jsonl, write_jsonl

EVALUATED, STEPS, PER_STEP = 6, 3, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "a")


@pytest.fixture
def index(folder):
    index = EpisodeIndex(folder)
    index.refresh()
    return index


def list_refs(index, **filters):
    total, rows = index.list_episodes(filters, limit=500)
    assert total == len(rows)
    return [row["ref"] for row in rows]


def test_every_episode_is_in_the_index(index):
    assert index.count() == 2 * EVALUATED + STEPS * PER_STEP
    assert not index.refresh()  # nothing has changed
    assert [(step["stage"], step["step"], step["kept"]) for step in index.list_steps()] == [
        ("rl", step, PER_STEP // 2) for step in (1, 2, 3)
    ]


def test_filters_select_episodes(index):
    assert len(list_refs(index, stage="before")) == EVALUATED
    assert len(list_refs(index, stage="before", verdict="right")) == EVALUATED // 2
    assert len(list_refs(index, stage="rl", step="2", outcome="dropped")) == PER_STEP // 2
    assert len(list_refs(index, stage="rl", reward_min="0.5")) == STEPS * PER_STEP // 2
    assert len(list_refs(index, errors="yes")) == index.count()  # each has a call that failed
    assert list_refs(index, called="no") == []
    assert len(list_refs(index, text="blue")) == 2  # the two answers that flipped
    assert len(list_refs(index, text="gree look")) == 0
    assert list_refs(index, text='") OR 1 --', status="x' OR '1") == []
    assert len(list_refs(index, stage="", verdict="unknown", reward_min="no number")) == index.count()


def test_pages_sort_and_position(index):
    refs = list_refs(index)
    assert refs[0].startswith("rl/3/")  # the newest step first
    pages = [index.list_episodes({}, offset=offset, limit=10)[1] for offset in range(0, index.count(), 10)]
    assert [row["ref"] for page in pages for row in page] == refs
    assert index.find_position(refs[17], {}) == 17
    assert index.find_position(refs[17], {"stage": "nothing"}) is None
    rewards = [row["reward"] for row in index.list_episodes({}, sort="-reward", limit=500)[1]]
    assert rewards == sorted(rewards, reverse=True)


def test_facets_count_episodes(index):
    facets = index.list_facets()
    assert dict(facets["stage"]) == {"rl": STEPS * PER_STEP, "before": EVALUATED, "after": EVALUATED}
    assert dict(facets["outcome"]) == {"kept": 12, "dropped": 12, "scored": 12}


def test_the_index_follows_the_files(tmp_path):
    folder = make_run(tmp_path / "a", num_steps=1)
    index = EpisodeIndex(folder)
    assert index.refresh()
    clip = str(next((folder / "media").iterdir()))
    write_rollouts(folder, 1, build_rollouts(1, clip, groups=1))  # a step that is sampled again
    write_rollouts(folder, 2, build_rollouts(2, clip))
    results = folder / "evaluations" / "after.jsonl"
    append_jsonl(results, build_record(example(name="w-new", path=clip, answer="violet")))
    append_jsonl(results, build_record(example(name="w-0", path=clip, answer="violet")))  # newer than its first line
    with results.open("ab") as file:
        file.write(b'{"task": ')  # a line that is still being written
    assert index.refresh()
    assert len(list_refs(index, stage="rl", step="1")) == 4
    assert len(list_refs(index, stage="rl", step="2")) == PER_STEP
    assert len(list_refs(index, stage="after")) == EVALUATED + 1
    assert len(list_refs(index, text="violet")) == 2
    results.unlink()
    index.refresh()
    assert list_refs(index, stage="after") == []
    verdict = JudgeVerdict(task_id="w-0", answer="red", value=1.0, overrides_rule=True)
    write_jsonl(folder / "evaluations" / "before.verdicts.jsonl", [verdict])
    index.refresh()
    assert len(list_refs(index, stage="before", verdict="right")) == EVALUATED // 2 + 1


def test_a_file_that_was_read_in_part_is_read_to_its_end(tmp_path, monkeypatch):
    """A viewer that is stopped while it reads leaves the rest to the next one."""
    folder = make_run(tmp_path / "a", num_steps=1)
    build_row, rows = EpisodeIndex._build_row, []

    def stop_at_the_third(self, *arguments):
        rows.append(arguments)
        if len(rows) == 3:
            raise KeyboardInterrupt
        return build_row(self, *arguments)

    monkeypatch.setattr("saccade.reporting.viewer.index.BATCH_LINES", 1)
    monkeypatch.setattr(EpisodeIndex, "_build_row", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        EpisodeIndex(folder).refresh()
    index = EpisodeIndex(folder)
    index.refresh()
    assert index.count() == 2 * EVALUATED + PER_STEP


def test_verdicts_belong_to_samples_and_may_be_deleted(tmp_path):
    folder = make_run(tmp_path / "a", num_steps=1)
    results = folder / "evaluations" / "before.jsonl"
    results.unlink()
    for sample, answer in enumerate(("violet", "grey")):
        append_jsonl(results, replace(build_record(example(name="w-0", answer=answer)), sample_index=sample))
    verdicts = [
        JudgeVerdict(task_id="w-0", answer=answer, value=value, overrides_rule=True)
        for answer, value in (("violet", 1.0), ("grey", 0.0))
    ]
    write_jsonl(results.with_suffix(".verdicts.jsonl"), verdicts)
    index = EpisodeIndex(folder)
    index.refresh()
    assert [ref[-1] for ref in list_refs(index, stage="before", verdict="right")] == ["0"]
    results.with_suffix(".verdicts.jsonl").unlink()
    index.refresh()
    assert len(list_refs(index, stage="before", verdict="right")) == 2  # the rule's scores


@contextlib.contextmanager
def limit_file_size(num_bytes):
    """No file may grow beyond so many bytes: writes fail as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_index(tmp_path):
    folder = make_run(tmp_path / "a", num_steps=1)
    index = EpisodeIndex(folder)
    index.refresh()
    known, inode = index.count(), (folder / INDEX_FOLDER / "index.sqlite").stat().st_ino
    write_rollouts(folder, 2, build_rollouts(2, str(next((folder / "media").iterdir()))))
    with limit_file_size(100), pytest.raises(RunError, match="free some space"):
        index.refresh()
    assert index.count() == known
    assert (folder / INDEX_FOLDER / "index.sqlite").stat().st_ino == inode
    assert index.refresh()
    assert index.count() == known + PER_STEP


def test_the_index_of_a_closed_run_is_private(tmp_path, monkeypatch):
    folder, shared = make_run(tmp_path / "a", num_steps=1), tmp_path / "tmp"
    shared.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    (folder / INDEX_FOLDER).touch()  # no index can be beside the run
    EpisodeIndex(folder).refresh()
    (private,) = shared.iterdir()
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    private.rename(tmp_path / "theirs")
    private.symlink_to(tmp_path / "theirs")  # as another user could
    with pytest.raises(RunError, match="TMPDIR"):
        EpisodeIndex(folder)


def test_damaged_files_and_a_damaged_index(tmp_path):
    folder = make_run(tmp_path / "a", num_steps=1)
    with (folder / "evaluations" / "after.jsonl").open("ab") as file:
        file.write(b'no json\n{"task": 1}\n[]\n')
    (folder / INDEX_FOLDER).mkdir()
    (folder / INDEX_FOLDER / "index.sqlite").write_bytes(b"not a database" * 500)
    index = EpisodeIndex(folder)
    assert index.count() == 0
    index.refresh()
    assert index.count() == 2 * EVALUATED + PER_STEP
    assert list(index.problems) == ["evaluations/after.jsonl"]
    episodes = next((folder / "episodes").glob("*.jsonl.gz"))
    episodes.unlink()
    episodes.mkdir()
    index.refresh()
    assert index.count() == 2 * EVALUATED
    assert sorted(index.problems) == [f"episodes/{episodes.name}", "evaluations/after.jsonl"]


def test_an_episode_is_read_from_its_place(index):
    for ref in (list_refs(index, stage="before")[0], list_refs(index, stage="rl", step="2")[5]):
        location, row = index.find(ref)
        stored = read_episode(location)
        assert stored.episode.task.id == row["task"]
        assert stored.score.value == row["reward"]
    assert index.find("eval/none/0/0") is None


def test_the_description_of_an_episode():
    scored = example(path="clip.mp4")
    view = Describer(StoredEpisode(episode=scored.episode, score=scored.score, outcome="scored")).describe()
    first, last = view["conversation"]["turns"]
    assert [call["ok"] for call in first["calls"]] == [True, False]
    assert first["calls"][0]["window"] == (0.0, 8.0)
    child = first["calls"][0]["child"]
    assert [view["images"][number]["time"] for number in child["prompt"]["images"]] == [1.5, 4.5]
    assert "".join(piece["text"] for piece in last["pieces"]) == scored.episode.turns[1].reply.text
    assert {piece["origin"] for piece in last["pieces"]} == {"prefill", "sampled"}
    assert len(list_images(scored.episode)) == 6


def test_the_time_line_has_windows_and_events():
    scored = example()
    timeline = build_timeline(scored.episode)
    assert timeline["seconds"] == 64.0
    assert timeline["frames"] == [8.0, 24.0, 40.0, 56.0]
    assert [(window["start"], window["end"], window["frames"]) for window in timeline["windows"]] == [
        (0.0, 8.0, [1.5, 4.5])
    ]
    assert len(timeline["events"]) == 2


def test_the_time_line_has_the_spans_that_a_generated_task_needs(dataset_folder):
    episode = example().episode
    tasks = load_tasks(dataset_folder / "train" / "tasks.jsonl")
    assert tasks
    for task in tasks:
        timeline = build_timeline(replace(episode, task=task))
        evidence = [(region["start"], region["end"]) for region in timeline["evidence"]]
        assert evidence == [tuple(region) for region in task.extras["evidence"]] != []
        assert len(timeline["events"]) == len(task.extras["events"])


def test_a_generated_picture_shows_the_boxes_that_its_task_needs(tmp_path):
    settings = ["--recipe", "tiny/map", "synthetic.train=2", "synthetic.validation=1", "synthetic.test=1"]
    good("data", "synth", tmp_path / "images", *settings)
    task = load_tasks(tmp_path / "images" / "train" / "tasks.jsonl")[0]
    episode = replace(example().episode, task=task, turns=())
    view = Describer(StoredEpisode(episode=episode, score=None, outcome="ungraded")).describe()
    assert view["evidence_boxes"] == [list(map(float, region)) for region in task.extras["evidence"]] != []


def test_kept_results_are_bounded_and_follow_their_files():
    results, computed = RecentResults(2), []

    def compute(key):
        computed.append(key)
        return key

    for key, stamp in (("a", 0), ("b", 0), ("a", 0), ("c", 0), ("a", 1), ("b", 0)):
        results.keep(key, stamp, lambda key=key: compute(key))
    assert computed == ["a", "b", "c", "a", "b"]
    assert len(results) == 2


def test_tokens_have_logprobs_and_advantages():
    episode = example().episode
    values = tuple(0.5 if mask else 0.0 for mask in episode.ledger.loss_mask())
    main, child = describe_tokens(episode, decode, {0: values})
    sampled = [segment for segment in main["segments"] if segment["origin"] == "sampled"]
    assert {piece["advantage"] for segment in sampled for piece in segment["pieces"]} == {0.5}
    text = "".join(piece["text"] for segment in sampled for piece in segment["pieces"])
    assert text == decode(episode.ledger.sampled_tokens())
    assert all(segment["version"] == 3 for segment in sampled)
    assert child["segments"][-1]["pieces"][0]["advantage"] is None


def test_advantages_of_a_step_are_those_of_the_recipe(folder):
    library = Library([folder.parent])
    library.refresh()
    advantages = library.compute_advantages("a", "rl", 2)
    assert sorted(advantages) == [f"rl/2/0/{index}" for index in range(4)]  # the other group was dropped
    assert [round(advantages[f"rl/2/0/{index}"], 3) for index in range(4)] == [-1.0, 1.0, -1.0, 1.0]


def test_comparisons_list_right_to_wrong_first(folder):
    library = Library([folder.parent])
    library.refresh()
    result = library.compare(("a", "before", 0), ("a", "after", 0))
    assert result["counts"] == {"right → wrong": 1, "wrong → right": 2, "answer changed": 1, "same": 2}
    assert [pair["kind"] for pair in result["pairs"]][:2] == ["right → wrong", "wrong → right"]
    (table,) = library.compare_evaluations(("a", "before", 0), ("a", "after", 0))
    assert any(row[0] == "difference, paired" for row in table["rows"])


def test_curves_overlay_runs_and_average_seeds(tmp_path):
    for name in ("a", "b"):
        make_run(tmp_path / name, num_steps=2)
    library = Library([tmp_path])
    library.refresh()
    panels = {panel["title"]: panel for panel in library.build_curves(["a", "b"], "rl")["panels"]}
    assert {curve["run"] for curve in panels["Entropy"]["curves"]} == {"a", "b"}
    averaged = library.build_curves(["a", "b"], "rl", has_bands=True)
    assert list(averaged["families"].values()) == [["a", "b"]]
    (entropy,) = next(panel for panel in averaged["panels"] if panel["title"] == "Entropy")["curves"]
    assert entropy["y"] == [1.0, 0.5]
    assert entropy["low"] == [1.0, 0.5]  # equal seeds: an interval without width
    with pytest.raises(UnknownItemError):
        library.build_tables("../a")
