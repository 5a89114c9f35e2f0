"""VideoMME: 900 videos of 11 s to 1 h, three four-way questions each, with or without subtitles."""

from collections.abc import Iterator

from saccade.data.raw import Row
from saccade.evaluation.benchmarks._answers import first_letter
from saccade.evaluation.benchmarks._benchmark import Benchmark, Mark, extra
from saccade.evaluation.benchmarks._rows import Copy
from saccade.evaluation.benchmarks._rules import accuracy_beside, choice_mark, tolerant_choice, unlabelled
from saccade.types import Kind, Task

# The two that run together are so in the published script, so that neither of their halves is ever deleted.
PHRASES = (
    *("The best answer is", "The correct answer is", "The answer is", "The answer"),
    *("The best option isThe correct option is", "Best answer:Best option:"),
    *("Answer:", "Option:", "The correct answer", "The correct option"),
)
_KEPT = ("video_id", "videoID", "duration", "domain", "sub_category", "task_type")


def videomme(*, subtitles: bool = False) -> Benchmark:
    """VideoMME (Fu et al. 2024, arXiv 2405.21075); `subtitles` names each video's file, from the video's own folder,
    in `extras["subtitles"]` ("" where a video has none), and agents show the lines of the frames that they sample.

    Official: some phrases are deleted, then the first of A-D anywhere is the answer, even inside a word. The official
    script leaves out of the mean what it can't read; that number stands beside as `accuracy_of_answered`.
    """

    def read(row: Row, copy: Copy) -> Iterator[Task]:
        stem = row.text("videoID")
        options = unlabelled(row.texts("options"))
        media = copy.video(*(f"{place}{stem}{end}" for place in ("data/", "videos/", "") for end in _ENDS))
        long = row.label("duration") == "long"  # every one of these has subtitles, of the others some
        said = {"subtitles": copy.beside(media[0], f"subtitle/{stem}.srt", required=long)} if subtitles else {}
        yield Task(
            id=row.text("question_id"),
            question=row.text("question"),
            media=media,
            kind=Kind.CHOICE,
            gold=row.letter(len(options), "answer"),
            choices=options,
            extras={**{name: row.label(name) for name in _KEPT}, **said},
        )

    return Benchmark(
        name="videomme_subtitles" if subtitles else "videomme",
        hub="lmms-lab/Video-MME",
        patterns=("videomme/test-*.parquet", "data/test-*.parquet", "*.jsonl", "videomme.json"),
        count=2700,
        read=read,
        official=_official,
        tolerant=tolerant_choice,
        headline="accuracy",
        metrics=accuracy_beside(lambda result: result.mark.read is not None),
        strata={name: extra(name) for name in ("duration", "domain", "sub_category", "task_type")},
        counts={"duration": {"short": 900, "medium": 900, "long": 900}},
        packed=("subtitle.zip",) if subtitles else (),
        subtitled=744 if subtitles else None,
    )


_ENDS = (".mp4", ".MP4", ".mkv")


def _official(text: str, task: Task) -> Mark:
    return choice_mark(first_letter(text, PHRASES, "ABCD"), task)
