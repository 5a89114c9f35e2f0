"""Score pointing: whether a point lies in the ground-truth box."""

from saccade.rewards.answer_types.box import BoxAnswer, Sides


class PointAnswer(BoxAnswer):
    """Pointing: 1.0 if the point lies in the ground-truth box, else 0.0; the rest is as for a box.

    Accepted points: `(x, y)`, `[x, y]`, JSON (`{"point_2d": [...]}`), `<point x="1" y="2">`; of a box its center
    counts.
    """

    names = ("point",)
    example = ((0.25, 0.25, 0.75, 0.5), "(0.5, 0.3)")
    accepted_lengths = (2, 4)

    def compare(self, predicted: Sides, expected: Sides) -> float:
        """Return whether the point, or the center of the box, lies in the expected box."""
        x, y = (predicted[0] + predicted[-2]) / 2, (predicted[1] + predicted[-1]) / 2
        return float(expected[0] <= x <= expected[2] and expected[1] <= y <= expected[3])


point = PointAnswer
