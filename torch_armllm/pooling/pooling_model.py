"""Models that pool: batches of token ids become vectors, probabilities or scores."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_armllm.hf.model_kind import ModelKind
from torch_armllm.pooling.activation import activation_of
from torch_armllm.pooling.pooling_params import PoolingParams, PoolingTask
from torch_armllm.pooling.sentence_files import SentenceFiles, pool


@dataclass(frozen=True)
class PoolingInput:
    """A tokenized text, or a pair of texts.

    Attributes:
        token_ids: its tokens.
        task: what to compute of it.
        params: parameters of the request.
        token_types: 0 or 1 for each token, for models that tell the texts of a pair apart so; None: all 0.
        skip: leading tokens that are not pooled.
    """

    token_ids: list[int]
    task: PoolingTask
    params: PoolingParams = PoolingParams()
    token_types: list[int] | None = None
    skip: int = 0


class PoolingModel(ABC):
    """A model with its pooler.

    Args:
        kind: of a transformers model, patched or not.
        width: dimensions of the vectors, or number of classes.
        tasks: what the model computes; the first is the default.

    Attributes:
        tasks: see above.
        kind: see above.
        width: see above.
        pads: False if the model's texts cannot be padded, and so run one at a time.
    """

    pads = True

    def __init__(self, kind: ModelKind, width: int, tasks: tuple[PoolingTask, ...]) -> None:
        self.kind = kind
        self.width = width
        self.tasks = tasks
        names = inspect.signature(kind.model.forward).parameters
        self._options = {"use_cache": False} if "use_cache" in names else {}
        self._has_types = "token_type_ids" in names
        pad = kind.pad_token
        self._pad = 0 if pad is None or pad < 0 else int(pad)

    @torch.no_grad()
    def compute(self, inputs: Sequence[PoolingInput]) -> list[Tensor]:
        """Computes a batch.

        Returns:
            What each input's task asks for, float32.
        """
        lengths = [len(each.token_ids) for each in inputs]
        longest = max(lengths)
        ids = torch.full((len(inputs), longest), self._pad)
        mask = torch.zeros_like(ids)
        for row, each in enumerate(inputs):
            ids[row, : lengths[row]] = torch.tensor(each.token_ids)
            mask[row, : lengths[row]] = 1
        options: dict[str, Any] = dict(self._options)
        if self._has_types and any(each.token_types is not None for each in inputs):
            options["token_type_ids"] = types = torch.zeros_like(ids)
            for row, each in enumerate(inputs):
                if each.token_types is not None:
                    types[row, : lengths[row]] = torch.tensor(each.token_types)
        if min(lengths) < longest:
            options["attention_mask"] = mask
        raw = self._raw(self.kind.model(input_ids=ids, **options))
        return [
            self._finish(raw[row, :length] if raw.dim() == 3 else raw[row], each)
            for row, (each, length) in enumerate(zip(inputs, lengths, strict=True))
        ]

    @abstractmethod
    def _raw(self, output: Any) -> Tensor:
        """Returns hidden states or logits ``(batch, tokens, width)``, or logits ``(batch, width)``."""

    @abstractmethod
    def _finish(self, raw: Tensor, one: PoolingInput) -> Tensor:
        """Returns the result of an input."""

    def check(self, task: PoolingTask, params: PoolingParams) -> None:
        """Checks the parameters of a request.

        Raises:
            ValueError: the model does not compute the task, or a parameter does not fit the model.
        """
        if task not in self.tasks:
            raise ValueError(
                f"{self.kind.name} does not compute {task!r}; it computes {', '.join(self.tasks)}"
            )
        if params.dimensions is not None and task not in ("embed", "token_embed"):
            raise ValueError(
                f"dimensions is {params.dimensions}, but {task!r} makes no vectors: leave it out"
            )


class Embedder(PoolingModel):
    """Makes a vector of a text: pools hidden states, projects, cuts and scales them.

    Args:
        kind: of a model without a head.
        files: the files of sentence-transformers.
        mode: pooling mode where the files name none.
    """

    def __init__(self, kind: ModelKind, files: SentenceFiles, mode: str) -> None:
        assert kind.hidden_size is not None, "vectors have a width"
        hidden = kind.hidden_size
        self._files = files
        self._modes = files.modes or (mode,)
        width = hidden * len(self._modes)
        for projection in files.projections:
            if projection.weight.shape[1] != width:
                raise ValueError(
                    f"a Dense of this model takes {projection.weight.shape[1]} dimensions and gets {width}"
                )
            width = projection.weight.shape[0]
        super().__init__(kind, width, ("embed", "token_embed"))
        self._hidden = hidden
        self._trained = getattr(kind.model.config, "matryoshka_dimensions", None)

    def check(self, task: PoolingTask, params: PoolingParams) -> None:
        """See `PoolingModel.check`."""
        super().check(task, params)
        size, most = params.dimensions, self.width if task == "embed" else self._hidden
        if size is not None and size > most:
            raise ValueError(
                f"dimensions is {size}, and the model's vectors have {most}: give at most {most}"
            )
        if size is not None and self._trained and size not in (*self._trained, most):
            known = ", ".join(map(str, self._trained))
            raise ValueError(f"dimensions is {size}, and the model was trained for {known}: give one of them")

    def _raw(self, output: Any) -> Tensor:
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _finish(self, raw: Tensor, one: PoolingInput) -> Tensor:
        files, params = self._files, one.params
        vectors = raw.float()
        if one.task == "embed":
            skip = 0 if files.include_prompt else one.skip
            vectors = torch.cat([pool(vectors, mode, skip) for mode in self._modes])
            for projection in files.projections:
                vectors = projection(vectors)
        size = params.dimensions if params.dimensions is not None else files.dimensions
        if size is not None:
            vectors = vectors[..., :size]
        scales = params.scales if params.scales is not None else files.normalize
        return vectors.clone() if scales is False else nn.functional.normalize(vectors, dim=-1)


class Classifier(PoolingModel):
    """Computes probabilities of a text's classes; with one class, scores of pairs of texts.

    Args:
        kind: of a model with a head for sequences.
        tasks: what the model computes; None: ``classify``, and with one label ``score``.
    """

    def __init__(self, kind: ModelKind, tasks: tuple[PoolingTask, ...] | None = None) -> None:
        width = int(kind.model.config.num_labels)
        super().__init__(kind, width, tasks or (("classify", "score") if width == 1 else ("classify",)))
        self._activation = activation_of(kind.model.config)
        # such a model finds the last token by its padding
        self.pads = kind.pad_token is not None

    def _raw(self, output: Any) -> Tensor:
        logits: Tensor = output.logits
        return logits

    def _finish(self, raw: Tensor, one: PoolingInput) -> Tensor:
        logits = raw.float()
        return self._activation(logits) if one.params.activates else logits.clone()


class TokenClassifier(Classifier):
    """Computes probabilities of each token's classes."""

    def __init__(self, kind: ModelKind) -> None:
        super().__init__(kind, ("token_classify",))
        self.pads = True


class TokenScorer(PoolingModel):
    """Scores by the logits that a language model gives tokens such as "no" and "yes" after a text.

    Args:
        kind: of a model without a head.
        rows: float32 ``(2, hidden)``, rows of the head of the tokens for false and true.
    """

    def __init__(self, kind: ModelKind, rows: Tensor) -> None:
        super().__init__(kind, 1, ("score", "classify"))
        self._weight = (rows[1] - rows[0]).float()

    def _raw(self, output: Any) -> Tensor:
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _finish(self, raw: Tensor, one: PoolingInput) -> Tensor:
        logit = (raw[-1].float() @ self._weight)[None]
        return logit.sigmoid() if one.params.activates else logit
