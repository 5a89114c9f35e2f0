r"""Read an answer: where it stands in a text, and which letter, number or time span it names.

    text ──find_answers──> the boxes, else what follows "the answer is", else the text
                             ├── read_letter   one option, by its letter or its text
                             ├── read_number   one number
                             └── read_span     two times in order

A reading is None if the text names nothing, several things or denies what it names: what is ambiguous earns nothing.
Answer types read this way; with `in_prose` the lenient rules of benchmarks also search sentences.

What follows an answer may explain it, not change it. These make a reading None:
- words that hedge or take back, right after the answer (`or`, `but`, `maybe`, `wait`, `no,`, `that is wrong`, a
  question mark) or at the start of a later sentence (`Wait`, `Sorry`, `Scratch that`);
- a denial of the same letter (`C is wrong`);
- another letter, or another option's text, that is claimed: announced (`answer: A`, `I choose A`), concluded (`it is
  A`, `so A`), confirmed (`A fits`, `A is also right`, `Both A and C fit`), offered (`or A`), alone in a line, listed.
A mere mention of another letter is an explanation, and so is a denied one: `C. A is wrong because ...` is C. So is a
sentence that goes on to restrict it: `A fits the color, but ...`.

Text that touches a box belongs to it: `-\boxed{4}` is -4, `\boxed{4} million` is 4,000,000. An answer with a part
that is struck out names nothing. Of a text longer than `MAX_CHARS` only the end is read, and unless `in_prose` it must
box or announce its answer.
"""

import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from saccade.rewards.answer_types.denials import Denials, has_denial, is_retracted, is_taken_back
from saccade.rewards.answer_types.number_scanner import (
    SPACELESS,
    Number,
    mask_numbers,
    normalize_answer,
    scan_numbers,
)
from saccade.rewards.text_normalization import ANSWER_LEAD_IN, Box, find_boxed, normalize_text

# ---- where the answer stands ---------------------------------------------------------------------------------------

MAX_CHARS = 10_000  # of a longer text only the last characters are read, from a blank on
_ANNOUNCEMENT = re.compile(
    r"(?:(?:\b(?:answer|ans(?=[.:] )|(?:correct|right|best|final|my|selected|chosen)[ _]"
    r"(?:option|choice|letter|result|value))\b|答案|正确选项)[>*_]*(?: (?:to|for) [^.:\n]{1,80}?)?"
    r"(?:\s*\b(?:is|are|would be|should be|must be)\b|\s*(?:应该?|应当|就)?[:：=＝是为选])"
    r"|(?:(?:故|应|我|因此|所以|本题|[,，。])选择?|(?:应该?|所以|因此|而)是)(?=\W*[A-Ja-j]\b))[\s:：*]*",
    re.IGNORECASE,
)
# `If the ball were red, the answer would be A` announces nothing, unlike `If I had to choose, ...`.
_HYPOTHETICAL = re.compile(
    r"\b(?:if|unless)\b(?! (?:i|we|you|one)\b)[^.!?\n]*\b(?:answer|option|choice)\s+would be\W*\Z"
    r"|(?:如果|假如|要是|倘若)(?!必须|一定)[^。！？\n]*答案\w{0,3}\W*\Z",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|[。！？\n]")
_STRUCK_OUT = re.compile(
    r"~~[^~]{1,200}~~|<(s|del|strike)>[^<]{1,200}</\1>|\\(?:[bx]?cancel|sout|st)\s?\{[^{}]{0,200}\}", re.IGNORECASE
)
STROKE = "\u0336"  # the combining stroke, which no reading accepts
_SIGN_BEFORE_BOX = re.compile(r"(?:(?<![\w)\]}])|(?<=[=(] ))[-\u2212](?:\\[,;!]|[${(*]){0,6}\Z")
_OPERATOR_BEFORE_BOX = re.compile(
    r"(?:[\d,^_.][${(]{0,4}|(?:[+×÷·√±≤≥⩽⩾≦≧≠/]|\w\s[<>]|\d\s?\*|[\w)\]}][-\u2212]|\d\s?[-\u2212]"
    r"|\\(?:times|cdot|div|sqrt|pm|mp|leq?|geq?|lt|gt|log|ln|sin|cos|tan)"
    r"|\b(?:at least|at most|(?:more|less|fewer|greater) than|up to|over|under|minus|times|plus))[\s${(]{0,6})\Z",
    re.IGNORECASE,
)
_SCALE_AFTER_BOX = r"hundred|thousand|lakh|crore|dozen|[a-z]{1,4}illion|bn|(?-i:k|M)"
_OR_BETWEEN = re.compile(r"[\s$,]{0,8}(?:\\text\s?\{)?\s?(?:or|或者?|还是)\s?\}?[\s$]{0,8}")
_AFTER_BOX = re.compile(
    rf"(?:[\s$)}}*\\,!]|\\(?:text\w{{0,2}}|mathrm)\{{){{0,8}}(?P<scale>(?:{_SCALE_AFTER_BOX})\b|[万萬亿億千百兆만억조])"
    r"|[\s$)}]{0,6}(?P<operator>\^(?!\s*\{?\s*\\circ)|[/×÷·±<>≤≥+]|\*(?!\*)|-\s?(?=\d)|\\(?:times|cdot|div|pm)\b)",
    re.IGNORECASE,
)


def clean_text(text: str) -> str:
    """Return the text to read: the end of a long one, with a stroke in place of what is struck out."""
    if len(text) > MAX_CHARS:
        text = text[-MAX_CHARS:]
        text = text[len(text.split(maxsplit=1)[0]) :] if text.strip() else ""  # the first word is not whole
    return _STRUCK_OUT.sub(f" {STROKE} ", text)


def find_answers(text: str, *, in_prose: bool = False) -> tuple[str, ...]:
    r"""Return the parts of a text that give its answer: its boxes, else what follows each "answer is", else all of it.

    A box that isn't closed ends with its line. If the answer is denied or taken back, there is none.

    >>> find_answers(r"so \boxed{4}"), find_answers("3 and 1. The answer is 4."), find_answers("4 cm")
    (('4',), ('4',), ('4 cm',))
    >>> find_answers(r"It can't be \boxed{4}"), find_answers("I don't think the answer is 4")
    ((), ())
    >>> find_answers(r"-\boxed{4}"), find_answers(r"\boxed{4} million"), find_answers(r"\sqrt{\boxed{4}}")
    (('-4',), ('4 million',), ())
    """
    is_cut, text = len(text) > MAX_CHARS, clean_text(text)
    if boxes := find_boxed(text):
        if _offers_alternatives(text, boxes):
            return ()
        denials, parts = Denials(text), [_read_box(text, box) for box in boxes]
        is_denied = any(denials.govern(box.start) or denials.follow(box.end) for box in boxes)
        return () if is_denied or "" in parts or is_taken_back(text[boxes[-1].end :]) else tuple(parts)
    announced, rest = _find_announced(text)
    if announced is None:
        return () if (is_cut and not in_prose) or is_retracted(text) else (text,)
    return () if is_taken_back(rest) else tuple(announced)


def _offers_alternatives(text: str, boxes: Sequence[Box]) -> bool:
    """Return whether "or" joins two boxes."""
    return any(_OR_BETWEEN.fullmatch(text, first.end, second.start) for first, second in itertools.pairwise(boxes))


def _read_box(text: str, box: Box) -> str:
    """Return a box's content with the sign and the scale that touch it; "" if an operator does: it is no value."""
    before, after = text[max(0, box.start - 40) : box.start].rpartition("\n")[2], _AFTER_BOX.match(text, box.end)
    sign = _SIGN_BEFORE_BOX.search(before)
    if not re.search(r"\d", box.content):
        return "" if sign or (after and after["operator"]) else box.content
    if (not sign and _OPERATOR_BEFORE_BOX.search(before)) or (after and after["operator"]):
        return ""
    return ("-" if sign else "") + box.content + (f" {after['scale']}" if after else "")


def _find_announced(text: str) -> tuple[list[str] | None, str]:
    """Return what follows each "answer is" in its sentence, and the rest; None without one, [] if denied."""
    matches = [match for match in _ANNOUNCEMENT.finditer(text) if not text[match.end() : match.end() + 1].isspace()]
    matches = [match for match in matches if match.end() < len(text)]
    if not matches:
        return None, ""
    matches = [match for match in matches if not _HYPOTHETICAL.search(text, max(0, match.start() - 200), match.end())]
    denials, parts = Denials(text), list[str]()
    rest = ""
    for match, following in itertools.zip_longest(matches, matches[1:]):
        segment = text[match.end() : following.start() if following else len(text)]
        end = _SENTENCE_END.search(segment)
        parts.append(segment[: end.end() if end[0] in "!?！？" else end.start()] if end else segment)
        rest = segment[end.end() :] if end else ""
    return ([] if any(denials.govern(match.start()) for match in matches) else parts), rest


def names_text(text: str, expected: str) -> bool:
    """Return whether a text contains another one as whole words, in any case, and doesn't deny it or offer others.

    A number is whole only if no digit, separator or colon continues it: `4` is not in `4,500` or `4:30`.

    >>> [names_text(text, "Dec") for text in ("It is in Dec.", "in December", "not in Dec", "Nov or Dec")]
    [True, False, False, False]
    """
    plain, words = (" ".join(normalize_text(part).casefold().split()) for part in (clean_text(text), expected))
    if not words.strip("."):
        return False
    pattern = (
        rf"(?<![^\W{SPACELESS}])(?<![.,:/^][^\W\d_])(?<!\d[.,:/^'])(?<![-.√]){re.escape(words.rstrip('.'))}"
        rf"(?![^\W{SPACELESS}]|-|[.,:/^'+]\d|\^)"
    )
    has_choice = re.search(r"\bor\b", plain) and not re.search(r"\bor\b", words)
    is_named = not has_choice and re.search(pattern, plain) is not None and not is_retracted(plain)
    return is_named and (has_denial(words) or not has_denial(plain))


# ---- letters -------------------------------------------------------------------------------------------------------

_MARKUP = re.compile(
    r"\\(?:f?box(?:ed)?|text(?:bf|it|rm|sf)?|math(?:bf|it|rm|sf)|underline)\s*\{([^{}]*)\}|\\[()\[\]]|\*+|\$+|_{2,}"
    r"|<<|>>|</?(?:b|strong|i|em|u)>|[\"'`](?!t\b|s\b)|^#{1,6}\s|^>+\s",
    re.MULTILINE,
)
_HEADER = re.compile(r"<(?=/?[a-z ]+>)|(?<=[a-z])>", re.IGNORECASE)
# These patterns match casefolded text.
_CONFIDENCE = r"(?:(?:clearly|definitely|certainly|surely|undoubtedly|obviously),? )"
_LEAD_IN = (
    rf"(?:(?:so|thus|therefore|hence),? )?{_CONFIDENCE}?"
    r"(?:(?:it|that|this)(?: is|'s| must be| should be| has to be| can only be) "
    rf"|i(?:'?ll|'?d| will| would)? (?:choose|pick|select|go with) )?{_CONFIDENCE}?{ANSWER_LEAD_IN}"
)
_LETTER_ALONE = re.compile(
    rf"(?:[-•] )?{_LEAD_IN}(?:letter )?(?:[(\[{{「【] ?){{0,2}}([a-z])(?: ?[)\]}}」】]){{0,2}}[)\]}}」】.:,;!。、✅✓✔]*"
    r"(?: ?[✅✓✔]| ?(?:选项)?(?:是?(?:正)?确的?)?。?)?"
)
_LEAD_IN_PATTERN = re.compile(_LEAD_IN)
_LABELED_OPTION = re.compile(rf"{ANSWER_LEAD_IN}[(\[]?([a-z])(?:[)\]][.:]? ?|[.:,] ?| ?- ?| )(\S.*)")
_SENTENCE_ENDS = ".!。"  # stripped before an option's text is compared
_ARTICLE = re.compile(r"(?:an?|the|its?|this|that) ")
# The following ones match text with its capitals.
_ANSWER_WORD = "(?:answer|option|choice|one)"
_CORRECT = "(?:correct|right|best|answer|true)"
# An answer with an explanation after it: `C. Because ...`, `(C) The ...`, `C because ...`, `C is correct. ...`
_OPENING = re.compile(
    rf"{ANSWER_LEAD_IN}(?P<letter>[(\[]?([a-z])[)\]]?)(?: is(?: the)? {_CORRECT}(?: {_ANSWER_WORD})?)?"
    r"(?:(?:(?<=[)\]])[.:]?|[.;:!])(?: |\n|$)|\n|$| - |[,，。]?(?=因为|而不是|而非)|。"
    r"|,? (?=(?:not|instead of|rather than)(?: option)? [(\[]?(?-i:[A-J])\b)"
    r"|[,.]? ?[(]?(?=(?:because|since|given|due to|as (?:it|the|this|there|only|in|all))\b))",
    re.IGNORECASE,
)
_CHOOSE = (
    r"(?:answer|choose|chose|pick(?:ed)?|select(?:ed)?|go(?:ing)? with|i(?:'?d| would)? say"
    r"|i (?:think|believe|guess|mean)|(?:chang|switch)(?:e|ed|ing)(?: my \w+)? to|答案|选)"
)
_OPTION_WORD = r"\s*(?:the\s+)?(?:option\s*|choice\s*|letter\s*|answer\s+(?:is\s+)?)?[(\[]?\Z"
_CLAIM_BEFORE = re.compile(
    rf"(?:\b{_CHOOSE}(?:\s+is|\s+would be|\s+must be|\s*是|\s*为)?\s*[:：]?|答案[是为]?|选"
    rf"|\b(?:option|choice|letter|one)(?:\s+(?:is|would be|must be)\b|\s*[:：])"
    r"|\b(?:it|that|this)(?:'s|\s+(?:is|was|must be|has to be|should be|would be|can only be))"
    r"(?:\s+(?:actually|really|probably|clearly|rather|therefore|thus|instead|only|also))?"
    rf"|\b(?:so|thus|hence|therefore|conclude|instead|actually|rather)\b,?|=>|->|→|⇒){_OPTION_WORD}",
    re.IGNORECASE,
)
_OFFER_BEFORE = re.compile(
    rf"\b(?:or|maybe|perhaps|possibly|alternatively|(?:could|may|might)(?: also)? be),?{_OPTION_WORD}"
    r"|^\W{0,6}(?:and|plus|[&,/+])\s*\(?\Z",
    re.IGNORECASE,
)
_LONE_BEFORE = re.compile(r"(?:^|[.!?]\s|\n)(?:[a-z]{2,15}\s?){1,3},\s*\(?\Z", re.IGNORECASE)  # `On reflection, A.`
_LONE_END = re.compile(r"[)\]]?\s*(?:[.!](?=\s|\Z)|\n|\Z)")
# What a claim by its place alone ("so A") may be followed by: the end of the clause.
_CLAIM_END = re.compile(
    r"[)\]]?(?:\s*(?:[.,;:!?)。，]|\n|\Z|-)|\s+(?:is|was|because|since|as|instead|too|and|or|it)\b)"
)
_POSSIBLE = r"(?:possible|plausible|acceptable)\b"  # weaker than right: another answer beside it
_POSITIVE = (
    rf"(?:(?:the\s+|a\s+)?(?:(?:correct|right|best|answer|true|valid|better|good)\b|(?P<possible>{_POSSIBLE}))"
    r"|fits?\b|it is\b|works?\b|applies\b|apply\b|match(?:es)?\b|holds?\b|✅|✓|✔)"
)
_CONFIRMED = re.compile(
    r"[)\]]?\s*(?:[:-]\s*)?(?:(?:is|are|was|were|must be|has to be|could be|would be|seems?|looks?|also|both|all"
    r"|equally|too|as|well|just|would|actually|clearly|can|could|may|might|be|should)\s+)*"
    rf"{_POSITIVE}(?P<tail>[^.\n;]{{0,80}})"
    r"|[)\]]?\s*(?:is|was|would be|could be|seems?|fits?)?\s*(?:,?\s*(?:too|as well|also))\b",
    re.IGNORECASE,
)
_RESTRICTED = re.compile(r"\b(?:but|however|though|although|yet|except|only|not|about|than)\b|n't\b", re.IGNORECASE)
_CLAUSE = re.compile(r"[.,;!\n]")
_SENTENCE_START = re.compile(r"[.!?](?=\s)|\n")
# What the letter A stands before, unlike the article: the end of a clause, a conjunction or a verb.
_AFTER_LETTER = re.compile(
    r"(?! [a-z])| it is\b| (?:or|and|nor|to|through|but|is|isn|because|since|was|wasn|also|too|as|if|does|doesn|can"
    r"|cannot"
    r"|could|couldn|would|wouldn|should|must|may|might|has|fits|works|matches|applies|fails|holds|shows|happens|occurs"
    r"|seems|appears|looks|says)\b"
    r"|(?: [a-z]+){0,3} (?:over|than|versus|vs) [(\[]?[A-J]\b"
)
_LIST_SEPARATOR = re.compile(
    r"[)\].:]{0,4}\s*(?:[,/&|+、]\s*|-(?=\S))?"
    r"(?:(?:or|and|nor|and/or|as well as|through)\s+|(?:还是|或者?|以?及|和|与)\s*)?[(\[]?"
)
_LABEL = re.compile(
    r"(?:^(?P<bullet>[-•> ]{0,6})|(?<=[\s,;.|]))[(\[]?(?P<letter>[A-J])(?:[)\].:]{1,3}\s*| - )(?=\S)", re.MULTILINE
)
_YES = re.compile(r"[✅✓✔☑]|(?:[-:(,]|\bis)\s*(?:yes|correct|right|true|this one|the answer)\W*\Z|<-", re.IGNORECASE)
_NO = re.compile(r"[-:(,]\s*(?:no|wrong|incorrect|false)\W*\Z", re.IGNORECASE)


def read_letter(text: str, letters: str, options: Sequence[str] = (), *, in_prose: bool = False) -> str | None:
    r"""Return the one option that an answer names, as one of `letters`; None if it names none, several or denies it.

    Read in this order, ignoring case, width, quotes and markup: a letter alone (`B`, `(b)`, `<<B>>`, `Option B`), the
    exact text of one option, both if they agree; the one option of a list that is marked (`A. red - no, B. blue -
    yes`); a letter that opens the text, with an explanation after it; the same after "the answer is", after a list of
    the options, too. Two boxes must agree. With `in_prose` the last box counts, and sentences are read: the capital
    letter that is claimed (see above); a letter at the start; the only letter that is not denied (`A` before a word is
    an article, `I` a pronoun); the only option whose text occurs.

    >>> [read_letter(text, "ABCD") for text in (r"\boxed{b", "<<C>>", "B\nA shows another ball.", "Not C.", "A or B")]
    ['B', 'C', 'B', None, None]
    >>> [read_letter(text, "ABCD", in_prose=True) for text in ("A man walks in, so B", "It can't be (C)", "C, not B")]
    ['B', None, 'C']
    >>> [read_letter(text, "AB") for text in ("B\nIt is A.", r"\boxed{B}. Wait.", "A: red\nB: blue\nAnswer: B")]
    [None, None, 'B']
    """
    is_cut, text = len(text) > MAX_CHARS, clean_text(text)
    reader = _get_letter_reader(letters, tuple(options))
    if boxes := find_boxed(text):
        selected = boxes[-1:] if in_prose else boxes
        denials, rest = Denials(text), text[boxes[-1].end :]
        is_denied = any(denials.govern(box.start) or denials.follow(box.end) for box in selected)
        if is_denied or is_taken_back(rest) or _offers_alternatives(text, boxes):
            return None
        readings = {reader.read(_strip_markup(_read_box(text, box)), in_prose) for box in selected}
        letter = readings.pop() if len(readings) == 1 else None
        return None if letter is None or reader.is_contradicted(letter, _strip_markup(rest)) else letter
    plain = _strip_markup(text)
    return None if is_cut and not in_prose and _find_announced(plain)[0] is None else reader.read(plain, in_prose)


@functools.lru_cache(maxsize=1024)  # the options of a task are compared with every reply to it
def _get_letter_reader(letters: str, options: tuple[str, ...]) -> "_LetterReader":
    return _LetterReader(letters, options)


@dataclass(frozen=True, slots=True)
class _Mention:
    names: frozenset[str]  # letters; those of a list together
    is_denied: bool
    is_claimed: bool  # announced, concluded or confirmed as the answer
    is_offered: bool  # as another possible answer
    is_question: bool


class _LetterReader:
    """Read answers to one question. A text has its markup stripped; its lines have single blanks."""

    def __init__(self, letters: str, options: tuple[str, ...]) -> None:
        self._letters = letters
        self._texts = {
            letter: _strip_label(option, letter) for letter, option in zip(letters, options, strict=False) if option
        }
        self._words = {letter: _split_words(text) for letter, text in self._texts.items()}
        self._pattern = re.compile(
            rf"(?<![A-Za-z0-9])(?<!\b[Nn]/)(?:[(\[]([{letters}{letters.lower()}])[)\]]|([{letters}])(?!['’]?[A-Za-z0-9]|\+\+|#|\+(?![\s\w])|-[A-Za-z]{{2}}))"
        )
        quoted = sorted((re.escape(text) for text in self._texts.values() if len(text) > 1), key=len, reverse=True)
        # `it is red.` claims an option by its text
        self._claimed_text = re.compile(
            r"(?:\b(?:answer|one|option|choice)|(?:^|[.!?;:]\s|\b(?:so|thus|hence|therefore|because|since|actually|rather|no"
            r"|think)\b,? ?)(?:it|that|this))(?:'s|\s+(?:is|was|must be|should be))\s+(?:actually\s+|rather\s+)?"
            rf"(?:an?\s+|the\s+)?({'|'.join(quoted) or '(?!)'})\s*(?:[.;!]|$|\Z|instead\b|,? not\b|, so\b)",
            re.IGNORECASE | re.MULTILINE,
        )

    def read(self, plain: str, in_prose: bool) -> str | None:
        """Return the letter of an answer, None for none."""
        if (letter := self._read_alone(plain)) is not None:
            return letter or None
        marked, unlisted = self._split_list(plain)
        if marked is not None:
            return marked if marked and not self.is_contradicted(marked, unlisted) else None
        if unlisted != plain and (letter := self._read_alone(unlisted)) is not None:
            return letter or None
        if (letter := self._read_opening(unlisted)) is not None:
            return letter or None
        parts, rest = _find_announced(unlisted)
        if parts is not None:
            named = {self._read_alone(part.strip()) or self._read_opening(part.strip()) for part in parts}
            letter = named.pop() if len(named) == 1 else None
            if letter:
                return None if is_taken_back(rest) or self.is_contradicted(letter, rest) else letter
            if not in_prose or not parts or letter == "":
                return None
        return self._find_letter(unlisted) if in_prose else None

    def is_contradicted(self, letter: str, rest: str) -> bool:
        """Return whether the text after an answer denies it, answers again or lists options."""
        if is_retracted(f"\n{rest}"):
            return True
        mentions = self._find_mentions(rest)
        is_denied = any(mention.is_denied and letter in mention.names for mention in mentions)
        is_claimed = any(
            (mention.is_claimed or mention.is_offered) and not mention.is_denied and mention.names != {letter}
            for mention in mentions
        )
        lines = {self._read_alone(line) for line in rest.splitlines()} - {None, letter}
        if is_denied or is_claimed or lines or self._find_claimed_texts(rest) - {letter}:
            return True
        listed = [label["letter"] for label in _LABEL.finditer(rest) if label["bullet"] is not None]
        others = [
            label
            for label in _LABEL.finditer(rest)
            if label["letter"] in self._letters and label["letter"] != letter and self._is_list_item(rest, label)
        ]
        return bool(others) and "".join(listed) != self._letters[: max(len(self._texts), 2)]

    def _is_list_item(self, rest: str, label: re.Match[str]) -> bool:
        """Return whether a label is one of a list of options, and no sentence that rejects its option."""
        line = rest[label.end() : label.end() + 300].partition("\n")[0]
        own = self._texts.get(label["letter"], "")
        if own and line.casefold().startswith(own):
            line = line[len(own) :]
        elif label["bullet"] is None:
            return False
        return not has_denial(line) and not _NO.search(line)

    def _read_alone(self, plain: str) -> str | None:
        """Return the letter of a text that is nothing but an answer; "" if it names none of these, None for prose."""
        if len(plain) > 1000:
            return None
        folded = " ".join(plain.casefold().split())
        if (alone := _LETTER_ALONE.fullmatch(folded)) is not None:
            return self._match_letter(alone[1])
        # An option may itself look hedged ("A and B"), so compare exact texts before rejecting anything.
        sentence = folded.rstrip(_SENTENCE_ENDS)
        matching = [letter for letter, option in self._texts.items() if option == sentence]
        if matching:
            return matching[0] if len(matching) == 1 else ""  # two options with the same text are indistinguishable
        lead_in = _LEAD_IN_PATTERN.match(sentence)
        bare = sentence[lead_in.end() if lead_in else 0 :]
        # Without a lead-in "a" may be a label.
        if bare != sentence or not bare.startswith(("a ", "an ")):
            bare = _ARTICLE.sub("", bare, count=1)
        matching = [
            letter for letter, option in self._texts.items() if bare and _ARTICLE.sub("", option, count=1) == bare
        ]
        if len(matching) == 1:
            return matching[0]
        labeled = _LABELED_OPTION.fullmatch(folded)
        letter = self._match_letter(labeled[1]) if labeled else ""
        if labeled and letter in self._texts:
            label_text = labeled[2].rstrip(_SENTENCE_ENDS)
            if self._texts[letter] in (label_text, re.sub(r"^\((.*)\)$", r"\1", label_text)):
                return letter
        return None

    def _read_opening(self, plain: str) -> str | None:
        """Return the letter that opens a text, if the rest explains it; "" if the rest contradicts it, else None."""
        first, _, rest = plain.partition("\n")
        letter, has_own_text = self._read_alone(first) if rest else None, False
        if letter is None and (opening := _OPENING.match(plain)) is not None:
            letter, rest = self._match_letter(opening[2]), plain[opening.end() :]
            own = self._texts.get(letter, "")
            if opening[1] == "a":  # an article
                return None
            has_own_text = bool(own) and re.match(rf"{re.escape(own)}(?!\w)", rest.casefold()) is not None
            if has_own_text:
                rest = rest[len(own) :].lstrip(" .,;:)")
            elif Denials(plain).cover(opening.start(1), opening.end(1)) or self._is_text_of_another(letter, rest):
                return ""
        if letter is None:
            letter, rest = self._read_opening_text(plain)
        if letter is None:
            return None
        is_prose = len(re.findall(r"[^\W\d_]{2,}", rest[:200])) >= 2 or re.search(f"[{SPACELESS}]{{2}}", rest)
        is_explained = bool(is_prose) or not rest.strip() or has_denial(rest) or self._read_alone(rest) == letter
        is_denied = is_taken_back(rest) or self.is_contradicted(letter, rest)
        if not letter or is_denied:
            return ""
        return letter if is_explained or has_own_text or not self._texts else None

    def _read_opening_text(self, plain: str) -> tuple[str | None, str]:
        """Return the option whose text opens a text of more, and the rest; None if the rest names another one."""
        folded = plain.casefold()
        opened = [name for name, text in self._texts.items() if text and folded.startswith(text)]
        for name in sorted(opened, key=lambda name: -len(self._texts[name])):
            rest = plain[len(self._texts[name]) :]
            if re.match(r"[.,;:!]\s|\n|\s-\s|,? because\b", rest, re.IGNORECASE):
                padded = f" {_split_words(rest)} "
                others = [words for other, words in self._words.items() if other != name and f" {words} " in padded]
                return (None if others else name), rest.lstrip(" .,;:!-\n")
        return None, ""

    def _is_text_of_another(self, letter: str, label_text: str) -> bool:
        """Return whether what follows a letter begins with another option's text, and not with its own."""
        clause = _CLAUSE.split(label_text, maxsplit=1)[0]
        words = _ARTICLE.sub("", f"{_split_words(clause)} ", count=1)
        begins = {name for name, text in self._words.items() if text and words.startswith(_ARTICLE.sub("", f"{text} "))}
        return bool(begins) and letter not in begins and not has_denial(clause)

    def _match_letter(self, letter: str) -> str:
        return letter.upper() if letter.upper() in self._letters else ""

    def _find_mentions(self, plain: str) -> list[_Mention]:
        """Return the letters that a text mentions."""
        denials = Denials(plain)
        mentions = []
        for names, start, end in self._iterate_mentions(plain):
            window = plain[max(0, start - 80) : start]
            confirmed = _CONFIRMED.match(plain, end)
            if confirmed and _RESTRICTED.search(confirmed["tail"] or ""):
                confirmed = None
            ends_clause = _CLAIM_END.match(plain, end) is not None
            mentions.append(
                _Mention(
                    names=names,
                    is_denied=denials.cover(start, end),
                    is_claimed=bool(
                        (confirmed and not confirmed["possible"])
                        or (ends_clause and _CLAIM_BEFORE.search(window))
                        or (_LONE_END.match(plain, end) and _LONE_BEFORE.search(window))
                    ),
                    is_offered=bool(confirmed or (ends_clause and _OFFER_BEFORE.search(window))),
                    is_question=re.match(r"[)\]]?\s*[?？]", plain[end : end + 4]) is not None,
                )
            )
        return mentions

    def _find_claimed_texts(self, plain: str) -> set[str]:
        """Return the letters of the options that a text claims by their texts."""
        denials = Denials(plain)
        claimed = set()
        for claim in self._claimed_text.finditer(plain):
            sentence = _SENTENCE_START.split(plain[max(0, claim.start() - 200) : claim.start()])[-1]
            # In a sentence about a letter "it" is that option: `A is wrong because it is red`.
            if not self._pattern.search(sentence) and not denials.cover(claim.start(1), claim.end(1)):
                claimed |= {letter for letter, text in self._texts.items() if text == claim[1].casefold()}
        return claimed

    def _iterate_mentions(self, plain: str) -> list[tuple[frozenset[str], int, int]]:
        """Return the letters that a text mentions, those of a list together, each with its start and its end."""
        groups: list[tuple[frozenset[str], int, int]] = []
        for match in self._pattern.finditer(plain):
            name = (match[1] or match[2]).upper()
            is_listed = (
                groups
                and match.start() - groups[-1][2] < 20
                and _LIST_SEPARATOR.fullmatch(plain, groups[-1][2], match.start())
                and "." not in plain[groups[-1][2] : match.start()]
            )
            is_article = name in "AI" and not match[1] and not _AFTER_LETTER.match(plain, match.end())
            if is_article and not (is_listed and _CONFIRMED.match(plain, match.end())):
                continue
            names, start, _ = groups.pop() if is_listed else (frozenset[str](), match.start(), 0)
            groups.append((names | {name}, start, match.end()))
        return groups

    def _split_list(self, plain: str) -> tuple[str | None, str]:
        """Return the option that a list of options marks, and the text without the list.

        A list begins with A; its items are consecutive, each at the start of a line or followed by its option's text.
        None: nothing is marked; "": several are.
        """
        labels: list[re.Match[str]] = []
        for label in _LABEL.finditer(plain):
            own = self._texts.get(label["letter"], "")
            is_item = label["bullet"] is not None or (
                own and plain[label.end() : label.end() + len(own)].casefold() == own
            )
            if len(labels) < len(self._letters) and label["letter"] == self._letters[len(labels)] and is_item:
                labels.append(label)
        is_first = bool(labels) and not self._read_alone(plain[: labels[0].start()].partition("\n")[0])
        if len(labels) < 2 or not is_first or plain[: labels[0].start()].count("\n") > 2:
            return None, plain
        marks: dict[str, bool | None] = {}
        for label, following in itertools.zip_longest(labels, labels[1:]):
            end = following.start() if following else len(plain)
            item = plain[label.end() : end].partition("\n")[0]
            if announced := _ANNOUNCEMENT.search(item):
                item = item[: announced.start()]
            end = label.end() + len(item)
            own = self._texts.get(label["letter"], "")
            remark = item[len(own) :] if own and item.casefold().startswith(own) else item
            is_positive = _YES.search(remark.rstrip(" ,;|")) and not has_denial(remark)
            is_negative = has_denial(remark) or _NO.search(remark.rstrip(" ,;|"))
            marks[label["letter"]] = True if is_positive else False if is_negative else None
        unlisted = "\n".join(part for part in (plain[: labels[0].start()].strip(), plain[end:].strip(" \n;,|")) if part)
        positive = [letter for letter, mark in marks.items() if mark]
        unmarked = [letter for letter, mark in marks.items() if mark is None]
        if positive:
            return positive[0] if len(positive) == 1 else "", unlisted
        if len(unmarked) == 1 and len(marks) == len(self._texts) and not unlisted:
            return unmarked[0], unlisted
        return None, unlisted

    def _find_letter(self, plain: str) -> str | None:
        """Return the letter that sentences name, or None."""
        mentions = self._find_mentions(plain)
        denied = frozenset().union(*(mention.names for mention in mentions if mention.is_denied))
        affirmed = [mention for mention in mentions if not mention.is_denied and not mention.is_question]
        claimed = {mention.names for mention in affirmed if mention.is_claimed}
        if claimed:
            names = frozenset().union(*claimed)
            return min(names) if len(names) == 1 and not names & denied else None
        opening = re.match(r"[(\[]([a-zA-Z])[)\]]|([A-Z])[).:,](?=\s|$)", plain)
        if opening and (letter := self._match_letter(opening[1] or opening[2])):
            is_alone = affirmed[:1] == [mention for mention in affirmed if mention.names == {letter}][:1]
            is_hedged = is_taken_back(plain[opening.end() :]) or any(
                mention.is_offered and mention.names != {letter} for mention in affirmed
            )
            return letter if is_alone and affirmed and letter not in denied and not is_hedged else None
        remaining = frozenset().union(*(mention.names for mention in affirmed)) - denied
        if affirmed:
            return min(remaining) if len(remaining) == 1 and not is_retracted(plain) else None
        return None if denied else self._find_quoted_option(plain)

    def _find_quoted_option(self, plain: str) -> str | None:
        """Return the letter of the only option whose text occurs as whole words."""
        padded = f" {_split_words(plain)} "
        matching = [letter for letter, words in self._words.items() if words and f" {words} " in padded]
        return matching[0] if len(matching) == 1 and not has_denial(plain) else None


def _split_words(text: str) -> str:
    return " ".join(re.sub(r"[^\w.%+-]+|[.](?!\d)", " ", text.casefold()).split())


def _strip_label(option: str, letter: str) -> str:
    """Return an option's text, casefolded, without the label some datasets write into it (`B. the red ball`)."""
    plain = " ".join(_strip_markup(option).casefold().split())
    label = re.match(rf"[(\[]?{letter.lower()}[)\].:]+\s*(?=\S)", plain)
    return (plain[label.end() :] if label else plain).rstrip(_SENTENCE_ENDS)


def _strip_markup(text: str) -> str:
    """Return a text, its lines with single blanks, without markup: bold, math, quotes, brackets like <<B>>."""
    plain = re.sub(r"\\[ ,;:!]", " ", normalize_text(text))
    for _ in range(4):  # markup nests: \boxed{\text{b}}
        plain = _MARKUP.sub(lambda match: match[1] or "", plain)
    plain = _HEADER.sub("", plain) if re.search(r"<answer>\s*:", plain, re.IGNORECASE) else plain
    return "\n".join(line for line in (" ".join(line.split()) for line in plain.splitlines()) if line)


# ---- numbers -------------------------------------------------------------------------------------------------------

_FRACTION_WORDS = "(?:third|quarter|fourth|fifth|sixth|seventh|eighth|ninth|tenth)s?"
_FUNCTIONS = (
    r"(?:log|ln|lg|exp|(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|sqrt|cbrt|abs|floor|ceil|round|gcd|lcm|mod|max(?:imum)?"
    r"|min(?:imum)?|square|cube|factorial|reciprocal|inverse|negative|opposite)"
)
_AT_LEAST = "at (?:the )?(?:very )?(?:least|most)"
# What makes a number's value another one or leaves it open. "#" is a number.
_AMBIGUOUS = re.compile(
    r"\b(?:half|halves|quarters?|dozens?|lakhs?|crores?|(?:hundred|thousand|[a-z]*illion)\w*|twice|double|triple|squared"
    r"|cubed|root|factorial)\b"
    rf"|#\s*(?:(?:k|mn|bn|tn|mio|mrd|mil|π|pi)\b|[π万萬亿億千百兆만억조천백])|#[xob][#\d]|[\u0335-\u0338]"  # struck out
    rf"|#[\s-]*(?:and\s+)?(?:a\s+)?\b(?:{_FRACTION_WORDS})\b|\b(?:{_FRACTION_WORDS})\s+of\s+(?:the\s+|a\s+)?#"
    rf"|\b{_FUNCTIONS}\b\.?(?:\s+(?:of|value))*[\s({{\[]*#|[$€£¥₩₹]\s*#\s?[mb]\b|#\s?[xyznie]\b(?!\s*[a-z])"
    r"|#[)\s]*(?:[-+*/×÷:x^·⋅•∙⁄∕∗.]+|\b(?:times|plus|minus|point|over|by|divided by)\b)\s*-?#|#\s+#|#\s*[)\]]\s*\^"
    r"|[±∓√∛⌊⌈<>≤≥≠∞⩽⩾≦≧≲≳≪≫≮≯⪅⪆≶≷¬]|!\s*=|#\s?!|#[()\s]*\?|\+\s*/\s*-|-[\s({\[]*#"
    r"|\b(?:not|never|except|neither|nor|none)\b|n't\b|\|[\s-]*#\s*\||#[\s-]*(?:score|(?:degrees\s+)?below)\b"
    r"|\btoo (?:low|high|many|few|much|little|small|large|big|short|long)\b"
    r"|(?:至[少多]|最[少多]|[超多少大小高低]于|超过|不足)[有是为]?\s?#|#[^\W\d_]?\s?(?:以[上下内]|多[^少]?(?:\Z|\W))|分之"
    rf"|#(?: [a-z]+){{0,2}},? (?:{_AT_LEAST}|max(?:imum)?|minimum|tops)\b|\bpoint #"
    rf"|\b(?:{_AT_LEAST}|(?:more|less|fewer|greater|larger|smaller|other) than(?: or equal to)?|up to"
    r"|upwards? of)\s+#"
    r"|\b(?:over|under|above|below|beyond|exceed(?:s|ing)?|minimum of|maximum of|mod(?:ulo)?|minus)\s+#"
    r"|#\s*(?:\+(?!\s*#)|(?:plus|minus|and change)\b"
    r"|or (?:more|less|fewer|over|under|above|below|(?:high|low|great|larg|small)er)\b"
    r"|and (?:more|over|up|above|below)\b)"
)
# Between the last two numbers: then the last one is a part of a span, a list or a compound: `1 h 30 min`, `3 of the 4`.
_CONNECTOR = re.compile(
    r"\W*(?:[a-z]{1,12}\W*)?(?:(?:[到至或和与、年月日点時时分]|to|or|and|until|till|through|up to|vs|versus|(?:out )?of"
    r"|[-/,;~|])\W*"
    r"(?:about|around|maybe|perhaps|possibly|the|these|those|every|all)?\W*(?:power(?: of)?)?\W*)?"
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
    readings = [_read_number(part, in_prose) for part in find_answers(text, in_prose=in_prose)]
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
    denials = Denials(plain)
    return None if any(denials.cover(number.start, number.end) for number in numbers) else values.pop()


# ---- time spans ----------------------------------------------------------------------------------------------------

_UNIT = r"(?:\s*(?:(?:s|secs?|seconds?)\b\.?|秒))?"
_SPAN_MARKUP = r"(?:\s*[\"'`<>()\[\]*$]{1,4})?"  # around a time: `<4 seconds>` as in prompts, quotes, bold, math
_SPAN_WORD = r"-{1,3}>?|~|\u301c|\u2192|\.\.+|(?:up )?to\b|until\b|till\b|through\b|到|至"
# The second time may be labeled: `end: 8`, `"end_time": 8`, `it ends at 8`, `second 8`. Then a blank suffices.
_END_LABEL = (
    r"(?:(?:the|it|which|and)\s+)*['\"]?(?:end|stop|finish)(?:s|es|ing)?(?:[_ ]?time)?['\"]?"
    r"\s*(?:is\b|at\b|by\b|[:=])?\s*"
)
_TIME_PREFIX = r"(?:(?:第|about|around|at|second|time|t\s*=)\s*)*"
_BETWEEN = re.compile(
    rf"{_UNIT}{_SPAN_MARKUP}(?:\s*(?:{_SPAN_WORD}|and\b|[,;和与])\s*(?:{_END_LABEL})?|[\s.]*\s{_END_LABEL})"
    rf"{_TIME_PREFIX}{_SPAN_MARKUP}\s*"
)
_CHAIN = re.compile(rf"{_UNIT}{_SPAN_MARKUP}\s*(?:{_SPAN_WORD}){_TIME_PREFIX}{_SPAN_MARKUP}\s*")
# `Between 4 and 8 nothing happens`, in the clause of the span
_DENIAL_AFTER_SPAN = re.compile(r"\b(?:not|never|nothing|none|nowhere)\b|n't\b|[没不]")
_CLAUSE_AFTER_SPAN = re.compile(
    r"[,.;:!?()\n]|\b(?:and|but|or|because|when|while|where|which|until|before|after|as|if)\b"
)
_MAX_SECONDS = 1e7
_COMMA = re.compile(r"\s*,\s*")
_OTHER_UNIT = r"(?:m|min(?:ute)?s?|h|hrs?|hours?|ms|msecs?|milliseconds?|days?|frames?|scenes?|pages?|percent)"
_AFTER_SPAN = re.compile(
    rf"{_UNIT}(?![0-9a-z_:%^/]|\.\d|['′]\s*\d)(?! \d{{3}}\b)(?!\s*(?:%|\?|(?:in )?{_OTHER_UNIT}(?![a-z])))"
)
_UNIT_AFTER_BOX = re.compile(rf"[\s$)}}*\\,!]{{0,8}}{_OTHER_UNIT}\b")
# `frames 4-8`, `minutes: 4 to 8`, `frame numbers 4-8`
_BEFORE_SPAN = re.compile(
    rf"\d['′]\s*$|\b{_OTHER_UNIT}\W{{0,3}}(?:(?:numbers?|nos?|ind(?:ex|ices)|from)\W{{1,3}})?$|[.:,-]$"
    rf"|[^\W{SPACELESS}]$|\d $"
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
    parts = find_answers(text, in_prose=True)
    spans = [_find_span(part) for part in parts]
    text = clean_text(text)
    boxes = find_boxed(text)
    if any(_UNIT_AFTER_BOX.match(text, box.end) for box in boxes):
        return None
    if parts and not any(spans) and not boxes:
        return _find_span(text)
    return spans[0] if spans and len({*spans}) == 1 else None


def _find_span(text: str) -> tuple[float, float] | None:
    plain = normalize_answer(re.sub(r"<<|>>|\*\*", "", text))
    numbers, denials = scan_numbers(plain), Denials(plain)
    links = [_classify_link(plain[first.end : second.start]) for first, second in itertools.pairwise(numbers)]
    for index, (first, second) in enumerate(itertools.pairwise(numbers)):
        neighbors = {*links[max(0, index - 1) : index], *links[index + 1 : index + 2]}
        is_chained = "range" in neighbors or (links[index] == "comma" and "comma" in neighbors)
        if not is_chained and _is_span(plain, first, second) and not denials.cover(first.start, second.end):
            if _DENIAL_AFTER_SPAN.search(_CLAUSE_AFTER_SPAN.split(plain[second.end : second.end + 80], maxsplit=1)[0]):
                continue
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
