"""lm-eval's own command line, with the model ``armllm``.

python -m torch_armllm.evaluation run --model armllm --tasks piqa --model_args pretrained=DIR,method=rtn
"""

from torch_armllm.system.extras import require_extra

require_extra("lm_eval", "eval", "evaluation")

from lm_eval.__main__ import cli_evaluate  # noqa: E402

from torch_armllm.evaluation import harness  # noqa: E402,F401  # registers the model

cli_evaluate()
