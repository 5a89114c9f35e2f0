r"""Read an answer: where it stands in a text, and which letter, number or time span it names.

    text ──find_answers──> the boxes, else what follows "the answer is", else the text
                             ├── read_letter   one option, by its letter or its text
                             ├── read_number   one number
                             └── read_span     two times in order

A reading is None if the text names nothing, several things or denies what it names: what is ambiguous earns nothing.
Answer types read this way; with `in_prose` the lenient rules of benchmarks also search sentences.
"""

import functools
import itertools
import re
from collections.abc import Sequence

from saccade.rewards.answer_types.number_scanner import (
    SPACELESS,
    Number,
    mask_numbers,
    normalize_answer,
    scan_numbers,
)
from saccade.rewards.text_normalization import ANSWER_LEAD_IN, extract_boxed, normalize_text

# ---- where the answer stands ---------------------------------------------------------------------------------------

_ANNOUNCEMENT = re.compile(
    r"\b(?:answer|答案)\b[>*_]*(?: (?:to|for) [^.:\n]{1,80}?)?\s*(?:(?:is|are|would be|should be|must be)\b|[:=是为])"
    r"[\s:*]*",
    re.IGNORECASE,
)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|[。\n]")
_HEDGE = re.compile(
    r"\W*(?:(?:or|nope|wait|but|maybe|perhaps|alternatively|actually|sorry|hmm)\b|no\s*[,.!?:;])", re.IGNORECASE
)


def find_answers(text: str) -> tuple[str, ...]:
    r"""Return the parts of a text that give its answer: its boxes, else what follows each "answer is", else all of it.

    A box that isn't closed ends with its line. If the answer is denied or taken back, there is none.

    >>> find_answers(r"so \boxed{4}"), find_answers("3 and 1. The answer is 4."), find_answers("4 cm")
    (('4',), ('4',), ('4 cm',))
    >>> find_answers(r"It can't be \boxed{4}"), find_answers("I don't think the answer is 4")
    ((), ())
    """
    if boxes := extract_boxed(text):
        if box := _BOX.search(text):
            end = text.index(boxes[0], box.end()) + len(boxes[0])
            if _is_governed_by_denial(text, box.start()) or _DENIAL_AFTER.match(text, end):
                return ()
        return tuple(boxes)
    announcements = [match for match in _ANNOUNCEMENT.finditer(text) if text[match.end() :].strip()]
    if not announcements:
        return (text,)
    ends = [*(match.start() for match in announcements[1:]), len(text)]
    segments = [text[match.end() : end] for match, end in zip(announcements, ends, strict=True)]
    ended = [_SENTENCE_END.search(segment) for segment in segments]
    rest = segments[-1][ended[-1].end() :] if ended[-1] else ""
    if _HEDGE.match(rest) or any(_is_governed_by_denial(text, match.start()) for match in announcements):
        return ()
    return tuple(segment[: end.start()] if end else segment for segment, end in zip(segments, ended, strict=True))


# ---- denials -------------------------------------------------------------------------------------------------------

_DENIAL = (
    r"\b(?:not|never|neither|nor|cannot|none|without|except|excluding|excludes?|excluded|eliminat\w+|reject\w*"
    r"|dismiss\w*|discard\w*|rul(?:e|es|ed|ing)(?: \w+)? out|cross(?:ed|ing)? out|doubt\w*|rather than|instead of"
    r"|other than|unlike|wrong(?:ly)?|incorrect(?:ly)?|impossible|unlikely|false|mistaken(?:ly)?|den(?:y|ies|ied)"
    r"|no(?! ?[.,;:!?#\d]))\b"
    r"|n't\b|不|没"
)
_DENIAL_ANYWHERE = re.compile(_DENIAL, re.IGNORECASE)
_DENIAL_BEFORE = re.compile(
    rf"{_DENIAL}|\b(?:hardly|barely|scarcely|far from|absent|outside|fail(?:s|ed)? to|lack(?:s|ed|ing)?|least|worst)\b"
    r"|[¬≠✗✘❌][\s(\[]*\Z|(?<!\S)![\s(\[]*\Z",
    re.IGNORECASE,
)
_GOVERNING_DENIAL = re.compile(
    rf"(?:{_DENIAL}|\b(?:least|worst|hardly)\b|\\(?:neq?|not)\b|[¬≠✗✘❌!])"
    r"(?:\W+(?:be|it|is|it's|that|this|the|a|an|think|believe|say|saying|to|of|for|by|as|if|whether|final|correct|right"
    r"|true|answer|option|choice|number|value|equal|likely|probable|plausible|suitable))*\W*\Z",
    re.IGNORECASE,
)
_MAX_CLAUSE_CHARS = 400
_EXCEPTION = re.compile(r"\b(?:anything|all|any|everything|everyone) but\b", re.IGNORECASE)
_CLAUSE_END = re.compile(
    r"[.;!?。；](?=\s)|\n|, (?=(?:so|it|the|this|that|answer|hence|therefore|thus|then|leaving|which leaves|only"
    r"|rather|instead)\b(?! than| of))|\b(?:but|because|since|therefore|thus|hence|so|instead(?! of))\b",
    re.IGNORECASE,
)
_BE = "is|was|are|were|be|been|being|seems?|looks?|appears?|sounds?|would|must|could|can|should|does|did|do|has|have|to"
_DENIAL_AFTER = re.compile(
    rf"""[)\]}}>'"*$]*(?:\s+(?:{_BE}|also|clearly|definitely|certainly|obviously|simply|probably|therefore|thus|just))*"""
    r"(?:\s+|\s*=\s*)(?:not|never|cannot|\w+n't|wrong|incorrect|false|impossible|unlikely|invalid|out|excluded|eliminated|rejected"
    r"|dismissed|discarded|mistaken|(?:ruled|crossed|left) out)\b|[)\]]?\?\s*no\b|\s*(?:[✗✘❌]|不|错)",
    re.IGNORECASE,
)


def is_denied(text: str, start: int, end: int | None = None) -> bool:
    """Return whether the clause before `start`, or the words right after `end`, deny what is between.

    >>> [is_denied(text, text.index("C"), text.index("C") + 1) for text in ("Not C.", "C is wrong", "not B but C")]
    [True, True, False]
    """
    before = _EXCEPTION.sub("except", text[max(0, start - _MAX_CLAUSE_CHARS) : start])
    clause = _CLAUSE_END.split(before)[-1]
    return bool(_DENIAL_BEFORE.search(clause) or (end is not None and _DENIAL_AFTER.match(text, end)))


def _is_governed_by_denial(text: str, start: int) -> bool:
    """Return whether a denial directly precedes `start`; words such as "it is the" may stand between.

    A denial earlier in the sentence is a reason: "Excluding A and B, we get" an answer.
    """
    before = _EXCEPTION.sub("except", text[max(0, start - _MAX_CLAUSE_CHARS) : start])
    return _GOVERNING_DENIAL.search(before) is not None


def has_denial(text: str) -> bool:
    """Return whether a text denies anything, whatever that is."""
    return _DENIAL_ANYWHERE.search(_EXCEPTION.sub("except", text)) is not None


def names_text(text: str, expected: str) -> bool:
    """Return whether a text contains another one as whole words, in any case, and doesn't deny it or offer others.

    >>> [names_text(text, "Dec") for text in ("It is in Dec.", "in December", "not in Dec", "Nov or Dec")]
    [True, False, False, False]
    """
    plain, words = (" ".join(normalize_text(part).casefold().split()) for part in (text, expected))
    match = (
        re.search(rf"(?<![^\W{SPACELESS}])(?<![.-]){re.escape(words.rstrip('.'))}(?![^\W{SPACELESS}]|-|\.\d)", plain)
        if words.strip(".")
        else None
    )
    has_choice = re.search(r"\bor\b", plain) and not re.search(r"\bor\b", words)
    return bool(match) and not has_choice and (has_denial(words) or not has_denial(plain))


# ---- letters -------------------------------------------------------------------------------------------------------

_MARKUP = re.compile(
    r"\\(?:f?box(?:ed)?|text(?:bf|it|rm|sf)?|math(?:bf|it|rm|sf)|underline)\s*\{([^{}]*)\}|\\[()\[\]]|\*+|\$+|_{2,}"
    r"|<<|>>|[\"'`](?!t\b|s\b)|^#{1,6}\s",
    re.MULTILINE,
)
_HEADER = re.compile(r"<(?=/?[a-z ]+>)|(?<=[a-z])>", re.IGNORECASE)
# These patterns match casefolded text.
_LETTER_ALONE = re.compile(rf"{ANSWER_LEAD_IN}[(\[{{「]?([a-z])[)\]}}」.:,;!。、]*")
_LABELED_OPTION = re.compile(rf"{ANSWER_LEAD_IN}[(\[]?([a-z])(?:[)\]][.:]? ?|[.:,] ?| ?- ?| )(\S.*)")
_ANSWER_WORD = "(?:answer|option|choice|one)"
_EXPLAINED = re.compile(
    rf"{ANSWER_LEAD_IN}[(\[]?([a-z])[)\]]?(?: is(?: the)? (?:correct|right|best|answer|true)(?: {_ANSWER_WORD})?)?"
    r"[.,;:!]?(?: ?- ?| )?(?:[(]?(?:because|since|given|due to|as (?:it|the|this|there|only|in|all)\b)\b.*"
    r"|(?<=[a-z])[.!]?)"
)
_SENTENCE_ENDS = ".!。"  # stripped before an option's text is compared
_CHOICE_WORDS = r"(?:answer|option|choice|choose|chose|pick|select|go(?:ing)? with|答案|选项?)"
_ANNOUNCED = re.compile(
    rf"{_CHOICE_WORDS}(?:\s+is|\s+would be|\s+must be|\s*是|\s*为)?\s*[:：]?\s*(?:option\s*)?$", re.IGNORECASE
)
_CONFIRMED = re.compile(
    r"[)\]]?\s+(?:is|was|must be|has to be)\s+(?:the\s+)?(?:correct|right|best|answer|true)\b", re.I
)
_NOT_ARTICLE = ("or", "and", "nor", "to", "but", "is", "because", "since", "was")  # words after the letter A
_LIST_SEPARATOR = re.compile(r"[)\].:]*\s*(?:[,/&|]\s*)?(?:(?:or|and|nor|and/or)\s+)?[(\[]?")


def read_letter(text: str, letters: str, options: Sequence[str] = (), *, in_prose: bool = False) -> str | None:
    r"""Return the one option that an answer names, as one of `letters`; None if it names none, several or denies it.

    Read in this order, ignoring case, width, quotes and markup: a letter alone (`B`, `(b)`, `<<B>>`, `Option B`), the
    exact text of one option, both if they agree; such a first line with an explanation after it; the same after "the
    answer is". Two boxes must agree. With `in_prose` the last box counts, and sentences are read: the capital letter
    after `answer`, `option` or `choose`, or that is called correct; a letter at the start; the only letter that is not
    denied (`A` before a word is an article, `I` a pronoun); the only option whose text occurs.

    >>> [read_letter(text, "ABCD") for text in (r"\boxed{b", "<<C>>", "B\nA shows another ball.", "Not C.", "A or B")]
    ['B', 'C', 'B', None, None]
    >>> [read_letter(text, "ABCD", in_prose=True) for text in ("A man walks in, so B", "It can't be (C)", "C, not B")]
    ['B', None, 'C']
    """
    boxes = extract_boxed(text)
    if boxes and not find_answers(text):
        return None
    parts = boxes[-1:] if boxes and in_prose else boxes or [text]
    readings = {_read_letter(part, letters, options, in_prose) for part in parts}
    return readings.pop() if len(readings) == 1 else None


def _read_letter(text: str, letters: str, options: Sequence[str], in_prose: bool) -> str | None:
    plain = _strip_markup(text)
    texts = [_strip_label(option, letter) for letter, option in zip(letters, options, strict=False)]
    if (letter := _read_head(plain, letters, texts)) is not None:
        return letter or None
    first, _, rest = plain.partition("\n")
    letter = _read_head(first, letters, texts) if rest else None
    if letter:
        return letter if _agrees(letter, rest, letters, texts) else None
    announced = find_answers(plain)
    if announced != (plain,):
        named = {_read_head(part.strip(), letters, texts) or None for part in announced}
        if len(named) == 1 and (letter := named.pop()):
            return letter
        if not announced or (len(named) > 1 and not in_prose):
            return None
    return _find_letter(plain, letters, texts) if in_prose else None


def _read_head(plain: str, letters: str, texts: Sequence[str]) -> str | None:
    """Return the letter of a text that is nothing but an answer; "" if it is one of several or none, None for prose."""
    folded = " ".join(plain.casefold().split())
    if (alone := _LETTER_ALONE.fullmatch(folded)) is not None:
        return _match_letter(alone[1], letters)
    # An option may itself look hedged ("A and B"), so compare exact texts before rejecting anything.
    sentence = folded.rstrip(_SENTENCE_ENDS)
    matching = [letter for letter, option in zip(letters, texts, strict=False) if option and option == sentence]
    if matching:
        return matching[0] if len(matching) == 1 else ""  # two options with the same text are indistinguishable
    labeled = _LABELED_OPTION.fullmatch(folded)
    letter = _match_letter(labeled[1], letters) if labeled else ""
    if labeled and letter and texts:
        label_text = labeled[2].rstrip(_SENTENCE_ENDS)
        if texts[letters.index(letter)] in (label_text, re.sub(r"^\((.*)\)$", r"\1", label_text)):
            return letter
    if (explained := _EXPLAINED.fullmatch(folded)) is not None:
        letter = _match_letter(explained[1], letters)
        strong, denied = _find_mentions(plain, letters)
        return letter if letter not in denied and strong <= {letter} else ""
    return None


def _match_letter(letter: str, letters: str) -> str:
    return letter.upper() if letter.upper() in letters else ""


def _agrees(letter: str, explanation: str, letters: str, texts: Sequence[str]) -> bool:
    """Return whether the lines after an answer are an explanation: words that neither deny it nor answer again."""
    heads = {_read_head(line, letters, texts) for line in explanation.splitlines()} - {None}
    strong, denied = _find_mentions(explanation, letters)
    again = {*heads, *strong} - {letter}
    is_listed = any(
        (label := re.match(r"[(\[]?([A-Za-z])[)\].:]\s", line)) and _match_letter(label[1], letters) not in ("", letter)
        for line in explanation.splitlines()
    )
    is_prose = len(re.findall(r"[^\W\d_]{2,}", explanation)) >= 2
    return not again and not is_listed and letter not in denied and (is_prose or not explanation.strip())


def _find_mentions(plain: str, letters: str) -> tuple[set[str], set[str]]:
    """Return the letters that a text announces or confirms, and those that it denies."""
    strong: set[str] = set()
    denied: set[str] = set()
    for names, start, end in _iterate_mentions(plain, letters):
        if is_denied(plain, start, end):
            denied |= names
        elif _ANNOUNCED.search(plain[:start].rstrip("([")) or _CONFIRMED.match(plain, end):
            strong |= names
    return strong, denied


def _find_letter(plain: str, letters: str, texts: Sequence[str]) -> str | None:
    """Return the letter that sentences name, or None."""
    affirmed: list[set[str]] = []
    strong, denied = _find_mentions(plain, letters)
    for names, start, end in _iterate_mentions(plain, letters):
        if not is_denied(plain, start, end) and not re.match(r"[)\]]?\s*\?", plain[end:]):
            affirmed.append(names)
    if strong:
        return strong.pop() if len(strong) == 1 and not strong & denied else None
    leading = re.match(rf"[(\[]([{letters}{letters.lower()}])[)\]]|([{letters}])[).:,](?=\s|$)", plain)
    if leading:
        letter = (leading[1] or leading[2]).upper()
        return letter if affirmed[:1] == [{letter}] and letter not in denied else None
    remaining = set().union(*affirmed) - denied if affirmed else set[str]()
    if remaining or affirmed:
        return remaining.pop() if len(remaining) == 1 else None
    return None if denied else _find_quoted_option(plain, letters, texts)


def _iterate_mentions(plain: str, letters: str) -> list[tuple[set[str], int, int]]:
    """Return the letters that a text mentions, those of a list together, with the start and the end of the mention."""
    pattern = rf"(?<![A-Za-z0-9])(?:[(\[]([{letters}{letters.lower()}])[)\]]|([{letters}])(?!['’]?[A-Za-z0-9]))"
    groups: list[tuple[set[str], int, int]] = []
    for match in re.finditer(pattern, plain):
        name, word = (match[1] or match[2]).upper(), re.match(r" ([a-z]+)", plain[match.end() :])
        if not match[1] and name in "AI" and word and word[1] not in _NOT_ARTICLE:
            continue
        if (
            groups
            and _LIST_SEPARATOR.fullmatch(plain, groups[-1][2], match.start())
            and "." not in plain[groups[-1][2] : match.start()]
        ):
            names, start, _ = groups.pop()
            groups.append((names | {name}, start, match.end()))
        else:
            groups.append(({name}, match.start(), match.end()))
    return groups


def _find_quoted_option(plain: str, letters: str, texts: Sequence[str]) -> str | None:
    """Return the letter of the only option whose text occurs as whole words."""
    padded = f" {_split_words(plain)} "
    words = [f" {_split_words(text)} " for text in texts]
    matching = [letter for letter, option in zip(letters, words, strict=False) if option.strip() and option in padded]
    return matching[0] if len(matching) == 1 and not has_denial(plain) else None


def _split_words(text: str) -> str:
    return " ".join(re.sub(r"[^\w.%+-]+|[.](?!\d)", " ", text.casefold()).split())


@functools.lru_cache(maxsize=4096)  # the options of a task are compared with every line of every reply to it
def _strip_label(option: str, letter: str) -> str:
    """Return an option's text, casefolded, without the label some datasets write into it (`B. the red ball`)."""
    plain = " ".join(_strip_markup(option).casefold().split())
    label = re.match(rf"[(\[]?{letter.lower()}[)\].:]+\s*(?=\S)", plain)
    return (plain[label.end() :] if label else plain).rstrip(_SENTENCE_ENDS)


def _strip_markup(text: str) -> str:
    """Return a text, its lines with single blanks, without markup: bold, math, quotes, brackets like <<B>>."""
    plain = normalize_text(text)
    for _ in range(4):  # markup nests: \boxed{\text{b}}
        plain = _MARKUP.sub(lambda match: match[1] or "", plain)
    plain = _HEADER.sub("", plain) if re.search(r"<answer>\s*:", plain, re.IGNORECASE) else plain
    return "\n".join(line for line in (" ".join(line.split()) for line in plain.splitlines()) if line)


# ---- numbers -------------------------------------------------------------------------------------------------------

_FRACTION_WORDS = "(?:third|quarter|fourth|fifth|sixth|seventh|eighth|ninth|tenth)s?"
# What makes a number's value another one or leaves it open. "#" is a number.
_AMBIGUOUS = re.compile(
    r"\b(?:half|halves|quarters?|dozens?|lakhs?|crores?|(?:hundred|thousand|[a-z]*illion)\w*|twice|double|squared|cubed|root)\b"
    r"|#\s*(?:(?:k|mn|bn|mio|mrd|π|pi)\b|[π万萬亿億千百兆])|#[xob][#\d]|[\u0335-\u0338]"  # struck out
    rf"|#[\s-]*(?:and\s+)?(?:a\s+)?\b(?:{_FRACTION_WORDS})\b"
    r"|#[)\s]*(?:[-+*/×÷:x^·⋅•∙⁄∕∗.]+|\b(?:times|plus|minus|point|over|by|divided by)\b)\s*-?#|#\s+#|#\s*[)\]]\s*\^"
    r"|[±∓√∛<>≤≥≠∞]|\+\s*/\s*-|-[\s({\[]*#|\b(?:not|never|except|neither|nor|none)\b|n't\b"
    r"|\b(?:at (?:least|most)|(?:more|less|fewer|greater|larger|smaller|other) than|up to)\s+#"
    r"|\b(?:over|under|above|below|beyond)\s+#"
    r"|#\s*(?:\+(?!\s*#)|or (?:more|less|fewer|over|under)\b|and (?:more|over|up|above|below)\b)"
)
# Between the last two numbers: then the last one is a part of a span, a list or a compound: `1 h 30 min`, `3 of the 4`.
_CONNECTOR = re.compile(
    r"\W*(?:[a-z]{1,12}\W*)?(?:(?:to|or|and|until|till|through|up to|vs|versus|(?:out )?of|[-/,;~|])\W*"
    r"(?:about|around|maybe|perhaps|possibly|the|these|those)?\W*(?:power(?: of)?)?\W*)?"
)
_RESTART = re.compile(r"[.:\n](?:\s|$)|=|\b(?:so|but|is|are)\b")
_NUMBER_SEPARATOR = re.compile(rf"{_RESTART.pattern}|[;,]\s")


def read_number(text: str, *, in_prose: bool = False) -> float | None:
    r"""Return the only number of an answer (`find_answers`); the same number twice counts once.

    None for several numbers, spans, calculations, bounds (`at least 4`), denials and clock times. Units are ignored,
    `%` among them. With `in_prose` other numbers may precede: the last one is read, unless it belongs to a span or a
    list.

    >>> [read_number(text) for text in ("2,500 cm", "2,5", "seventy-two", "3/4", "10^3", "1:30", "3 or 4")]
    [2500.0, 2.5, 72.0, 0.75, 1000.0, None, None]
    >>> read_number("3 here and 1 there, so 4", in_prose=True), read_number("from 70 to 72", in_prose=True)
    (4.0, None)
    """
    readings = [_read_number(part, in_prose) for part in find_answers(text)]
    if in_prose:
        return readings[-1] if readings else None
    return readings[0] if readings and len(set(readings)) == 1 else None


def _read_number(text: str, in_prose: bool) -> float | None:
    plain = normalize_answer(text)
    numbers = scan_numbers(plain)
    if in_prose and len(numbers) > 1:
        previous, last = numbers[-2:]
        between = plain[previous.end : last.start]
        is_linked = _CONNECTOR.fullmatch(between) or _AMBIGUOUS.search(f"#{between}#")
        if previous.value != last.value and (_RESTART.search(between) or not is_linked):
            separators = [match.end() for match in _NUMBER_SEPARATOR.finditer(between)]
            begin = previous.end + max(separators, default=0)
            plain, numbers = plain[begin:], scan_numbers(plain[begin:])
    values = {None if number.is_clock else number.value for number in numbers}
    if len(values) != 1 or _AMBIGUOUS.search(mask_numbers(plain, numbers)):
        return None
    return None if any(is_denied(plain, number.start, number.end) for number in numbers) else values.pop()


# ---- time spans ----------------------------------------------------------------------------------------------------

_UNIT = r"(?:\s*(?:(?:s|secs?|seconds?)\b\.?|秒))?"
_SPAN_MARKUP = r"(?:\s*[\"'`<>()\[\]*$]{1,4})?"  # around a time: `<4 seconds>` as in prompts, quotes, bold, math
_SPAN_WORD = r"-{1,3}>?|~|\u301c|\u2192|\.\.+|(?:up )?to\b|until\b|till\b|through\b|到|至"
# The second time may be labeled: `end: 8`, `"end_time": 8`, `it ends at 8`, `second 8`. Then a blank suffices.
_END_LABEL = (
    r"(?:(?:the|it|which|and)\s+)*['\"]?(?:end|stop|finish)(?:s|es|ing)?(?:[_ ]?time)?['\"]?"
    r"\s*(?:is\b|at\b|by\b|[:=])?\s*"
)
_TIME_PREFIX = r"(?:(?:about|around|at|second|time|t\s*=)\s*)*"
_BETWEEN = re.compile(
    rf"{_UNIT}{_SPAN_MARKUP}(?:\s*(?:{_SPAN_WORD}|and\b|[,;])\s*(?:{_END_LABEL})?|[\s.]*\s{_END_LABEL})"
    rf"{_TIME_PREFIX}{_SPAN_MARKUP}\s*"
)
_CHAIN = re.compile(rf"{_UNIT}{_SPAN_MARKUP}\s*(?:{_SPAN_WORD}){_TIME_PREFIX}{_SPAN_MARKUP}\s*")
_MAX_SECONDS = 1e7
_COMMA = re.compile(r"\s*,\s*")
_OTHER_UNIT = r"(?:m|min(?:ute)?s?|h|hrs?|hours?|ms|msecs?|milliseconds?|days?|frames?|scenes?|pages?|percent)"
_AFTER_SPAN = re.compile(rf"{_UNIT}(?![0-9a-z_:%^/]|\.\d|['′]\s*\d)(?! \d{{3}}\b)(?!\s*(?:%|{_OTHER_UNIT}(?![a-z])))")
# `frames 4-8`, `minutes: 4 to 8`, `frame numbers 4-8`
_BEFORE_SPAN = re.compile(
    rf"\d['′]\s*$|\b{_OTHER_UNIT}\W{{0,3}}(?:(?:numbers?|nos?|ind(?:ex|ices)|from)\W{{1,3}})?$|[\w.:,-]$|\d $"
)


def read_span(text: str) -> tuple[float, float] | None:
    """Return the first time span of an answer, in seconds, as it is written: its end may precede its start.

    Two times with `-`, `to`, `and`, `until`, a comma or the word `end` between them; a time is a number of seconds or a
    clock time. Spans that are denied, negative, in other units, or parts of a chain (`4-8-12`) are skipped.

    >>> read_span("from 1,200 to 1,300"), read_span("01:30 - 01:30:05"), read_span("[3,5]"), read_span("20 to 24 s")
    ((1200.0, 1300.0), (90.0, 5405.0), (3.0, 5.0), (20.0, 24.0))
    >>> read_span("It is not shown between 20 and 24"), read_span("3,5")
    (None, None)
    """
    parts = find_answers(text)
    spans = [_find_span(part) for part in parts]
    if parts and not any(spans) and not extract_boxed(text):
        return _find_span(text)
    return spans[0] if spans and len({*spans}) == 1 else None


def _find_span(text: str) -> tuple[float, float] | None:
    plain = normalize_answer(text.replace("<<", "").replace(">>", ""))
    numbers = scan_numbers(plain)
    links = [_classify_link(plain[first.end : second.start]) for first, second in itertools.pairwise(numbers)]
    for index, (first, second) in enumerate(itertools.pairwise(numbers)):
        neighbors = {*links[max(0, index - 1) : index], *links[index + 1 : index + 2]}
        is_chained = "range" in neighbors or (links[index] == "comma" and "comma" in neighbors)
        if not is_chained and _is_span(plain, first, second) and not is_denied(plain, first.start, second.end):
            assert first.value is not None
            assert second.value is not None
            return first.value, second.value
    return None


def _classify_link(between: str) -> str:
    return "range" if _CHAIN.fullmatch(between) else "comma" if _COMMA.fullmatch(between) else ""


def _is_span(plain: str, first: Number, second: Number) -> bool:
    are_times = all(number.value is not None and 0 <= number.value <= _MAX_SECONDS for number in (first, second))
    return bool(
        are_times
        and plain[first.start] != "-"
        and _BETWEEN.fullmatch(plain, first.end, second.start)
        and _AFTER_SPAN.match(plain, second.end)
        and not _BEFORE_SPAN.search(plain[max(0, first.start - 40) : first.start])
    )
