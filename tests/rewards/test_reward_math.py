"""Formulas through math-verify, in worker processes that are attacked, starved and killed."""

import asyncio
import gc
import os
import signal

import pytest
from error_cases import raises
from reward_cases import answer_episode, episode, task, text, turn

from saccade.errors import ConfigError, DataError
from saccade.rewards import math_worker_pool
from saccade.rewards.accuracy import Accuracy
from saccade.rewards.answer_types.math_ import MathAnswer, extract_formula
from saccade.rewards.math_worker_pool import MathWorkerPool
from saccade.types import AnswerType, Ungraded


@pytest.fixture(scope="module")
def reward():
    pytest.importorskip("math_verify", reason="math-verify is missing: pip install 'saccade[math]'")
    return MathAnswer(cpu_seconds=1, num_workers=1)


def grade_formula(reward, body, ground_truth):
    return asyncio.run(reward(answer_episode(body, ground_truth=ground_truth, kind=AnswerType.MATH)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "ground_truth"),
    [
        (r"\boxed{4}", "4"),
        (r"\boxed{4", "4"),
        (r"x \approx 4", "4"),
        (r"\boxed{x \approx 4.0}", "4"),
        ("4", "4"),
        ("4.0", "4"),
        ("$4$", "4"),
        (r"\(4\)", "4"),
        (r"\[\boxed{4}\]", "4"),
        (r"The answer is $\boxed{4}$.", "4"),
        ("The final answer is: 4.", "4"),
        (r"\boxed{4} = \boxed{4}", "4"),
        ("x = 4", "4"),
        ("x = 2 + 2 = 4", "4"),
        ("4", "x=4"),
        ("2+2", "4"),
        (r"\frac{8}{2}", "4"),
        ("8/2", "4"),
        ("2**2", "4"),
        ("2²", "4"),
        ("sqrt(16)", "4"),
        ("√16", "4"),
        ("√(16)", "4"),
        ("2×2", "4"),
        ("8÷2", "4"),
        ("2·2", "4"),
        ("\uff14", "4"),
        ("0.5", r"\frac{1}{2}"),
        ("½", "0.5"),
        (r"\frac12", "1/2"),
        (r"50\%", "0.5"),
        ("50%", "0.5"),
        ("\u22125", "-5"),
        ("\u20135", "-5"),
        ("1,000", "1000"),
        ("x²+2x+1", "(x+1)^2"),
        (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
        ("2π", r"2\pi"),
        ("2, 1", r"\{1, 2\}"),
        ("(1, 2)", "(1,2)"),
        ("3 > x", "x < 3"),
        ("x ≤ 3", r"x \le 3"),
        ("∞", r"\infty"),
        (r"\text{even}", "even"),
        ("0.333333", r"\frac{1}{3}"),
        ("4", 4.0),
        ("**4**", "4"),
        ("`4`", "4"),
        ("1.5e3", "1500"),
        ("1 1/2", "1.5"),
        ("pi/2", r"\frac{\pi}{2}"),
        ("2sqrt3", r"2\sqrt{3}"),
        ("sin(x)", r"\sin x"),
        ("90°", r"90^\circ"),
        (r"\varnothing", r"\emptyset"),
        (r"4 \text{ cm}^2", "4"),
        (r"4 \text{ m}/\text{s}.", "4"),
        (r"1 \text{ and } 2", r"\{1, 2\}"),
        ("\u0664", "4"),
    ],
)
def test_equal_formulas(reward, body, ground_truth):
    assert grade_formula(reward, body, ground_truth) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "ground_truth"),
    [
        ("5", "4"),
        ("-4", "4"),
        ("\u20134", "4"),
        ("0.4", "4"),
        ("40", "4"),
        ("4.0000001", "4"),
        ("4 or 5", "4"),
        ("4, 5", "4"),
        (r"4 \text{ or } 5", "4"),
        (r"\{4, 5\}", "4"),
        (r"\pm 4", "4"),
        (r"4 \pm 1", "4"),
        (r"\boxed{4} \boxed{5}", "4"),
        (r"\boxed{5} or \boxed{4}", "4"),
        (r"not \boxed{4}", "4"),
        ("5 = 4", "4"),
        ("4 = 5", "4"),
        ("2 + 2 = 5 = 4", "4"),
        ("not 4", "4"),
        ("it is 4 I think", "4"),
        ("4!", "4"),
        ("4i", "4"),
        ("4x", "4"),
        (r"4\infty", "4"),
        (r"x \neq 4", "4"),
        ("4x²", "4x"),
        ("0.333", r"\frac{1}{3}"),
        ("3.14", r"\pi"),
        ("(2, 1)", "(1, 2)"),
        ("x > 3", "x < 3"),
        ("", "4"),
        (r"\boxed{}", "4"),
        (r"\text{odd}", "even"),
        (r"4 \text{if } x > 0, 5 \text{ else}", "4"),
        (r"4\text{5}", "4"),
        (r"4 \text{ perhaps } + 1", "4"),
        ("1 1/2", "11/2"),
        ("11/2", "1 1/2"),
        ("2e3", "23"),
        ("4" + "+0" * 300, "4"),  # longer than answers are
    ],
)
def test_unequal_formulas(reward, body, ground_truth):
    assert grade_formula(reward, body, ground_truth) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        "9**9**9**9",
        r"\boxed{10^{10^{10}}!}",
        "(" * 190 + "4" + ")" * 190,
        "x^{" * 90 + "x" + "}" * 90,
    ],
)
def test_hostile_formulas_take_bounded_time(reward, body, monkeypatch):
    """At most two processes, each ended by its limit, and no wait for a response in vain, which is ungraded."""
    stop_process, exit_codes = MathWorkerPool._stop_process, []

    def record_exit(pool, process):
        stop_process(pool, process)
        exit_codes.append(process.returncode)

    monkeypatch.setattr(MathWorkerPool, "_stop_process", record_exit)
    assert grade_formula(reward, body, "4") == 0.0
    assert len(exit_codes) <= 2
    assert all(exit_codes)
    monkeypatch.undo()
    assert grade_formula(reward, "1 + 3", "4") == 1.0


@pytest.mark.slow
def test_hostile_formula_does_not_block_the_event_loop(reward):
    async def body():
        ticks = 0
        hostile = asyncio.ensure_future(reward(answer_episode("8**9**9**9", ground_truth="4", kind=AnswerType.MATH)))
        while not hostile.done():
            ticks += 1
            await asyncio.sleep(0.01)
        return ticks, await hostile

    ticks, value = asyncio.run(body())
    assert value == 0.0
    assert ticks > 3  # it takes a second of processor time


def test_comparisons_are_cached(reward, monkeypatch):
    compare, compared = MathWorkerPool._compare, []

    def record_comparison(pool, *formulas):
        compared.append(formulas)
        return compare(pool, *formulas)

    monkeypatch.setattr(MathWorkerPool, "_compare", record_comparison)
    assert [grade_formula(reward, "7**9**9**9", "4") for _ in range(3)] == [0.0] * 3
    assert len(compared) == 1


@pytest.mark.slow
def test_killed_worker_is_replaced(reward):
    assert grade_formula(reward, "3 + 1", "4") == 1.0
    (process,) = reward._worker_pool._processes
    process.send_signal(signal.SIGKILL)
    assert grade_formula(reward, "6 - 2", "4") == 1.0
    assert len(reward._worker_pool._processes) == 1


@pytest.mark.slow
def test_workers_end_with_their_reward():
    pytest.importorskip("math_verify", reason="math-verify is missing")
    own = MathAnswer(num_workers=2)
    assert grade_formula(own, "3 + 1", "4") == 1.0
    (process,) = own._worker_pool._processes
    del own
    gc.collect()
    process.wait(120)  # whichever thread lets go of it last ends it; raises where none does


def test_worker_that_can_not_start_is_ungraded(monkeypatch):
    pytest.importorskip("math_verify", reason="math-verify is missing")
    monkeypatch.setattr(math_worker_pool.math_worker, "__file__", os.devnull)
    found = grade_formula(MathAnswer(), "3 + 1", "4")
    assert isinstance(found, Ungraded)
    assert "math-verify" in found.reason


@pytest.mark.slow
def test_unresponsive_worker_raises(monkeypatch, tmp_path):
    script = tmp_path / "idle.py"
    script.write_text("import time\nprint('{\"ready\": true}', flush=True)\ntime.sleep(99)\n")
    monkeypatch.setattr(math_worker_pool.math_worker, "__file__", str(script))
    monkeypatch.setattr(math_worker_pool, "_RESPONSE_TIMEOUT", (0.2, 0.0))
    with pytest.raises(math_worker_pool.MathWorkerError):
        asyncio.run(MathWorkerPool(cpu_seconds=1, num_workers=1).are_equal("4", "5"))


def test_missing_math_verify_raises(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises(ConfigError, key="answer_type", value="math"):
        MathAnswer()
    other = Accuracy()  # works without the package until the first math task
    assert other(answer_episode("red", ground_truth="red")).value == 1.0
    with raises(ConfigError, key="answer_type", value="math"):
        other(answer_episode("4", ground_truth="4", kind=AnswerType.MATH))


def test_accuracy_passes_settings_to_the_answer_type(reward):
    async def body():
        return await Accuracy(answer_types={"math": {"max_answer_chars": 3}})(
            answer_episode("4.", ground_truth="4", kind=AnswerType.MATH)
        )

    assert asyncio.run(body()).value == 1.0


@pytest.mark.parametrize("settings", [{"cpu_seconds": 0}, {"num_workers": 0}, {"max_answer_chars": 0}])
def test_invalid_settings_raise(reward, settings):
    key = f"rewards.accuracy.settings.answer_types.math.{next(iter(settings))}"
    with raises(ConfigError, key=key, value=0):
        Accuracy(answer_types={"math": settings})


@pytest.mark.parametrize("ground_truth", [(1.0, 2.0), "", " "])
def test_invalid_formula_raises(reward, ground_truth):
    with raises(DataError, key="ground_truth", value=ground_truth):
        grade_formula(reward, "4", ground_truth)


def test_text_outside_an_answer_is_not_read(reward):
    of = task("4", AnswerType.MATH)
    assert asyncio.run(reward(episode(turn(text(r"\boxed{4}")), of=of))) == 0.0


def test_extract_formula():
    assert extract_formula(r"so $\boxed{\frac{1}{\{2\}}}$") == r"\frac{1}{\{2\}}"
    assert extract_formula(r"\boxed{1}\boxed{ 1 }") == "1"
    assert extract_formula(r"\fbox{3}") == "3"
    assert extract_formula("the answer is 3") == "3"
    assert extract_formula("a}{b") is None
    assert extract_formula(r"\boxed{a}\boxed{b}") is None
