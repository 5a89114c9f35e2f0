"""Denials in a text: which words deny, how far they reach, and which words take an answer back.

A denial reaches to the end of its clause, over what follows it ("not A or B"), and over what directly precedes it
("A is wrong", "A (wrong)"). There is one list of denying words for every reader.
"""

import re
from bisect import bisect_right

_NOUN = "(?:answer|option|choice|number|value|letter|one|guess|result)"
_FALSE = r"wrong(?:ly)?|incorrect(?:ly)?|false|mistaken(?:ly)?|invalid|impossible|unlikely"
_REMOVED = (
    r"exclud\w+|eliminat\w+|reject\w*|dismiss\w*|discard\w*|rul(?:e|es|ed|ing)(?: \w+)? out"
    r"|(?:cross|left|leav)(?:ed|ing)? out"
)
_DENIAL = re.compile(
    rf"\b(?:not|never|neither|nor|cannot|none|without|except(?! for this)|{_REMOVED}|{_FALSE}|doubt\w*|rather than"
    r"|instead of|other than|opposite of|a(?:part|side) from|unlike|den(?:y|ies|ied)|hardly|barely|scarcely|far from"
    r"|absent|fail(?:s|ed|ing)? to|lack(?:s|ed|ing)?|(?:least|worst) (?:likely|probable|plausible|suitable|fitting"
    rf"|convincing|{_NOUN})|(?:anything|all|any|everything|everyone) but|nothing(?! (?:but|other|except))"
    r"|disagree\w*|avoid(?:s|ed|ing)?|no(?! ?[.,;:!?#\d)]|$))\b|n't\b"
    r"|不|没|非(?!常)|除了|排除",
    re.IGNORECASE,
)
_EXCLUDED_AREA = re.compile(r"\boutside(?: of)?\W*\Z", re.IGNORECASE)
_MARK = r"¬≠✗✘❌✖╳"
_SIGN_BEFORE = re.compile(rf"(?:[{_MARK}]|\\(?:neg|lnot)\b|(?<!\S)!|!=|=/=)[\s(\[]{{0,4}}\Z")
_CLAUSE_END = re.compile(
    r"[.;!?。；](?=\s)|\n|, (?=(?:so|it|the|this|that|answer|hence|therefore|thus|then|leaving|which leaves|only"
    r"|rather|instead)\b(?! than| of))"
    r"|,\s?(?=而是|应|答案|所以|因此|故|选(?!项)|正确)|(?=而是)"
    r"|(?<!anything )(?<!\ball )(?<!\bany )(?<!everything )(?<!everyone )\bbut\b"
    r"|\b(?:because|since|therefore|thus|hence|so|while|whereas|instead(?! of))\b",
    re.IGNORECASE,
)
_MAX_CLAUSE_CHARS = 400
# Words that may stand between a denial and the whole answer: "I don't think the answer is".
_FILLER = re.compile(
    r"(?:\W+(?:be|it|is|it's|that|this|the|a|an|think|believe|say|saying|to|of|for|by|as|if|whether|final|correct|right"
    r"|true|answer|option|choice|number|value|equal|likely|probable|plausible|suitable))*\W*",
    re.IGNORECASE,
)
_MATH_DENIAL = re.compile(rf"(?:\\(?:neq?|not)\b|[{_MARK}!]|!=|=/=)[^\w.]{{0,40}}\Z")
_BE = (
    "is|was|are|were|be|been|being|turn(?:s|ed) out|seems?|looks?|appears?|sounds?|would|must|might|could|can|should"
    "|does|did|do|has|have|had|to|itself|also|clearly|definitely|certainly|obviously|simply|probably|therefore|thus|just|really"
    "|quite"
)
_VERDICT = (
    rf"(?:{_FALSE}|out|never|hardly|barely|scarcely|far from|{_REMOVED}|a mistake|fails?"
    r"|lacks?|no longer|contradict(?:s|ed)?|conflicts? with"
    r"|least \w+|worst|not (?:a |an |the )?(?:right|correct|true|possible|it|that|likely|plausible|suitable|valid"
    r"|answer|shown|visible)"
    r"|no(?=\W*(?:\Z|[.,;)\]!\n])))(?![\w'])"
)
_CLOSING = r"[)\]}>'\"*$.]{0,4}"
_DENIAL_AFTER = re.compile(
    rf"{_CLOSING},?(?:(?:\s+(?:{_BE})\b){{1,5}}\s+(?:not|n't|neither|(?:a |an |the (?:only )?)?{_VERDICT})"
    rf"|(?:\s+(?:{_BE})\b){{0,5}}\s+(?:cannot|never|\w{{1,8}}n't)\b"
    rf"|\s*(?:=|:|\(|\[|,|-+|\s)\s*(?:a |an |the )?{_VERDICT}"
    r"|(?:\s*(?::|-+)|\s+ha(?:s|d|ve))\s*no\b(?! (?:doubt|question|problem))"
    rf"|\?+\s*(?:no|nope|wrong|not)\b|\s*[-(:]?\s*(?:[✗✘❌✖╳]|[\u4e00-\u9fff]{{0,6}}?(?:不(?!错)|没(?!错)|(?<!没)错|非(?!常)|有误|排除)))",
    re.IGNORECASE,
)
# What takes back the answer before it, anywhere at the start of a sentence, and right after the answer.
_TAKEN_BACK = (
    r"wait\b|nope|no\s*(?:[,.!?:;]|wait\b)|hold on|make that\b|let me (?:correct|fix|revise)\b"
    r"|my (?:mistake|bad)\b|i (?:meant|mis\w+)\b"
    r"|hmm+|sorry|apologies|scratch that|on second thoughts?|correction|never ?mind|strike that"
    r"|i (?:was|am) (?:wrong|mistaken)|i take (?:it|that) back"
    r"|(?:that|this|it)(?:'s| is| was) (?:\w+ )?(?:wrong|incorrect|a mistake|mistaken|not (?:right|correct|true|it))"
    r"|(?:that|this|it) (?:isn't|wasn't|can't be) (?:right|correct|true|it)"
    r"|ignore (?:that|this|it|the above)|disregard|just kidding|jk\b|oops|i (?:will )?change (?:my|to)"
    r"|(?:just )?an? (?:random )?guess|random guess|i (?:don't|do not|can't|cannot) (?:know|tell|decide)|can't tell"
    r"|none(?: of (?:them|these|the options|the above))?(?:\s*[.!\n]| (?:(?:is|are) )?(?:fits?|correct|right)\b)"
    r"|(?:either|both|any|all|every)(?: of (?:them|these|the options)| options?| one)?"
    r" (?:(?:is|are|would|could|may|might|be|seems?) )*(?:equally|works?|fits?|fine|correct|right|possible|plausible)\b"
    r"|等等|不对|不,"
)
_RETRACTION = re.compile(rf"(?:[.!?;。！？]\s|\n|\s-+|\bbut )[\s\"'(*]{{0,4}}(?:{_TAKEN_BACK})", re.IGNORECASE)
_HEDGE = re.compile(
    rf"\W{{0,12}}(?:(?:or|but|maybe|perhaps|possibly|alternatively|actually)\b|{_TAKEN_BACK})"
    r"|[\s$})\].*]{0,8}\?",
    re.IGNORECASE,
)


class Denials:
    """The denials of one text, found once: asking about a part of it takes no further search of the text.

    >>> text = "A is wrong. It is not B, so C."
    >>> [Denials(text).cover(text.index(letter), text.index(letter) + 1) for letter in "ABC"]
    [True, True, False]
    """

    def __init__(self, text: str) -> None:
        self._text = text
        matches = list(_DENIAL.finditer(text))
        self._starts, self._ends = [match.start() for match in matches], [match.end() for match in matches]
        self._clauses = [match.end() for match in _CLAUSE_END.finditer(text)]

    def cover(self, start: int, end: int | None = None) -> bool:
        """Return whether the clause before `start`, or the words right after `end`, deny what is between."""
        clause = bisect_right(self._clauses, start)
        begin = max(self._clauses[clause - 1] if clause else 0, start - _MAX_CLAUSE_CHARS)
        last = bisect_right(self._ends, start) - 1
        if last >= 0 and self._starts[last] >= begin:
            return True
        if _SIGN_BEFORE.search(self._text, max(begin, start - 8), start) or _EXCLUDED_AREA.search(
            self._text, max(begin, start - 16), start
        ):
            return True
        return end is not None and self.follow(end)

    def follow(self, end: int) -> bool:
        """Return whether the words right after `end` deny what is before."""
        return _DENIAL_AFTER.match(self._text, end) is not None

    def govern(self, start: int) -> bool:
        """Return whether a denial directly precedes `start`; words such as "it is the" may stand between.

        A denial earlier in the sentence is a reason: "Excluding A and B, we get" an answer.
        """
        last = bisect_right(self._ends, start) - 1
        if (
            last >= 0
            and start - self._ends[last] <= _MAX_CLAUSE_CHARS
            and _FILLER.fullmatch(self._text, self._ends[last], start)
        ):
            return True
        return _MATH_DENIAL.search(self._text, max(0, start - 48), start) is not None


def has_denial(text: str) -> bool:
    """Return whether a text denies anything, whatever that is."""
    return _DENIAL.search(text) is not None or re.search(f"[{_MARK}]", text) is not None


def is_taken_back(rest: str) -> bool:
    """Return whether what follows an answer hedges or retracts it: "or 5", "Wait, ...", "That is wrong."

    >>> [is_taken_back(rest) for rest in (". Wait, it is A", "? No.", ". A is wrong.", ". It is red. Scratch that.")]
    [True, True, False, True]
    """
    return _HEDGE.match(rest) is not None or is_retracted(rest)


def is_retracted(text: str) -> bool:
    """Return whether a sentence after the first one retracts what was written before it."""
    return _RETRACTION.search(text) is not None
