"""A prompt of as many tokens as the model takes, which is returned without a continuation."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from torch_armllm.engine.outputs import RequestOutput
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.server.served_model import ServedModel


async def echo_longest(
    served: ServedModel, prompt: dict[str, Any], params: SamplingParams, request_id: str, priority: int
) -> AsyncGenerator[RequestOutput, None]:
    """Yields the outputs of a prompt that leaves no room for a token behind it.

    The engine computes the logits behind every prompt, and the model has no position for those of the last
    token.  So the last token is generated, as the only one that is allowed: its log-probabilities are those
    that it has as a part of the prompt, as they do not depend on what is allowed.

    Args:
        served: the model.
        prompt: with `ServedModel.max_model_len` tokens.
        params: of the request.
        request_id: names the request in the engine.
        priority: lower values run first.
    """
    *tokens, last = prompt["prompt_token_ids"]
    own = SamplingParams(
        n=params.n,
        temperature=params.temperature,
        max_tokens=1,
        ignore_eos=True,
        allowed_token_ids=[last],
        logprobs=params.prompt_logprobs,
        prompt_logprobs=params.prompt_logprobs,
        output_kind=params.output_kind,
    )
    generated = served.generate({**prompt, "prompt_token_ids": tokens}, own, request_id, priority)
    async with aclosing(generated) as outputs:
        async for output in outputs:
            logprobs = output.prompt_logprobs
            if logprobs is not None:
                logprobs = [*logprobs, *(output.outputs[0].logprobs or [])[:1]]
            yield replace(output, prompt_token_ids=[*tokens, last], prompt_logprobs=logprobs)
