"""Reports of one and of several runs as HTML, Markdown and PDF."""

import pytest
from commands import fail, good

from saccade.config.load import load_recipe
from saccade.errors import RunError
from saccade.metrics.tables import Table
from saccade.reporting.pdf import format_table, write_pdf
from saccade.reporting.report import Report, ReportSection
from saccade.runs.run_folder import Run
from saccade.utils.jsonl import append_jsonl

pytestmark = pytest.mark.slow

NASTY = "<script>alert(1)</script> $x_1$ \x1b[31m\u202e\udc00 | *b*"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folders = []
    for name, lr in (("a", 1e-4), ("b", 2e-4)):
        folder = tmp_path_factory.mktemp("runs") / name
        Run.create(folder, load_recipe("tiny/para_grpo", [f"rl.optim.lr={lr}"]), metadata={"seed": 0, "commit": "abc"})
        for step in (1, 2, 3):
            row = {"stage": "rl", "step": step, "reward": step * lr, "accuracy": 0.5, "calls": 2.0}
            tokens = {"trained_tokens": 1000, "sampled_tokens": 50.0, "visual_tokens": 60.0, "seconds/train": 2.0}
            append_jsonl(folder / "metrics.jsonl", row | tokens)
        folders.append(folder)
    return folders


@pytest.mark.parametrize("ending", ["html", "md"])
def test_a_report_of_runs_has_differences_cost_and_commands(folders, tmp_path, ending):
    page = tmp_path / f"report.{ending}"
    good("report", *folders, "-o", page)
    text = page.read_text().replace("\\", "")
    for part in ("rl.optim.lr", "0.0002", "3,000", "recipe.yaml --out", "abc"):
        assert part in text, part
    assert "rl.group_size" not in text  # equal in both
    assert ("<svg" in text) is (ending == "html")
    assert len(list(tmp_path.glob("report_plots/*.png"))) == (3 if ending == "md" else 0)
    assert text.count("(report_plots/") == (3 if ending == "md" else 0)


def test_reports_as_pdf(folders, tmp_path):
    for name, runs in (("one", folders[:1]), ("two", folders)):
        page = tmp_path / f"{name}.pdf"
        good("report", *runs, "-o", page)
        data = page.read_bytes()
        assert data.startswith(b"%PDF")
        assert data.rstrip().endswith(b"%%EOF")
        assert data.count(b"/Subtype /Image") >= 3  # the curves


def test_a_file_of_another_kind_is_an_error(folders, tmp_path):
    fail(RunError, "report", *folders, "-o", tmp_path / "a.doc", key="--out", value=str(tmp_path / "a.doc"))
    fail(RunError, "report", folders[0], "-o", tmp_path / "a.doc", key="--out", value=str(tmp_path / "a.doc"))
    fail(RunError, "report", *folders, key="--out")


def test_a_pdf_holds_any_text(tmp_path):
    table = Table(title=NASTY, header=("a", NASTY), rows=((NASTY, "x" * 3000), *(("b", "c") for _ in range(200))))
    report = Report(kind="run", title=NASTY, warnings=(NASTY,), sections=(ReportSection(title=NASTY, tables=(table,)),))
    assert write_pdf(report, tmp_path / "new" / "nasty.pdf").read_bytes().startswith(b"%PDF")


def test_tables_are_wrapped_to_the_width():
    row = tuple(f"cell {number} with a few words" for number in range(12))
    lines = list(format_table(Table(title="t", header=row, rows=(row,)), 100))
    assert max(map(len, lines)) <= 100
    assert "".join(lines).count("words") == 24
