"""Token usage of a request."""

from __future__ import annotations

from typing import Any

from torch_armllm.engine.outputs import RequestOutput


class Usage:
    """Counts the prompt tokens and the output tokens of a request.

    Attributes:
        reasoning: output tokens of reasoning; None if it is not parted from the output.
    """

    def __init__(self) -> None:
        self._prompts: dict[str, tuple[int, int]] = {}
        self._choices: dict[tuple[str, int], int] = {}
        self.reasoning: int | None = None

    def add(self, output: RequestOutput) -> None:
        """Counts an output: a delta, or the whole output once."""
        self._prompts[output.request_id] = len(output.prompt_token_ids), output.num_cached_tokens
        for completion in output.outputs:
            choice = output.request_id, completion.index
            self._choices[choice] = self._choices.get(choice, 0) + len(completion.token_ids)

    def of_choice(self, request_id: str, index: int) -> dict[str, int]:
        """Returns the usage of one output so far.

        Args:
            request_id: of the prompt.
            index: of the output among those of the prompt.
        """
        prompt, _ = self._prompts.get(request_id, (0, 0))
        completion = self._choices.get((request_id, index), 0)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def to_dict(self) -> dict[str, Any]:
        """Returns the usage in OpenAI's format."""
        prompt = sum(count for count, _ in self._prompts.values())
        cached = sum(count for _, count in self._prompts.values())
        completion = sum(self._choices.values())
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if self.reasoning is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning}
        return usage


def without_output(usage: dict[str, Any]) -> dict[str, Any]:
    """Returns a usage as if nothing was generated."""
    return {**usage, "completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
