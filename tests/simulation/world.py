"""A virtual clock, and processes whose threads take turns in an order that chance decides.

Threads are greenlets, of which one runs at a time. They give way wherever they wait, sleep, or tell
another thread something, and a process can be killed or frozen at each of these places. Time
passes only when no thread can go on.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import greenlet

from sparsewire.groups.environment import Environment, Event, Queue, Thread


class Violation(AssertionError):
    """Something that must not happen, whatever goes wrong."""


class Task:
    """A thread of a process."""

    def __init__(self, process: Process, name: str, run: Callable[[], None]) -> None:
        self.process = process
        self.world = process.world
        self.name = name
        self.is_inside: str | None = None  # what would abort the process if it ended now
        self.ended = Signal(process.world)
        self.wait_number = 0
        self.is_waiting = False
        self.greenlet = greenlet.greenlet(lambda: self._run(run), process.world.hub)
        self.greenlet.world = process.world  # type: ignore[attr-defined]

    def _run(self, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:
            self.process.world.fail(Violation(f"{self} died: {error!r}"))
        finally:
            self.world.is_news = True
            self.ended.happen()

    @property
    def is_done(self) -> bool:
        return self.greenlet.dead

    def join(self, timeout: float | None = None) -> None:
        if not self.is_done:
            self.world.wait(self.ended, timeout)

    def __str__(self) -> str:
        return f"{self.name} of {self.process.name}"


class Signal:
    """Something that threads wait for."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.waiting: list[tuple[Task, int]] = []

    def happen(self) -> None:
        """Wake all threads that wait."""
        waiting, self.waiting = self.waiting, []
        for task, number in waiting:
            self._world.wake(task, number)


class Process:
    """A process, which may be killed, frozen and thawed."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.turns = 0
        self.is_dead = False
        self.is_frozen = False
        self.is_stopped = False  # frozen for ever
        self.frozen_for = 0.0  # seconds, so far
        self.tasks: list[Task] = []
        self.interrupts: list[Callable[[], None]] = []
        self.on_thaw: list[Callable[[], None]] = []
        self.on_end: list[Callable[[], None]] = []
        self._since = 0.0
        world.processes.append(self)

    def spawn(self, run: Callable[[], None], name: str) -> Task:
        if self.is_dead:
            _leave_if_dead(self.world)
        task = Task(self, name, run)
        self.tasks.append(task)
        self.world.ready.append(task)
        return task

    def kill(self) -> None:
        """End the process: none of its threads goes on. Not for its own threads to call."""
        if self.is_dead:
            return
        self.is_dead, self.is_frozen = True, False
        self.world.is_news = True
        for task in self.tasks:
            if task.greenlet:  # it has begun, and not ended
                task.greenlet.throw(greenlet.GreenletExit)
        self.world.ready = [task for task in self.world.ready if task.process is not self]
        for react in self.on_end:
            react()
        self.world.changed.happen()

    def freeze(self, seconds: float | None) -> None:
        """Stop the process, for ever if seconds is None."""
        if self.is_dead or self.is_frozen:
            return
        self.is_frozen, self._since = True, self.world.now
        self.world.is_news = True
        if seconds is None:
            self.is_stopped = True
        else:
            self.world.at(self.world.now + seconds, self.thaw)

    def thaw(self) -> None:
        if not self.is_frozen:
            return
        self.is_frozen = False
        self.world.is_news = True
        self.frozen_for += self.world.now - self._since
        late, self.on_thaw = self.on_thaw, []
        for react in late:
            react()
        self.world.changed.happen()

    def run_soon(self, react: Callable[[], None]) -> None:
        """Do something that the process's kernel does not do by itself: not while it is frozen."""
        if self.is_frozen:
            self.on_thaw.append(react)
        elif not self.is_dead:
            react()

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        for react in self.interrupts:
            self.spawn(react, "signals")


class World:
    """Everything that is simulated, and the scheduler."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.now = 0.0
        self.ready: list[Task] = []
        self.changed = Signal(self)  # a process or a link went or came
        self.is_news = True  # a thread or a process has ended, or was frozen
        self.on_turn: Callable[[Process], None] = lambda process: None
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.hub = greenlet.getcurrent()
        self.processes: list[Process] = []
        self._current: Task | None = None
        self._is_any_frozen = False
        self._violation: Violation | None = None

    # -- for the test ----------------------------------------------------------------------------

    def run(self, is_over: Callable[[], bool], limit: float) -> None:
        """Let all threads go on until it is over, which only ends and frozen processes bring."""
        random, timers = self.chance.random, self._timers
        while True:
            if self.is_news:
                self.is_news = False
                if is_over():
                    return
                self._is_any_frozen = any(process.is_frozen for process in self.processes)
            able = self.ready
            if able and self._is_any_frozen:
                able = [task for task in able if not task.process.is_frozen]
            if able:
                task = able[int(random() * len(able))]
                self.ready.remove(task)
                self._let(task)
            elif timers:
                moment, _, react = heapq.heappop(timers)
                if moment > self.now:
                    self.now = moment
                react()
            else:
                raise Violation(f"nobody can ever go on: {self._who_waits()}")
            if self._violation is not None:
                raise self._violation
            if self.now > limit:
                raise Violation(f"it takes more than {limit:.0f} s: {self._who_waits()}")

    def _let(self, task: Task) -> None:
        process = task.process
        process.turns += 1
        self.on_turn(process)
        if process.is_dead:
            return
        if process.is_frozen:
            self.ready.append(task)
            return
        self._current = task
        task.greenlet.switch()
        self._current = None

    def _who_waits(self) -> str:
        tasks = [task for process in self.processes for task in process.tasks]
        return ", ".join(str(task) for task in tasks if not task.is_done) or "nobody waits"

    def close(self) -> None:
        """End all processes."""
        for process in self.processes:
            process.kill()

    def fail(self, violation: Violation) -> None:
        self._violation = self._violation or violation

    def at(self, moment: float, react: Callable[[], None]) -> None:
        """Do something at some time."""
        heapq.heappush(self._timers, (moment, next(self._numbers), react))

    # -- for threads -----------------------------------------------------------------------------

    def pause(self) -> None:
        """Give way to other threads."""
        task = self._current
        if task is None or greenlet.getcurrent() is not task.greenlet:
            _leave_if_dead(self)
            return
        self.ready.append(task)
        self._give_way(task)

    def wait(self, signal: Signal, timeout: float | None = None) -> bool:
        """Wait until something happens; returns whether it has."""
        task = self._current
        if task is None or greenlet.getcurrent() is not task.greenlet:
            _leave_if_dead(self)
            return False
        task.wait_number += 1
        task.is_waiting = True
        number = task.wait_number
        signal.waiting.append((task, number))
        timed_out = []
        if timeout is not None:

            def expire() -> None:
                if task.is_waiting and task.wait_number == number:
                    timed_out.append(True)
                    self.wake(task, number)

            self.at(self.now + timeout, expire)
        self._give_way(task)
        return not timed_out

    def sleep(self, seconds: float) -> None:
        self.wait(Signal(self), seconds)

    def wake(self, task: Task, number: int) -> None:
        if task.is_waiting and task.wait_number == number and not task.process.is_dead:
            task.is_waiting = False
            self.ready.append(task)

    def _give_way(self, task: Task) -> None:
        self.hub.switch()
        if task.process.is_dead:
            raise greenlet.GreenletExit

    @property
    def current(self) -> Task:
        """The thread that runs."""
        assert self._current is not None
        return self._current


def _leave_if_dead(world: World) -> None:
    """A thread that is being killed does nothing any more."""
    if getattr(greenlet.getcurrent(), "world", None) is world:
        raise greenlet.GreenletExit


class VirtualEvent:
    def __init__(self, world: World) -> None:
        self._world = world
        self._has_happened = False
        self._signal = Signal(world)

    def set(self) -> None:
        self._has_happened = True
        self._signal.happen()
        self._world.pause()

    def is_set(self) -> bool:
        return self._has_happened

    def wait(self, timeout: float | None = None) -> bool:
        return self._has_happened or self._world.wait(self._signal, timeout) or self._has_happened


class VirtualQueue:
    def __init__(self, world: World) -> None:
        self._world = world
        self._items: deque[Any] = deque()
        self._signal = Signal(world)

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._signal.happen()
        self._world.pause()

    def get(self) -> Any:
        while not self._items:
            self._world.wait(self._signal)
        return self._items.popleft()


class VirtualLock(AbstractContextManager[None]):
    def __init__(self, world: World) -> None:
        self._world = world
        self._is_held = False
        self._signal = Signal(world)

    def __enter__(self) -> None:
        while self._is_held:
            self._world.wait(self._signal)
        self._is_held = True

    def __exit__(self, *_: object) -> None:
        self._is_held = False
        self._signal.happen()


class VirtualEnvironment(Environment):
    """The clock and the threads of a process of the world."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._world = process.world

    def now(self) -> float:
        return self._world.now

    def sleep(self, seconds: float) -> None:
        self._world.sleep(seconds)

    def spawn(self, run: Callable[[], None], name: str) -> Thread:
        return self._process.spawn(run, name)

    def is_current(self, thread: Thread) -> bool:
        return self._world._current is thread

    def lock(self) -> AbstractContextManager[Any]:
        return VirtualLock(self._world)

    def event(self) -> Event:
        return VirtualEvent(self._world)

    def queue(self) -> Queue:
        return VirtualQueue(self._world)

    def on_interrupt(self, react: Callable[[], None]) -> object:
        self._process.interrupts.append(react)
        return react
