"""The threads and the trace of an engine."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.execution.thread_team import ThreadTeam, choose_threads
from torch_armllm.engine.reports import diagnostics
from torch_armllm.engine.reports.trace import Trace, trace_to
from torch_armllm.ops import variants
from torch_armllm.system.host import cpu_name

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Machine:
    """The threads that an engine computes with, and its trace.

    Attributes:
        team: compute threads.
        trace: records the phases of steps.
    """

    team: ThreadTeam
    trace: Trace

    def log(self) -> None:
        """Says in the log what computes, and what makes it slow."""
        logger.info("kernels for %s on %s; %s", variants.machine().compiled, cpu_name(), self.team.chosen)
        for advice in diagnostics.warnings(diagnostics.describe()):
            logger.warning("%s", advice)


def machine_of(config: EngineConfig) -> Machine:
    """Returns the threads and the trace of an engine; the threads are settled before models run."""
    team = ThreadTeam(choose_threads(config.threads, config.pin_threads))
    team.settle()
    return Machine(team, trace_to(config.trace))
