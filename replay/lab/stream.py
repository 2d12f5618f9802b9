"""A thread that runs jobs in the order they were launched, and events on it: what a device stream is to a host."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Job = Callable[[], None]


class Event:
    """A point of a stream. ``query()`` never blocks; ``wait()`` does."""

    def __init__(self, serial: int) -> None:
        self.serial = serial
        self._flag = threading.Event()

    def query(self) -> bool:
        """Whether everything launched before the event is over."""
        return self._flag.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the event has happened; ``False`` after ``timeout`` seconds."""
        return self._flag.wait(timeout)

    @property
    def happened(self) -> bool:
        """What :meth:`query` would say; for those who only look on."""
        return self._flag.is_set()

    def complete(self) -> None:
        """Called by the stream."""
        self._flag.set()


class Stream:
    """Runs jobs one after another on its own thread.

    A job that raises stops the stream: later jobs are dropped, their events still complete, and ``on_error`` gets
    the exception once.
    """

    def __init__(self, name: str, on_error: Callable[[BaseException], None]) -> None:
        self._jobs: queue.SimpleQueue[tuple[Job, Event] | None] = queue.SimpleQueue()
        self._serial = 0
        self._on_error = on_error
        self._broken = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def launch(self, job: Job) -> Event:
        """Put ``job`` on the stream and return the event behind it."""
        self._serial += 1
        event = Event(self._serial)
        self._jobs.put((job, event))
        return event

    def close(self) -> None:
        """Finish what was launched and end the thread."""
        self._jobs.put(None)
        self._thread.join(timeout=30)

    def run(self, job: Job, event: Event) -> None:
        """One job on the stream's thread, then its event."""
        try:
            if not self._broken:
                job()
        except BaseException as error:
            self._broken = True
            self._on_error(error)
        finally:
            event.complete()

    def _loop(self) -> None:
        while (item := self._jobs.get()) is not None:
            self.run(*item)
