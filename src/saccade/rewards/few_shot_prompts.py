"""Load a judge's few-shot prompts: one YAML file per domain, chosen by the data source of a task.

    judge_prompts/math.yaml    sources: ["*math*", …]    instructions: …    examples: [{question, ground_truth, …}, …]

`general.yaml` serves every source that no other file names. A folder of your own has files of the same form.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from saccade.config.load import read_yaml
from saccade.config.schema import Section, parse_section
from saccade.errors import ConfigError

PACKAGED_FOLDER = Path(__file__).parent / "judge_prompts"
GENERAL = "general"  # the name of the file for all other sources


class JudgedExample(Section):
    """An answer with its verdict."""

    question: str
    ground_truth: str
    answer: str
    is_right: bool


class FewShotPrompt(Section):
    """A domain: patterns of its sources, such as `*math*`, what is right in it, and examples."""

    sources: tuple[str, ...]
    instructions: str = ""
    examples: tuple[JudgedExample, ...]


@dataclass(frozen=True, slots=True)
class FewShotPrompts:
    """The prompts of a folder, by domain."""

    prompts: dict[str, FewShotPrompt]

    @classmethod
    def load(cls, folder: Path) -> "FewShotPrompts":
        """Load every file of a folder. Raises ConfigError for a bad one, or without `general.yaml`."""
        paths = sorted(folder.glob("*.yaml"))
        prompts = {
            path.stem: parse_section(FewShotPrompt, read_yaml(path, "judge prompt"), f"the judge prompt {path}")
            for path in paths
        }
        if GENERAL not in prompts:
            message = f"{folder} holds no {GENERAL}.yaml, the prompt of sources that no other file names; add it"
            raise ConfigError(message, key="rewards.judge.settings.prompts", value=str(folder))
        return cls(prompts=prompts)

    def select_domain(self, source: str) -> str:
        """Return the domain of a data source: the first file in alphabetical order with a pattern that matches it.

        Case makes no difference, and - equals _.

        >>> prompts = FewShotPrompts.load(PACKAGED_FOLDER)
        >>> prompts.select_domain("math_8k_verified"), prompts.select_domain("zebra_cot"), prompts.select_domain("")
        ('math', 'puzzle', 'general')
        """
        name = _normalize_name(source)
        for domain, prompt in self.prompts.items():
            if any(fnmatchcase(name, _normalize_name(pattern)) for pattern in prompt.sources):
                return domain
        return GENERAL

    def format_prompt(self, source: str, prompt: str, right_label: str, wrong_label: str) -> str:
        """Return `prompt` with the instructions and the examples of a source's domain."""
        chosen = self.prompts[self.select_domain(source)]
        examples = [
            f"Question: {example.question}\nReference answer: {example.ground_truth}\n"
            f"Candidate's answer: {example.answer}\nVerdict: {right_label if example.is_right else wrong_label}"
            for example in chosen.examples
        ]
        introduction = "Examples of verdicts on other questions:"
        return "\n\n".join(filter(None, (prompt, chosen.instructions, introduction, *examples)))


def _normalize_name(name: str) -> str:
    return name.casefold().replace("-", "_")
