r"""Replies that contradict, retract, list or wrap their answer, and honest ones that must be credited.

Each row gives a reply, ground truths that a misreading would hit, and the ground truth that it earns 1 for, or None.
"""

import asyncio
import contextlib
import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_cases import answer_episode

from saccade.errors import DataError
from saccade.rewards.accuracy import Accuracy
from saccade.rewards.answer_types.denials import has_denial
from saccade.rewards.answer_types.math_ import MathAnswer, extract_formula
from saccade.rewards.answer_types.number_scanner import normalize_answer, scan_numbers
from saccade.rewards.answer_types.open_ import OpenAnswer
from saccade.rewards.answer_types.reader import (
    MAX_CHARS,
    find_answers,
    names_text,
    read_letter,
    read_number,
    read_span,
)
from saccade.types import AnswerType

OPTIONS = ("red", "blue", "green", "the last")

# An answer that the reply contradicts afterwards names nothing.
CONTRADICTED = [
    "B\nIt is C",
    "C\nIt is A",
    "C\nIt's A.",
    "C\nActually, it is (A).",
    "C because it is A",
    "C, because it is (A)",
    "C since it is red, so A",
    "C since it is red, hence A.",
    r"\boxed{C}. Wait, it is A",
    r"\boxed{C}. Wait.",
    r"\boxed{C}? No.",
    r"\boxed{C}?",
    r"$\boxed{C}$? Nope.",
    r"\boxed{C} or \boxed{A}",
    r"\boxed{C} or A",
    r"\boxed{C}, but maybe A",
    r"\boxed{C} is wrong",
    r"\boxed{C} is not the answer",
    r"\boxed{C}. It is A.",
    r"\boxed{C}. That is wrong.",
    r"\boxed{C} (wrong)",
    r"\boxed{C} Actually it is A.",
    r"\boxed{C}" + "\nI choose A.",
    r"\boxed{C}" + "\nThe answer is red.",
    "C\nthat is wrong",
    "C\nThat's not right.",
    "C\nThis is incorrect.",
    "C\nBoth A and C fit",
    "C\nBoth A and C are correct.",
    "C\nA and C work.",
    "C\nA also fits.",
    "C\nA fits too.",
    "C\nA is possible as well.",
    "C\nA is correct.",
    "C\nIn fact A is the right answer.",
    "C\nThe answer is red.",
    "C\nIt is red.",
    "C. It is red.",
    "C. The answer is red.",
    "C\nThat is the red.",
    "C\nred",
    "C\nThe correct option is A.",
    "C\nSo I choose A.",
    "C\nI would pick A.",
    "C\nTherefore, A.",
    "C\nThus (A)",
    "C\nHence the answer A.",
    "C\n=> A",
    "C\nor A",
    "C\nMaybe A.",
    "C\nIt could also be A.",
    "C\nOn second thought, the first.",
    "C\nThe ball is shown. Wait, no.",
    "C\nThe ball is shown. Scratch that.",
    "C\nHmm, let me think again.",
    "C\nSorry, I misread.",
    "C\nNo, that isn't shown.",
    "C\nI was wrong.",
    "C\nC does not fit.",
    "C\nC can be ruled out.",
    "C\nOption C: wrong",
    "C\nC (incorrect)",
    "C. A is correct.",
    "C. Both A and C fit.",
    "C. Wait, it is A.",
    "C. No, A.",
    "C. I mean A or so A.",
    "C. That's wrong, it must be A.",
    "(C) It is A.",
    "(C) is wrong.",
    "(C) is hardly right.",
    "C: wrong",
    "C (incorrect)",
    "C - no",
    "C is the wrong answer",
    "C is a mistake",
    "C is hardly right",
    "C is far from right",
    "C fails",
    "C \u274c",
    "C: the red one",
    "C. The red ball is shown.",
    "C, or A",
    "C / A",
    "The answer is C. It is A.",
    "The answer is C. A is correct, too.",
    "The answer is C. That is wrong.",
    "The answer is C? No.",
    "The answer is C. The ball is green. Wait, it is red.",
    "The answer is C.\nA",
    "The answer is C.\nThe answer is A.",
    "The answer is green. It is A.",
    "Answer: C\nFinal answer: A",
    "green\nIt is A",
    "green\nThe answer is red.",
    "A. red - yes\nB. blue - no\nC. green - yes",
    "A. red\nB. blue\nC. green",
    "A: red, B: blue, C: green",
    "A. red or C. green",
    "C. green or A. red",
    "C\n(A) red",
    "C\nB. blue fits",
    "\u7b54\u6848\u662fC\u3002\u4e0d\u5bf9\u3002",
    "C\n\u4e0d\u5bf9\uff0c\u5e94\u9009A",
    "C, A",
    "C A",
    "C\nA?",
    "C. A",
    "C\nThe answer: A",
    "C! A!",
    "C then A",
    "C and maybe A",
    "first C then A",
    "C\n\n\nA",
    "A: C",
    "C; A",
    "C... or A",
    "C, no A",
    "C-A",
    "C>A",
    "C, alternatively A",
    "C (A)",
    "C [A]",
    "C (or A)",
    "C\nAlternatively: A",
    "C\nAlt: A",
    "C\nEdit: A",
    "C\nCorrection: A",
    "C\nUpdate: it's A",
    "C\nOops, A",
    "C\nOops. It should be A",
    "C\nMy final answer is A",
    "C\nFinally, A",
    "C\nOn reflection, A.",
    "C\nA instead.",
    "C\nRather A.",
    "C\nA it is.",
    "C\nA!",
    "C\n**A**",
    "C\nI pick A",
    "C\nI'm going with A",
    "C\nI'd say A",
    "C\nProbably A",
    "C\nLikely A.",
    "C\nA is the answer",
    "C\nthe answer must be red",
    "C\nThe right one is A",
    "C\nThe right one is red",
    "C\nI change my answer to A",
    "C\nI change my mind.",
    "C\nNot C.",
    "C\nC? no",
    "C is wrong, A is right",
    "C is not it",
    "C isn't it",
    "C was wrong",
    "C, wrong",
    "C [wrong]",
    "C *not*",
    "~~C~~",
    "C\n~~C~~ A",
    "-C",
    "!C",
    "C - just kidding, A",
    "C\njk it's A",
    "C\nignore that, A",
    "C\nIgnore the above.",
    "C\nDisregard this.",
    "\\boxed{C}, \\boxed{A}",
    "\\boxed{C}/A",
    "\\boxed{C} and A",
    "\\boxed{C} & A",
    "\\boxed{C} A",
    "\\boxed{C}\nA",
    "\\boxed{C, A}",
    "\\boxed{A \\text{ or } C}",
    "\\boxed{\\text{not }C}",
    "\\boxed{C?}",
    "\\boxed{\\neg C}",
    "Anything except C",
    "everything but C",
    "C is the only wrong one",
    "C is the least likely",
    "The wrong answer is C",
    "The incorrect option is C",
    "The answer cannot be C",
    "The answer is never C",
    "It would be wrong to say C",
    "Which is right, C?",
    "C, I guess, or A",
    "C/D",
    "C|D",
    "C+D",
    "C & D",
    "C,D",
    "CD",
    "C\nD is equally valid",
    "C\nD is just as good",
    "C\nD would work as well",
    "C\nEither works.",
    "C\nAll of them fit.",
    "C\nAll options are correct.",
    "C\nEvery option is right.",
    "C\nCan't tell.",
    "C\nI don't know.",
    "C\nNone of them.",
    "C\nNone is correct.",
    "C\nRandom guess.",
    "A B C D\nC",
    "All: C",
    "the opposite of C",
]

# Replies that name C and explain it, however they are written.
HONEST_C = [
    "C. A is wrong because it is red.",
    "C. A and B are wrong.",
    "C. The man picks the green ball up.",
    "C) The ball rolls to the left.",
    "(C) The ball rolls to the left.",
    "C: the ball rolls away at the end",
    "C - it is shown at 0:42",
    "C\n\nOption A shows a different ball, and B is not in the video.",
    "C\nOption A is incorrect: the ball isn't red.",
    "C\nA: the ball isn't red.\nB: the ball isn't blue.",
    "C\n- A: not shown\n- B: not shown",
    "C\nA man enters. I see a green ball.",
    "C\nUnlike A, it shows the end.",
    "C\nBoth A and B are wrong.",
    "C\nA fits the color but not the shape.",
    "C\nNeither A nor B fits.",
    "C\nA is red, B is blue, and D is not shown.",
    "C\nBecause it is green.",
    "C because it is green",
    "C, since the ball is green.",
    "C because A and B are not shown",
    "C is correct. A is wrong.",
    "C is the right answer because B is not shown.",
    "C.\n\n**Explanation:** the ball turns green at 00:12.",
    "**C**",
    "**C.** The ball is green.",
    "**C. green**",
    "**Answer: C**",
    "**Answer:** C",
    "**Answer:** **C. green**",
    "### Final Answer\n**C**",
    "The correct answer is **C. green**.",
    "The correct option is C.",
    "Therefore, the correct option is **C**.",
    "So the right choice is (C).",
    "My answer: C",
    "The best answer is C.",
    "The final answer is: C",
    "Final answer: $\\boxed{C}$",
    "Based on the video, the answer is C. A and B don't occur.",
    "Looking at the frames, the ball is green. The answer is C.",
    "The answer to this question is C.",
    "The answer to the question is **green**.",
    "The answer to this is C",
    "The answer should be C.",
    "We see red at 5 s and green at 9 s.\n\nAnswer: C",
    "A: red\nB: blue\nC: green\nAnswer: C",
    "A. red\nB. blue\nC. green\nD. the last\n\nThe answer is C.",
    "A. red B. blue C. green D. the last\nAnswer: C",
    "(A) red\n(B) blue\n(C) green\n\n**Answer:** (C)",
    "Options:\nA. red\nB. blue\nC. green\nAnswer: C",
    "A. red - no\nB. blue - no\nC. green - yes",
    "A. red \u274c\nB. blue \u274c\nC. green \u2705",
    "A. red - no, B. blue - no, C. green - yes",
    "- A. red: wrong\n- B. blue: wrong\n- C. green: correct",
    "A. red is not shown\nB. blue is not shown\nC. green \u2713\nD. the last is not shown",
    "C \u2705",
    "$\\boxed{\\text{C}}$",
    "\\boxed{\\textbf{(C)}}",
    "\\[\\boxed{C}\\]",
    "Step 1: the ball is red. Step 2: it is green.\n\\boxed{C}",
    "Step 1: not A. Step 2: not B.\nTherefore $\\boxed{C}$.",
    "\\boxed{C} because the ball is green",
    "\\boxed{C}. A and B are not shown.",
    "\\boxed{\\text{C. green}}",
    "\u7b54\u6848\u662fC\u3002",
    "\u7b54\u6848\uff1aC",
    "\u7b54\u6848\u4e3aC",
    "\u6b63\u786e\u7b54\u6848\u662f\uff1aC",
    "\u6240\u4ee5\u7b54\u6848\u662f C\u3002",
    "\u6545\u9009C",
    "\u89c6\u9891\u4e2d\u7684\u7403\u662f\u7eff\u8272\u7684\uff0c\u7b54\u6848\u662fC\u3002",
    "C\u3002\u56e0\u4e3a\u7403\u662f\u7eff\u8272\u7684\u3002",
    "C\n\u56e0\u4e3a\u7403\u662f\u7eff\u8272\u7684",
    "<b>C</b>",
    "> C",
    "C. The green ball rolls away, so it leaves the frame.",
    "The answer is C. This is because A shows a cat, and B shows a dog.",
    "**Answer: (C) green**\n\n"
    "Explanation: In the video at 0:12 it turns green. The other options (A, B, D) are not supported.",
    "Answer: C\n\nReasoning:\n- A is incorrect because it is red.\n"
    "- B is incorrect because it is blue.\n- D is not shown.",
    "C\n\n1. The ball is red at first.\n2. Then it turns green.",
    "C. green\n\nAt first it is red, but then it is green.",
    "C. green\nIn the second scene it is red.",
    "The answer is option C: green.",
    "The answer is **(C) green**, because A is red.",
    "Let's analyze each option:\nA. red: The ball is not red.\nB. blue: not shown.\n"
    "C. green: The ball is green.\nD. the last: not relevant.\n\nTherefore, the answer is C.",
    "Let's analyze each option:\n\n**A. red**: The man is red.\n**B. blue**: The dog is blue.\n"
    "**C. green**: The ball is green.\n**D. the last**: no.\n\n**Answer: C**",
    "Option C is correct.",
    "Both A and B are incorrect, so the answer is C.",
    "c) green",
    "c. green",
    "Answer: C\n\n(The ball is green)",
    "The correct answer is **C**, since A only appears at the start.",
    "C \u2014 the green ball",
    "C \u2014 green",
    "Answer is C",
    "Ans: C",
    "\u9009\u9879C",
    "\u9009C\u3002",
    "C\u9009\u9879",
    "\u7b54\u6848\uff1a(C)",
    "\u6b63\u786e\u7b54\u6848\uff1aC. green",
    "\u56e0\u6b64\uff0c\u7b54\u6848\u4e3aC\u3002",
    "\u7efc\u4e0a\u6240\u8ff0\uff0c\u9009C",
    "\u7b54\u6848\u9009C",
    "\u7b54\u6848\u662f **C**",
    "C\n\nNo other option fits.",
    "The answer is C.\n\nNo other option fits.",
    "C. Although A looks similar, it is blue.",
    "C. However, A is similar.",
    "Therefore, $\\boxed{C}$ is the correct answer.",
    "Hence, the answer is \\boxed{C}.",
    "\\boxed{C. green}",
    "\\boxed{\\text{(C) green}}",
    "The final answer is $\\boxed{C}$. I hope it is correct.",
    "### Answer: C",
    "Final Answer: C",
    "The answer is: **C. green**.",
    "Based on my analysis, the correct choice is C.",
    "The answer would be C.",
    "I believe the correct answer is C.",
    "Answer: C. The ball is green",
    "(C)",
    "( C )",
    "C\u3002",
    "C\uff0c\u56e0\u4e3a\u7403\u662f\u7eff\u8272\u7684",
    "Answer:\nC",
    "Answer:\n\n**C**",
    "**Final answer:** C",
    "The best option is C",
    "Correct answer: C",
    "C - green ball",
    "It's C.",
    'The answer is "C".',
    "The answer is 'green'.",
    "the answer is c",
    "Answer: c",
    "Option C.",
    "(C) green ball",
    "Answer = C",
    "C is the answer.",
    "C is the best answer because it is green.",
    "A. red B. blue C. green D. the last. The answer is C",
    "The answer is C because B happens later and A never happens.",
]

CONTRADICTED += [
    "The answer is C. No wait, A.",
    "The answer is C. Hold on, it is A.",
    "C. Let me correct that: A",
    "C. My mistake: A.",
    "C. I misread it.",
    "If the ball were green, the answer would be C.",
    "Unless it is red, the correct answer would be C",
    "The answer is C or red",
    r"\boxed{C} \text{or} \boxed{C}",
    "C contradicts the video",
    "C conflicts with the video",
    "C is no longer possible",
    "\u6392\u9664C\u3002",  # exclude C
    "\u5982\u679c\u662f\u7ea2\u7403\uff0c\u7b54\u6848\u5c31\u662fC",  # if it were red, the answer would be C
    "\u6ca1\u6709\u51fa\u73b0C",  # C did not appear
    "C: no evidence in the frames",
    "C - no such thing",
    "My previous answer, C, was wrong.",
    "C turned out to be wrong",
    "C\u80af\u5b9a\u4e0d\u5bf9",  # C is certainly wrong
    "C\u9009\u9879\u6709\u8bef",  # option C is mistaken
    "A\u8fd8\u662fC\uff1f\u4e0d\u786e\u5b9a\u3002",  # A or C? Not sure.
]
HONEST_C += [
    "The green.",
    "It's the green.",
    "It is green.",
    "The answer is the green.",
    "It must be C.",
    "It's clearly C",
    "It can only be C",
    "Definitely C",
    "I'd go with C",
    "I'll choose C.",
    "If I had to choose, the answer would be C",
    "C, not A",
    "C instead of A",
    "C rather than A",
    "[[C]]",
    "- C",
    "Selected option: C",
    "C - no doubt",
    "\u7b54\uff1aC",  # answer: C
    "C \u9009\u9879",  # option C
    "\u9009\u62e9 (C) \u3002",  # choose (C)
    "\u672c\u9898\u9009 C\u3002",  # choose C here
    "\u7b54\u6848\u5e94\u4e3aC",  # the answer should be C
    "A\u4e0d\u5bf9\uff0c\u5e94\u8be5\u662fC",  # A is wrong, it should be C
    "A\u3001B\u3001D\u90fd\u4e0d\u5bf9\uff0c\u6240\u4ee5\u662fC",  # A, B and D are wrong, so it is C
    "\u3010C\u3011",
    "C\u9009\u9879\u6b63\u786e",  # option C is right
    "\u9009\u9879C\u662f\u6b63\u786e\u7684\u3002",
    "\u6392\u9664A\u3001B\u3001D\uff0c\u9009C\u3002",  # excluding A, B and D, choose C
    r"\boxed{\textbf{(C)}\ \text{green}}",
]

# (reply, numbers that it earns 0 for, the number that it earns 1 for or None)
NUMBERS = [
    # bounds after the number, and in Chinese; half-read decimals and scales
    ("10 at most", (10,), None),
    ("10 people at least", (10,), None),
    ("10 max", (10,), None),
    ("10 at the very least", (10,), None),
    ("at the most 10", (10,), None),
    ("10 or higher", (10,), None),
    ("\u81f3\u5c11\u670910\u4e2a", (10,), None),  # there are at least 10
    ("max. 10", (10,), None),
    ("10 minutes", (), 10),
    ("upwards of 10", (10,), None),
    ("less than or equal to 10", (10,), None),
    ("point five", (5,), None),
    ("$4B", (4,), None),
    ("4B", (4,), None),
    ("2e", (2,), None),
    ("\u81f3\u5c115\u4e2a", (5,), None),  # at least 5
    ("\u6700\u591a5\u4e2a", (5,), None),  # at most 5
    ("\u8d85\u8fc75\u4e2a", (5,), None),  # more than 5
    ("\u5c0f\u4e8e5", (5,), None),  # less than 5
    ("5\u4e2a\u4ee5\u4e0a", (5,), None),  # 5 and above
    ("10\u591a\u4e2a", (10,), None),  # ten odd
    ("3\u5206\u4e4b1", (3, 1), None),  # one third
    ("\u603b\u5171\u67095\u4e2a\u4eba\u3002", (), 5),  # 5 people in total
    ("5\u4e2a\u5de6\u53f3", (), 5),  # about 5
    # LaTeX units, indices and ordinals
    (r"45^\circ", (4, 5), 45),
    (r"45^{\circ}", (4, 5), 45),
    (r"$45^\circ$", (), 45),
    (r"\boxed{45^\circ}", (), 45),
    (r"12\text{ cm}^2", (2, 144, 122), 12),
    (r"12\,\text{cm}^{2}", (2, 144), 12),
    (r"12\ \mathrm{m}^3", (3, 1728), 12),
    (r"x_{1} = 4", (1, 14), 4),
    (r"x_1 = 4", (1,), 4),
    (r"x_{\text{max}} = 4", (1,), 4),
    ("4^{th}", (), 4),
    (r"4^{\text{th}}", (), 4),
    (r"4\textsuperscript{th}", (), 4),
    (r"1{,}200\text{ m}", (1, 200), 1200),
    # functions, factorials, bounds and inequalities
    ("log 3", (3,), None),
    (r"\log 3", (3,), None),
    ("ln(3)", (3,), None),
    ("sin 4", (4,), None),
    (r"\sin 4", (4,), None),
    (r"\cos(4)", (4,), None),
    ("the square of 4", (4, 16), None),
    ("max 4", (4,), None),
    ("4!", (4, 24), None),
    ("The answer is 4!", (4, 24), None),
    ("4?", (4,), None),
    ("\u2a7e4", (4,), None),
    ("\u2a7d4", (4,), None),
    ("\u22674", (4,), None),
    ("!= 4", (4,), None),
    ("x != 4", (4,), None),
    ("\u2260 4", (4,), None),
    ("x \u2260 4", (4,), None),
    ("The answer is \u2260 4", (4,), None),
    ("no more than 4", (4,), None),
    ("4 plus", (4,), None),
    ("4x", (4,), None),
    ("4 squared", (4, 16), None),
    # scales
    ("4\ub9cc", (4,), None),
    ("4\uc5b5", (4,), None),
    ("$4M", (4,), None),
    ("$4m", (4,), None),
    ("4M", (4,), None),
    ("4 M", (4,), None),
    ("\u20ac4bn", (4,), None),
    ("$4 million", (4,), 4000000),
    ("4\u5343", (4,), None),
    # struck out, rejected
    ("~~4~~", (4,), None),
    ("~~3~~ 4", (3, 4, 34), None),
    (r"\cancel{4}", (4,), None),
    (r"\cancel{3} 4", (3, 4), None),
    ("<s>4</s>", (4,), None),
    ("4 (wrong)", (4,), None),
    ("4: wrong", (4,), None),
    ("4 (incorrect)", (4,), None),
    ("4 is a mistake", (4,), None),
    ("4 - no", (4,), None),
    ("4 \u274c", (4,), None),
    ("apart from 4", (4,), None),
    ("hardly 4", (4,), None),
    ("The answer is 4. That is wrong.", (4,), None),
    ("The answer is 4. Wait.", (4,), None),
    ("4. Wait, no.", (4,), None),
    ("There are four. Scratch that.", (4,), None),
    # compounds
    ("1h30m", (1, 30, 90), None),
    ("1h30", (1, 30, 90), None),
    ("2m50cm", (2, 50), None),
    ("5'4\"", (5, 4), None),
    ("5 o'clock", (5,), None),
    ("5 o\u2019clock", (5,), None),
    ("third of 9", (9, 3), None),
    ("a third of 9", (9, 3), None),
    ("one third of the 9", (9, 3), None),
    # text that touches a box
    (r"-\boxed{4}", (4,), -4),
    ("$-\\boxed{4}$", (4,), -4),
    ("\u2212\\boxed{4}", (4,), -4),
    (r"x = -\boxed{4}", (4,), -4),
    (r"\boxed{4} million", (4,), 4000000),
    (r"$\boxed{4}$ thousand", (4,), 4000),
    (r"\boxed{4}\text{ million}", (4,), None),
    (r"\boxed{4}k", (4,), None),
    (r"\boxed{4}\u4e07".replace(r"\u4e07", "\u4e07"), (4,), None),
    (r"\boxed{4}^2", (4, 2), None),
    (r"\boxed{4}/5", (4, 5), None),
    (r"\boxed{4} + 1", (4, 5, 1), None),
    (r"\sqrt{\boxed{4}}", (4,), None),
    (r"\pm\boxed{4}", (4, -4), None),
    (r"at least \boxed{4}", (4,), None),
    (r"x > \boxed{4}", (4,), None),
    (r"x \ge \boxed{4}", (4,), None),
    (r"1\boxed{4}", (4, 14), None),
    (r"\boxed{4}?", (4,), None),
    (r"\boxed{4}. No, 5.", (4, 5), None),
    (r"\boxed{4} is wrong", (4,), None),
    (r"\boxed{4} (wrong)", (4,), None),
    (r"3 + 1 = \boxed{4} apples", (3, 1), 4),
    (r"- \boxed{4}", (-4,), 4),
    (r"Answer: \boxed{4}.", (), 4),
    (r"=> \boxed{4}", (), 4),
    (r"**\boxed{4}**", (), 4),
    (r"\boxed{4} cm", (), 4),
    (r"\boxed{45}^\circ", (), 45),
    (r"so it is 3. \boxed{4}", (3,), 4),
    *(
        (reply, (4, -4), None)
        for reply in ("4 and change", "half 4", "|-4|", "4 too many", "four score", "4 below zero")
    ),
    *(
        (reply, (4, -4), None)
        for reply in ("-(-4)", "minus minus 4", "4 minus", "4y", "4 (?)", "4?!", "4. Oops", "I doubt 4")
    ),
    *(
        (reply, (4, 5), None)
        for reply in ("4..5", "4~5", "4&5", "4|5", "4;5", "4 vs 5", "1 in 4", "4 per 5", "4 out of 5")
    ),
    *((reply, (4, 2), None) for reply in (r"\binom{4}{2}", r"\log_4 2", r"\log_{4} 2", r"\int 4", "4'2", "4 choose 2")),
    *(
        (reply, (4,), None)
        for reply in ("\u0393(4)", "f(4)", "CO4", "H_4", "4h5", "4:00", "4 lakh", "\u20b94 crore", "4 dozen")
    ),
    *((reply, (4,), None) for reply in ("the 4 is wrong", "4 does not fit", "4 can be excluded", "4, not", "4 -- no")),
    # honest
    *(
        (reply, (), 4.5)
        for reply in (r"4.5\,\text{m}", r"\boxed{4.5~\text{m}}", "4.5 m/s\u00b2", "about 4.5 or so", "<b>4.5</b>")
    ),
    *(
        (reply, (), 4.5)
        for reply in ("4,5 m", "\u5927\u7ea64.5\u7c73", r"\(\boxed{4.5}\)", "My estimate: 4.5", "[4.5]", "~4.5")
    ),
    ("The answer to this question is 4.", (), 4),
    ("The answer to this is 4", (), 4),
    ("\u7b54\u6848\u662f4", (), 4),
    ("\u7b54\u6848\uff1a4", (), 4),
    ("There are **4** chairs.", (), 4),
    ("There are four chairs in the room.", (), 4),
    ("**Answer:** 4 chairs", (), 4),
    ("The final answer is $4$.", (), 4),
    (r"$x = 4$", (), 4),
    (r"\(4\)", (), 4),
    ("approximately 4.5 meters", (), 4.5),
    ("about 1,200 m\u00b2", (2, 1), 1200),
    ("The room is 24.5 square meters.", (), 24.5),
    ("I count 3 on the left and 1 on the right. The answer is 4.", (3, 1), 4),
    ("\u5171\u67094\u628a\u6905\u5b50\u3002", (), 4),
    ("4 chairs", (), 4),
    ("`4`", (), 4),
    ("4.", (), 4),
    ("The total is 4", (), 4),
    ("Final result: 4", (), 4),
    ("-4", (4,), -4),
    ("minus 4 degrees", (4,), -4),
]

# (reply, spans that it earns no credit for, the span that it earns 1 for or None)
SPANS = [
    ("Between 20 and 24 nothing happens.", ((20, 24),), None),
    ("From 20 to 24 the ball is not shown", ((20, 24),), None),
    ("20 to 24 in frame numbers", ((20, 24),), None),
    ("20\u523024\u79d2\u4e4b\u95f4\u6ca1\u6709\u53d1\u751f", ((20, 24),), None),  # did not happen within
    ("20 to 24 s, not 30 to 34 s", ((30, 34),), (20, 24)),
    ("from 20 to 24, and it does not happen again", (), (20, 24)),
    ("20 to 24 when nothing else moves", (), (20, 24)),
    ("apart from 20 to 24", ((20, 24),), None),
    ("20 to 24 (wrong)", ((20, 24),), None),
    ("20 to 24: wrong", ((20, 24),), None),
    ("20 to 24 - no", ((20, 24),), None),
    ("20-24 is a mistake", ((20, 24),), None),
    ("20 to 24? No.", ((20, 24),), None),
    ("20 to 24. Wait, no.", ((20, 24),), None),
    ("20 to 24. Scratch that.", ((20, 24),), None),
    ("~~20 to 24~~", ((20, 24),), None),
    (r"\boxed{20-24} minutes", ((20, 24),), None),
    (r"\boxed{20-24}. Wait, no.", ((20, 24),), None),
    (r"\boxed{20-24} is wrong", ((20, 24),), None),
    ("hardly from 20 to 24", ((20, 24),), None),
    ('["1,200","1,300"]', ((1, 200), (200, 300)), (1200, 1300)),
    ('["1,200", "1,300"]', ((1, 200),), (1200, 1300)),
    ("['20', '24']", (), (20, 24)),
    ("\u4ece20\u79d2\u523024\u79d2", (), (20, 24)),
    ("\u4ece20\u79d2\u81f324\u79d2", (), (20, 24)),
    ("20\u79d2\u523024\u79d2", (), (20, 24)),
    ("\u7b54\u6848\u662f\u4ece20\u79d2\u523024\u79d2\u3002", (), (20, 24)),
    ("\u4e0d\u662f\u4ece20\u79d2\u523024\u79d2", ((20, 24),), None),
    ("\u7b2c20\u79d2\u5230\u7b2c24\u79d2", (), (20, 24)),
    ("\u572820\u79d2\u548c24\u79d2\u4e4b\u95f4", (), (20, 24)),
    ("**Start:** 20\n**End:** 24", (), (20, 24)),
    ("20-24?", ((20, 24),), None),
    ("20-24 min", ((20, 24),), None),
    ("everything but 20 to 24", ((20, 24),), None),
    ("The answer to this question is 20 to 24.", (), (20, 24)),
    ("**20.0s - 24.0s**", (), (20, 24)),
    ("From 00:20 to 00:24.", (), (20, 24)),
    ("The event happens from 20 s to 24 s.", (), (20, 24)),
    ("The event starts at 20.0 seconds and ends at 24.0 seconds.", (), (20, 24)),
    ("between 20 and 24 seconds", (), (20, 24)),
    ("Answer: [20.0, 24.0]", (), (20, 24)),
    (r"$\boxed{[20, 24]}$", (), (20, 24)),
]

# (reply, ground truths that it must not be correct for, the ground truth that it earns 1 for or None)
OPEN = [
    # words that relate others
    ("red, then blue", ("blue, then red",), "red, then blue"),
    ("first the cube, then the ball", ("first the ball, then the cube",), "First the cube, then the ball."),
    ("from Rome to Paris", ("from Paris to Rome",), "From Rome to Paris"),
    ("the cat is left of the dog", ("the dog is left of the cat",), "cat is left of dog"),
    ("green and red", (), "red and green"),
    ("Yes, it does", ("no",), "yes"),
    ("No, it doesn't", ("yes",), "no"),
    ("Yes, it is not.", ("yes", "no"), None),
    ("Yes, or no", ("yes", "no"), None),
    ("red, green, blue", ("red, green", "red", "green, blue"), None),
    ("red and green and blue", ("red and green",), None),
    ("The dog ran away", ("The dog did not run away",), None),
    ("He does wear a hat", ("He does not wear a hat",), None),
    ("with a hat", ("without a hat",), None),
    ("It can be red", ("It can't be red",), None),
    ("He never wears the red hat", ("He wears the red hat",), "He never wears the red hat"),
    ("hardly red", ("red",), None),
    ("red (wrong)", ("red",), None),
    ("red. Wait, no.", ("red",), None),
    ("~~red~~", ("red",), None),
    (r"\boxed{red}. No.", ("red",), None),
    ("The answer to this question is red", ("this question is red",), "red"),
    ("\u7b54\u6848\u662f\u7ea2\u8272", ("\u7b54\u6848",), "\u7ea2\u8272"),
    ("\u7b54\u6848\uff1a\u7ea2\u8272", ("\u7b54\u6848",), "\u7ea2\u8272"),
    ("**Red**", (), "red"),
    ("The answer is **red**.", (), "red"),
    (r"\boxed{\text{red}}", (), "red"),
]

# (reply, formulas that it earns 0 for, the formula that it earns 1 for or None)
MATH = [
    (r"-\boxed{4}", ("4",), "-4"),
    (r"\boxed{4} million", ("4",), None),
    (r"\boxed{4}^2", ("4",), None),
    (r"\sqrt{\boxed{4}}", ("4", "2"), None),
    (r"\boxed{4}. Wait, it is 5.", ("4", "5"), None),
    (r"\boxed{4}? No.", ("4",), None),
    (r"\boxed{4} is wrong", ("4",), None),
    ("~~4~~", ("4",), None),
    (r"\cancel{4}", ("4",), None),
    ("**4**", (), "4"),
    ("The answer to this is $4$", (), "4"),
    (r"$\boxed{45^\circ}$", (), r"45^\circ"),
]

# (kind, reply, boxes that it earns 0 for, a box that it earns 1 for or None); all are fractions of the image
AREAS = [
    ("box", "[0.4, 0.4, 0.6, 0.6] is wrong", [(0.4, 0.4, 0.6, 0.6)], None),
    ("box", "[0.4, 0.4, 0.6, 0.6] (incorrect)", [(0.4, 0.4, 0.6, 0.6)], None),
    ("box", "[0.4, 0.4, 0.6, 0.6]. Wait, no.", [(0.4, 0.4, 0.6, 0.6)], None),
    ("box", "apart from [0.4, 0.4, 0.6, 0.6]", [(0.4, 0.4, 0.6, 0.6)], None),
    ("box", "~~[0.4, 0.4, 0.6, 0.6]~~", [(0.4, 0.4, 0.6, 0.6)], None),
    ("point", "hardly (0.5, 0.5)", [(0.4, 0.4, 0.6, 0.6)], None),
    ("point", "(0.5, 0.5): wrong", [(0.4, 0.4, 0.6, 0.6)], None),
    ("box", "The box is [0.4, 0.4, 0.6, 0.6].", [], (0.4, 0.4, 0.6, 0.6)),
    ("box", '```json\n[{"bbox_2d": [0.4, 0.4, 0.6, 0.6]}]\n```', [], (0.4, 0.4, 0.6, 0.6)),
    ("point", "**(0.5, 0.5)**", [], (0.4, 0.4, 0.6, 0.6)),
]
EXACT = Accuracy(answer_types={"number": {"mode": "exact"}})


def grade(reply, truth, kind):
    options = OPTIONS if kind == "choice" else ()
    return EXACT(answer_episode(reply, ground_truth=truth, kind=AnswerType(kind), choices=options)).value


def build_rows():
    """Return a row per reply and ground truth: the reply, the ground truth, its type, and whether it is right."""
    rows = [(reply, letter, "choice", False) for reply in CONTRADICTED for letter in "ABCD"]
    rows += [(reply, letter, "choice", letter == "C") for reply in HONEST_C for letter in "ABCD"]
    tables = [("number", *row) for row in NUMBERS] + [("grounding", *row) for row in SPANS]
    tables += [("open", *row) for row in OPEN] + AREAS
    for kind, reply, wrong, right in tables:
        truths = [(truth, False) for truth in wrong] + ([(right, True)] if right is not None else [])
        for truth, is_right in truths:
            typed = truth if kind == "open" else float(truth) if kind == "number" else tuple(map(float, truth))
            rows.append((reply, typed, kind, is_right))
    return rows


def find_failures():
    """Return the rows whose value is another one; a wrong open answer or span must only not be correct."""
    failures = []
    for reply, truth, kind, is_right in build_rows():
        value = grade(reply, truth, kind)
        is_expected = abs(value - 1) < 1e-9 if is_right else value < (0.5 if kind in ("open", "grounding") else 1e-9)
        if not is_expected:
            failures.append((reply, truth, kind, value))
    return failures


def test_the_adversarial_list():
    assert find_failures() == []


@pytest.mark.slow
def test_formulas():
    pytest.importorskip("math_verify")
    score = MathAnswer()
    rows = [(reply, truth, 0.0) for reply, wrong, _ in MATH for truth in wrong]
    rows += [(reply, right, 1.0) for reply, _, right in MATH if right is not None]

    async def find_math_failures():
        values = [
            await score(answer_episode(reply, ground_truth=truth, kind=AnswerType.MATH)) for reply, truth, _ in rows
        ]
        return [(row, value) for row, value in zip(rows, values, strict=True) if value != row[2]]

    assert asyncio.run(find_math_failures()) == []


@pytest.mark.parametrize("mode", ["exact", "f1_precision"])
@pytest.mark.parametrize(
    ("answer", "others", "right"),
    [
        *(
            ("A-", ("A+", "A"), "A-"),
            ("A+", ("A-", "A"), "A+"),
            ("C#", ("C++", "C"), "c#"),
            ("C++.", ("C#", "C"), "C++"),
        ),
        *(("AB+", ("AB-", "AB"), "AB+"), ("18+", ("18",), "18+"), ("a+b", (), "a b"), ("pre-war", (), "pre war")),
    ],
)
def test_signs_at_the_end_of_a_word_are_kept(answer, others, right, mode):
    score = OpenAnswer(mode=mode)
    assert [score(answer_episode(answer, ground_truth=truth)) for truth in (*others, right)] == [0.0] * len(others) + [
        1.0
    ]


@pytest.mark.parametrize(
    ("answer", "ground_truth", "expected"),
    [
        *(("The red ball!", "a red ball", 1.0), ("red, green, blue", "red, green", 0.8), ("red", "blue", 0.0)),
        *(("not red", "red", 2 / 3), ("The answer is red", "red", 0.5), ("", "red", 0.0), ("the", "the", 0.0)),
        *(("red red", "red", 2 / 3), ("-5", "5", 1.0), ("1,000", "1000", 1.0), (r"\boxed{red}", "red", 0.0)),
    ],
)
def test_f1_is_the_published_one(answer, ground_truth, expected):
    """By hand from the evaluation of SQuAD: lower case, no punctuation, no articles, F1 of the two bags of words."""
    assert OpenAnswer(mode="f1")(answer_episode(answer, ground_truth=ground_truth)) == pytest.approx(expected)


def test_numbers_of_rows():
    wrong = [*CONTRADICTED, *(row for table in (NUMBERS, SPANS, OPEN, MATH) for row in table if row[1])]
    honest = [*HONEST_C, *(row for table in (NUMBERS, SPANS, OPEN, MATH) for row in table if row[2] is not None)]
    assert (len(wrong) >= 150, len(honest) >= 60) == (True, True)


@pytest.mark.parametrize(
    ("text", "expected", "is_named"),
    [
        *(("4,500", "4", False), ("4:30", "4", False), ("at 14:30", "14", False), ("2.4", "4", False)),
        *(("3/4", "4", False), ("10^4", "4", False), ("4^2", "4", False), ("1,4", "4", False), ("-4", "4", False)),
        *(("4+1", "4", False), ("4 (wrong)", "4", False), ("~~4~~", "4", False), ("it is hardly red", "red", False)),
        *(("red. Wait, no.", "red", False), ("apart from red", "red", False), ("4 or 5", "4", False)),
        *(("There are 4.", "4", True), ("4, that is all", "4", True), ("(4)", "4", True), ("it's red!", "red", True)),
        *(("\u5171\u67094\u628a", "4", True), ("4:30", "4:30", True), ("about 4,500 m", "4,500", True)),
    ],
)
def test_a_text_is_named_as_whole_words(text, expected, is_named):
    assert names_text(text, expected) is is_named


@pytest.mark.parametrize("word", ["hardly", "barely", "scarcely", "far from", "not", "never", "apart from", "unlike"])
def test_there_is_one_list_of_denials(word):
    """What denies before a letter, a number and a span is a denial for a whole text, too."""
    assert has_denial(f"{word} C")
    assert read_letter(f"{word} C", "ABCD", in_prose=True) is None
    assert read_number(f"{word} 4", in_prose=True) is None
    assert read_span(f"{word} 20 to 24") is None
    assert not names_text(f"{word} red", "red")


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        *(("A. red - no\nB. blue - no\nC. green - yes", "C"), ("A. red \u274c B. blue \u274c C. green \u2705", "C")),
        *(
            ("A. red - yes, C. green - yes", None),
            ("C (incorrect)", None),
            ("C: wrong", None),
            ("C is hardly right", None),
        ),
        *(("C could be right, but it is A", "A"), ("I first thought A, so C", "C"), ("It is C. A fits too.", None)),
        *(("Is it A? No. It is C.", "C"), ("The man shows A red ball, so it is (C)", "C"), ("Both A and C fit", None)),
        *(("It is A.\nIt is C.", None), ("C \u2705", "C"), ("I pick C", "C"), (r"\boxed{A} no, \boxed{C}", "C")),
        *(("C, although A is possible", None), ("C was my guess, but it is wrong", None), ("C, sorry, A", None)),
        *(("If it were red, the answer would be A", None), ("A through C", None), ("A-C", None), ("A over B", None)),
        *(
            ("nothing suggests C", None),
            ("C lacks support", None),
            ("C has no support", None),
            ("I disagree with C", None),
            ("I avoid C", None),
        ),
        *(
            ("C++", None),
            ("C#", None),
            ("grade A+", None),
            ("D-Day", None),
            ("N/A", None),
            ("A+B", None),
            ("It has to be C", "C"),
        ),
        *(
            ("A\u8fd8\u662fC", None),
            ("A\u548cC", None),
            ("A\u4e0d\u5bf9, \u5e94\u8be5\u662fC", "C"),
        ),  # or, and; A is wrong
        *(("It can be nothing but C", "C"), ("A is tempting, but C is right", "C"), ("C can't be it", None)),
    ],
)
def test_letters_in_prose(text, letter):
    assert read_letter(text, "ABCD", OPTIONS, in_prose=True) == letter


@pytest.mark.parametrize(
    ("text", "options", "letter"),
    [
        *(("No", ("Yes", "No"), "B"), ("No.", ("Yes", "No"), "B"), ("B. No", ("Yes", "No"), "B")),
        *(("B. No, the man does not run.", ("Yes", "No"), "B"), ("No, the man does not run.", ("Yes", "No"), "B")),
        *(("A. Yes, because he runs.", ("Yes", "No"), "A"), ("Yes and no", ("Yes", "No"), None)),
        *(("Yes. No.", ("Yes", "No"), None), ("B. Yes", ("Yes", "No"), None), ("Yes, no", ("Yes", "No"), None)),
        *(("3", "1234", "C"), ("The answer is 3.", "1234", "C"), ("C. There are 3.", "1234", "C")),
        *(("1, 2, 3", "1234", None), ("C. 2", "1234", None), ("A. 1\nB. 2\nC. 3\nD. 4\nAnswer: C", "1234", "C")),
        *(("not shown", ("shown", "not shown"), "B"), ("B. not shown", ("shown", "not shown"), "B")),
        *(("It is not shown.", ("It is shown.", "It is not shown."), "B"), ("neither", ("both", "neither"), "B")),
    ],
)
def test_options_that_look_like_denials_or_numbers(text, options, letter):
    assert read_letter(text, "ABCD"[: len(options)], tuple(options)) == letter


# ---- properties ----------------------------------------------------------------------------------------------------

AROUND = st.text("abc,;:.!?()[]{}$\\=-+*/^~ \n\u4e07\u2260", max_size=6)


@settings(deadline=None, max_examples=300)
@given(AROUND, st.integers(0, 99_999), AROUND)
def test_no_reading_changes_digits_that_it_does_not_consume(before, value, after):
    """A value that is read is that of one whole number of the text, and all of the digits belong to it."""
    text = f"{before}{value}{after}"
    for in_prose in (False, True):
        read = read_number(text, in_prose=in_prose)
        plains = [normalize_answer(part) for part in find_answers(text, in_prose=True)]
        consumed = [
            plain[number.start : number.end]
            for plain in plains
            for number in scan_numbers(plain)
            if number.value == read
        ]
        assert read is None or any(str(value) in digits for digits in consumed)


def test_a_contradiction_is_one_for_every_pair_of_letters():
    """The rows are written with C and A; the rule knows no letter."""
    rows = [reply for reply in CONTRADICTED if not re.search(r"\b[BD]\b|red|green|first|AC|CD", reply)]
    assert len(rows) > 100
    for reply, first, second in itertools.product(rows, "ABCD", "ABCD"):
        names = {"C": first, "A": second}
        renamed = "".join(names.get(part, part) for part in re.split(r"(?<![A-Za-z])([AC])(?![A-Za-z])", reply))
        assert first == second or read_letter(renamed, "ABCD", OPTIONS) is None, renamed


# ---- length --------------------------------------------------------------------------------------------------------

PIECES = [
    *("4", "4 ", "1,", "1.", "1:", "1/", "1/2/", "2^", "2e", "-", "- ", "+", "*", "**", "`", "```", "_", "~~", "#"),
    *(
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        "<",
        ">",
        "<s>",
        "<<",
        "<b>",
        "(1,2)",
        "[1,2,3,4] ",
        "(0.1, 0.2), ",
        "\\",
        "?",
        "$",
    ),
    *(r"\boxed{", r"\boxed{4} ", r"\boxed{C}", r"\frac{", r"\frac{1}{2}", r"\text{", r"\text{m}", r"\sqrt{", r"\("),
    *("the answer is ", "answer ", "answer: ", "answer to ", "is ", "so ", "one hundred ", "million ", "not ", "n't "),
    *(
        "A or ",
        "A, ",
        "A",
        "(A) ",
        "A. ",
        "A\n",
        "A. red\n",
        "A. red, ",
        "C is ",
        "it is A ",
        "maybe ",
        "Wait, ",
        "no. ",
    ),
    *("20 to ", "20-24 ", "1:30 ", "a.", "a", "red ", "red or ", "and ", "\u7b54\u6848", "\u4e07", "\u00bd", "\u0301"),
    *(
        "is wrong ",
        "=",
        "x=",
        "\\approx ",
        "sqrt(",
        "\u221a(",
        "\u00b2",
        '"',
        "'",
        "{}",
        "oxed{",
        "<point x=",
        "Answer",
    ),
    *(
        "o{}xed{",
        "<think>",
        "</think>",
        "<answer>",
        "</answer>",
        "\n",
        " ",
        "\t",
        "to ",
        "\\cancel{",
        "e",
        "0.",
        "A B ",
    ),
]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["choice", "number", "grounding", "open", "math", "box", "point"])
def test_every_answer_type_reads_long_answers(kind):
    """A quadratic pattern would take minutes for one of them."""
    truth = {"choice": "C", "number": 4.0, "grounding": (1.0, 2.0), "open": "red", "math": "4"}.get(kind, (0, 0, 1, 1))
    for text in (piece * (MAX_CHARS // len(piece)) for piece in PIECES):
        if kind == "math":
            extract_formula(text)
        else:
            with contextlib.suppress(DataError):  # an answer in pixels of an image of unknown size
                grade(text, truth, kind)


@pytest.mark.parametrize("kind", ["choice", "number", "grounding", "open"])
def test_the_end_of_a_long_answer_is_read(kind):
    answer, truth = {
        "choice": ("The answer is C.", "C"),
        "number": ("The answer is 4.", 4.0),
        "grounding": ("The answer is 20 to 24.", (20.0, 24.0)),
        "open": (r"\boxed{red}", "red"),
    }[kind]
    assert grade("We look at it. " * 70_000 + answer, truth, kind) == 1.0
    assert grade(answer + " We look at it." * 70_000, truth, kind) == 0.0
    assert grade("4 C red 20-24" + " " * MAX_CHARS + "4", truth, kind) == 0.0  # a part of an answer is none
    assert grade("1" * 1_000_000, truth, kind) == 0.0
