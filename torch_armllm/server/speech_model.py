"""A served model that transcribes."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch_armllm.server.client_limits import ClientLimits
from torch_armllm.server.errors import ApiError, bad_request
from torch_armllm.server.metrics import AudioMetrics, ServerMetrics
from torch_armllm.server.middleware.limits import RETRY_AFTER, Admission
from torch_armllm.server.settings import ServerSettings
from torch_armllm.speech.transcriber import Stopped, Transcriber
from torch_armllm.speech.transcription import Transcription


class SpeechModel:
    """One model that transcribes, a request after the other.

    Args:
        name: the model's name in requests.
        source: where it was loaded from.
        transcriber: the model.
        settings: settings of the server.
        metrics: metrics of the server.
        clients: limits of the server's clients.

    Attributes:
        admission: counts running and waiting requests.
        created: time of loading, in seconds since 1970.
    """

    def __init__(
        self,
        name: str,
        source: str,
        transcriber: Transcriber,
        settings: ServerSettings,
        metrics: ServerMetrics,
        clients: ClientLimits,
    ) -> None:
        self.name = name
        self.source = source
        self.transcriber = transcriber
        self.created = int(time.time())
        self.admission = Admission(1, settings.max_queue, clients)
        self._metrics = metrics.for_model(name, lambda: ())
        self._timeout = settings.request_timeout
        self._thread = ThreadPoolExecutor(1, "armllm-speech")
        self._exiting = threading.Event()

    async def transcribe(self, audio: bytes, **settings: Any) -> Transcription:
        """Transcribes a file; canceling the task ends the work.

        Args:
            audio: the file.
            settings: see `Transcriber`.

        Raises:
            ApiError: the queue is full, the audio or a parameter does not fit the model, the request took too
                long, or the server exits.
        """
        canceled = threading.Event()
        deadline = time.monotonic() + self._timeout

        def is_stopped() -> bool:
            return canceled.is_set() or self._exiting.is_set() or time.monotonic() > deadline

        metrics = AudioMetrics(self._metrics)

        def work() -> Transcription:
            metrics.begin()
            return self.transcriber(audio, is_stopped=is_stopped, **settings)

        with self.admission.admit(1):
            try:
                found = await asyncio.get_running_loop().run_in_executor(self._thread, work)
                metrics.finish(found.duration)
                return found
            except asyncio.CancelledError:
                metrics.abort()
                raise
            except Stopped as error:
                metrics.abort()
                raise self._reason() from error
            except (ValueError, ImportError) as error:
                raise bad_request(error) from error
            finally:
                canceled.set()

    def _reason(self) -> ApiError:
        if self._exiting.is_set():
            headers = {"Retry-After": str(RETRY_AFTER)}
            return ApiError(503, "the server exits; try again later", None, "exiting", headers)
        text = f"the request took more than {self._timeout:g} seconds; send shorter audio"
        return ApiError(504, text, code="timeout")

    def end_requests(self) -> None:
        """Ends all requests with a 503 error, because the server exits."""
        self._exiting.set()

    def close(self) -> None:
        """Ends all requests, and the thread."""
        self._exiting.set()
        self._thread.shutdown(wait=False, cancel_futures=True)
