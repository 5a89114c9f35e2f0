r"""MathVision's published reading of an answer, and its equality, rule for rule.

    model_answer(response)  ->  the answer as a string     is_equal(gold, answer)  ->  strings, tuples, then values

The published code evaluates what the model wrote as Python; here `_latex` works it out, which knows numbers alone.
"""

import re

from saccade.evaluation.benchmarks._latex import value_of

_FLAGS = ("the final answer is", "the answer is", "the correct answer is", "the answer should be")
_UNITS = ("{m}^3", "m^3", "{units}", "units", "{km}", "km")


def model_answer(response: str) -> str:
    """What the response answers, in small letters; "" where nothing is left."""
    text = response.strip()
    for letter in "ABCDE":
        ends = text.endswith((f" {letter}.", f" ({letter})."))
        if ends or text.startswith((f"{letter}\n", f"({letter})\n", f"({letter}) {letter}\n")):
            text = letter
    tail = text.split("is ")[-1].rstrip(".")
    text = tail if _is_number(tail) else text
    if "oxed{" not in text:
        for flag in _FLAGS:
            text = _after(_after(text, flag), flag.replace("the", "The"))
    elif text.count("oxed{") > 1:
        text = "\\boxed{" + text.split("oxed{")[-1]
    found = _math_answer(text)
    for letter in "abcde":
        found = found.replace(f"({letter})", letter)
    for letter in "abcde":
        found = found.replace(f"{{{letter}}}", letter)
    return found.rstrip(".").lstrip(":").strip()


def is_equal(gold: str, said: str) -> bool:
    """Whether two answers are one string, one tuple or list, or one value rounded to two decimals."""
    gold, said = gold.lower(), said.lower()
    if not gold.replace(" ", "") or not said.replace(" ", ""):
        return False
    if gold.strip() == said.strip():
        return True
    gold, said = _rounded_tuple(gold), _rounded_tuple(said)
    if gold == said:
        return True
    values = value_of(gold), value_of(said)
    return None not in values and round(values[0] or 0.0, 2) == round(values[1] or 0.0, 2)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _after(text: str, flag: str) -> str:
    """The first sentence of the first line after the last flag; the text itself, stripped, where there is none."""
    rest = text.split(flag)[-1].strip()
    return rest.split("\n")[0].split(". ")[0] if flag in text else rest


def _rounded_tuple(text: str) -> str:
    parts = text[1:-1].split(",")
    if len(parts) < 2 or (text[0], text[-1]) not in (("(", ")"), ("[", "]")):
        return text
    rounded = []
    for part in parts:
        value = value_of(part)
        kept = "infty" in part or part in ("a", "-a")
        if value is None and not kept:
            return text
        # a whole number has no decimals there either
        whole = value is not None and value == int(value) and "." not in part and "frac" not in part
        rounded.append(part if kept else str(int(value or 0)) if whole else str(round(value or 0.0, 2)))
    return f"{text[0]}{','.join(rounded)}{text[-1]}"


def _math_answer(text: str) -> str:
    text = text.lower().replace("{}", "")
    inside = re.findall("oxed{(.*)}", text, flags=re.DOTALL)
    found = inside[-1] if inside else text
    if "}" in found and ("{" not in found or found.index("}") < found.index("{")):
        found = found.split("}")[0]
    found = found.split("=")[-1].split("\\approx")[-1]
    found = found.replace(" ", "").replace("\\,", "").replace("∞", "\\infty")
    found = found.replace("+\\infty", "\\infty").replace("\\\\", "\\").replace("\n", "")
    for mark in ("\\text", "\\mbox"):
        found = found.replace(mark, "")
    found = found.replace("bmatrix", "pmatrix")
    for mark in ("\\left", "\\right", "^{\\circ}", "^\\circ", *_UNITS):
        found = found.replace(mark, "")
    return _stripped(found)


def _stripped(text: str) -> str:
    """The second cleaning: fractions in one spelling, no signs of money or per cent."""
    for before, after in (("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac")):
        text = text.replace(before, after)
    for mark in ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$", "$"):
        text = text.replace(mark, "")
    text = text.split("\\text{ ")[0].replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    text = "0" + text if text.startswith(".") else text
    for mark in ("=", "\\approx"):
        text = text.split(mark)[-1] if text.count(mark) == 1 else text
    if "sqrt" in text:
        text = re.sub(r"\\sqrt(?!\{|$)(.)", r"\\sqrt{\1}", text, flags=re.DOTALL)
        text = re.sub(r"\\frac(?!\{)(.)([^{])", r"\\frac{\1}{\2}", text)
    text = text.replace(" ", "")
    text = "\\frac{1}{2}" if text == "0.5" else text
    return re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", text)
