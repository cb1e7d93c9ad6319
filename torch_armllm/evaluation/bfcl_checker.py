"""BFCL's own checker of calls, without what its package installs for the models of many vendors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType, SimpleNamespace
from typing import Any

from torch_armllm.evaluation.bfcl_rows import BfclRow
from torch_armllm.system.extras import is_installed

_REMEDY = (
    "bfcl_* tasks need BFCL's checker: pip install --no-deps bfcl-eval (without its dependencies, which pin "
    "other releases of numpy and filelock and are not needed here)"
)
_MODELS = "bfcl_eval.constants.model_config"
_NAME = "armllm"


def require_checker() -> None:
    """Checks that BFCL's checker is installed.

    Raises:
        ImportError: it is not.
    """
    if not is_installed("bfcl_eval"):
        raise ImportError(_REMEDY)


def is_right(category: str, row: BfclRow, calls: Sequence[dict[str, Any]]) -> bool:
    """True if calls are the right ones.

    Args:
        category: of the row; where no call is right, the checker is not needed.
        row: the question.
        calls: name and arguments of each call, as ``{name: {argument: value}}``.

    Raises:
        ImportError: the checker is needed and is not installed.
    """
    if category == "irrelevance":
        return not calls
    check, language = _checker()
    try:
        found = check(row.functions, list(calls), row.answers, language, category, _NAME)
    except (AttributeError, KeyError, TypeError):  # of values whose types the checker does not look at
        return False
    return bool(found["valid"])


@lru_cache(maxsize=1)
def _checker() -> tuple[Any, Any]:
    """Returns the function and its name of Python.

    It imports a table of all models, with the packages of their vendors, only to know whether a model's names
    have dots: a table of one model stands in for it.
    """
    require_checker()
    loaded = sys.modules.get(_MODELS)
    table = ModuleType(_MODELS)
    table.MODEL_CONFIG_MAPPING = {_NAME: SimpleNamespace(underscore_to_dot=True)}  # type: ignore[attr-defined]
    sys.modules[_MODELS] = table
    try:
        from bfcl_eval.constants.enums import Language
        from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker
    except ImportError as error:
        raise ImportError(f"{error}; {_REMEDY}") from error
    finally:
        sys.modules.pop(_MODELS)
        if loaded is not None:
            sys.modules[_MODELS] = loaded
    return ast_checker, Language.PYTHON
