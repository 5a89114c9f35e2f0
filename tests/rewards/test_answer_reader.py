"""An adversarial list: replies, the ground truth that a misreading would hit, and the value that they earn.

Each row gives a reply, and the ground truths that it earns nothing (or everything) for.
"""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_cases import answer_episode

from saccade.rewards.accuracy import Accuracy
from saccade.rewards.answer_types.number_scanner import mask_numbers, normalize_answer, scan_numbers
from saccade.rewards.answer_types.reader import read_letter, read_number, read_span
from saccade.types import AnswerType

COLORS = ("red", "blue", "green", "yellow")

# (reply, ground truths that it earns 0 for, the ground truth that it earns 1 for or None)
NUMBERS = [
    # thousands and decimal commas
    ("2,500", (2, 500, 2.5), 2500),
    ("2,5", (2, 5, 25), 2.5),
    ("3,4", (3, 4, 34), 3.4),
    ("12,75 m", (12, 75, 1275), 12.75),
    ("0,5", (0, 5), 0.5),
    ("0,500", (0, 500), 0.5),
    ("1,234,567", (1, 234, 567, 1234), 1234567),
    ("1,234.5", (1, 234.5, 234, 1.2345), 1234.5),
    ("1.234,5", (1, 234, 5, 1.234), 1234.5),
    ("12,34,567", (12, 34, 567, 34567), None),
    ("1,23,4", (1, 23, 4, 23.4), None),
    ("1.2.3", (1, 2, 3, 1.2, 2.3), None),
    ("2 500 m", (2, 500), None),
    ("2\u00a0500 m", (2, 500), 2500),
    ("2'500", (2, 500), 2500),
    ("2_500", (2, 500), 2500),
    ("2{,}500", (2, 500), 2500),
    (r"2\,500", (2, 500), 2500),
    ("-2,5", (2.5, 5, -5), -2.5),
    ("3,1416", (3, 1416), 3.1416),
    ("\u0664\u066b\u0665", (4, 5, 45), 4.5),
    ("[2,5]", (2, 5, 2.5), None),
    ("(2,5)", (2, 5, 2.5), None),
    ("4,5,6", (4, 5, 6, 4.5), None),
    # numbers behind the letters of a word
    ("USD1,200", (200, 1, 1200), None),
    ("v4.2", (2, 4), None),
    ("x4:30", (30, 4), None),
    # a denial that is a reason
    (r"We reject the negative root and get \boxed{4}", (), 4),
    ("Since 3 is not possible, the answer is 4.", (3,), 4),
    (r"It can't be \boxed{4}", (4,), None),
    # calls of functions and hours
    ("sqrt(9)", (9, 3), None),
    ("log10(1000)", (10, 1000, 3), None),
    ("f(4)", (4,), None),
    ("four (4)", (), 4),
    ("3 pm", (3, 15), None),
    ("11 a.m.", (11,), None),
    # spans and several numbers
    ("1,200 to 1,300", (1, 200, 300, 1200, 1300), None),
    ("1,200\u20131,300", (1, 200, 300, 1200, 1300), None),
    ("20 - 24", (20, 24, -24, -4), None),
    ("20-24", (20, 24, -24), None),
    ("20 -24", (20, 24, -24), None),
    ("between 20 and 24", (20, 24), None),
    ("from two to four", (2, 4), None),
    ("3 or 4", (3, 4), None),
    ("3/4/5", (3, 4, 5, 0.75, 0.8), None),
    ("12/03/2020", (12, 3, 2020, 4), None),
    ("2019-12-03", (2019, 12, 3), None),
    ("4 4", (4, 44, 8), None),
    ("three four", (3, 4, 7, 34), None),
    ("one, two, three", (1, 2, 3, 6), None),
    ("4 of 5", (4, 5, 0.8), None),
    ("4 (four)", (44,), 4),
    ("4, that is four", (44,), 4),
    ("4 cm. The answer is", (), 4),
    # number words
    ("seventy-two", (2, 70, 7), 72),
    ("seventy two", (2, 70), 72),
    ("three hundred and five", (3, 5, 300, 100, 8), 305),
    ("three hundred five", (3, 5, 300), 305),
    ("a hundred", (1, 0), 100),
    ("one hundred and twenty-one", (1, 20, 21, 100), 121),
    ("two thousand and three", (2, 3, 2000), 2003),
    ("two thousand five hundred", (2, 5, 2000, 500), 2500),
    ("one million two hundred thousand", (1, 2, 200, 10**6), 1200000),
    ("one million, two hundred thousand and five", (1, 2, 5, 200), 1200005),
    ("twenty-one hundred", (20, 21, 100, 1), 2100),
    ("nineteen", (9, 10), 19),
    ("ninety-nine", (9, 90), 99),
    ("zero", (1,), 0),
    ("minus forty", (40,), -40),
    ("negative seventy-two", (72, 2, 70), -72),
    ("four point five", (4, 5, 45), 4.5),
    ("three point one four", (3, 1, 4, 14), 3.14),
    ("twenty-first", (20, 1, 21), None),
    ("nineteen eighty-four", (19, 84, 80, 4), None),
    ("four and a half", (4,), None),
    ("two dozen", (2, 12), None),
    ("4 million", (4,), 4000000),
    ("2.5 thousand", (2.5, 2, 5), 2500),
    ("4 hundred", (4,), 400),
    ("4k", (4,), None),
    ("4 tenths", (4, 10), None),
    ("seventy-two of them", (2, 70), 72),
    ("SEVENTY\u2010TWO", (2, 70), 72),
    ("twenty\nfour", (4, 20, 24), None),
    ("someone", (1,), None),
    ("tension", (10,), None),
    # fractions
    ("3/4", (3, 4, 34), 0.75),
    ("1/2", (1, 2, 12), 0.5),
    ("-9/2", (9, 2, -9, 4.5), -4.5),
    ("1 1/2", (1, 2, 11, 5.5), 1.5),
    ("4\u00bd", (4, 41, 2, 20.5), 4.5),
    ("\u00be", (3, 4), 0.75),
    ("3\u20444", (3, 4), 0.75),
    (r"\frac{3}{4}", (3, 4), 0.75),
    (r"\dfrac{3}{4}", (3, 4), 0.75),
    (r"\frac34", (3, 4), 0.75),
    (r"\boxed{\frac{3}{4}}", (3, 4), 0.75),
    (r"\frac{x}{4}", (4,), None),
    ("x/4", (4,), None),
    ("4/x", (4,), None),
    ("4/0", (4, 0), None),
    ("three quarters", (3, 4), None),
    ("2 thirds", (2, 3), None),
    ("4 km/h", (0,), 4),
    # powers and exponents
    ("10^3", (10, 3, 103), 1000),
    ("10**3", (10, 3), 1000),
    ("10\u00b3", (10, 3, 103), 1000),
    ("10^{3}", (10, 3), 1000),
    ("10^-2", (10, 2, -2, 100), 0.01),
    ("10\u207b\u00b2", (10, 2, 100), 0.01),
    ("2^10", (2, 10, 210), 1024),
    ("4^2", (4, 2, 42), 16),
    ("2^3^2", (2, 3, 8, 64), None),
    ("2 x 10^3", (2, 10, 3, 20, 23), 2000),
    ("2x10^3", (2, 10, 3, 20), 2000),
    ("2\u00d710\u00b3", (2, 10, 3, 20), 2000),
    (r"2 \times 10^{3}", (2, 10, 3, 20), 2000),
    (r"2.5 \cdot 10^3", (2.5, 10, 3, 25), 2500),
    ("2e3", (2, 3, 23), 2000),
    ("1.5E-2", (1.5, 2, -2), 0.015),
    ("1e999", (1, 999), None),
    ("9^9999", (9, 9999), None),
    ("x^4", (4,), None),
    ("4^x", (4,), None),
    ("(2)^2", (2, 4), None),
    ("4 m^2", (2, 16), 4),
    ("4 m\u00b2", (2, 16), 4),
    ("4 m2", (2,), 4),
    ("4\u2082", (4, 2, 42), None),
    ("2\u03c0", (2,), None),
    (r"2\pi", (2,), None),
    (r"\sqrt{16}", (16, 4), None),
    ("10 to the power of 3", (10, 3), None),
    # percent, units, currency
    ("50%", (0.5,), 50),
    (r"50\%", (0.5,), 50),
    ("$4", (-4,), 4),
    ("-$4", (4,), -4),
    ("4.0m", (40,), 4),
    ("4th", (), 4),
    ("room 4b", (), 4),
    ("b4", (4,), None),
    ("x4", (4,), None),
    ("\u5171\u67094\u628a\u6905\u5b50", (5,), 4),
    ("4\u4e07", (4,), None),
    ("0x4", (4, 0), None),
    # clock times
    ("1:30", (1, 30, 130, 90), None),
    ("01:30:05", (1, 30, 5), None),
    ("at 1:30", (1, 30), None),
    ("16:9", (16, 9), None),
    ("00:04", (4, 0), None),
    # bounds, approximations, calculations
    (r"\approx 4", (), 4),
    (r"x \approx 4", (), 4),
    (r"$x\approx4$", (), 4),
    ("\u2248 4", (), 4),
    ("~4", (), 4),
    ("about 4", (), 4),
    ("x = 4", (), 4),
    ("at least 4", (4,), None),
    ("> 4", (4,), None),
    (r"\geq 4", (4,), None),
    (r"x \ne 4", (4,), None),
    ("4 or more", (4,), None),
    ("4+", (4,), None),
    ("\u00b14", (4, -4), None),
    (r"\pm 4", (4, -4), None),
    ("4 x 4", (4, 16), None),
    ("4*4", (4, 16), None),
    ("4 - 4", (4, 0, -4), None),
    ("twice 4", (4, 8), None),
    ("--4", (4, -4), None),
    # denials
    ("not 4", (4,), None),
    ("It isn't 4.", (4,), None),
    ("4 is wrong", (4,), None),
    ("rule out 4", (4,), None),
    ("It can't be 4.", (4,), None),
    ("anything but 4", (4,), None),
    ("neither 3 nor 4", (3, 4), None),
    ("The answer is not 4.", (4,), None),
    ("I don't think the answer is 4.", (4,), None),
    (r"It can't be \boxed{4}.", (4,), None),
    ("4? No.", (4,), None),
    ("other than 4", (4,), None),
    ("The answer is 4. Or 5.", (4, 5), None),
    ("The answer is 4. No, 5.", (4, 5), None),
    ("The answer is 4. Then the answer is 5.", (4, 5), None),
    # where the answer stands
    ("There are 3 here and 1 there. The answer is 4.", (3, 1), 4),
    ("The answer is: 4", (), 4),
    ("Answer: **4**", (), 4),
    (r"3 + 1 = \boxed{4}", (3, 1), 4),
    (r"\boxed{4", (), 4),
    (r"so \boxed{72", (2, 7), 72),
    (r"\boxed{3} or \boxed{4}", (3, 4), None),
    (r"\boxed{4} = \boxed{4}", (), 4),
    ("<<4>>", (), 4),
    ("**4**", (), 4),
    ("_4_", (), 4),
    ("none", (0, 1), None),
    ("", (0,), None),
]

# (reply, letters that it earns 0 for, the letter that it earns 1 for or None); four options, three colors and a text
LETTERS = [
    *(
        (reply, "ABCD", None)
        for reply in (
            "Not C.",
            "not C",
            "NOT (C)",
            "It can't be (C)",
            "it cannot be C",
            "rule out C",
            "Rule C out.",
            "C is wrong",
            "(C) is incorrect.",
            "C is not right",
            "C isn't right",
            "neither B nor C",
            "Neither A, B nor C",
            "anything but C",
            "all but C",
            "I doubt it is C",
            "C? No.",
            "C is ruled out",
            "C must be wrong",
            "other than C",
            "except C",
            "not A, not C",
            "no longer C",
            "C can't be",
            r"not \boxed{C}",
            r"It isn't \boxed{C}",
            "The answer is not C.",
            "The answer isn't C",
            "I don't think the answer is C.",
            "Option C is wrong.",
            "exclude C",
            "eliminate C",
            "the answer is anything but C",
            "instead of C",
            "C\nC is wrong.",
            "C\nBut it can't be C.",
            "A or C",
            "A/C",
            "A, C",
            "AC",
            "A and C",
            "Between A and C",
            "A\nC",
            "C\nA",
            r"\boxed{A}\boxed{C}",
            "C or A",
            "Answer: A. Answer: C",
            "The answer is A because the answer is C.",
            "C. Or A.",
            "The answer is C. Or A.",
            "The answer is C. No, A.",
            "A B C D",
            "(A)(C)",
            "C\nThe answer is A.",
            "A. red\nB. blue\nC. green\nD. the last",
            "C\nA. red\nB. blue",
            "none",
            "all of them",
            "",
            "E",
            "C. red",
            "C, red",
            "not green",
            "anything but green",
            "green or red",
            "red, green",
            "green isn't shown",
            "No option",
            "<<A>> <<C>>",
            "C is right, but so is A",
            "The answer is A or C.",
            "the answer is A and C",
            "maybe C, maybe A",
            "\u0421",
            "C\u0336",
            r"\cancel{C}",
            "~~A~~ C",
        )
    ),
    *(
        (reply, "ABD", "C")
        for reply in (
            "C",
            "c",
            "(C)",
            "(c)",
            "[C]",
            "{C}",
            "C.",
            "C)",
            "<<C>>",
            "<<(C)>>",
            "**C**",
            "`C`",
            "$C$",
            "'C'",
            r"\boxed{C}",
            r"\boxed{C",
            r"$\boxed{C$",
            r"\boxed{\text{C}}",
            r"\boxed{(C)}",
            r"\fbox{C}",
            "Option C",
            "option (C)",
            "Answer: C",
            "The answer is C",
            "The answer is (C).",
            "The correct answer is: C",
            "final answer: C",
            "the best option is C",
            "green",
            "Green.",
            "C. green",
            "(C) green",
            "C: green",
            "C green",
            "C - green",
            "\uff23",
            "\u7b54\u6848\u662fC",
            "\u24b8",
            "C\nA shows another ball.",
            "C\nBecause A is red and B is blue.",
            "C.\n\nA is wrong since it isn't shown.",
            "(C)\nOption A is not in the video.",
            "**C**\nThe others, A and B, do not fit.",
            "C. green\nA is red instead.",
            "The answer is C\nA and B are wrong.",
            "Answer: C\nExplanation: B is seen later.",
            "C because A is wrong",
            "C, because A is red.",
            "C since B is not shown",
            "The answer is C because A is wrong.",
            "C is correct.",
            "C is the right answer",
            "The answer is <<C>>",
            "The answer is C, green",
            "C (green)",
            "### Answer\nC",
            "<Answer>: <<C>>",
            r"A is red. \boxed{C}",
            "It flashes at the end. The answer is C.",
            "\\text{C}",
            r"\mathbf{C}",
            "The answer is green.",
            "<Thought process>: <<A man>> <Answer>: <<C>>",
            r"\boxed{C} \boxed{C}",
            "Answer: C. Answer: C.",
        )
    ),
]

# (reply, spans that a misreading would hit, the span that it is or None); it earns its IoU with each of them
SPANS = [
    ("1 200 to 300", ((200, 300),), None),
    ("1 200 - 1 300", ((1, 200), (200, 300)), None),
    ("100 to 1 300", ((1, 100), (1, 300)), None),
    ("1,200 to 1,300", ((1, 300), (1, 200), (200, 300)), (1200, 1300)),
    ("1,200\u20131,300", ((1, 300), (1, 200)), (1200, 1300)),
    ("from 1,200.5 s to 1,300 s", ((1, 300), (200.5, 300)), (1200.5, 1300)),
    ("12,5 to 20,5", ((5, 20), (12, 20)), (12.5, 20.5)),
    ("12,5-20,5", ((5, 20),), (12.5, 20.5)),
    ("3,5", ((3, 5),), None),
    ("[3,5]", ((0, 3),), (3, 5)),
    ("(3.0,5.0)", ((0, 5),), (3, 5)),
    ("3, 5", (), (3, 5)),
    ("It is not shown between 20 and 24", ((20, 24),), None),
    ("It isn't shown from 20 to 24.", ((20, 24),), None),
    ("not 20 to 24", ((20, 24),), None),
    ("never between 20 and 24", ((20, 24),), None),
    ("20 to 24 is wrong", ((20, 24),), None),
    ("20 to 24? No.", ((20, 24),), None),
    ("It can't be 20-24.", ((20, 24),), None),
    ("rule out 20-24", ((20, 24),), None),
    ("anything but 20-24", ((20, 24),), None),
    ("no flash between 20 and 24", ((20, 24),), None),
    ("neither 10-12 nor 20-24", ((10, 12), (20, 24)), None),
    ("It does not happen, as far as I see, from 20 to 24.", ((20, 24),), None),
    (r"not \boxed{20-24}", ((20, 24),), None),
    ("The answer is not 20-24", ((20, 24),), None),
    ("not at 5 to 9 but from 20 to 24", ((5, 9),), (20, 24)),
    ("It isn't dark. It is shown from 20 to 24.", (), (20, 24)),
    ("01:30 to 01:45", ((1, 45), (30, 45), (1, 30)), (90, 105)),
    ("1:30-1:45", ((30, 45), (1, 45)), (90, 105)),
    ("01:30:05 - 01:30:15", ((5, 15), (1, 15), (1, 30)), (5405, 5415)),
    ("00:01:30,500 --> 00:01:45,000", ((30, 45), (0, 105)), (90.5, 105)),
    ("01:30", ((1, 30),), None),
    ("at 1:30", ((1, 30),), None),
    ("16:9", ((9, 16),), None),
    ("4:75 to 8:00", ((4, 8), (5, 8)), None),
    ("twenty to twenty-four", ((4, 20), (20, 20.1)), (20, 24)),
    ("from twenty to twenty-four seconds", ((4, 20),), (20, 24)),
    ("seventy-two to ninety", ((2, 90), (70, 90)), (72, 90)),
    ("10^1 to 10^2", ((1, 10), (2, 10)), (10, 100)),
    ("3/4 to 5", ((4, 5), (3, 5)), (0.75, 5)),
    ("2e1 to 3e1", ((1, 3), (2, 3)), (20, 30)),
    ("20-24-28", ((20, 24), (24, 28), (20, 28)), None),
    ("20 to 24 to 30", ((20, 24), (24, 30), (20, 30)), None),
    ("24 to 20", ((20, 24),), None),
    ("20 to 20", ((20, 24),), None),
    ("-20 to 24", ((20, 24), (0, 24)), None),
    ("20 to -24", ((20, 24),), None),
    ("frames 20 to 24", ((20, 24),), None),
    ("20 to 24 minutes", ((20, 24),), None),
    ("20% to 24%", ((20, 24),), None),
    ("2019-12-03", ((3, 12), (12, 2019)), None),
    ("5-9, 20-24", ((20, 24),), (5, 9)),
    ("20-24", (), (20, 24)),
    ("20 - 24", (), (20, 24)),
    ("20 -24", (), (20, 24)),
    ("20s - 24s", (), (20, 24)),
    ("between 20 and 24", (), (20, 24)),
    ("<20.0 seconds> to <24.0 seconds>", (), (20, 24)),
    ('{"start": 20, "end": 24}', (), (20, 24)),
    ("start: 20\nend: 24", (), (20, 24)),
    (r"\boxed{20-24}", (), (20, 24)),
    (r"\boxed{20-24", (), (20, 24)),
    ("<<20-24>>", (), (20, 24)),
    ("It was dark from 1 to 2. The answer is 20 to 24.", ((1, 2),), (20, 24)),
    (r"$20 \to 24$", ((0, 20),), None),
    ("20 and", ((0, 20),), None),
    ("[1,020, 1,024]", ((1, 20), (20, 24), (1, 24)), None),
    ("5, 9, 20, 24", ((5, 9), (9, 20), (20, 24)), None),
    ("1'20\" - 1'24\"", ((1, 20), (1, 24), (20, 24)), None),
    ("outside 20 to 24", ((20, 24),), None),
    ("It is absent from 20 to 24.", ((20, 24),), None),
    ("It fails to appear from 20 to 24.", ((20, 24),), None),
    ("1,020.5\u20131,024.5", ((20.5, 24.5), (1, 20.5)), (1020.5, 1024.5)),
    ("80 to 84 (1:20 to 1:24)", ((20, 24),), (80, 84)),
    ("", ((0, 1),), None),
]

# (reply, ground truths that it must not be correct for, the ground truth that it earns 1 for or None)
OPEN = [
    ("red blue green", ("red", "blue", "green"), None),
    ("red, blue, green", ("red", "blue", "green"), None),
    ("red and blue and green", ("red", "blue", "green"), None),
    ("red\nblue\ngreen", ("red", "blue", "green"), None),
    ("red blue", ("red", "blue"), None),
    ("red or blue", ("red", "blue"), None),
    ("red; blue; green", ("red", "blue", "green"), None),
    ("red red red blue", ("red", "blue"), None),
    ("a red ball, a blue ball, a green ball", ("red ball", "blue ball"), None),
    ("December", ("Dec", "Decembe", "member"), "december"),
    ("Decimal", ("Dec", "decima"), None),
    ("reddish", ("red",), "reddish"),
    ("carpet", ("car", "pet"), "carpet"),
    ("not red", ("red",), "not red"),
    ("It isn't red.", ("red",), None),
    ("anything but red", ("red",), None),
    ("never red", ("red",), None),
    ("neither red nor blue", ("red", "blue"), None),
    ("red is wrong", ("red",), None),
    ("The answer is not red", ("red",), None),
    (r"not \boxed{red}", ("red",), None),
    ("no red", ("red",), None),
    ("without a hat", ("a hat", "hat"), "without a hat"),
    ("2,5", ("2", "5", "25"), None),
    ("1,200", ("1", "200"), "1200"),
    ("-5", ("5",), "-5"),
    ("3/4", ("3", "4"), "3/4"),
    ("yes and no", ("yes", "no"), None),
    ("The answer is red.", ("blue",), "red"),
    ("Answer: red", ("answer",), "red"),
    (r"\boxed{red}", ("boxed",), "red"),
    (r"\boxed{red", ("boxed",), "red"),
    (r"\boxed{red} \boxed{blue}", ("red", "blue"), None),
    ("The RED ball!", ("ball",), "red ball"),
    ("No.", ("yes",), "no"),
    ("", ("red",), None),
    ("the", ("the red",), None),
]

# (kind, reply, boxes that it earns 0 for, a box that it earns 1 for or None); all are fractions of the image
AREAS = [
    ("point", "(0.4, 0.4), (0.6, 0.6)", [(0.45, 0.45, 0.55, 0.55), (0.0, 0.0, 1.0, 1.0)], None),
    ("point", "(0.4, 0.4) (0.6, 0.6)", [(0.45, 0.45, 0.55, 0.55)], None),
    ("point", "[[0.4, 0.4], [0.6, 0.6]]", [(0.45, 0.45, 0.55, 0.55)], None),
    ("point", "(0.4, 0.4) and (0.6, 0.6)", [(0.45, 0.45, 0.55, 0.55)], None),
    ("point", "not (0.5, 0.5)", [(0.4, 0.4, 0.6, 0.6)], None),
    ("point", "It can't be at (0.5, 0.5)", [(0.4, 0.4, 0.6, 0.6)], None),
    ("point", "(0.5, 0.5)", [(0.6, 0.6, 0.7, 0.7)], (0.4, 0.4, 0.6, 0.6)),
    ("point", "[0.4, 0.4, 0.6, 0.6]", [(0.6, 0.6, 0.7, 0.7)], (0.45, 0.45, 0.55, 0.55)),
    ("box", "The points are (0.4, 0.4), (0.6, 0.6)", [(0.4, 0.4, 0.6, 0.6)], None),
    ("box", "(0.4, 0.4) and (0.6, 0.6)", [(0.4, 0.4, 0.6, 0.6)], None),
    ("box", "one at (0.4, 0.4), (0.6, 0.6) the other", [(0.4, 0.4, 0.6, 0.6)], None),
    ("box", "not [0.4, 0.4, 0.6, 0.6]", [(0.4, 0.4, 0.6, 0.6)], None),
    ("box", "It is not at [0.4, 0.4, 0.6, 0.6]", [(0.4, 0.4, 0.6, 0.6)], None),
    ("box", "[0,4, 0,4, 0,6, 0,6]", [(0.4, 0.4, 0.6, 0.6)], None),
    ("box", "[0.4, 0.4, 0.6, 0.6] or [0, 0, 1, 1]", [(0.4, 0.4, 0.6, 0.6), (0.0, 0.0, 1.0, 1.0)], None),
    ("box", "(0.4, 0.4), (0.6, 0.6)", [(0.4, 0.4, 0.6, 0.6), (0.7, 0.7, 0.8, 0.8)], None),
    ("box", "box: (0.4, 0.4), (0.6, 0.6)", [(0.7, 0.7, 0.8, 0.8)], (0.4, 0.4, 0.6, 0.6)),
    ("box", "[0.4, 0.4, 0.6, 0.6]", [(0.7, 0.7, 0.8, 0.8)], (0.4, 0.4, 0.6, 0.6)),
]


def compute_iou(first, second):
    return max(0, min(first[1], second[1]) - max(first[0], second[0])) / (
        max(first[1], second[1]) - min(first[0], second[0])
    )


def build_rows():
    """Return a row per reply and ground truth: the reply, the ground truth, its type, the options and the value."""
    rows = []
    for kind, table in (("number", NUMBERS), ("open", OPEN)):
        for reply, wrong, right in table:
            rows += [(reply, truth, kind, (), 0.0) for truth in wrong]
            rows += [(reply, right, kind, (), 1.0)] if right is not None else []
    for reply, wrong, right in SPANS:
        rows += [(reply, truth, "grounding", (), compute_iou(right, truth) if right else 0.0) for truth in wrong]
        rows += [(reply, right, "grounding", (), 1.0)] if right else []
    for reply, wrong, right in LETTERS:
        options = (*COLORS[:3], "the last")
        rows += [(reply, letter, "choice", options, 0.0) for letter in wrong]
        rows += [(reply, right, "choice", options, 1.0)] if right else []
    for kind, reply, wrong, right in AREAS:
        rows += [(reply, truth, kind, (), 0.0) for truth in wrong] + ([(reply, right, kind, (), 1.0)] if right else [])
    return rows


ROWS = build_rows()
EXACT = Accuracy(answer_types={"number": {"mode": "exact"}})


def grade(reply, truth, kind, options):
    if kind == "number":
        truth = float(truth)
    elif kind in ("grounding", "box", "point"):
        truth = tuple(map(float, truth))
    return EXACT(answer_episode(reply, ground_truth=truth, kind=AnswerType(kind), choices=options)).value


def find_failures():
    """Return the rows whose value is another one; an open answer that is wrong must only not be correct."""
    failures = []
    for reply, truth, kind, options, expected in ROWS:
        value = grade(reply, truth, kind, options)
        is_right = value < 0.5 if kind == "open" and not expected else abs(value - expected) < 1e-9
        if not is_right:
            failures.append((reply, truth, kind, value))
    return failures


def test_the_adversarial_list():
    assert len(NUMBERS) + len(LETTERS) + len(SPANS) + len(OPEN) + len(AREAS) >= 300
    assert find_failures() == []


# ---- properties ----------------------------------------------------------------------------------------------------

PIECES = st.sampled_from(
    [
        r"0",
        r"1",
        r"2",
        r"3",
        r"4",
        r"5",
        r"6",
        r"7",
        r"8",
        r"9",
        r"12",
        r"305",
        r"1,200",
        r"2,5",
        r".",
        r",",
        r":",
        r"/",
        r"^",
        r"-",
        r"x",
        r"×10^",
        r"e",
        r"%",
        r"(",
        r"]",
        r"to",
        r"and",
        r"m",
        r"cm",
        r"four",
        r"seventy-two",
        r"hundred",
        r"not",
        r"½",
        r"²",
        r"₂",
        r"{",
        r"}",
        r"_",
        " ",
        "\n",
        "$",
        r"\frac{1}{2}",
    ]
)


@settings(deadline=None, max_examples=300)
@given(st.lists(PIECES, max_size=14).map("".join))
def test_every_digit_belongs_to_one_number_or_word(text):
    plain = normalize_answer(text)
    numbers = scan_numbers(plain)
    ends = [0, *(number.end for number in numbers)]
    assert all(end <= number.start < number.end for end, number in zip(ends, numbers, strict=False))
    # What remains are digits of words (x4, v4.2) and exponents of units (m^2).
    rest = re.sub(r"[^\W\d_]\w*(?:(?<=\d)[.,:'_]\d+)*(?:\^-?\.?\d[\d.,e+-]*)*", "", mask_numbers(plain, numbers))
    assert not re.search(r"\d", rest)
    value = read_number(text)
    assert value is None or [number.value for number in numbers if number.value == value] == [n.value for n in numbers]


@settings(deadline=None)
@given(st.floats(0, 1e6).map(lambda value: round(value, 3)), st.text("abc ,;!?()[]:=\n", max_size=8), st.booleans())
def test_text_around_a_number_never_changes_it(value, around, is_before):
    text = f"{around} {value}" if is_before else f"{value} {around}"
    assert read_number(text) in (value, None)
    assert read_number(text, in_prose=True) in (value, None)


@settings(deadline=None)
@given(
    st.integers(0, 10**9),
    st.integers(0, 10**9),
    st.sampled_from(["{} to {}", "{}-{}", "{} or {}", "{}, {}", "{} and {}"]),
)
def test_two_numbers_are_none(first, second, form):
    for written in (form.format(first, second), form.format(f"{first:,}", f"{second:,}")):
        assert read_number(written) in ((None,) if first != second else (None, first))


def write_words(number):
    """Write a number below 10 ** 12 in English."""
    small = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
    small = (small + " seventeen eighteen nineteen").split()
    tens = ["-", "-", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
    if number < 20:
        return small[number]
    if number < 100:
        return tens[number // 10] + (f"-{small[number % 10]}" if number % 10 else "")
    for size, name in ((10**9, "billion"), (10**6, "million"), (10**3, "thousand"), (100, "hundred")):
        if number >= size:
            head = f"{write_words(number // size)} {name}"
            joint = " and " if number % size < 100 else " "
            return head + (joint + write_words(number % size) if number % size else "")
    raise AssertionError


@settings(deadline=None)
@given(st.integers(0, 10**12 - 1) | st.integers(0, 2000), st.sampled_from(["{}", "minus {}", "There are {} of them."]))
def test_number_words_of_any_size(number, form):
    value = -number if form.startswith("minus") else number
    words = write_words(number)
    for written in (words, words.replace("-", " "), words.upper(), words.replace(" and", "")):
        assert read_number(form.format(written)) == value


@settings(deadline=None)
@given(
    st.integers(0, 99_999), st.integers(1, 99_999), st.sampled_from(["{} to {}", "{}\u2013{}", "from {} s until {} s"])
)
def test_spans_with_thousands_and_decimal_commas(start, length, form):
    end = start + length
    assert read_span(form.format(f"{start:,}", f"{end:,}")) == (start, end)
    assert read_span(form.format(f"{start},5", f"{end},5")) == (start + 0.5, end + 0.5)
    assert read_span("It is not shown " + form.format(start, end)) is None


DENIALS = (
    "not {}",
    "It can't be {}",
    "rule out {}",
    "{} is wrong",
    "{} isn't right",
    "neither {} nor E",
    "anything but {}",
)


@pytest.mark.parametrize("in_prose", [False, True])
@pytest.mark.parametrize("denial", DENIALS)
def test_a_denied_letter_is_none_in_every_form(denial, in_prose):
    for letter in "ABCD":
        for form in ("{}", "({})", "[{}]", "**{}**", "<<{}>>", "option {}", r"\boxed{{{}}}"):
            for frame in ("{}", "{}.", "I think {}", "{}, as the video shows", "The flash is early, so {}."):
                text = frame.format(denial.format(form.format(letter)))
                assert read_letter(text, "ABCD", in_prose=in_prose) is None, text


@settings(deadline=None)
@given(st.text("ABCDabcd .,()\n<>*", max_size=20) | st.text(max_size=30), st.booleans())
def test_a_reading_is_one_of_the_letters(text, in_prose):
    assert read_letter(text, "ABCD", COLORS, in_prose=in_prose) in (*"ABCD", None)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("10 to the power of 3", None), ("1h 30m", None), ("1 hour 30 minutes", None), ("2 m 50 cm", None)),
        *(("6 ft 2 in", None), ("1 000", None), ("3 out of 4", None), ("3 of the 4", None), ("7 = 3 + 4", None)),
        *(("7, maybe 8", None), ("one two", None), ("from 70 to 72", None), ("3, 4", None), ("3 + 4 = 7", 7)),
        *(("not 8 but 7", 7), ("3 here and 1 there, so 4", 4), ("Step 1: 7", 7), ("12 + 4 = 16.", 16)),
        *(("First 3, then 4. In total there are seven.", 7), ("7 is wrong", None), ("seventy-two", 72)),
        *(
            ("1 out of every 5", None),
            ("3\u52305\u4e2a", None),
            ("18\u70b930\u5206", None),
            (r"\boxed{3} or \boxed{4}", None),
        ),
    ],
)
def test_the_last_number_in_prose(text, value):
    assert read_number(text, in_prose=True) == value


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        *(
            ("A to C", None),
            ("Is it C?", None),
            ("C = wrong", None),
            ("\u00acC", None),
            ("C \u274c", None),
            ("!C", None),
        ),
        *(
            ("it is hardly C", None),
            ("C\u4e0d\u5bf9", None),
            ("the least likely answer is C", None),
            ("C but maybe A", None),
        ),
        *(("Neither A nor B; C.", "C"), ("A is wrong, so C", "C"), ("C rather than B", "C"), ("not A but C", "C")),
        *(("It isn't A or B, so it is C", "C"), ("I would go with C", "C"), ("A man walks in, so C", "C")),
    ],
)
def test_letters_in_prose(text, letter):
    assert read_letter(text, "ABCD", COLORS, in_prose=True) == letter


def test_naming_several_candidates_earns_less_than_naming_one():
    colors = ("red", "blue", "green", "yellow", "white", "black")

    def earn(reply):
        values = [grade(reply, color, "open", ()) for color in colors]
        return sum(values), sum(value >= 0.5 for value in values)

    for separator in (" ", ", ", " and ", "\n", "; ", " or ", "/"):
        for count in range(2, 7):
            value, num_correct = earn(separator.join(colors[:count]))
            assert value < earn("red")[0] == 1.0
            assert num_correct == 0


@pytest.mark.slow
def test_long_replies_are_read_in_linear_time():
    """A quadratic pattern would take minutes."""
    pieces = ("4 ", "1,", "the answer is ", "(", "one hundred ", "not ", "A or ", "1/", "2^", "20 to ", r"\boxed{", "-")
    for text in (piece * 1500 for piece in pieces):
        read_number(text), read_number(text, in_prose=True), read_span(text), read_letter(text, "ABCD", in_prose=True)
