"""Entry point of ``python -m torch_armllm``."""

import sys

from torch_armllm.cli.main import main

sys.exit(main())
