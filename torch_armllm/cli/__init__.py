"""The command line: one file per command, with ``add_parser`` for its options and ``run`` for its work.

Commands import heavy modules when they run, not before: ``--help`` must answer at once.
"""

from __future__ import annotations

import argparse
from typing import TypeAlias

Subcommands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
