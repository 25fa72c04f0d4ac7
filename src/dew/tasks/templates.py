"""How a problem is put to the model.

chat         a user message, for the model's own chat template
qwen-boxed   Qwen2.5-Math's own prompt, written out: for base models, whose chat template may be missing
r1           DeepSeek-R1-Zero's prompt: thinking and answer in tags
plain        the problem as it is
"""

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from dew.errors import ConfigError

STEP_BY_STEP = r"Please reason step by step, and put your final answer within \boxed{}."

_QWEN = "<|im_start|>system\n{instruction}<|im_end|>\n<|im_start|>user\n{problem}<|im_end|>\n<|im_start|>assistant\n"
# The prompt of DeepSeek-R1-Zero, word for word (arXiv 2501.12948, Table 1): models are trained on these words.
_R1 = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant "
    "first thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning "
    "process and answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e., "
    "<think> reasoning process here </think> <answer> answer here </answer>. User: {problem} Assistant:"
)


def _chat(problem: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{problem}\n{STEP_BY_STEP}"}]


def _qwen_boxed(problem: str) -> str:
    return _QWEN.replace("{instruction}", STEP_BY_STEP).replace("{problem}", problem)


def _r1(problem: str) -> str:
    return _R1.replace("{problem}", problem)


TEMPLATES: dict[str, Callable[[str], Any]] = {"chat": _chat, "qwen-boxed": _qwen_boxed, "r1": _r1, "plain": str}


def render(template: str, problem: str) -> Any:
    """The prompt: text, or a list of chat messages. A template with `{problem}` in it is one's own."""
    if "{problem}" in template:
        return template.replace("{problem}", problem)
    if template not in TEMPLATES:
        near = get_close_matches(template, TEMPLATES, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(TEMPLATES)}."
        raise ConfigError(
            f"No template is called {template!r}. {hint} Or write one of your own, with {{problem}} in it."
        )
    return TEMPLATES[template](problem)
