"""What PyVision-RL's two kinds of rows share: how their origin says that they are judged."""

from saccade.data.raw import Row


def declared(row: Row) -> str | None:
    """The kind of question that `data_source` and `ability` stand for; None where the answer has to tell."""
    source, ability = (str(row.values.get(name) or "").lower() for name in ("data_source", "ability"))
    if source == "vsi_numerical" or source.endswith("_rule_verifiable"):
        return "number"
    return "math" if "math" in ability else None
